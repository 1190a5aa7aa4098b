"""Reachability of this peer: whether others can dial it, from the reports of peers that have tried.
Pure. Enters: reports of single peers, the time. Leaves: open or closed, the peers to ask next,
addresses that were proven. Never: a claim of this peer itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from node.core.addresses import Scope, scope
from node.core.ids import PeerId

ASKED_AT_ONCE = 3
"""Number of peers with reports that decide: the ones heard last."""
AGAIN_S = 60.0
"""Seconds between two rounds of questions once the reachability is known."""
AGAIN_SOON_S = 5.0
"""Seconds between two rounds of questions before the reachability is known."""
STALE_S = 300.0
"""Seconds after which a report does not count any more."""
DOUBTS = 3
"""Failures in a row that a peer must report before a port that it could dial counts as closed: one
may be a moment of trouble."""


class Standing(Enum):
    """``UNKNOWN``: nobody has tried yet."""

    UNKNOWN = "unknown"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ReachReport:
    """Findings of the peer ``by``: it sees this peer at ``host`` (port ``port``), and could connect
    from there to the TCP ports in ``open`` of this peer. ``far``: it has a public address itself,
    so it speaks for everybody and not for a LAN only."""

    by: PeerId
    host: str
    port: int
    open: frozenset[int]
    far: bool
    at: float


class Reach:
    """``p2p`` and ``grpc`` are the ports others dial: the external ones where they are mapped."""

    def __init__(self) -> None:
        self._reports: dict[PeerId, ReachReport] = {}
        self._asked: dict[PeerId, float] = {}
        self._doubts: dict[PeerId, int] = {}
        self.ports: tuple[int, int] = (0, 0)

    def listens(self, p2p: int, grpc: int) -> None:
        """The ports that others would dial. Reports about others count no more."""
        if self.ports != (p2p, grpc):
            self.ports = p2p, grpc
            self._reports = {}
            self._asked = {}
            self._doubts = {}

    def reported(self, report: ReachReport) -> None:
        """Take in the report of a peer."""
        old = self._reports.get(report.by)
        if old is not None and old.open - report.open and report.at - old.at < STALE_S:
            self._doubts[report.by] = self._doubts.get(report.by, 0) + 1
            if self._doubts[report.by] < DOUBTS:
                self._asked[report.by] = report.at - AGAIN_S + AGAIN_SOON_S
                return
        self._doubts.pop(report.by, None)
        self._reports[report.by] = report

    def standing(self, now: float) -> Standing:
        """Majority of the reports heard last; only far peers count, where there are any."""
        fresh = self._fresh(now)
        if not fresh:
            return Standing.UNKNOWN
        yes = sum(self.ports[0] in r.open for r in fresh)
        if 2 * yes > len(fresh):
            return Standing.OPEN
        return Standing.CLOSED

    def bulk_open(self, now: float) -> bool:
        """Return True if the gRPC port answers from outside too."""
        fresh = self._fresh(now)
        return 2 * sum(self.ports[1] in r.open for r in fresh) > len(fresh)

    def seen(self, now: float) -> tuple[tuple[str, int], ...]:
        """(host, port) under which others see the connections that this peer makes, the newest
        first, at most four."""
        found = sorted(self._reports.values(), key=lambda r: -r.at)
        return tuple(
            dict.fromkeys((r.host, r.port) for r in found if r.host and now - r.at < STALE_S)
        )[:4]

    def public(self, now: float) -> tuple[str, ...]:
        """Public addresses under which this peer is seen."""
        return tuple(
            dict.fromkeys(host for host, _ in self.seen(now) if scope(host) is Scope.PUBLIC)
        )

    def whom_to_ask(self, connected: Iterable[PeerId], now: float) -> list[PeerId]:
        """Peers that should be asked now, at most three at a time."""
        every = AGAIN_S
        if self.standing(now) is Standing.UNKNOWN:
            every = AGAIN_SOON_S
        due = [p for p in connected if now - self._asked.get(p, -every) >= every]
        due.sort(key=lambda p: (self._asked.get(p, -1e9), p))
        busy = sum(now - at < every for at in self._asked.values())
        chosen = due[: max(0, ASKED_AT_ONCE - busy)]
        for peer in chosen:
            self._asked[peer] = now
        return chosen

    def _fresh(self, now: float) -> list[ReachReport]:
        fresh = sorted(
            (r for r in self._reports.values() if now - r.at < STALE_S), key=lambda r: -r.at
        )
        far = [r for r in fresh if r.far]
        return (far or fresh)[:ASKED_AT_ONCE]
