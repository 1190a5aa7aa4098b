"""Agreement of the peers of a cell: its leader, the votes that commit a version, the plans that
may be followed. Pure.

Enters: sightings of peers, signed statements, plans as proposals.
Leaves: a leader, quorum certificates, reasons against a plan.
Never: a micro-batch, a tensor, a clock, a socket.
"""
