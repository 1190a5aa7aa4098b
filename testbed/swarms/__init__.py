"""Swarms of daemons or simulated peers, with the faults that strike them."""
