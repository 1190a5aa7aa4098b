"""A whole swarm on one machine: real daemons as processes, real p2pd, real TLS, watched until it
has learnt to write.

``tutti demo`` is the product itself, started several times; nothing here knows how training works.
"""
