"""Finds the group that a cell averages with in a window. Posts and reads the directory, talks to
the leaders of other cells, and passes the events to
:class:`~node.averaging.strategies.group_forming.GroupForming`, which decides.

The machine counts wall-clock seconds from the window's start, because all cells share that clock.
The wall clock is read again at every event, and at least once a turn, so that a clock that was set
takes effect.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from node.averaging.strategies import group_forming as machine
from node.core.errors import PeerFault, WireError
from node.core.ids import CellId, PeerId, short
from node.core.journey import Partner
from node.core.tasks import Tasks
from node.identity.keys import Signer
from node.outer import notes
from node.outer.board import WindowBoard
from node.outer.notes import Acceptance, Accepting
from node.outer.postings import CellFacts, pack_posting
from node.transport.port import TransportPort, answers, blamed, printable
from protos import cells_pb2 as pb
from protos import cells_pb2_grpc as rpc

BARRED_WINDOWS = 10
"""Windows for which the offers of a cell are ignored after it bound this cell and named no
group."""
NAME_TRIES = 3
"""Attempts to tell a member that does not answer that it is in the group."""

LEAST_S = 1e-3
"""Shortest wait before the clock is read again: a difference of two Unix times is not exact, so a
shorter timer would make no progress."""


@dataclass(frozen=True, slots=True)
class CellGroup:
    """The cells that average with each other in a window, this one included. ``anchors``: the
    anchor that each cell has posted; empty if its posting was not seen."""

    members: Mapping[CellId, Partner]
    anchors: Mapping[CellId, str]


class GroupFinder(rpc.CellsServicer):
    """Forms a group for this peer's cell. Serves ``Cells`` on ``transport`` from the start; while
    no search runs, every caller is told that this peer is busy. ``learn(peer, addresses)`` is told
    at which addresses leaders of other cells can be dialled."""

    def __init__(
        self,
        identity: Signer,
        run_id: str,
        transport: TransportPort,
        board: WindowBoard,
        learn: Callable[[PeerId, Sequence[str]], None],
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.me = identity.peer_id
        self.transport = transport
        self.board = board
        self._learn = learn
        self.tasks = Tasks("cells", on_error)
        self._signing = Accepting(identity, run_id)
        self._search: Search | None = None
        self._barred: dict[CellId, int] = {}
        rpc.add_CellsServicer_to_server(self, transport.server)

    async def find(
        self,
        about: CellFacts,
        window: int,
        keys: Sequence[str],
        most: int,
        start_wall: float,
        together: bool = False,
    ) -> CellGroup | None:
        """A group of at most ``most`` cells for ``window``, which begins at ``start_wall`` (Unix
        seconds); None if there is none, or if the wall clock is set back meanwhile. Call it at
        ``start_wall + times.post``, where ``times.post`` is negative: other cells leave out a cell
        that posts late, and a key is not tried if it is too late to post under it.

        Each of ``keys`` is tried for ``times.attempt`` seconds. A search for another window ends
        when this one begins. ``together``: a cell without a place in the group forms no other.
        """
        about = replace(about, hosts=notes.fitted(about.hosts))
        starts = {key: start_wall + n * self.board.times.attempt for n, key in enumerate(keys)}
        now = self.board.clock.wall()
        tried = [key for key in keys if self.board.latest(starts[key]) >= now]
        if not tried:
            self.board.say("outer-late", f"too late to look for a group in window {window}", window)
            return None
        self._barred = {c: until for c, until in self._barred.items() if until >= window}
        forming = machine.GroupForming(
            about.cell,
            window,
            tried,
            most,
            starts[tried[0]] - start_wall,
            self._barred,
            self.board.times,
            together,
        )
        search = self._search = Search(self.me, about, forming, start_wall, starts)
        try:
            # If the clock was set back, the window is far off, and other windows come before it.
            while (
                self._search is search
                and forming.done is None
                and self.board.clock.wall() >= now - self.board.times.clocks
            ):
                await self._turn(search)
        finally:
            if self._search is search and forming.done is None:  # given up: nobody stays bound
                self._search = None
                self._release(search, search.answers)
        if search.group is None:
            self.board.say("outer-alone", f"no group in window {window}", window, "debug")
        return search.group

    async def close(self) -> None:
        """Stop the search: :meth:`find` returns None. Other cells are told that this peer is
        busy."""
        search = self._search
        self._search = None
        if search is not None:
            search.changed.set()
        await self.tasks.close()

    async def _turn(self, search: "Search") -> None:
        """Tell the machine the time, then wait for its next instant or for news."""
        self._happens(search, machine.TimePassed())
        search.changed.clear()
        if (at := search.forming.wakes_at) is None:
            return
        seconds = min(max(at - self._now(search), LEAST_S), self.board.times.turn)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await search.changed.wait()

    def _now(self, search: "Search") -> float:
        return self.board.clock.wall() - search.start_wall

    # ----------------------------------------------------------- what the machine decides

    def _happens(
        self,
        search: "Search",
        event: machine.Event,
        shown: Mapping[CellId, Acceptance] | None = None,
    ) -> bool:
        """Feed the machine and carry out its decisions. Return True if it accepts an offer.
        ``shown``: the acceptances of a group that another cell names. A search that is over gets no
        events."""
        accepts = False
        if search is not self._search:
            return accepts
        for action in search.forming.handle(event, self._now(search)):
            match action:
                case machine.Post(key):
                    self.tasks.spawn(self._post(search, key), "post")
                case machine.ReadCells(key):
                    self.tasks.spawn(self._read(search, key), "read")
                case machine.Offer(to, key):
                    own = self._signing.accept(search.about, search.window, key, search.cell)
                    search.answers = {search.cell: own}
                    for cell in to:
                        self.tasks.spawn(self._offer(search, cell, key), f"offer {cell}")
                case machine.AnswerOffer():
                    accepts = action.accepts
                case machine.NameGroup(key, members):
                    self._name(search, key, members)
                case machine.Release(to):
                    self._release(search, to)
                case machine.BarCaller(caller):
                    self._barred[caller] = search.window + BARRED_WINDOWS
                    self.board.say(
                        "caller-barred",
                        f"cell {caller} offered a group and named none that counts: its offers are "
                        f"ignored for {BARRED_WINDOWS} windows",
                        search.window,
                        "warning",
                        cell=caller,
                    )
                case machine.Unbar(caller):
                    self._barred.pop(caller, None)
                case machine.GroupFormed(key, members):
                    search.group = self._group(search, key, members, shown or search.answers)
        search.changed.set()
        return accepts

    def _group(
        self,
        search: "Search",
        key: str,
        members: Collection[CellId],
        shown: Mapping[CellId, Acceptance],
    ) -> CellGroup:
        posted = {**search.posted.anchors, self.me: search.about.anchor}
        partners = {c: Partner(c, shown[c].leader, shown[c].hosts) for c in sorted(members)}
        anchors = {c: posted.get(p.leader, "") for c, p in partners.items()}
        self.board.say(
            "outer-grouped",
            f"{len(partners)} cells average with each other in window {search.window}",
            search.window,
            "debug",
            key=key,
            cells=list(partners),
        )
        return CellGroup(partners, anchors)

    async def _post(self, search: "Search", key: str) -> None:
        times = self.board.times
        body = pack_posting(search.about)
        life_s = times.attempt - times.post + times.lock + times.clocks
        await self.board.post(search.window, key, body, life_s, search.starts[key])

    async def _read(self, search: "Search", key: str) -> None:
        async with search.reading:
            await self._look(search, key)
        seen = frozenset(search.posted.under(key))
        self._happens(search, machine.CellsRead(key, seen))

    async def _offer(self, search: "Search", cell: CellId, key: str) -> None:
        """Send an offer. An answer may come as late as the offer binds: a cell that accepted in
        vain is then released."""
        peer = search.posted.under(key)[cell]
        note = notes.offer_note(search.window, key, search.cell)
        accepts = False
        try:
            reply = await self._tell(peer, note, self.board.times.lock)
            if reply.accepts:
                said = notes.parse_acceptance(reply.acceptance)
                if (said.cell, said.leader) != (cell, peer):
                    raise WireError("an acceptance of another cell, or by another leader")
                self._signing.check(said, search.window, key, search.cell)
                search.answers[cell] = said
                accepts = True
        except PeerFault as e:
            self.board.say("outer-unanswered", str(e), search.window, "debug", peer=peer)
        except WireError as e:
            self.transport.fault(peer, str(e), 1.0)
        if accepts and search is not self._search:
            self._release(search, (cell,))
        self._happens(search, machine.OfferAnswered(cell, key, accepts))

    def _release(self, search: "Search", cells: Iterable[CellId]) -> None:
        """Tell ``cells``, all of which accepted this cell's offer, that they are free."""
        note = notes.release_note(search.window, search.cell)
        for cell in cells:
            if cell != search.cell:
                peer = search.answers[cell].leader
                self.tasks.spawn(self._insist(peer, note), f"release {cell}")

    def _name(self, search: "Search", key: str, members: Collection[CellId]) -> None:
        shown = [search.answers[cell] for cell in sorted(members)]
        note = notes.group_note(search.window, key, search.cell, shown)
        for one in shown:
            if one.cell != search.cell:
                self.tasks.spawn(self._insist(one.leader, note), f"name {one.cell}")

    async def _insist(self, peer: PeerId, note: pb.CellsNote) -> None:
        """Send the note until the leader answers, at most :data:`NAME_TRIES` times."""
        for _ in range(NAME_TRIES):
            try:
                reply = await self._tell(peer, note, self.board.times.answers)
            except PeerFault:
                await asyncio.sleep(self.board.times.answers / NAME_TRIES)
                continue
            if not reply.accepts:
                why = printable(reply.reason)
                self.board.say("outer-refused", f"{short(peer)}: {why}", note.window, peer=peer)
            return

    async def _tell(self, peer: PeerId, note: pb.CellsNote, timeout: float) -> pb.CellsReply:
        """Send the note and return the reply. Raises PeerFault when there is no answer in time."""
        async with answers(peer, timeout):
            channel = await self.transport.channel(peer)
            return await rpc.CellsStub(channel).Tell(note, timeout=timeout)

    # ----------------------------------------------------------- who posted

    async def _look(self, search: "Search", key: str) -> None:
        """Add the leaders that the directory shows under ``key``."""
        about = search.about
        try:
            found = await self.board.read(search.window, key, about.change, search.starts[key])
        # Also when the caller that made us look has hung up: it must not make us look again at once
        finally:
            search.posted.looked(key, self.board.clock.wall())
        for peer, said in found:
            if not about.anchor or said.anchor:
                self._leads(search, key, peer, said)
                if peer != self.me:
                    self._learn(peer, said.maddrs)

    def _leads(self, search: "Search", key: str, peer: PeerId, said: CellFacts) -> None:
        """``peer`` has posted for its cell under ``key``."""
        cell = said.cell
        other = search.posted.claim(key, cell, peer, said.anchor)
        if other is None:
            return
        self.board.say(
            "cell-led-twice",
            f"{short(other)} and {short(peer)} both say that they lead cell {cell}",
            search.window,
            "warning",
            cell=cell,
        )

    async def _knows(self, search: "Search", key: str, cells: Iterable[CellId]) -> None:
        """Read the directory again for cells that were not seen; not sooner than ``times.answers``
        seconds after the last look, so that nobody makes this peer ask the directory often."""
        wanted = set(cells)
        posted = search.posted
        if wanted <= posted.under(key).keys():
            return
        async with search.reading:
            ago = self.board.clock.wall() - posted.looks.get(key, -self.board.times.answers)
            if not wanted <= posted.under(key).keys() and ago >= self.board.times.answers:
                await self._look(search, key)

    # ----------------------------------------------------------- what others say

    async def Tell(self, request: pb.CellsNote, context: Any) -> pb.CellsReply:
        """Handle a note from another cell's leader. A note that no honest leader would send counts
        as a fault of its sender."""
        peer = self.transport.caller(context)
        async with blamed(self.transport, peer, context):
            return await self._hear(peer, request)

    async def _hear(self, peer: PeerId, note: pb.CellsNote) -> pb.CellsReply:
        members = notes.parse_note(note)
        search = self._search
        key = note.key
        caller = CellId(note.caller)
        if search is None or search.window != note.window:
            return _no("this peer forms no group in that window")
        if note.HasField("offer"):
            return await self._offered(search, peer, key, caller)
        if note.HasField("named"):
            return await self._named(search, peer, key, caller, members)
        if peer not in search.callers.get(caller, {}).values():
            return _no("this peer accepted no offer of that cell")
        self._happens(search, machine.Released(caller))
        return pb.CellsReply(accepts=True)

    async def _offered(
        self, search: "Search", peer: PeerId, key: str, caller: CellId
    ) -> pb.CellsReply:
        if search.forming.done is not None or key != search.forming.key:
            return _no("busy")
        await self._knows(search, key, (caller,))
        if search.posted.under(key).get(caller) != peer:
            return _no("no posting under this key shows that the caller leads that cell")
        if not self._happens(search, machine.Offered(caller, key)):
            return _no("busy")
        search.callers.setdefault(caller, {})[key] = peer
        mine = self._signing.accept(search.about, search.window, key, caller)
        return pb.CellsReply(accepts=True, acceptance=notes.acceptance_note(mine))

    async def _named(
        self,
        search: "Search",
        peer: PeerId,
        key: str,
        caller: CellId,
        told: Mapping[CellId, Acceptance],
    ) -> pb.CellsReply:
        """Check a named group. Every acceptance must be signed by the leader that a posting names;
        the caller's posting was looked up when it made its offer, and this peer signed its own
        acceptance."""
        if search.callers.get(caller, {}).get(key) != peer:
            return _no("this peer accepted no offer of that cell under this key")
        for shown in told.values():
            self._signing.check(shown, search.window, key, caller)
        await self._knows(search, key, told.keys() - {search.cell})
        leaders = {**search.posted.under(key), search.cell: self.me, caller: peer}
        for cell, shown in told.items():
            if leaders.get(cell) != shown.leader:
                return _no(f"no posting under this key shows that leader of cell {cell}")
        members = frozenset(told)
        self._happens(search, machine.GroupNamed(caller, key, members), told)
        if search.forming.done != machine.GroupFormed(key, members):
            return _no("busy")
        return pb.CellsReply(accepts=True)


class CellLeaders:
    """Leaders of cells, as they posted themselves; ``me`` leads ``cell``."""

    def __init__(self, me: PeerId, cell: CellId) -> None:
        self._me = me
        self._cell = cell
        self._leaders: dict[str, dict[CellId, PeerId]] = {}
        """``[key][cell]``: the peer that posted for the cell, for cells that this one may average
        with."""
        self.anchors: dict[PeerId, str] = {}
        """The anchor that each leader's cell has posted."""
        self.looks: dict[str, float] = {}
        """Wall-clock time of the last look under each key."""

    def looked(self, key: str, wall: float) -> None:
        """The directory was read under ``key``, or could not be."""
        self.looks[key] = wall

    def under(self, key: str) -> Mapping[CellId, PeerId]:
        """The leaders of other cells that posted under ``key``."""
        return self._leaders.get(key, {})

    def claim(self, key: str, cell: CellId, peer: PeerId, anchor: str) -> PeerId | None:
        """``peer`` says that it leads ``cell``, which has this anchor. If two peers say so, the
        first in order is asked, because the claim itself proves nothing. This peer leads its own
        cell. Returns the other peer that says so, None if there is none."""
        self.anchors[peer] = anchor
        leaders = self._leaders.setdefault(key, {})
        own = cell == self._cell
        other = self._me if own else leaders.setdefault(cell, peer)
        if other == peer:
            return None
        if not own:
            leaders[cell] = min(other, peer)
        return other


class Search:
    """The search for one window's group: the machine and the state that feeds it. ``starts``: the
    wall-clock time at which the attempt under each key begins."""

    def __init__(
        self,
        me: PeerId,
        about: CellFacts,
        forming: machine.GroupForming,
        start_wall: float,
        starts: Mapping[str, float],
    ) -> None:
        self.about = about
        self.forming = forming
        self.start_wall = start_wall
        self.starts = starts
        self.cell = about.cell
        self.window = forming.window
        self.changed = asyncio.Event()
        self.reading = asyncio.Lock()
        self.posted = CellLeaders(me, about.cell)
        self.callers: dict[CellId, dict[str, PeerId]] = {}
        """``callers[cell][key]``: the author of the accepted offer for the cell under the key."""
        self.answers: dict[CellId, Acceptance] = {}
        """Acceptances of this cell's last offer, its own first."""
        self.group: CellGroup | None = None


def _no(reason: str) -> pb.CellsReply:
    return pb.CellsReply(accepts=False, reason=reason)
