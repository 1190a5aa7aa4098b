"""Recordings of a peer's state machines: written while they decide, played again afterwards. Opened
by ``tutti start --record`` and ``tutti replay``."""
