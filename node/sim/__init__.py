"""A whole swarm in virtual time: the product's own services, a simulated network, disk and device
under them, faults on a time line, invariants after every event. Enters: a setup, a schedule of
faults, a seed. Never: a socket, a thread, the wall clock."""
