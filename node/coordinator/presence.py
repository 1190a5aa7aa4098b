"""Peers of the swarm, as this peer's directory shows them: posts the own record, and reads the
records of its cell from time to time."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from functools import cached_property

from node.consensus.election import Sighting
from node.coordinator.vitals import Vitals
from node.core.clock import Clock
from node.core.ids import ENDS, NO_CELL, CellId, PeerId
from node.core.tasks import Tasks
from node.dht.record import DirectoryPort, PeerBody, PeerEntry
from node.dht.topics import PEERS, cell_topic
from node.reach.standing import Standing
from node.scheduler.choosing import Placed, able

LOST_FOR_S = 300.0
"""Seconds for which a peer is still shown, as lost, after its record has expired."""
QUIET_AFTER = 3
"""Readings without a change after which each further one doubles the pause."""
QUIET_MOST = 4.0
"""Most times the usual pause. Newcomers are noticed meanwhile by the number of DHT neighbours."""
LOOK_S = 1.0
"""Seconds between two looks at that number."""
FEW = 16
"""Number of records above which the pauses grow in proportion to the number, up to QUIET_MOST
times: each reading brings all records from several peers, so the work of all peers together grows
with the square of their number."""
SEEK_S = 2.0
"""Most seconds between two readings while this peer waits for others, who may be in sight again."""
HASTE_S = 0.5
"""Seconds between two readings while nobody else is in sight, or a stage is being chosen."""
DUE = 0.9
"""Share of the usual time between two posts after which an unchanged record is posted again."""
REST = 3.0
"""The pause after a reading is at least REST times as long as the reading took: a reading asks
several peers for all records, and is slow while many peers arrive."""
COMING = ("choosing", "starting", "joining")
"""States of a peer that does not take part yet."""
LEAVING = ("draining", "stopping", "finished-leaving")
"""States of a peer that will soon leave the place that its record names."""

WORKING = ("training", "finished")
"""States of a leader while the epochs of its cell follow each other, or after the last one."""
OUTSIDE_S = 60.0
"""Seconds between two looks of a member of a cell for peers outside all cells: peers that only help
others to find each other."""


class View:
    """One reading of the directory: ``everybody`` else, and the other peers of ``cell``. Answers
    are computed once, because they are used many times until the next reading."""

    def __init__(self, everybody: Mapping[PeerId, PeerEntry], cell: str = "") -> None:
        self.everybody = everybody
        self.others = {p: e for p, e in everybody.items() if e.body.cell == cell}
        self._placed: dict[int, Mapping[PeerId, Placed]] = {}

    def stages(self) -> list[int]:
        """The stages that other peers of the cell host or are about to host."""
        return [
            s
            for e in self.others.values()
            if e.body.state not in LEAVING and e.body.role != "rendezvous"
            if (s := _stage(e.body)) is not None
        ]

    def led(self) -> bool:
        """Return True if another peer leads the cell and does not wait."""
        return any(e.body.leads and e.body.state in WORKING for e in self.others.values())

    @cached_property
    def leaders(self) -> frozenset[PeerId]:
        """Other peers of the cell that say they lead."""
        return frozenset(p for p, e in self.others.items() if e.body.leads)

    @cached_property
    def hosting(self) -> frozenset[PeerId]:
        """Other peers, of any cell, that have a stage and do not leave it."""
        return frozenset(
            p
            for p, e in self.everybody.items()
            if e.body.role in ("ends", "stage") and e.body.state not in ("choosing", *LEAVING)
        )

    @cached_property
    def ends(self) -> Mapping[PeerId, Sighting]:
        """Other ends peers that can lead."""
        return {
            p: Sighting(e.seq, e.body.leads)
            for p, e in self.replicas(ENDS).items()
            if e.body.state not in COMING + LEAVING
        }

    @cached_property
    def follows(self) -> Mapping[PeerId, PeerId]:
        """For each other peer, the leader that it says it follows."""
        return {p: PeerId(e.body.follows) for p, e in self.others.items() if e.body.follows}

    @cached_property
    def hosts(self) -> Mapping[PeerId, int]:
        """The stages of other peers that host one, including peers that do not take part in it
        yet."""
        return {
            p: e.body.stage
            for p, e in self.others.items()
            if e.body.role in ("ends", "stage") and e.body.state not in ("choosing", "starting")
        }

    def replicas(self, stage: int) -> dict[PeerId, PeerEntry]:
        """Other peers that host ``stage``."""
        role = "ends" if stage == ENDS else "stage"
        return {
            p: e for p, e in self.others.items() if e.body.stage == stage and e.body.role == role
        }

    @cached_property
    def coming(self) -> Mapping[PeerId, int | None]:
        """Peers that are about to take part, with their stage; None while they choose one."""
        return {p: _stage(e.body) for p, e in self.others.items() if e.body.state in COMING}

    def placed(self, stages: int) -> Mapping[PeerId, Placed]:
        """Present or future placement of each other peer in a run of ``stages`` block stages; peers
        that leave are left out."""
        if stages not in self._placed:
            self._placed[stages] = {
                p: Placed(
                    _stage(e.body),
                    able(e.body.open_to, stages),
                    e.body.settled,
                    e.body.speed,
                    e.body.reach == Standing.CLOSED.value,
                )
                for p, e in self.others.items()
                if e.body.state not in LEAVING and e.body.role != "rendezvous"
            }
        return self._placed[stages]


class Pace:
    """Pauses between readings and between posts: longer among many peers, and while nothing
    changes. ``every_s``: the usual pause, in seconds."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.hasty = False
        """Read every :data:`HASTE_S`."""
        self.seeks: Callable[[], bool] = lambda: False
        """Returns True while this peer waits for others, which it should see as soon as they are
        back."""
        self._records = 0
        """Records in the last reading."""
        self._same = 0
        """Readings since the last change."""
        self._neighbours = 0

    def read(self, records: int, *, unchanged: bool) -> None:
        """A reading has brought this number of records; ``unchanged``: the ones of the reading
        before."""
        self._records = records
        if unchanged:
            self._same += 1
        else:
            self._same = 0

    def own_changed(self) -> None:
        """The own record has changed."""
        self._same = 0

    def neighbours(self, count: int) -> bool:
        """Take the number of DHT neighbours. Return True if somebody has come or gone."""
        if count == self._neighbours:
            return False
        self._neighbours = count
        self._same = 0
        return True

    @property
    def times(self) -> float:
        """Factor by which the pauses between readings and posts are longer than at the start; 1
        while anything changes among few peers."""
        quiet = 2.0 ** min(max(0, self._same - QUIET_AFTER), 30)
        return min(QUIET_MOST, max(quiet, self._many))

    @property
    def pause_s(self) -> float:
        """Seconds until the next reading."""
        if self._records < 2 or self.hasty:
            return min(HASTE_S, self.every_s)
        if self.seeks():
            return min(SEEK_S, self.every_s)
        return self.times * self.every_s

    @property
    def look_s(self) -> float:
        """Seconds until the next reading, at most, after somebody has come or gone."""
        return self.every_s * max(1.0, self._many)

    @property
    def _many(self) -> float:
        return min(QUIET_MOST, self._records / FEW)


class OwnRecord:
    """The record of this peer, which others read: posted when it changes, and again before it
    expires."""

    def __init__(self, directory: DirectoryPort, clock: Clock, pace: Pace) -> None:
        self._directory = directory
        self._clock = clock
        self._pace = pace
        self._make: Callable[[], PeerBody] | None = None
        self._posted_at = -math.inf
        """Time of the last post, in seconds of the clock."""
        self.posted: PeerBody | None = None
        """The record as it was last posted."""

    def announce(self, make: Callable[[], PeerBody]) -> None:
        """Post the result of ``make()`` from now on."""
        self._make = make

    async def post(self, cell: CellId) -> None:
        """Post the record under the topic of a cell, if it has changed or the last post is a
        refresh old."""
        if self._make is None:
            return
        body = self._make()
        now = self._clock.now()
        topic = cell_topic(cell) if cell else PEERS
        times = self._pace.times
        if body == self.posted and now - self._posted_at < DUE * times * self._pace.every_s:
            return
        if body != self.posted:
            self._pace.own_changed()
        self.posted = body
        posted = await self._directory.publish(body, self._pace.times, topic)
        self._posted_at = now if posted else -math.inf


class RecordReader:
    """Readings of the directory: the records of one cell at a time, and now and then the records of
    peers outside all cells."""

    def __init__(self, directory: DirectoryPort, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._outside: Mapping[PeerId, PeerEntry] = {}
        self._looked = -OUTSIDE_S

    async def read(self, cell: CellId) -> dict[PeerId, PeerEntry]:
        """The records of ``cell`` and of peers outside all cells, the own one included; all
        records, in a run of one cell."""
        if not cell:
            return await self._directory.read()
        if self._clock.now() - self._looked >= OUTSIDE_S:
            self._looked = self._clock.now()
            read = await self._directory.read()
            self._outside = {p: e for p, e in read.items() if not e.body.cell}
        now = self._clock.wall()
        outside = {p: e for p, e in self._outside.items() if e.not_after > now}
        return outside | await self._directory.read(cell_topic(cell))


class Sightings:
    """What successive readings have shown of the other peers: signs of life, and the peers that are
    gone. ``learn(peer, body)`` is told each peer's record."""

    def __init__(self, me: PeerId, learn: Callable[[PeerId, PeerBody], None]) -> None:
        self._me = me
        self._learn = learn
        self._seen: dict[PeerId, PeerEntry] = {}
        self.lost: Mapping[PeerId, tuple[PeerEntry, float]] = {}
        """Peers that lost their record lately, each with the last record and the wall-clock time at
        which it was first missed."""
        self.vitals = Vitals()
        """Signs of life of the peers in the directory."""

    def enter(self) -> None:
        """This peer belongs to another cell now."""
        self.lost = {}

    def read(self, seen: dict[PeerId, PeerEntry], cell: CellId, wall: float) -> bool:
        """Take a reading of ``cell``, begun at ``wall`` (Unix seconds). Return True if it has the
        records of the reading before."""
        # A peer that takes down its record before it expires has left, or is in another cell.
        gone = {p: (e, wall) for p, e in self._seen.items() if not cell or e.not_after <= wall}
        self.lost = {
            p: (e, t)
            for p, (e, t) in {**self.lost, **gone}.items()
            if p not in seen and p != self._me and wall - t < LOST_FOR_S
        }
        before = {p: e.body for p, e in self._seen.items()}
        self._seen = seen
        return before == {p: e.body for p, e in seen.items()}

    def meet(self, peer: PeerId, entry: PeerEntry, now: float) -> None:
        """The record of another peer was read."""
        self._learn(peer, entry.body)
        life_s = entry.not_after - entry.refreshed
        self.vitals.record(peer, entry.seq, life_s, entry.body.started, now)


class Presence:
    """Posts the own record and reads the other peers' records. ``learn(peer, body)`` is told each
    peer's record: the addresses at which it can be dialled, the relays through which it can be
    reached."""

    def __init__(
        self,
        me: PeerId,
        directory: DirectoryPort,
        clock: Clock,
        every_s: float,
        learn: Callable[[PeerId, PeerBody], None],
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.me = me
        self.directory = directory
        self._clock = clock
        self._tasks = Tasks("presence", on_error)
        self._changed = asyncio.Event()
        self.pace = Pace(every_s)
        self._own = OwnRecord(directory, clock, self.pace)
        self._reader = RecordReader(directory, clock)
        self.sightings = Sightings(me, learn)
        self.view = View({})
        """All other peers, as the last reading shows them."""
        self.cell = NO_CELL
        """The cell of this peer: it posts its record there, and reads the records of the same cell
        and of peers outside all cells."""
        self.company = asyncio.Event()
        """Set when the first other peer is seen."""

    def start(self) -> None:
        """Begin to read; nothing is posted before :meth:`announce`."""
        self._tasks.spawn(self._watch(), "watch", eternal=True)

    async def close(self, *, stays: bool = False) -> None:
        """Withdraw the record and stop reading. ``stays``: leave the record, because this peer
        starts again at once."""
        await self._tasks.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                if not stays:
                    await self.directory.withdraw()
        await self.directory.close()

    def announce(self, body: Callable[[], PeerBody]) -> None:
        """Post the result of ``body()`` from now on, at once and with every refresh."""
        self._own.announce(body)
        self._changed.set()

    def changed(self) -> None:
        """Post the record now rather than with the next refresh, because the own state has
        changed."""
        self._changed.set()

    def enter(self, cell: CellId) -> None:
        """This peer belongs to another cell now: post the record there at once."""
        if cell != self.cell:
            self.sightings.enter()
        self.cell = cell
        self.view = View(self.view.everybody, cell)
        self.changed()

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Addresses at which a peer, or this one, says that it can be dialled."""
        if peer == self.me:
            own = self._own.posted
            if not own:
                return ()
            return own.maddrs
        entry = self.view.everybody.get(peer)
        if not entry:
            return ()
        return entry.body.maddrs

    async def visit(self, cell: CellId) -> View:
        """Read the records of another cell once. Its peers can be dialled from then on."""
        view = View(await self.directory.read(cell_topic(cell)), cell)
        for peer, entry in view.others.items():
            self.sightings.meet(peer, entry, self._clock.now())
        return view

    async def _watch(self) -> None:
        while True:
            self._changed.clear()  # a change during the reading is posted next
            began = self._clock.now()
            await self._own.post(self.cell)
            cell = self.cell
            await self.look()
            if cell != self.cell:
                continue  # of the cell that this peer has just left
            pause_s = self.pace.pause_s
            await self._pause(max(pause_s, REST * (self._clock.now() - began)))

    async def look(self) -> None:
        """Read the records of the own cell now, and show them in :attr:`view`; what is read of a
        cell that this peer leaves meanwhile is dropped."""
        wall = self._clock.wall()
        cell = self.cell
        seen = await self._reader.read(cell)
        if cell != self.cell:
            return
        unchanged = self.sightings.read(seen, cell, wall)
        self.pace.read(len(seen), unchanged=unchanged)
        self.view = View({p: e for p, e in seen.items() if p != self.me}, self.cell)
        for peer, entry in self.view.everybody.items():
            self.sightings.meet(peer, entry, self._clock.now())
        if self.view.everybody:
            self.company.set()

    async def _pause(self, seconds: float) -> None:
        """Wait for ``seconds``, or less if something is known to have changed."""
        left = seconds
        while left > 0 and not self._changed.is_set():
            if self.pace.neighbours(self.directory.neighbours):
                left = min(left, self.pace.look_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._changed.wait()
            left -= LOOK_S


def _stage(body: PeerBody) -> int | None:
    return None if body.state == "choosing" else body.stage
