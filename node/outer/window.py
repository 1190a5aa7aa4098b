"""A window at one member: the cell's contribution, the mean with its partners' contributions while
training goes on, and the next version made from that. Enters: plans. Leaves: the next parameters,
the mean that this peer holds. Never: the choice of partners (:mod:`node.outer.service`), a plan.

Each cell pulls the contributions of its partners and computes the mean itself, unless the strategy
has a server (parameter-server, hogwild): then the others fetch the server's result.

begin    a plan names the window and the partners: the parameters in place are kept and served, and
         fetching the partners' begins
attempt  a plan without paths names the mean: parameters become x + (mean - given), so that the
         training meanwhile stays
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
from node.epoch import events as ev
from node.outer.anchor import Anchor
from node.outer.merging import (
    Merge,
    OuterPushes,
    distance,
    finite,
    merge_of,
    moved,
    nearer,
)
from node.stage.engines import Engines
from node.stage.inner_round import Rounds
from node.stage.outer_port import Outer, StageParts, WindowNews
from node.stage.state_export import StateExport
from node.wire.tensors import digest

AGAIN_S = 1.0
"""Seconds between two attempts to fetch a contribution that is not there yet."""
AGAIN_SHARE = 0.05
"""Upper bound on these seconds, as a share of the window's time."""
SOME_SHARE = 0.7
"""Share of the window's time after which the contributions that have arrived are enough."""
OWN_SHARE = 0.5
"""Share of the window's time within which every replica gets its turn to pull by itself, if the
replicas before it have not succeeded."""
USUAL = 4
"""Number of known distances of partners from which their median is the usual distance. Until then
the measure is the distance that the own training moved in a window, which no partner can influence;
it also bounds the distances that are remembered."""
REMEMBERED = 16
"""Distances that are remembered, the newest."""
FAR = 3.0
"""Multiple of the usual distance that a partner may be away."""
TOO_FAR = 0.5
"""Distance of a partner, relative to the length of the own contribution, from which it has another
model: half-way between the two is neither. Parameters drawn anew are 1.4 away."""


@dataclass
class Contributions:
    """Contributions to one window. ``cell``: this cell; ``given``: its contribution, as partners
    may fetch it, None without an anchor; ``own``: the same, decoded; ``came``: decoded
    contributions of the partners, by cell."""

    cell: str
    given: dict[str, Tensor] | None = None
    own: Mapping[str, Tensor] | None = None
    came: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a partner contributes."""
        return {name: tuple(t.shape) for name, t in (self.given or {}).items()}

    def enough(self, merge: Merge, partners: int, late: bool) -> bool:
        """Return True if the mean of the contributions that have arrived is to be computed. Where
        anchors must stay equal, a cell that lacks a contribution computes none, unless a quorum is
        enough: then its anchor differs from the anchor of cells that had more, and in the next
        window the rarer anchor gives way."""
        if self.own is None:
            return False
        if len(self.came) == partners:
            return True
        if merge.shared:
            return late and 0 < merge.settings.quorum <= 1 + len(self.came)
        return late and bool(self.came)

    def mean(self, merge: Merge) -> dict[str, Tensor]:
        """The mean of the contributions that have arrived."""
        return merge.makes(self.cell, self.own or {}, self.came)


@dataclass(frozen=True)
class WindowMean:
    """The result of a window, with its digest."""

    tensors: dict[str, Tensor]
    digest: str


@dataclass
class _Meeting:
    """The state of one window. ``local``: parameters at its beginning; ``merge``: the merge of
    ``contributions``; ``mean``: the result; ``news``: for the operator (0 cells where a replica
    made the mean); ``told``: nothing of this cell is in the result; ``server``: the cell that
    computes the mean, None: this one."""

    number: int
    base: Version
    local: Mapping[str, Tensor]
    merge: Merge
    contributions: Contributions
    told: bool = False
    server: Partner | None = None
    mean: WindowMean | None = None
    applied: bool = False
    news: WindowNews = field(default_factory=WindowNews)
    task: asyncio.Task[None] | None = None


def outer_of(settings: OuterSettings) -> Outer:
    """The part of a stage in rounds between cells, under the settings of a manifest: its anchor and
    its windows, made from the parts of the stage's runtime."""

    def made(p: StageParts) -> tuple[Anchor, WindowRound]:
        anchor = Anchor(p.stage, settings, p.engines, p.tasks, p.me)
        return anchor, WindowRound(anchor, p.engines, p.state_export, p.rounds, p.tasks, p.me)

    return made


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
        self._anchor = anchor
        self._engines = engines
        self._rounds = rounds
        self._me = me
        self._state_export = state_export
        self._tasks = tasks
        self._meeting: _Meeting | None = None
        self._apart: deque[float] = deque(maxlen=REMEMBERED)
        """Distances of the last partners from the own contribution, relative to its length."""
        self._went: deque[float] = deque(maxlen=REMEMBERED)
        """Distances that the own training moved in each of the last windows, in the same
        measure."""
        self._first: Mapping[str, Tensor] | None = None
        """Parameters in place when this peer's first plan was in force, kept until the first
        window."""
        self.news = WindowNews()

    # ----------------------------------------------------------- state for others

    @property
    def mean(self) -> tuple[int, str]:
        """The newest window for which the mean is here, with the mean's digest; (0, "") for
        none."""
        m = self._meeting
        if m is None or m.mean is None:
            return 0, ""
        return m.number, m.mean.digest

    def describe(
        self, kind: StateKind, window: int | None
    ) -> tuple[Version, Mapping[str, Tensor]] | None:
        """The cell's contribution to a window, or its mean."""
        m = self._meeting
        if m is None or window != m.number:
            return None
        found = m.contributions.given
        if kind is not StateKind.SNAPSHOT:
            found = None if m.mean is None else m.mean.tensors
        if found is None:
            return None
        return Version(m.number), found

    # ----------------------------------------------------------- the window

    def begin(self, plan: Plan, settings: OuterSettings, listener: bool) -> None:
        """A plan is in force, under these settings."""
        anchor = self._anchor
        window = plan.window
        if settings != anchor.settings:
            self._drop()  # its merge goes by the settings before
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
            plan.base,
            anchor.stage.parameters(),
            merge_of(settings, anchor, carried, 1 + len(window.partners)),
            Contributions(plan.cell_id),
            window.copies,
            self._server(settings, plan),
        )
        m.task = self._tasks.spawn(self._meet(m, plan, began), "window")

    def _began(self) -> Callable[[], Mapping[str, Tensor]] | None:
        """Returns the parameters from which this cell's training since the last window began: its
        anchor, the parameters in place after the last mean, or the first ones; None if they are not
        known here."""
        m = self._meeting
        state = self._anchor.state
        first = self._first
        if state is not None:
            return lambda: state.anchor
        if m is None or not m.merge.near:
            if first is None:
                return None
            return lambda: first
        local = m.local
        mean = m.mean
        if mean is None or not m.applied:
            return lambda: local
        mixing = m.merge.settings.mixing
        return lambda: moved(local, local, mean.tensors, mixing)

    def _server(self, s: OuterSettings, plan: Plan) -> Partner | None:
        """The partner that makes the mean for this stage; None if this cell does."""
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
        """Contribute, and get the mean: by pulling, or from a replica with an earlier turn.
        ``began_at``: the result of :meth:`_began`."""
        stage = self._rounds.stage
        within_s = plan.window.within_s
        gathered = m.contributions
        loop = asyncio.get_running_loop()
        began = loop.time()
        mates = [p.peer for p in plan.stage(stage) if p.current]
        if m.merge.near and began_at is not None:
            went = await self._engines.aside(lambda: distance(began_at(), m.local))
            if went > 0.0 and math.isfinite(went):  # an epoch may be longer than a window
                self._went.append(went)
        # In every window another replica pulls first.
        order = mates[m.number % len(mates) :] + mates[: m.number % len(mates)]
        turn = OWN_SHARE * within_s * order.index(self._me) / len(order)
        others = [peer for peer in order if peer != self._me]
        await self._anchor.arrived(within_s)
        if self._anchor.lacking:
            # Nobody in the cell has one, or it would have come: all begin with the parameters
            # contributed here.
            self._anchor.begin_with(m.local)
        if not m.told:
            gathered.given = await self._engines.aside(m.merge.gives, m.local)
            if gathered.given is None:
                return
            gathered.own = await self._engines.aside(m.merge.opens, gathered.given)
        partners = plan.window.partners
        if not partners and not m.merge.shared:
            return
        while m.mean is None and (now := loop.time() - began) < within_s:
            if now < turn:
                await self._result(m, others, stage)
            elif m.server is not None or m.told:
                # The result comes from the server, or from a partner: this cell lacks the partners'
                # anchor.
                for partner in partners if m.server is None else [m.server]:
                    if m.mean is None and (hosts := partner.hosts.get(stage, ())):
                        await self._result(m, [h.peer for h in hosts], stage)
            else:
                await self._pull(m, partners, stage)
            late = loop.time() - began >= SOME_SHARE * within_s
            makes = m.mean is None and m.server is None
            if makes and gathered.enough(m.merge, len(partners), late):
                if m.merge.near:
                    await self._engines.aside(self._clip, m)
                mean = await self._engines.aside(gathered.mean, m.merge)
                m.news.cells = 1 + len(gathered.came)
                self._weighed(m)
                if isinstance(m.merge, OuterPushes):
                    self._served(m, m.merge)
                m.mean = WindowMean(mean, await self._engines.aside(digest, mean))
            if m.mean is None:
                await asyncio.sleep(min(AGAIN_S, AGAIN_SHARE * within_s))
        m.news.seconds = loop.time() - began
        gathered.came.clear()

    async def _pull(self, m: _Meeting, partners: Sequence[Partner], stage: int) -> None:
        """Fetch the contributions of partners that are still missing, from any of their
        replicas."""
        came = m.contributions.came
        shapes = m.contributions.shapes()
        for partner in partners:
            hosts = partner.hosts.get(stage, ())
            if partner.cell in came or not hosts:
                continue
            found = await self._fetch(m, [h.peer for h in hosts], StateKind.SNAPSHOT, stage, shapes)
            if found is None:
                continue
            try:
                came[partner.cell] = await self._engines.aside(m.merge.opens, found.tensors)
            except WireError as e:
                for peer in found.sources:
                    self._engines.transport.fault(peer, str(e))

    def _clip(self, m: _Meeting) -> None:
        """Bound the influence of outliers. A partner more than FAR times as far away as usual is
        moved to the usual distance, and one TOO_FAR away is left out; so noise, or values scaled
        up, do little harm. While neither the usual distance nor the one of the own training is
        known, nothing is taken."""
        own = m.contributions.own or {}
        came = m.contributions.came
        far = {cell: distance(given, own) for cell, given in sorted(came.items())}
        if far:
            m.news.apart = median(far.values())
        went = max(self._went, default=0.0)
        # Among equally many near and far partners the near ones define the usual distance.
        usual = went
        if len(self._apart) >= USUAL:
            usual = median_low(self._apart)
        most = FAR * usual
        for cell, apart in far.items():
            if apart > most:
                given = came.pop(cell)
                if usual and apart < TOO_FAR:
                    came[cell] = nearer(given, own, usual / apart)
                self._clipped(cell, m.number, apart, usual)
            if went:
                # However long partners are far away, they do not make that usual.
                self._apart.append(min(apart, most, FAR * went))

    def _clipped(self, cell: str, window: int, apart: float, usual: float) -> None:
        said = "left out: it is not known yet how far away partners are"
        level = "info"
        if usual:
            times = f"{apart / usual:.1f} times as far away as partners usually are"
            does = "counts for less" if apart < TOO_FAR else "is left out"
            said = f"{times}, and {does}"
            level = "warning"
        text = f"cell {cell} is {said}"
        self._engines.journal.emit(
            "averaging", "partner-clipped", text, level, cell=cell, window=window
        )

    def _weighed(self, m: _Meeting) -> None:
        """Report the cells of this window that count less than others."""
        for cell, weight in (m.merge.weights or {}).items():
            if weight < 1.0:
                text = (
                    f"cell {cell} counts {weight:.2g} times in window {m.number}: its difference "
                    "goes against the others', or is a copy"
                )
                self._engines.journal.emit(
                    "averaging", "partner-weighed", text, "warning", cell=cell, window=m.number
                )

    def _served(self, m: _Meeting, merge: OuterPushes) -> None:
        """Report the ages of the pushes that came to this server."""
        late = sorted(cell for cell, age in merge.ages.items() if merge.late(age))
        pushes = self._engines.metrics.pushes_total
        pushes.labels(result="refused").inc(len(late))
        pushes.labels(result="applied").inc(len(merge.ages) - len(late))
        text = f"applies {len(merge.ages) - len(late)} pushes of window {m.number}"
        level = "debug"
        if late:
            text += f"; refused as too old: those of cell {', '.join(late)}"
            level = "warning"
        self._engines.journal.emit(
            "averaging", "pushes", text, level, window=m.number, ages=dict(merge.ages)
        )

    async def _result(self, m: _Meeting, peers: Sequence[PeerId], stage: int) -> None:
        """Fetch the window's mean from peers that may have it."""
        got = await self._fetch(m, peers, StateKind.MEAN, stage, m.merge.made())
        if got is not None and finite(found := got.tensors):
            found_digest = await self._engines.aside(digest, found)
            m.told = m.told or m.merge.lacks(m.contributions.cell, found)
            m.mean = WindowMean(dict(found), found_digest)

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
        """Make one attempt. Returns its outcome and the next parameters; missing parameters are
        copied from other members later."""
        m = self._meeting
        rounds = self._rounds
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
                and (m.number, m.mean.digest) == (plan.outer, wanted)
            ):
                fresh = await self._engines.aside(self._moved, m)
                m.applied = True
                m.news.number = plan.outer
                m.news.peers = len(members)
                m.news.cells = m.news.cells or 1 + len(plan.window.partners)
        missing = tuple(sorted(rounds.shapes.keys() - fresh.keys()))
        outcome = RoundOutcome(fresh, frozenset({self._me}), {}, 0, 0.0, missing=missing)
        return rounds.ended(plan, r, outcome, len(members)), fresh

    def _moved(self, m: _Meeting) -> dict[str, Tensor]:
        """Parameters in place, moved by the difference of the mean from the own contribution."""
        here = self._anchor.stage.parameters()
        rest = {name: t.to("cpu", torch.float32) for name, t in here.items()}
        began = m.merge.since(m.local, m.told)
        mixing = m.merge.settings.mixing
        mean: Mapping[str, Tensor] = {}
        if m.mean is not None:
            mean = m.mean.tensors
        return rest | moved(here, began, mean, mixing)

    async def takes(self) -> None:
        """The parameters of the attempt are put in place; if the cell keeps an anchor, the mean
        becomes the next one."""
        m = self._meeting
        if m is not None and m.applied and m.mean is not None:
            self.news = m.news
            if self._anchor.kept:
                owes = None
                if m.merge.shared and not m.told:
                    owes = m.merge.owes
                # An anchor that is still being fetched is from before this round
                self._anchor.stop()
                await self._engines.aside(self._anchor.takes, m.mean.tensors, owes)

    async def copied(
        self, plan: Plan, donors: Sequence[PeerId], version: Version, nbytes: int
    ) -> None:
        """The parameters of ``version`` came from ``donors``: fetch their anchor."""
        await self._anchor.copy(donors, version)
        stage = self._rounds.stage
        if stage in plan.window.means:
            cells = 1 + len(plan.window.partners)
            self.news = WindowNews(plan.outer, cells, len(plan.stage(stage)), nbytes)
