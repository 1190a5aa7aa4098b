"""Transport between peers: supervised p2pd, handshake, pinned TLS gRPC, tunnel through libp2p.
Enters: PeerIds, messages.
Never: the meaning of messages."""
