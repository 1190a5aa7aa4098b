"""The partitioned matrix optimizer: ownership, Newton-Schulz, steps. Pure torch.
Enters: mean gradients, parameters.
Never: a network."""
