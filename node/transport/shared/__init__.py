"""Memory shared by two daemons of one machine, for the bytes of tensors between them.

Enters: bytes for a proven peer. Leaves: their place, which travels in the call to which they
belong. Never: who may call what, and when, which is decided for that call.
"""
