"""Numbers for graphs: counters and gauges in Prometheus form, served on loopback only.

The attribute of a metric is its name without ``tutti_``: ``metrics.relay_clients.set(3)``,
``metrics.bytes_sent_total.labels(plane="pipeline").inc(4096)``. All are safe from any thread.
"""

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)

HOST = "127.0.0.1"
TIME_KINDS = ("compute", "wire", "wait", "round")


class Metrics:
    """Measurements of one daemon, in its own registry, so that several daemons fit into one
    process. :class:`node.app.snapshot.SnapshotBuilder` adds the numbers of the screen."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tutti_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tutti_{name}", text, labels, registry=registry)

        self.peers = gauge(
            "peers",
            "Peers with an open channel, by its path (direct, mapped, tunnel, reversed, punched, "
            "relayed)",
            "path",
        )
        self.relay_clients = gauge("relay_clients", "Peers that can be reached through this one")
        self.newcomers_waiting = gauge("newcomers_waiting", "Newcomers in the queue to join")
        self.relayed_bytes_total = counter("relayed_bytes_total", "Bytes relayed for others")
        self.bytes_sent_total = counter("bytes_sent_total", "Payload bytes sent", "plane")
        self.bytes_received_total = counter(
            "bytes_received_total", "Payload bytes received", "plane"
        )
        self.pushes_total = counter(
            "pushes_total",
            "Pushes of other cells to this server (applied, refused)",
            "result",
        )
        self.faults_total = counter(
            "faults_total", "Faults of other peers, by the component that saw them", "component"
        )
        self.refused_total = counter(
            "refused_total", "Calls and connections of others that were refused, by reason", "kind"
        )
        self.bans_total = counter("bans_total", "Times a peer was refused for a while")
        self.p2pd_restarts_total = counter("p2pd_restarts_total", "Restarts of the libp2p daemon")
        self.p2pd_outgrown_total = counter(
            "p2pd_outgrown_total", "Restarts of the libp2p daemon because of its memory"
        )
        self.time_seconds_total = counter(
            "time_seconds_total", "Where the time went (compute, wire, wait, round)", "kind"
        )
        self.epoch_seconds = Histogram(
            "tutti_epoch_seconds",
            "Seconds from plan to commit",
            registry=registry,
            buckets=(0.5, 1, 2, 5, 10, 20, 60, 120, 300),
        )
        self._times = {kind: self.time_seconds_total.labels(kind=kind) for kind in TIME_KINDS}
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def time_spent(self, kind: str, seconds: float) -> None:
        """Add seconds of "compute", "wire", "wait" or "round"; a clock that went back adds nothing.
        Raises KeyError for another kind."""
        self._times[kind].inc(max(0.0, seconds))

    def totals(self) -> dict[str, float]:
        """Seconds since the start by kind: {"compute": …, "wire": …, "wait": …, "round": …}."""
        read = self.registry.get_sample_value
        name = "tutti_time_seconds_total"
        return {kind: read(name, {"kind": kind}) or 0.0 for kind in TIME_KINDS}

    def serve(self, port: int = 0) -> str:
        """Answer scrapes on loopback, on a thread of its own, even while the event loop is busy;
        returns the URL. Call it once. Port 0 picks a free one.

        Raises OSError when the port is taken.
        """
        server, thread = start_http_server(port, HOST, self.registry)
        self._server = server, thread
        return f"http://{HOST}:{server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join(2.0)
