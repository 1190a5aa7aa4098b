"""How this peer reaches others. Values measured on a loopback; see docs/operating.md."""

from dataclasses import dataclass

from node.core.tables import rate_setting, setting

MIB = 1 << 20

LEAST_KEEPALIVE_S = 1.0
"""Shortest ``keepalive_s`` that a user may set."""
SERVER_TIMES = 10
"""Factor on the dialling side's probe interval that gives the other side's interval."""
LEAST_CAP = 16_000
"""Bytes a second; the directory, heartbeats and plans alone take a part of it."""


def _too_slow(cap: float) -> str:
    """Reason against a cap on everything that this peer sends or receives, "" for none."""
    if not 0 < cap < LEAST_CAP:
        return ""
    return (
        f"that is {cap:g} bytes a second, too little to take part; "
        f"allowed: {LEAST_CAP} or more, 0 for no cap"
    )


@dataclass(frozen=True)
class TransportSettings:
    """Settings of this peer; a manifest cannot change them."""

    host: str = setting(
        "", "Address the p2p daemon and the gRPC server listen on; empty: all, IPv4 and IPv6."
    )
    p2p_port: int = setting(
        0,
        "TCP port of the p2p daemon, and UDP port for QUIC; 0 picks a free one.",
        least=0,
        most=65535,
    )
    quic: bool = setting(
        False,
        "Listen on QUIC and dial QUIC addresses, beside TCP. It gets through firewalls that TCP "
        "does not; the QUIC of the p2p daemon is older than the mending of two flaws by which a "
        "stranger can exhaust its memory.",
    )
    p2pd_memory: int = setting(
        512 * MIB,
        "Bytes of memory above which the p2p daemon is restarted. It hangs up on silent strangers "
        "from three eighths on.",
        least=1 << 27,
        most=1 << 40,
    )
    grpc_port: int = setting(
        0, "TCP port of the gRPC server; 0 picks a free one.", least=0, most=65535
    )
    bypass_port: int = setting(
        0,
        "TCP port at which peers that this one cannot dial connect to it for gRPC, and peers that "
        "it relays for; 0 picks a free one. Where others cannot dial it, the p2p daemon carries "
        "these connections, at a third of the speed.",
        least=0,
        most=65535,
    )
    announce: tuple[str, ...] = setting(
        (), "host:port others should dial for gRPC instead of the address it listens on."
    )
    force_tunnel: bool = setting(
        False,
        "Announce no address, so that everybody comes through libp2p, like a peer behind NAT.",
    )
    max_message: int = setting(
        4 * MIB + 64 * 1024,
        "Largest gRPC message, in bytes; a larger one is refused before it is read.",
        least=1 << 16,
        most=1 << 30,
    )
    handshake_timeout_s: float = setting(
        5.0,
        "Seconds after which a stranger's connection without a finished handshake is closed.",
        least=0.1,
        most=600,
    )
    keepalive_s: float = setting(
        1.5,
        "Seconds without a byte from the other side after which a connection is probed.",
        least=LEAST_KEEPALIVE_S,
        most=3600,
    )
    keepalive_timeout_s: float = setting(
        3.0,
        "Seconds of silence after a probe from which the peer counts as gone. On a slow link the "
        "answer waits behind the data under way.",
        least=0.1,
        most=600,
    )
    window: int = setting(
        2 * MIB,
        "Bytes of one call that may be unread: 20 MB/s over a round trip of 0.1 s. A link that "
        "carries less than a third of these bytes in a second, under load, needs a longer "
        "keepalive_timeout_s.",
        least=1 << 16,
        most=1 << 28,
    )
    max_up: float = rate_setting(
        'Most bytes a second this peer sends, whatever for; 0: no cap. "20Mbit" and "2.5MB" are '
        "understood too.",
        refused=_too_slow,
    )
    max_down: float = rate_setting(
        "Most bytes a second this peer receives; 0: no cap.", refused=_too_slow
    )
    idle_s: float = setting(
        300.0,
        "Seconds without a call after which a connection is closed, so that their number does not "
        "grow with all peers ever met; the next call dials anew.",
        least=10,
        most=86400,
    )
    dial_timeout_s: float = setting(
        3.0,
        "Seconds for the dial of one address of a peer; then its next address is dialled, then "
        "the tunnel.",
        least=0.1,
        most=600,
    )
    peer_streams: int = setting(
        64, "Number of concurrent calls that one peer may have open here.", least=1, most=10000
    )

    frame: int = setting(
        128 * 1024,
        "Largest HTTP/2 frame. gRPC's own 16 KiB cost a fifth of an exchange on a fast line; a "
        "frame delays the answer to a probe by 1 s at 1 Mbit/s, and the answer has "
        "keepalive_timeout_s.",
    )

    shared_memory: str = setting(
        "auto",
        "auto: tensors between daemons of the same user on this machine go through shared memory, "
        "up to 64 MiB; off: through their connections. Linux only.",
        choices=("auto", "off"),
    )

    relayed_timeout_s: float = setting(
        6.0,
        "Seconds of silence after a probe from which a relayed connection counts as dead: the "
        "answer also waits in the relay's buffers.",
        least=0.1,
        most=600,
    )

    def connection_options(
        self,
        relayed: bool = False,
        slack_s: float = 0.0,
        *,
        server: bool = False,
        probe_idle: bool = True,
    ) -> list[tuple[str, int]]:
        """gRPC's options for both ends of a connection: probes of a silent peer, and most unread
        bytes. ``slack_s``: lateness of this process when the connection was made; the other side's
        answers to probes may be as late. The side that dialled would dial anew, so it has to learn
        of a break soon. The other side (``server``) only has to free the memory that a vanished
        peer held here; it probes at :data:`SERVER_TIMES` the interval, because probes of all
        connections are most of the cost of an idle peer in a large swarm. For the same reason a
        connection without ``probe_idle`` is probed only while a call is under way on it.

        gRPC 1.85 waits for the answer to a probe as long as ``ping_timeout_ms``, whatever the
        keepalive's own time-out. Its bandwidth probes are pings too, sent in the middle of a
        transfer, and on a slow link they are answered late; with them a short wait would end
        healthy connections, so windows are of a fixed size instead.
        """
        least_s = 0.0
        if relayed:
            least_s = self.relayed_timeout_s
        timeout_s = max(self.keepalive_timeout_s, least_s) + slack_s
        times = 1
        if server:
            times = SERVER_TIMES
        return [
            ("grpc.max_receive_message_length", self.max_message),
            ("grpc.max_send_message_length", self.max_message),
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_s * times)),
            ("grpc.keepalive_timeout_ms", round(1000 * timeout_s)),
            ("grpc.http2.ping_timeout_ms", round(1000 * timeout_s)),
            ("grpc.keepalive_permit_without_calls", int(probe_idle)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", self.window),
            ("grpc.http2.max_frame_size", self.frame),
            ("grpc.compression_enabled_algorithms_bitset", 1),
        ]

    def accepted_probes(self) -> list[tuple[str, int]]:
        """gRPC's option for a server: the shortest interval between two probes of one client that
        is not abuse. It depends on the range of ``keepalive_s`` and not on this peer's value,
        because every client probes at its own interval. Half of the shortest one is left for
        probes that arrive late and close together."""
        shortest_s = min(LEAST_KEEPALIVE_S, self.keepalive_s)
        return [("grpc.http2.min_ping_interval_without_data_ms", round(500 * shortest_s))]
