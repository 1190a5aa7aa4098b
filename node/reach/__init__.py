"""Connections between two peers: port mapping, discovery on the LAN, relays, proofs of identity
over them. Enters: addresses, byte streams. Leaves: addresses that work, streams with a proven peer
at the other end. Never: a tensor, a gRPC call."""
