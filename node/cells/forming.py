"""Finds the group that a cell averages with in a window: posts and reads the directory, talks to
the leaders of other cells, and gives what it hears to
:class:`~node.averaging.strategies.group_forming.GroupForming`, which decides.

The machine counts wall-clock seconds from the window's start, because that is what cells have in
common. The wall clock is read again at every event, and at least once a turn, so that a clock that
is set takes effect.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from node.averaging.strategies import group_forming as machine
from node.cells import notes
from node.cells.board import WindowBoard
from node.cells.notes import Acceptance, Accepting
from node.cells.postings import CellFacts, pack_posting
from node.core.errors import PeerFault, WireError
from node.core.ids import CellId, PeerId, short
from node.core.journey import Partner
from node.core.tasks import Tasks
from node.identity.keys import Signer
from node.transport.port import TransportPort, answers, blamed, printable
from protos import cells_pb2 as pb
from protos import cells_pb2_grpc as rpc

BARRED_WINDOWS = 10
"""For how many windows the offers of a cell are ignored that bound this one and named no group."""
NAME_TRIES = 3
"""How often a member that does not answer is told that it is in the group."""

LEAST_S = 1e-3
"""Between two looks at the clock: a difference of two Unix times is not exact, and a timer of less
would not bring it further."""


@dataclass(frozen=True, slots=True)
class Group:
    """The cells that average with each other in a window, this one included. ``anchors``: as each
    has posted its own; empty where that was not seen."""

    members: Mapping[CellId, Partner]
    anchors: Mapping[CellId, str]


class GroupFinder(rpc.CellsServicer):
    """Serves ``Cells`` on ``transport`` from the start; while nothing is looked for, everybody is
    told that this peer is busy. ``learn(peer, addresses)`` is told where leaders of other cells can
    be dialled."""

    def __init__(
        self,
        identity: Signer,
        run_id: str,
        transport: TransportPort,
        board: WindowBoard,
        learn: Callable[[PeerId, Sequence[str]], None],
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.me, self.transport, self.board = identity.peer_id, transport, board
        self._learn = learn
        self.tasks = Tasks("cells", on_error)
        self._signing = Accepting(identity, run_id)
        self._search: Search | None = None
        self._barred: dict[CellId, int] = {}
        rpc.add_CellsServicer_to_server(self, transport.server)

    async def find(
        self, about: CellFacts, window: int, keys: Sequence[str], most: int, start_wall: float
    ) -> Group | None:
        """A group of at most ``most`` cells for ``window``, which begins at ``start_wall`` (Unix
        seconds); None when there is none. Call it ``-times.post`` seconds earlier: cells that post
        late are left out by others, and a key that it is too late for is not tried.

        Each of ``keys`` is tried for ``times.attempt`` seconds. No other window is looked for any
        more. None also when the wall clock is set back meanwhile.
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
        )
        search = self._search = Search(about, forming, start_wall, starts)
        try:
            # Where the clock was set back the window is far off, and others come before it.
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
        """Stop looking: :meth:`find` returns None. Others are answered that this peer is busy."""
        search, self._search = self._search, None
        if search is not None:
            search.changed.set()
        await self.tasks.close()

    async def _turn(self, search: "Search") -> None:
        """Let the clock tick, and wait for the machine's next instant or for news."""
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
        """Feed the machine and carry out what it decides; whether it accepts an offer. ``shown``:
        the acceptances of a group that another cell names. A search that is over hears nothing."""
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
    ) -> Group:
        posted = {**search.anchors, self.me: search.about.anchor}
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
        return Group(partners, anchors)

    async def _post(self, search: "Search", key: str) -> None:
        times, body = self.board.times, pack_posting(search.about)
        life_s = times.attempt - times.post + times.lock + times.clocks
        await self.board.post(search.window, key, body, life_s, search.starts[key])

    async def _read(self, search: "Search", key: str) -> None:
        async with search.reading:
            await self._look(search, key)
        seen = frozenset(search.leaders.get(key, ()))
        self._happens(search, machine.CellsRead(key, seen))

    async def _offer(self, search: "Search", cell: CellId, key: str) -> None:
        """An answer may come as late as the offer binds: who accepted in vain is then released."""
        peer = search.leaders[key][cell]
        note, accepts = notes.offer_note(search.window, key, search.cell), False
        try:
            reply = await self._tell(peer, note, self.board.times.lock)
            if reply.accepts:
                said = notes.parse_acceptance(reply.acceptance)
                if (said.cell, said.leader) != (cell, peer):
                    raise WireError("an acceptance of another cell, or by another leader")
                self._signing.check(said, search.window, key, search.cell)
                search.answers[cell], accepts = said, True
        except PeerFault as e:
            self.board.say("outer-unanswered", str(e), search.window, "debug", peer=peer)
        except WireError as e:
            self.transport.fault(peer, str(e), 1.0)
        if accepts and search is not self._search:
            self._release(search, (cell,))
        self._happens(search, machine.OfferAnswered(cell, key, accepts))

    def _release(self, search: "Search", cells: Iterable[CellId]) -> None:
        """Tell these, all of which accepted the own offer, that they are free."""
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
        """Tell a leader until it has heard it, a few times."""
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
        """Raises PeerFault when there is no answer in time."""
        async with answers(peer, timeout):
            channel = await self.transport.channel(peer)
            return await rpc.CellsStub(channel).Tell(note, timeout=timeout)

    # ----------------------------------------------------------- who posted

    async def _look(self, search: "Search", key: str) -> None:
        """Add to the leaders of ``key`` whom the directory shows."""
        about, leaders = search.about, search.leaders.setdefault(key, {})
        try:
            found = await self.board.read(search.window, key, about.change, search.starts[key])
        finally:  # also when who made us look has hung up: it must not make us look again at once
            search.looked[key] = self.board.clock.wall()
        for peer, said in found:
            if not about.anchor or said.anchor:
                self._leads(search, leaders, said.cell, peer)
                if peer != self.me:
                    self._learn(peer, said.maddrs)
                search.anchors[peer] = said.anchor

    def _leads(
        self, search: "Search", leaders: dict[CellId, PeerId], cell: CellId, peer: PeerId
    ) -> None:
        """``peer`` says that it leads ``cell``. Of two who say so the first in order is asked: what
        they claim proves nothing. The own cell is led by this peer."""
        own = cell == search.cell
        other = self.me if own else leaders.setdefault(cell, peer)
        if other == peer:
            return
        if not own:
            leaders[cell] = min(other, peer)
        self.board.say(
            "cell-led-twice",
            f"{short(other)} and {short(peer)} both say that they lead cell {cell}",
            search.window,
            "warning",
            cell=cell,
        )

    async def _knows(self, search: "Search", key: str, cells: Iterable[CellId]) -> None:
        """Look again for cells that were not seen; not sooner than ``times.answers`` after the last
        look, so that nobody makes this peer ask the directory often."""
        wanted = set(cells)
        if wanted <= search.leaders.get(key, {}).keys():
            return
        async with search.reading:
            ago = self.board.clock.wall() - search.looked.get(key, -self.board.times.answers)
            if not wanted <= search.leaders.get(key, {}).keys() and ago >= self.board.times.answers:
                await self._look(search, key)

    # ----------------------------------------------------------- what others say

    async def Tell(self, request: pb.CellsNote, context: Any) -> pb.CellsReply:
        """A note of another cell's leader. One that nobody could mean counts as a fault of its
        sender."""
        peer = self.transport.caller(context)
        async with blamed(self.transport, peer, context):
            return await self._hear(peer, request)

    async def _hear(self, peer: PeerId, note: pb.CellsNote) -> pb.CellsReply:
        members, search = notes.parse_note(note), self._search
        key, caller = note.key, CellId(note.caller)
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
        if search.leaders.get(key, {}).get(caller) != peer:
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
        """Every acceptance must be signed by the leader that a posting names; the caller's was
        looked up when it offered, and the own one is by this peer."""
        if search.callers.get(caller, {}).get(key) != peer:
            return _no("this peer accepted no offer of that cell under this key")
        for shown in told.values():
            self._signing.check(shown, search.window, key, caller)
        await self._knows(search, key, told.keys() - {search.cell})
        leaders = {**search.leaders[key], search.cell: self.me, caller: peer}
        for cell, shown in told.items():
            if leaders.get(cell) != shown.leader:
                return _no(f"no posting under this key shows that leader of cell {cell}")
        members = frozenset(told)
        self._happens(search, machine.GroupNamed(caller, key, members), told)
        if search.forming.done != machine.GroupFormed(key, members):
            return _no("busy")
        return pb.CellsReply(accepts=True)


class Search:
    """One window's: the machine and what it is fed from. ``starts``: the wall-clock time at which
    the attempt under each key begins."""

    def __init__(
        self,
        about: CellFacts,
        forming: machine.GroupForming,
        start_wall: float,
        starts: Mapping[str, float],
    ) -> None:
        self.about, self.forming, self.start_wall = about, forming, start_wall
        self.starts = starts
        self.cell, self.window = about.cell, forming.window
        self.changed = asyncio.Event()
        self.reading = asyncio.Lock()
        self.looked: dict[str, float] = {}
        self.anchors: dict[PeerId, str] = {}
        """By leader: the anchor that its cell has posted."""
        self.leaders: dict[str, dict[CellId, PeerId]] = {}
        """By key: who posted, as far as it may be averaged with, and by whom."""
        self.callers: dict[CellId, dict[str, PeerId]] = {}
        """Whose offers were accepted, and who made them under which key."""
        self.answers: dict[CellId, Acceptance] = {}
        """To the last own offer, the own acceptance first."""
        self.group: Group | None = None


def _no(reason: str) -> pb.CellsReply:
    return pb.CellsReply(accepts=False, reason=reason)
