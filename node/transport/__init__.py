"""Transport between peers: supervised p2pd, handshake, pinned TLS gRPC, tunnel through libp2p.
Enters: PeerIds, messages.
Never: what the messages mean."""
