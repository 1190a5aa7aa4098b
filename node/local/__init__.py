"""The devices of one box as one stage: torch's tensor parallelism, a process for each device.
Enters: activations, gradients and whole parameters at rank 0. Leaves: the same, as from one device.
Never: a peer, a socket of the swarm, a pickle."""
