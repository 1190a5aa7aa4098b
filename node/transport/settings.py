"""How this peer reaches others. Values measured on a loopback; see docs/operating.md."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class TransportSettings:
    """Of this peer."""

    host: str = "127.0.0.1"
    """Address the p2p daemon and the gRPC server listen on; 0.0.0.0 for all."""
    p2p_port: int = 0
    """TCP (and UDP, QUIC) port of the p2p daemon; 0 picks a free one."""
    grpc_port: int = 0
    """TCP port of the gRPC server; 0 picks a free one."""
    announce: tuple[str, ...] = ()
    """host:port others should dial for gRPC instead of the address it listens on."""
    force_tunnel: bool = False
    """Announce no address, so that everybody comes through libp2p: what a peer behind NAT does."""
    relay: bool = False
    """Look for relays to become reachable (peers behind NAT)."""
    max_message: int = 4 * MIB + 64 * 1024
    """Largest gRPC message; a bigger one is refused before it is read."""
    chunk: int = MIB
    """Bytes of tensor in one message."""
    handshake_timeout_s: float = 5.0
    """A stranger's connection that has not finished its handshake by then is closed."""
    keepalive_s: float = 10.0
    """Idle time after which a channel is probed."""
    keepalive_timeout_s: float = 5.0
    """Silence after a probe that means the peer is gone."""
    dial_timeout_s: float = 3.0
    """Per address; then the next one, then the tunnel."""
    peer_streams: int = 64
    """Concurrent calls one peer may have open here."""
