"""Forward-only work: evaluation and generation. It uses the parameters of the moment, and keeps
nothing for backward."""
