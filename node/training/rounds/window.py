"""A window at one member: what the cell gives, what it makes of that and its partners' while
training goes on, and how that becomes the next version. Enters: plans. Leaves: the next parameters,
what this peer holds of a mean. Never: who the partners are (:mod:`node.cells`), a plan.

Each cell pulls what its partners give and computes the mean itself, unless the strategy has a
server (parameter-server, hogwild): then the others fetch what the server made.

begin    a plan names the window and the partners: the parameters in place are kept and served, and
         fetching the partners' begins
attempt  a plan without paths names the mean: parameters become x + (mean - given), so that what was
         learned meanwhile stays
copied   or the result was fetched from members that have it
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

import torch
from torch import Tensor

from node.averaging.exchange.request import RoundOutcome
from node.averaging.strategies.keys import server_of
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.state import StateKind, StateSnapshot
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.journey import Partner, Plan, Version
from node.core.tasks import Tasks
from node.training.protocol import events as ev
from node.training.rounds.anchor import Anchor
from node.training.rounds.inner import Rounds
from node.training.rounds.merging import (
    Merge,
    Pushes,
    distance,
    finite,
    merge_of,
    moved,
    nearer,
)
from node.training.state.engines import Engines
from node.training.state.state_export import StateExport
from node.wire.tensors import digest

AGAIN_S, AGAIN_SHARE = 1.0, 0.05
"""Seconds between two attempts to fetch what is not there yet, and their upper bound as a share of
the window's time."""
SOME_SHARE = 0.7
"""Of the time for a window, after which the partners that have given are enough."""
OWN_SHARE = 0.5
"""Share of the window's time within which every replica gets its turn to pull by itself, if the
replicas before it have not succeeded."""
USUAL, REMEMBERED, FAR = 4, 16, 3.0
"""The usual distance of partners is the median of the last REMEMBERED, from USUAL partners on; a
partner may be FAR times as far away. Until then, and as a bound on what is remembered, the measure
is how far the own training went in a window, which no partner can influence."""
TOO_FAR = 0.5
"""A partner that is so far away, relative to the length of what is given here, has another model:
half-way between the two is neither. Parameters drawn anew are 1.4 away."""


@dataclass
class WindowNews:
    """Of a window, the last whose mean came into place where a peer tells of it: its number, of how
    many cells it is, peers of this stage, tensor bytes, seconds. ``apart``: how far the partners
    were from what was given here, the median, relative to its length; 0: not known."""

    number: int = 0
    cells: int = 0
    peers: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    apart: float = 0.0


@dataclass
class _Meeting:
    """The state of one window. ``local``: parameters at its beginning; ``merge``: how contributions
    are merged; ``given``: what partners may fetch, None without an anchor; ``own``: the same,
    decoded; ``came``: decoded contributions by cell; ``mean``: the result, with its digest;
    ``news``: for the operator (0 cells where a replica made the mean); ``told``: nothing of this
    cell is in the result; ``server``: the cell that computes the mean, None: this one."""

    number: int
    cell: str
    base: Version
    local: Mapping[str, Tensor]
    merge: Merge
    told: bool = False
    server: Partner | None = None
    given: dict[str, Tensor] | None = None
    own: Mapping[str, Tensor] | None = None
    came: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    mean: dict[str, Tensor] | None = None
    digest: str = ""
    applied: bool = False
    news: WindowNews = field(default_factory=WindowNews)
    task: asyncio.Task[None] | None = None


class WindowRound:
    """Windows of one stage at one peer."""

    def __init__(
        self,
        anchor: Anchor,
        engines: Engines,
        state_export: StateExport,
        rounds: Rounds,
        tasks: Tasks,
        me: PeerId,
    ) -> None:
        self._anchor, self._engines, self._rounds, self._me = anchor, engines, rounds, me
        self._state_export, self._tasks = state_export, tasks
        self._meeting: _Meeting | None = None
        self._apart: deque[float] = deque(maxlen=REMEMBERED)
        """How far the last partners were from what was given here, relative to its length."""
        self._went: deque[float] = deque(maxlen=REMEMBERED)
        """How far the own training went in each of the last windows, in the same measure."""
        self._first: Mapping[str, Tensor] | None = None
        """Until the first window: what was in place when this peer's first plan was in force."""
        self.news = WindowNews()

    # ----------------------------------------------------------- what others may have

    @property
    def mean(self) -> tuple[int, str]:
        """The newest window whose mean is here, and its digest; (0, "") for none."""
        m = self._meeting
        return (0, "") if m is None or m.mean is None else (m.number, m.digest)

    def describe(
        self, kind: StateKind, window: int | None
    ) -> tuple[Version, Mapping[str, Tensor]] | None:
        """What the cell gives in a window, or what it made in it."""
        m = self._meeting
        found = None if m is None else m.given if kind is StateKind.SNAPSHOT else m.mean
        if m is None or found is None or window != m.number:
            return None
        return Version(m.number), found

    # ----------------------------------------------------------- the window

    def begin(self, plan: Plan, settings: OuterSettings, listener: bool) -> None:
        """A plan is in force, under these settings."""
        anchor, window = self._anchor, plan.window
        if settings != anchor.settings:
            self._drop()  # what it makes of contributions goes by the settings before
        anchor.follow(settings)
        if listener:
            anchor.forget()
            self._drop()
            self._first = None
            return
        if settings.windows and self._meeting is None and self._first is None:
            self._first = anchor.stage.parameters()
        anchor.look_for(plan)
        if anchor.kept and not anchor.name:
            self._tasks.spawn(self._engines.aside(anchor.names_itself), "anchor's name")
        m = self._meeting
        if not window.number or (
            m is not None and (m.number, m.base) == (window.number, plan.base)
        ):
            return
        began = self._began()
        self._drop()
        self._first = None
        carried = self._rounds.carried(window.number, settings.fragments)
        m = self._meeting = _Meeting(
            window.number,
            plan.cell_id,
            plan.base,
            anchor.stage.parameters(),
            merge_of(settings, anchor, carried, 1 + len(window.partners)),
            window.copies,
            self._server(settings, plan),
        )
        m.task = self._tasks.spawn(self._meet(m, plan, began), "window")

    def _began(self) -> Callable[[], Mapping[str, Tensor]] | None:
        """Where this cell's training since the last window began: its anchor, the parameters in
        place after the last mean, or the first ones; None when that is not known here."""
        m, state, first = self._meeting, self._anchor.state, self._first
        if state is not None:
            return lambda: state.anchor
        if m is None or not m.merge.near:
            return None if first is None else lambda: first
        local, mean, mixing = m.local, m.mean if m.applied else None, m.merge.settings.mixing
        return lambda: local if mean is None else moved(local, local, mean, mixing)

    def _server(self, s: OuterSettings, plan: Plan) -> Partner | None:
        """Who makes the mean for this stage; None where this cell does."""
        if not s.served or plan.window.copies:
            return None
        cells = {p.cell: p for p in plan.window.partners}
        found = server_of(self._rounds.stage, [*cells, plan.cell_id], s.shards)
        return cells.get(found)

    def _drop(self) -> None:
        if self._meeting is not None and self._meeting.task is not None:
            self._meeting.task.cancel()
        self._meeting = None

    async def _meet(
        self, m: _Meeting, plan: Plan, began_at: Callable[[], Mapping[str, Tensor]] | None
    ) -> None:
        """Give, and come to the mean: by pulling, or from a replica whose turn came before.
        ``began_at``: as :meth:`_began` gives it."""
        stage, within_s = self._rounds.stage, plan.window.within_s
        loop = asyncio.get_running_loop()
        began = loop.time()
        mates = [p.peer for p in plan.stage(stage) if p.current]
        if m.merge.near and began_at is not None:
            went = await self._engines.aside(lambda: distance(began_at(), m.local))
            if went > 0.0 and math.isfinite(went):  # an epoch may be longer than a window
                self._went.append(went)
        # Another replica pulls in every window.
        order = mates[m.number % len(mates) :] + mates[: m.number % len(mates)]
        turn = OWN_SHARE * within_s * order.index(self._me) / len(order)
        others = [peer for peer in order if peer != self._me]
        await self._anchor.arrived(within_s)
        if self._anchor.lacking:
            # Nobody in the cell has one, or it would have come: all begin with what is given here.
            self._anchor.begin_with(m.local)
        if not m.told:
            m.given = await self._engines.aside(m.merge.gives, m.local)
            if m.given is None:
                return
            m.own = await self._engines.aside(m.merge.opens, m.given)
        partners = plan.window.partners
        if not partners and not m.merge.shared:
            return
        while m.mean is None and (now := loop.time() - began) < within_s:
            if now < turn:
                await self._result(m, others, stage)
            elif m.server is not None or m.told:
                # Of one of the partners, whose anchor this cell does not have.
                for partner in partners if m.server is None else [m.server]:
                    if m.mean is None and (hosts := partner.hosts.get(stage, ())):
                        await self._result(m, [h.peer for h in hosts], stage)
            else:
                await self._pull(m, partners, stage)
            late = loop.time() - began >= SOME_SHARE * within_s
            makes = m.mean is None and m.server is None
            if makes and m.own is not None and _enough(m, len(partners), late):
                if m.merge.near:
                    await self._engines.aside(self._clip, m)
                mean = await self._engines.aside(m.merge.makes, m.cell, m.own, m.came)
                m.news.cells = 1 + len(m.came)
                if isinstance(m.merge, Pushes):
                    self._served(m, m.merge)
                m.digest = await self._engines.aside(digest, mean)
                m.mean = mean
            if m.mean is None:
                await asyncio.sleep(min(AGAIN_S, AGAIN_SHARE * within_s))
        m.news.seconds = loop.time() - began
        m.came.clear()

    async def _pull(self, m: _Meeting, partners: Sequence[Partner], stage: int) -> None:
        """What the partners give that has not come yet, from any of their replicas."""
        shapes = {name: tuple(t.shape) for name, t in (m.given or {}).items()}
        for partner in partners:
            hosts = partner.hosts.get(stage, ())
            if partner.cell in m.came or not hosts:
                continue
            found = await self._fetch(m, [h.peer for h in hosts], StateKind.SNAPSHOT, stage, shapes)
            if found is None:
                continue
            try:
                m.came[partner.cell] = await self._engines.aside(m.merge.opens, found.tensors)
            except WireError as e:
                for peer in found.sources:
                    self._engines.transport.fault(peer, str(e))

    def _clip(self, m: _Meeting) -> None:
        """Bound the influence of outliers. A partner more than FAR times as far away as usual is
        moved to the usual distance, and one TOO_FAR away is left out; so noise, or values scaled
        up, do little harm. While neither the usual distance nor that of the own training is known,
        nothing is taken."""
        own = m.own or {}
        far = {cell: distance(given, own) for cell, given in sorted(m.came.items())}
        m.news.apart = median(far.values()) if far else 0.0
        went = max(self._went, default=0.0)
        # Of as many near ones as far ones, the near ones say what is usual.
        usual = median_low(self._apart) if len(self._apart) >= USUAL else went
        most = FAR * usual
        for cell, apart in far.items():
            if apart > most:
                given = m.came.pop(cell)
                if usual and apart < TOO_FAR:
                    m.came[cell] = nearer(given, own, usual / apart)
                self._clipped(cell, m.number, apart, usual)
            if went:
                # However long partners are far away, they do not make that usual.
                self._apart.append(min(apart, most, FAR * went))

    def _clipped(self, cell: str, window: int, apart: float, usual: float) -> None:
        said = "left out: it is not known yet how far away partners are"
        if usual:
            times = f"{apart / usual:.1f} times as far away as partners usually are"
            said = f"{times}, and {'counts for less' if apart < TOO_FAR else 'is left out'}"
        self._engines.journal.emit(
            "averaging",
            "partner-clipped",
            f"cell {cell} is {said}",
            "warning" if usual else "info",
            cell=cell,
            window=window,
        )

    def _served(self, m: _Meeting, merge: Pushes) -> None:
        """How old the pushes were that came to this server."""
        late = sorted(cell for cell, age in merge.ages.items() if merge.late(age))
        pushes = self._engines.metrics.pushes_total
        pushes.labels(result="refused").inc(len(late))
        pushes.labels(result="applied").inc(len(merge.ages) - len(late))
        text = f"applies {len(merge.ages) - len(late)} pushes of window {m.number}"
        refused = f"; refused as too old: those of cell {', '.join(late)}" if late else ""
        self._engines.journal.emit(
            "averaging",
            "pushes",
            text + refused,
            "warning" if late else "debug",
            window=m.number,
            ages=dict(merge.ages),
        )

    async def _result(self, m: _Meeting, peers: Sequence[PeerId], stage: int) -> None:
        """What was made of the window, from those who have it."""
        got = await self._fetch(m, peers, StateKind.MEAN, stage, m.merge.made())
        if got is not None and finite(found := got.tensors):
            m.digest = await self._engines.aside(digest, found)
            m.told = m.told or m.merge.lacks(m.cell, found)
            m.mean = dict(found)

    async def _fetch(
        self,
        m: _Meeting,
        donors: Sequence[PeerId],
        kind: StateKind,
        stage: int,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> StateSnapshot | None:
        try:
            found = await self._engines.fetch(donors, stage, kind, Version(m.number), shapes)
        except PeerFault:
            return None  # not yet, or not any more
        m.news.nbytes += sum(found.sources.values())
        return found

    # ----------------------------------------------------------- the outer round

    async def attempt(
        self, plan: Plan, r: ev.RoundArrived, listener: bool
    ) -> tuple[ev.RoundEnded, dict[str, Tensor]]:
        """One attempt: what it came to, and the next parameters; what is missing is copied."""
        m, rounds = self._meeting, self._rounds
        stage = rounds.stage
        wanted = plan.window.means.get(stage, "")
        members = [p for p in plan.stage(stage) if p.peer not in r.dead]
        fresh: dict[str, Tensor] = {}
        if m is not None:
            m.applied = False
        if not listener:
            await self._state_export.hold(plan, r.dead, r.deadline_s)
            if not wanted:
                fresh = self._anchor.stage.parameters()
            elif (
                m is not None
                and m.mean is not None
                and (m.number, m.digest) == (plan.outer, wanted)
            ):
                fresh, m.applied = await self._engines.aside(self._moved, m), True
                m.news.number, m.news.peers = plan.outer, len(members)
                m.news.cells = m.news.cells or 1 + len(plan.window.partners)
        missing = tuple(sorted(rounds.shapes.keys() - fresh.keys()))
        outcome = RoundOutcome(fresh, frozenset({self._me}), {}, 0, 0.0, missing=missing)
        return rounds.ended(plan, r, outcome, len(members)), fresh

    def _moved(self, m: _Meeting) -> dict[str, Tensor]:
        """Parameters in place, moved by as much as the mean is from what was given."""
        here = self._anchor.stage.parameters()
        rest = {name: t.to("cpu", torch.float32) for name, t in here.items()}
        began, mixing = m.merge.since(m.local, m.told), m.merge.settings.mixing
        return rest | moved(here, began, m.mean or {}, mixing)

    async def takes(self) -> None:
        """What the attempt came to is put in place; where the cell keeps an anchor, the mean is the
        next one."""
        m = self._meeting
        if m is not None and m.applied and m.mean is not None:
            self.news = m.news
            if self._anchor.kept:
                owes = m.merge.owes if m.merge.shared and not m.told else None
                self._anchor.stop()  # an anchor that is on its way is from before this round
                await self._engines.aside(self._anchor.takes, m.mean, owes)

    async def copied(
        self, plan: Plan, donors: Sequence[PeerId], version: Version, nbytes: int
    ) -> None:
        """The parameters of ``version`` came from ``donors``: fetch the anchor that goes with
        them."""
        await self._anchor.copy(donors, version)
        stage = self._rounds.stage
        if stage in plan.window.means:
            cells = 1 + len(plan.window.partners)
            self.news = WindowNews(plan.outer, cells, len(plan.stage(stage)), nbytes)


def _enough(m: _Meeting, partners: int, late: bool) -> bool:
    """Whether to compute the mean of what has come. Where anchors must stay equal, a cell that
    lacks a contribution computes none, unless a quorum is enough: then its anchor differs from
    that of cells that had more, and in the next window the rarer anchor gives way."""
    if len(m.came) == partners:
        return True
    if m.merge.shared:
        return late and 0 < m.merge.settings.quorum <= 1 + len(m.came)
    return late and bool(m.came)
