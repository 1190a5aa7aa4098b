"""How two peers come to have a connection: port mapping, discovery on the LAN, relays, proofs of
identity over them. Enters: addresses, byte streams. Leaves: addresses that work, streams whose
other end is proven. Never: a tensor, a gRPC call."""
