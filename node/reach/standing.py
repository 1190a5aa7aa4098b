"""Reachability of this peer: whether others can dial it, from the reports of peers that have tried.
Pure. Enters: reports of single peers, the time. Leaves: open or closed, the peers to ask next,
addresses that were proven. Never: a claim of this peer itself."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from node.core.addresses import Scope, in_turns, scope
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
    """Findings of the peer ``by``: it sees this peer at ``host`` (TCP port ``port``, 0 over QUIC),
    and could connect from there to the TCP ports in ``open`` of this peer. ``far``: it has a public
    address itself, so it speaks for everybody and not for a LAN only."""

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
        """(host, port) under which others see the connections that this peer makes, at most four:
        of each scope and family those first that most peers see, then the newest."""
        places = [(r.host, r.port) for r in self._told(now) if r.host]
        reporters = Counter(places)
        found = sorted(reporters, key=lambda place: -reporters[place])
        return tuple(in_turns(found, lambda place: place[0])[:4])

    def public(self, now: float, port: int) -> tuple[str, ...]:
        """Public hosts as which this peer is seen, and where its ``port`` answered. Where several
        peers see it, two have to see the same host: one alone may lie. Those that see it over IPv6
        say nothing of its IPv4 host; its own IPv6 addresses are known without them."""
        reports = self._from_outside(now)
        four = [r for r in reports if ":" not in r.host]
        found: list[str] = []
        for among in (four, reports):
            reporters = Counter(r.host for r in among)
            enough = min(2, len(among))
            found += [r.host for r in among if port in r.open and reporters[r.host] >= enough]
        return tuple(dict.fromkeys(found))

    def moving_ports(self, now: float) -> bool:
        """Return True if the router gives every connection another port: several peers see one
        public host, and no two of them the same port."""
        reports = [r for r in self._from_outside(now) if r.port]
        hosts = Counter(r.host for r in reports)
        places = Counter((r.host, r.port) for r in reports)
        return max(hosts.values(), default=0) > 1 and max(places.values()) == 1

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

    def _told(self, now: float) -> list[ReachReport]:
        """The reports that count, the newest first."""
        fresh = (r for r in self._reports.values() if now - r.at < STALE_S)
        return sorted(fresh, key=lambda r: -r.at)

    def _from_outside(self, now: float) -> list[ReachReport]:
        """The reports of peers that see a public address of this one, the newest first."""
        return [r for r in self._told(now) if scope(r.host) is Scope.PUBLIC]

    def _fresh(self, now: float) -> list[ReachReport]:
        told = self._told(now)
        far = [r for r in told if r.far]
        return (far or told)[:ASKED_AT_ONCE]
