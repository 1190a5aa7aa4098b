"""Who is in the swarm, as this peer's directory shows it: posts the own record, reads those of
its cell, now and then."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from functools import cached_property

from node.core.clock import Clock
from node.core.ids import ENDS, NO_CELL, CellId, PeerId
from node.core.tasks import Tasks
from node.dht.record import DirectoryPort, PeerBody, PeerEntry
from node.dht.topics import PEERS, cell_topic
from node.reach.standing import Standing
from node.scheduler.choosing import Placed, able
from node.training.election import Sighting
from node.training.vitals import Vitals

LOST_FOR_S = 300.0
"""A peer whose record has expired is still shown, as lost, for so long."""
QUIET_AFTER, QUIET_MOST, LOOK_S = 3, 4.0, 1.0
"""After QUIET_AFTER readings without a change each further one doubles the pause, up to QUIET_MOST
times the usual one. Newcomers are noticed meanwhile by the number of DHT neighbours, which is
checked every LOOK_S."""
FEW = 16
"""With more peers in sight the pauses are longer in proportion to their number, up to QUIET_MOST
times: each reading brings all records from several peers, so that the work of all peers together
grows with the square of their number."""
SEEK_S = 2.0
"""Between two readings, at most, while this peer waits for others, who may be in sight again."""
HASTE_S = 0.5
"""Between two readings while nobody else is in sight, or a stage is being chosen."""
DUE = 0.9
"""Share of the usual time between two posts after which an unchanged record is posted again."""
REST = 3.0
"""The pause after a reading is at least REST times as long as the reading took: a reading asks
several peers for all records, and is slow where many peers come at the same time."""
COMING = ("choosing", "starting", "joining")
"""States of a peer that does not take part yet."""
LEAVING = ("draining", "stopping", "finished-leaving")
"""States of a peer that soon will not be where its record says."""

WORKING = ("training", "finished")
"""States of a leader in whose cell epochs follow each other, or all are done."""
OUTSIDE_S = 60.0
"""Who is in a cell looks so often for peers that are in none: those that only help others to find
each other."""


class View:
    """What one reading of the directory shows of ``everybody`` else, and of the other peers of
    ``cell``. Answers are computed once, because they are used many times until the next reading."""

    def __init__(self, everybody: Mapping[PeerId, PeerEntry], cell: str = "") -> None:
        self.everybody = everybody
        self.others = {p: e for p, e in everybody.items() if e.body.cell == cell}
        self._placed: dict[int, Mapping[PeerId, Placed]] = {}

    def stages(self) -> list[int]:
        """The stages that other peers of the cell host or are about to."""
        return [
            s
            for e in self.others.values()
            if e.body.state not in LEAVING and e.body.role != "rendezvous"
            if (s := _stage(e.body)) is not None
        ]

    def led(self) -> bool:
        """Whether somebody else leads in the cell, and does not wait."""
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
        """Of other peers, whose plan each says that it follows."""
        return {p: PeerId(e.body.follows) for p, e in self.others.items() if e.body.follows}

    @cached_property
    def hosts(self) -> Mapping[PeerId, int]:
        """The stages of other peers that host one, also of those who do not take part in it yet."""
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
        """Who is about to take part, and at which stage; None while it chooses one."""
        return {p: _stage(e.body) for p, e in self.others.items() if e.body.state in COMING}

    def placed(self, stages: int) -> Mapping[PeerId, Placed]:
        """Where others are or will be, in a run of so many block stages; not those who leave."""
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


class Presence:
    """``learn(peer, body)`` is told what everybody says of itself: where it can be dialled, through
    whom it can be reached."""

    def __init__(
        self,
        me: PeerId,
        directory: DirectoryPort,
        clock: Clock,
        every_s: float,
        learn: Callable[[PeerId, PeerBody], None],
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.me, self.directory, self._clock, self._every, self._learn = (
            me,
            directory,
            clock,
            every_s,
            learn,
        )
        self._tasks = Tasks("presence", on_error)
        self._body: Callable[[], PeerBody] | None = None
        self._own: PeerBody | None = None
        self._changed = asyncio.Event()
        self._seen: dict[PeerId, PeerEntry] = {}
        self.view = View({})
        """Everybody but this peer, as the last reading shows them."""
        self.cell = NO_CELL
        """The cell that this peer belongs to: it posts its record there, and of others reads those
        of the same cell and of peers that are in none."""
        self._outside: Mapping[PeerId, PeerEntry] = {}
        self._looked = -OUTSIDE_S
        self.lost: Mapping[PeerId, tuple[PeerEntry, float]] = {}
        """Peers whose record has gone lately, with the wall-clock time it was first missed."""
        self.company = asyncio.Event()
        """Set when the first other peer is seen."""
        self._same, self._neighbours = 0, 0
        self._posted = -math.inf
        """Time of the last post of the own record, in seconds of the clock."""
        self.hasty = False
        """Read every :data:`HASTE_S`."""
        self.vitals = Vitals()
        """Signs of life of the peers in the directory."""
        self.seeks: Callable[[], bool] = lambda: False
        """Whether this peer waits for others, whom it should see as soon as they are back."""

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
        """Post what ``body()`` says from now on, at once and with every refresh."""
        self._body = body
        self._changed.set()

    def changed(self) -> None:
        """The own state is another one: post it now rather than with the next refresh."""
        self._changed.set()

    def enter(self, cell: CellId) -> None:
        """This peer belongs to another cell now: the record says so at once."""
        if cell != self.cell:
            self.lost = {}
        self.cell = cell
        self.view = View(self.view.everybody, cell)
        self.changed()

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer, or this one, says that it can be dialled."""
        if peer == self.me:
            return self._own.maddrs if self._own else ()
        entry = self.view.everybody.get(peer)
        return entry.body.maddrs if entry else ()

    async def _post(self) -> None:
        """Post the own record if it has changed, or the last post is a refresh old."""
        if self._body is None:
            return
        body = self._body()
        now = self._clock.now()
        topic = cell_topic(self.cell) if self.cell else PEERS
        if body == self._own and now - self._posted < DUE * self.times * self._every:
            return
        self._same = self._same if body == self._own else 0
        self._own = body
        posted = await self.directory.publish(body, self.times, topic)
        self._posted = now if posted else -math.inf

    async def _watch(self) -> None:
        while True:
            self._changed.clear()  # what changes while the directory is asked is posted next
            began = self._clock.now()
            await self._post()
            now, cell = self._clock.wall(), self.cell
            seen = await self._read()
            if cell != self.cell:
                continue  # of the cell that this peer has just left
            # Who takes its record down while it holds has left, or is in another cell.
            gone = {p: (e, now) for p, e in self._seen.items() if not cell or e.not_after <= now}
            self.lost = {
                p: (e, t)
                for p, (e, t) in {**self.lost, **gone}.items()
                if p not in seen and p != self.me and now - t < LOST_FOR_S
            }
            unchanged = {p: e.body for p, e in seen.items()} == {
                p: e.body for p, e in self._seen.items()
            }
            self._same = self._same + 1 if unchanged else 0
            self._seen, self.view = (
                seen,
                View({p: e for p, e in seen.items() if p != self.me}, self.cell),
            )
            for peer, entry in self.view.everybody.items():
                self._learn(peer, entry.body)
                life_s = entry.not_after - entry.refreshed
                now_s = self._clock.now()
                self.vitals.record(peer, entry.seq, life_s, entry.body.started, now_s)
            if self.view.everybody:
                self.company.set()
            pause = self.times * self._every
            if len(seen) < 2 or self.hasty:
                pause = min(HASTE_S, self._every)
            elif self.seeks():
                pause = min(SEEK_S, self._every)
            await self._pause(max(pause, REST * (self._clock.now() - began)))

    async def _read(self) -> dict[PeerId, PeerEntry]:
        if not self.cell:
            return await self.directory.read()
        if self._clock.now() - self._looked >= OUTSIDE_S:
            self._looked = self._clock.now()
            read = await self.directory.read()
            self._outside = {p: e for p, e in read.items() if not e.body.cell}
        now = self._clock.wall()
        outside = {p: e for p, e in self._outside.items() if e.not_after > now}
        return outside | await self.directory.read(cell_topic(self.cell))

    @property
    def times(self) -> float:
        """Factor by which the pauses between readings and posts are longer than at the start; 1
        while anything changes among few peers."""
        quiet = 2.0 ** min(max(0, self._same - QUIET_AFTER), 30)
        return min(QUIET_MOST, max(quiet, self._many))

    @property
    def _many(self) -> float:
        return min(QUIET_MOST, len(self._seen) / FEW)

    async def _pause(self, seconds: float) -> None:
        """So long, but no longer than until something is known to have changed."""
        left = seconds
        while left > 0 and not self._changed.is_set():
            if (neighbours := self.directory.neighbours) != self._neighbours:
                self._neighbours, self._same = neighbours, 0
                left = min(left, self._every * max(1.0, self._many))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._changed.wait()
            left -= LOOK_S


def _stage(body: PeerBody) -> int | None:
    return None if body.state == "choosing" else body.stage
