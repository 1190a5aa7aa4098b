"""Who averages with whom, and what becomes of the mean. Pure but for tensors."""
