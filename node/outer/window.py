"""A window at one member: the cell's contribution, the mean with its partners' contributions while
training goes on, and the next version made from that. Enters: plans. Leaves: the next parameters,
the mean that this peer holds. Never: the choice of partners (:mod:`node.outer.service`), a plan.

Each cell pulls the contributions of its partners and computes the mean itself, unless the strategy
has a server (parameter-server, hogwild): then the others fetch the server's result.

begin    a plan names the window and the partners: the parameters in place are kept and served, and
         fetching the partners' begins, several at a time, so that a slow one holds up no other
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
from node.outer.asking import Places, first_of
from node.outer.merging import (
    Merge,
    OuterPushes,
    distance,
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
AT_ONCE = 4
"""Contributions that are pulled at a time while they arrive in time. If all were pulled at
once over a thin line, none would be whole when what has come counts."""
PATIENT = 3
"""Windows in a row in which this replica takes no part because other replicas may still give it
their anchor."""
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


@dataclass(frozen=True)
class WindowTimes:
    """Times of a window at one member, by the clock of the event loop. ``began``: the plan was in
    force; ``within_s``: seconds from then to the middle of the window."""

    began: float
    within_s: float

    @property
    def late(self) -> float:
        """The time from which the contributions that have arrived are enough."""
        return self.began + SOME_SHARE * self.within_s

    @property
    def over(self) -> float:
        """The time at which the window is over for this member."""
        return self.began + self.within_s

    @property
    def again_s(self) -> float:
        """Seconds between two attempts of a fetch."""
        return min(AGAIN_S, AGAIN_SHARE * self.within_s)


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
        self._missed = 0
        """Windows in a row in which this replica took no part, because it lacked the anchor."""
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
            self.forget()
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

    def forget(self) -> None:
        """The parameters in place came from elsewhere: forget the anchor and the window under way,
        which belong to the ones before."""
        self._anchor.forget()
        self._drop()
        self._first = None

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
        gathered = m.contributions
        loop = asyncio.get_running_loop()
        times = WindowTimes(loop.time(), plan.window.within_s)
        mates = [p.peer for p in plan.stage(stage) if p.current]
        if m.merge.near and began_at is not None:
            went = await self._engines.aside(lambda: distance(began_at(), m.local))
            if went > 0.0 and math.isfinite(went):  # an epoch may be longer than a window
                self._went.append(went)
        # In every window another replica pulls first.
        order = mates[m.number % len(mates) :] + mates[: m.number % len(mates)]
        turn = times.began + OWN_SHARE * times.within_s * order.index(self._me) / len(order)
        others = [peer for peer in order if peer != self._me]
        await self._anchor.arrived(times.within_s)
        if not await self._anchored(m):
            return
        partners = plan.window.partners
        try:
            if not m.told and not await self._gives(m):
                return
            if not partners and not m.merge.shared:
                return
            if await self._ready(m, partners, others, turn, times):
                await self._make(m)
        except ValueError as e:
            # A failed window costs one outer step of this replica.
            text = f"has no part in window {m.number}: {e}"
            self._engines.journal.emit(
                "averaging", "window-failed", text, "warning", window=m.number
            )
        m.news.seconds = loop.time() - times.began
        gathered.came.clear()

    async def _gives(self, m: _Meeting) -> bool:
        """Make the cell's contribution, which partners may fetch from now on. Return False if there
        is none. Raises ValueError for numbers that no cell can give."""
        given = await self._engines.aside(m.merge.gives, m.local)
        if given is None:
            return False
        m.contributions.own = await self._engines.aside(m.merge.opens, given)
        m.contributions.given = given
        return True

    async def _anchored(self, m: _Meeting) -> bool:
        """Return True if this replica can take part: it has an anchor if the run has anchors. While
        another replica may have the one of this cell, it makes up none, because then two replicas
        would differ; it copies the result of the window, with the anchor, as any member without
        the mean does."""
        if self._anchor.lacking:
            if not self._anchor.nobody_has_one and self._missed < PATIENT:
                self._missed += 1
                return False
            # Nobody in the cell has one: all begin with the parameters contributed here.
            await self._anchor.begin_with(m.local)
        self._missed = 0
        return True

    async def _ready(
        self,
        m: _Meeting,
        partners: Sequence[Partner],
        others: Sequence[PeerId],
        turn: float,
        times: WindowTimes,
    ) -> bool:
        """Ask until the mean is here, or the contributions that have come are enough to make it
        (True), or the window is over. Before ``turn`` the ``others`` of this cell are asked for the
        mean. No request goes on afterwards, so nothing changes what the mean is made of."""
        stage = self._rounds.stage
        asked = Tasks("window")
        taking = self._take(m, [others], times.began, turn, times)
        under_way = {asked.spawn(taking, "from replicas")}
        try:
            if m.server is None and not m.told:
                return await self._gather(m, partners, asked, under_way, turn, times)
            # The result comes from the server, or from a partner: this cell lacks the partners'
            # anchor.
            makers = partners
            if m.server is not None:
                makers = [m.server]
            hosts = [[h.peer for h in maker.hosts.get(stage, ())] for maker in makers]
            taking = self._take(m, hosts, turn, times.over, times)
            under_way.add(asked.spawn(taking, "from cells"))
            while m.mean is None and asyncio.get_running_loop().time() < times.over:
                under_way = await first_of(under_way, times.over)
            return False
        finally:
            await asked.close()

    async def _gather(
        self,
        m: _Meeting,
        partners: Sequence[Partner],
        asked: Tasks,
        under_way: set[asyncio.Task[None]],
        turn: float,
        times: WindowTimes,
    ) -> bool:
        """Pull the contributions of all partners from ``turn`` on. Return True as soon as those
        that have come are enough; False if the mean is here, or the window is over.
        ``under_way``: other requests, one of which may bring the mean."""
        loop = asyncio.get_running_loop()
        while m.mean is None and loop.time() < turn:
            under_way = await first_of(under_way, turn)
        # The longest pull with which all partners are pulled in time, ``AT_ONCE`` at a time.
        slow_s = max(0.0, times.late - loop.time()) * AT_ONCE / max(1, len(partners))
        places = Places(AT_ONCE, slow_s)
        for partner in partners:
            if partner.hosts.get(self._rounds.stage, ()):
                pulling = self._pull_until_here(m, partner, places, times.again_s)
                under_way.add(asked.spawn(pulling, f"pull {partner.cell}"))
        while m.mean is None and (now := loop.time()) < times.over:
            late = now >= times.late
            if m.contributions.enough(m.merge, len(partners), late):
                return True
            until = times.late
            if late:
                until = times.over
            under_way = await first_of(under_way, until)
        return False

    async def _pull_until_here(
        self, m: _Meeting, partner: Partner, places: Places, again_s: float
    ) -> None:
        """Pull the contribution of a partner, again and again until it has come."""
        while True:
            async with places.one():
                await self._pull(m, partner)
            if partner.cell in m.contributions.came:
                return
            await asyncio.sleep(again_s)

    async def _pull(self, m: _Meeting, partner: Partner) -> None:
        """Fetch the contribution of a partner from any of its replicas."""
        hosts = [h.peer for h in partner.hosts.get(self._rounds.stage, ())]
        found = await self._fetch(m, hosts, StateKind.SNAPSHOT, m.contributions.shapes())
        if found is None:
            return
        try:
            opened = await self._engines.aside(m.merge.opens, found.tensors)
        except WireError as e:
            self._blame(found, e)
        else:
            m.contributions.came[partner.cell] = opened

    def _blame(self, found: StateSnapshot, why: WireError) -> None:
        """Count a fault of the peers that gave these tensors."""
        for peer in found.sources:
            self._engines.transport.fault(peer, str(why))

    async def _take(
        self,
        m: _Meeting,
        sources: Sequence[Sequence[PeerId]],
        since: float,
        until: float,
        times: WindowTimes,
    ) -> None:
        """Ask for the window's mean from ``since`` on, and begin no request after ``until``. Each
        of ``sources`` is some peers with the same mean. They are asked one after another, and the
        next one also while one that is slow goes on, so that each is asked in time."""
        loop = asyncio.get_running_loop()
        sources = [peers for peers in sources if peers]
        await asyncio.sleep(max(0.0, since - loop.time()))
        slow_s = max(0.0, until - loop.time()) / max(1, len(sources))
        asked = Tasks("mean")
        under_way: dict[int, asyncio.Task[None]] = {}
        try:
            while loop.time() < until:
                for i, peers in enumerate(sources):
                    if i not in under_way:
                        under_way[i] = asked.spawn(self._result(m, peers), f"source {i}")
                    going = await first_of(set(under_way.values()), loop.time() + slow_s)
                    under_way = {i: task for i, task in under_way.items() if task in going}
                    if m.mean is not None:
                        return
                await asyncio.sleep(times.again_s)
            while under_way and m.mean is None:
                going = await first_of(set(under_way.values()), times.over)
                under_way = {i: task for i, task in under_way.items() if task in going}
        finally:
            await asked.close()

    async def _make(self, m: _Meeting) -> None:
        """Make the mean of the contributions that have come."""
        gathered = m.contributions
        if m.merge.near:
            await self._engines.aside(self._clip, m)
        mean = await self._engines.aside(gathered.mean, m.merge)
        m.news.cells = 1 + len(gathered.came)
        self._weighed(m)
        if isinstance(m.merge, OuterPushes):
            self._served(m, m.merge)
        m.mean = WindowMean(mean, await self._engines.aside(digest, mean))

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
        refused = [cell for cell in merge.ages if merge.refuses(cell)]
        late = [cell for cell in refused if cell not in merge.repeated]
        pushes = self._engines.metrics.pushes_total
        pushes.labels(result="refused").inc(len(refused))
        pushes.labels(result="applied").inc(len(merge.ages) - len(refused))
        text = f"applies {len(merge.ages) - len(refused)} pushes of window {m.number}"
        level = "debug"
        if late:
            text += f"; refused as too old: those of cell {', '.join(late)}"
        if merge.repeated:
            cells = ", ".join(sorted(merge.repeated))
            text += f"; refused because they contain one that was taken: those of cell {cells}"
        if refused:
            level = "warning"
        self._engines.journal.emit(
            "averaging", "pushes", text, level, window=m.number, ages=dict(merge.ages)
        )

    async def _result(self, m: _Meeting, peers: Sequence[PeerId]) -> None:
        """Fetch the window's mean from peers that may have it."""
        got = await self._fetch(m, peers, StateKind.MEAN, m.merge.made())
        if got is None:
            return
        found = dict(got.tensors)
        try:
            await self._engines.aside(m.merge.checks, found)
        except WireError as e:
            self._blame(got, e)
            return
        name = await self._engines.aside(digest, found)
        if m.mean is None:  # another source may have been quicker
            m.told = m.told or m.merge.lacks(m.contributions.cell, found)
            m.mean = WindowMean(found, name)

    async def _fetch(
        self,
        m: _Meeting,
        donors: Sequence[PeerId],
        kind: StateKind,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> StateSnapshot | None:
        stage = self._rounds.stage
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
