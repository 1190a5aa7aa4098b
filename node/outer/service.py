"""Finds partners for a cell: while this peer leads one, it looks for a group in every window and
tells its leader which cells it has found. Enters: the wall clock, what the leader knows of its
cell. Leaves: a group, and reports of the cell's windows. Never: a parameter;
:class:`node.outer.window.WindowRound` moves these."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil, floor
from typing import Protocol

from node.averaging.strategies.keys import meeting_keys
from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import ChangeStatus, Rules
from node.core.clock import Clock, begins
from node.core.errors import Refused
from node.core.ids import NO_CELL, CellId, PeerId, short_cell
from node.core.journey import Host, Partner, Plan, Window
from node.core.tasks import Tasks
from node.dht.topics import CHANGES
from node.epoch import events as ev
from node.outer.forming import GroupFinder
from node.outer.postings import CellFacts
from node.outer.register import LIVES, CellRegister
from node.outer.window import WindowNews
from node.telemetry.events import Journal
from protos import control_pb2 as pb

USUAL_S = 240.0
"""Seconds of a window that has time for two attempts to find a group and for averaging after that.
In shorter windows all times are scaled down."""
OPEN_SHARE = 0.5
"""Share of a window after which contributions that have not arrived are left out."""
NO_ANCHOR = 64 * "0"
"""Posted in place of its anchor by a cell in which some stage has none."""
HOSTS = 4
"""Hosts of a stage that partners are told."""
MADDRS = 4
"""Addresses of a host that partners are told."""
POSTERS = 4
"""Cells that post the owner's newest change when all of them know it."""


class LedPort(Protocol):
    """The cell of this peer, and its leader if this peer leads:
    :class:`node.coordinator.led_cell.LedCell`."""

    me: PeerId
    stage: int

    @property
    def cell(self) -> CellId:
        """The cell of this peer."""
        ...

    @property
    def standing(self) -> ChangeStatus:
        """The owner's changes, as this peer knows them."""
        ...

    @property
    def leads(self) -> bool:
        """True while this peer leads the cell."""
        ...

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        ...

    @property
    def plan(self) -> Plan | None:
        """The plan in force, of the cell that this peer leads; None without one."""
        ...

    @property
    def window(self) -> int:
        """Number of the window whose round has not ended, 0 for none."""
        ...

    @property
    def anchor(self) -> str:
        """64 hex digits for the anchors of all stages; empty if a stage has none."""
        ...

    def change(self, text: str) -> Rules:
        """Take a change of the owner from another cell. Raises Refused."""
        ...

    def grouped(self, group: ev.Grouped) -> None:
        """Tell the leader which cells were found."""
        ...


class CellMeetings:
    """The windows of one peer, in a run with several cells. ``addresses(peer)`` gives the addresses
    of a peer; ``learn(peer, addresses)`` is told at which addresses hosts of partners can be
    dialled."""

    def __init__(
        self,
        finder: GroupFinder,
        led: LedPort,
        clock: Clock,
        journal: Journal,
        *,
        register: CellRegister,
        addresses: Callable[[PeerId], Sequence[str]],
        learn: Callable[[PeerId, Sequence[str]], None],
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._finder = finder
        self._led = led
        self._clock = clock
        self._journal = journal
        self.register = register
        self._addresses = addresses
        self._learn = learn
        self._tasks = Tasks("cells", on_error)
        self._crowded = False
        """True while there are more cells than fit in the one group of this run."""

    @property
    def _settings(self) -> OuterSettings:
        """The settings in force."""
        return self._led.standing.in_force.outer

    def start(self) -> None:
        """Begin to look for partners whenever this peer leads."""
        self._tasks.spawn(self.register.keep(), "register", eternal=True)
        self._tasks.spawn(self._spread_changes(), "changes", eternal=True)
        self._tasks.spawn(self._look(), "windows", eternal=True)

    async def close(self) -> None:
        """Stop looking for partners."""
        await self._tasks.close()
        await self._finder.close()

    async def _look(self) -> None:
        every = self._settings.window_s
        post_s = self._finder.board.times.post
        alone = False  # a cell that stays alone says so once
        window = -1
        while True:
            # The next window that this cell can still post for.
            window = await begins(self._clock, every, window, post_s)
            about = self._about()
            if about is None or self._led.window or self._led.finished:
                continue
            met = await self._partners(about, window)
            until = (window + OPEN_SHARE) * every - self._clock.wall()
            if about.change != self._led.standing.in_force.revision:
                continue  # these partners go by other settings now
            if met is None or until <= 0:
                who = "no other cell" if met is None else "partners too late"
                text = f"found {who} to average with in this window"
                level = "debug" if alone else "info"
                self._journal.emit("training", "window-alone", text, level, window=window)
                alone = True
                continue
            alone = False
            # Without a partner of the same anchor this cell steps by itself, and the other cells of
            # the group copy the result.
            names = ", ".join(f"cell {short_cell(p.cell)}" for p in met.partners) or "no other cell"
            does = "takes the anchor of" if met.copies else "averages with"
            text = f"{does} {names} in this window"
            cells = [p.cell for p in met.partners]
            self._journal.emit("training", "window", text, window=window, cells=cells)
            self._led.grouped(ev.Grouped(met, self._clock.now() + until))

    async def _spread_changes(self) -> None:
        """Spread the owner's changes from cell to cell through the directory; inside a cell
        heartbeats and plans carry them. Leaders look for changes once a period. The first cells in
        order post the newest change that they know, and so does a cell that does not find it in the
        directory."""
        number = -1
        every = self.register.every
        while True:
            number = await begins(self._clock, every, number)
            if self._led.leads:
                await self._exchange_changes(LIVES * every)

    async def _exchange_changes(self, life_s: float) -> None:
        """Read the changes that other cells have posted, and post the newest known one if they may
        lack it."""
        directory = self._finder.board.directory
        told = list[str]()
        for posting in (await directory.look(CHANGES)).values():
            try:
                told.append(self._led.change(posting.body.decode()).change)
            except (Refused, UnicodeDecodeError):
                continue  # a stranger may post anything
        newest = self._led.standing.known.change
        if newest and (newest not in told or self.register.standing()[0] < POSTERS):
            await directory.post(CHANGES, newest.encode(), life_s)

    async def _partners(self, about: CellFacts, window: int) -> Window | None:
        """The cells to average with, and whether this cell only copies their result; None without a
        group."""
        start = window * self._settings.window_s
        s = self._settings
        number, cells = self.register.standing()
        keys, most = meeting_keys(s, about.cell, number, cells, window)
        self._warn(s, cells, most)
        group = await self._finder.find(about, window, keys, most, start, s.together)
        if group is None:
            return None
        shared = common_anchor(group.anchors.values())
        able = {cell: p for cell, p in group.members.items() if group.anchors[cell] == shared}
        return Window(window, _others(able, about.cell), copies=about.anchor != shared)

    def _warn(self, s: OuterSettings, cells: int, most: int) -> None:
        """Say once if there are more cells than fit in the one group of a window."""
        crowded = s.together and cells > most
        if crowded and not self._crowded:
            text = (
                f"there are about {cells} cells, and {s.strategy} of {s.carries} has room for "
                f"{most} in a window: the others stay alone in it. Larger cells, or "
                'carries = "state" over a moshpit grid, have no such bound'
            )
            self._journal.emit("training", "cells-too-many", text, "warning", cells=cells)
        self._crowded = crowded

    def _about(self) -> CellFacts | None:
        """Facts about the cell that this peer leads, for other cells; None before its first
        plan."""
        led = self._led
        plan = led.plan
        if plan is None:
            return None
        anchor = ""
        if self._settings.carries == "deltas" and not self._settings.pushes:
            anchor = led.anchor or NO_ANCHOR
        maddrs = tuple(self._addresses(led.me))
        change = led.standing.in_force.revision
        return CellFacts(led.cell, plan.base, self._hosts(plan), anchor, change, maddrs)

    def _hosts(self, plan: Plan) -> dict[int, tuple[Host, ...]]:
        current = {
            stage: [m.peer for m in plan.stage(stage) if m.current]
            for stage in sorted({m.stage for m in plan.members})
        }
        return {
            stage: tuple(Host(p, tuple(self._addresses(p)[:MADDRS])) for p in peers[:HOSTS])
            for stage, peers in current.items()
        }

    def meet_hosts(self, plan: Plan) -> None:
        """A plan names partners: learn the addresses of their hosts of this stage."""
        for partner in plan.window.partners:
            for host in partner.hosts.get(self._led.stage, ()):
                self._learn(host.peer, host.maddrs)


class CellTally:
    """Report to the operator about one of several cells and its windows, since the daemon began.
    Windows are ``every_s`` seconds long; ``wall`` is Unix time."""

    def __init__(self) -> None:
        self._cell = NO_CELL
        self._since = 0.0
        self._met = (0, 0)
        self._busy: set[int] = set()
        """Windows in which the cell had partners, or an outer round under way."""
        self._seen = self._last = self._alone_windows = self._averaged = 0
        self._alone = False

    def planned(self, plan: Plan, every_s: float, wall: float) -> None:
        """A plan of this peer's cell is in force."""
        if plan.cell_id != self._cell:
            self._cell = plan.cell_id
            self._since = wall
        if plan.window.number:
            self._met = plan.window.number, 1 + len(plan.window.partners)
            self._busy.add(plan.window.number)
        if plan.outer:
            self._busy.add(floor(wall / every_s))

    def line(
        self, cell: CellId, peers: int, cells: int, news: WindowNews, every_s: float, wall: float
    ) -> pb.CellLine:
        """The report. ``peers`` belong to the cell; about ``cells`` are in sight; ``news``
        describes the last mean that was put in place."""
        now = floor(wall / every_s)
        self._close_windows(now, every_s)
        self._averaged += news.number != self._last
        self._last = news.number
        return pb.CellLine(
            cell=cell,
            peers=peers,
            cells=cells,
            window_s=every_s,
            window=now,
            next_s=(now + 1) * every_s - wall,
            met=self._met[0],
            met_cells=self._met[1],
            last=news.number,
            cells_averaged=news.cells,
            bytes=news.nbytes,
            last_s=news.seconds,
            alone=self._alone,
            alone_windows=self._alone_windows,
            averaged_windows=self._averaged,
            apart=news.apart,
        )

    def _close_windows(self, now: int, every_s: float) -> None:
        """Count the windows before ``now`` that have ended since the last call. A window that began
        before the cell existed is not counted."""
        if self._cell and now > self._seen:
            whole = ceil(self._since / every_s)
            first = max(self._seen, whole)
            self._alone_windows += max(0, now - first) - sum(first <= w < now for w in self._busy)
            self._alone = now - 1 >= whole and now - 1 not in self._busy
            self._busy = {w for w in self._busy if w >= now}
            self._seen = now


def common_anchor(anchors: Collection[str]) -> str:
    """The anchor that a group averages from: the most common one, and the last in sort order if
    several are equally common; NO_ANCHOR only if no member has an anchor. All members choose the
    same one, and a cell with another anchor copies the result."""
    count = Counter(anchors)
    return max(count, key=lambda anchor: (anchor != NO_ANCHOR, count[anchor], anchor))


def _others(cells: Mapping[CellId, Partner], me: CellId) -> tuple[Partner, ...]:
    """All cells but ``me``, in order."""
    return tuple(p for cell, p in sorted(cells.items()) if cell != me)
