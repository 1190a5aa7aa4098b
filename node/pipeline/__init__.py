"""A path to parameter gradients: hops, stash, device thread, next-hop failover.
Enters: activations and their gradients.
Never: the optimizer."""
