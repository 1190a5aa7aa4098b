"""A whole swarm in virtual time: the real machines, fake links between them, faults on a time line,
invariants after every event. Enters: a setup, a schedule of faults, a seed. Never: torch, a socket,
the wall clock."""
