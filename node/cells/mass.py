"""Carries out what :class:`~node.averaging.strategies.push_sum.PushSum` decides: asks the leaders
of givers for a window's shares, and answers those of takers. Enters: who is at the ends of the
cell's edges. Leaves: shares. Never: a value, a grant of its own."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from node.averaging.strategies import push_sum as machine
from node.averaging.strategies.push_sum import PushSum
from node.cells.board import Neighbours
from node.core.clock import Clock
from node.core.errors import PeerFault, WireError
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.mass import MOST_STAGES, MOST_UNITS, Shares, Units
from node.core.numbers import cell_name
from node.core.tasks import Tasks
from node.identity.keys import SIGNATURE_BYTES, Signer, is_signed
from node.telemetry.events import Journal
from node.transport.port import TransportPort, answers, blamed
from protos import cells_pb2 as pb
from protos import cells_pb2_grpc as rpc

AGAIN_S = 1.0
"""Between two questions to who is not ready yet."""


class MassExchange(rpc.CellsServicer):
    """Serves ``Cells/Take`` on ``transport`` from the start. ``mass()``: the machine of the leader
    that this peer is, None while it is none."""

    def __init__(
        self,
        identity: Signer,
        run_id: str,
        transport: TransportPort,
        clock: Clock,
        journal: Journal,
        mass: Callable[[], PushSum | None],
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._identity, self._domain = identity, f"tutti/mass/1/{run_id}"
        self._transport, self._clock, self._journal, self._mass = transport, clock, journal, mass
        self._tasks = Tasks("mass", on_error)
        self._cell, self._near, self._window = NO_CELL, Neighbours({}, {}), 0
        self._came = asyncio.Event()
        self._shares: Shares = {}
        self._asking: set[CellId] = set()
        rpc.add_CellsServicer_to_server(self, transport.server)

    async def shares(self, cell: CellId, window: int, near: Neighbours, within_s: float) -> Shares:
        """What the cell takes in ``window``, and its takers have been granted what they take from
        it; after ``within_s`` seconds, without those who were not ready."""
        until = self._clock.now() + within_s
        self._cell, self._near, self._window = cell, near, window
        self._came, self._shares = asyncio.Event(), {}
        givers, takers = tuple(near.sources), tuple(near.targets)
        self._does(machine.WindowBegan(window, givers, takers, until))
        while (
            (mass := self._mass()) is not None and mass.asks and self._clock.now() < until + AGAIN_S
        ):
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._came.wait()
            except TimeoutError:
                self._does(machine.TimePassed())
        return self._shares

    async def close(self) -> None:
        await self._tasks.close()

    def _does(self, event: machine.Event) -> machine.UnitsGranted | machine.NotYet | None:
        """Feed the machine and carry out what it decides; its answer to a question."""
        mass, answer = self._mass(), None
        for action in mass.handle(event, self._clock.now()) if mass is not None else ():
            match action:
                case machine.UnitsAsked(giver):
                    there = self._near.sources.get(giver)
                    if there is not None and giver not in self._asking:
                        self._asking.add(giver)
                        self._tasks.spawn(self._ask(action, there.leader), f"ask {giver}")
                case machine.SharesCame(window, shares):
                    if window == self._window:
                        self._shares = shares
                        self._came.set()
                case machine.UnitsGranted() | machine.NotYet():
                    answer = action
        return answer

    async def _ask(self, asks: machine.UnitsAsked, leader: PeerId) -> None:
        """Once; the machine asks again."""
        try:
            note = pb.TakeNote(
                window=asks.window,
                giver=asks.cell,
                taker=self._cell,
                since=asks.since,
                units=asks.units,
            )
            note.signature = self._identity.sign(_said(note), self._domain)
            async with answers(leader, 3 * AGAIN_S):
                channel = await self._transport.channel(leader)
                reply = await rpc.CellsStub(channel).Take(note, timeout=3 * AGAIN_S)
            if reply.since > asks.window:
                raise WireError("an answer about mass that counts from the future")
            if reply.ready:
                self._does(
                    machine.UnitsGranted(
                        asks.cell,
                        asks.window,
                        reply.since,
                        _units(reply.units),
                        _units(reply.agreed),
                    )
                )
        except PeerFault as e:
            self._journal.emit("cells", "mass-unanswered", str(e), "debug", window=asks.window)
        except WireError as e:
            self._transport.fault(leader, str(e), 1.0)
        finally:
            self._asking.discard(asks.cell)

    async def Take(self, request: pb.TakeNote, context: Any) -> pb.GrantNote:
        """A taker's question. One that nobody could mean counts as a fault of its sender."""
        peer = self._transport.caller(context)
        async with blamed(self._transport, peer, context):
            return self._hear(peer, request)

    def _hear(self, peer: PeerId, note: pb.TakeNote) -> pb.GrantNote:
        taker, giver, units = cell_name(note.taker), cell_name(note.giver), _units(note.units)
        if not 0 < len(note.signature) <= SIGNATURE_BYTES or note.since > note.window:
            raise WireError("a question for mass that is not signed, or counts from the future")
        if not is_signed(self._identity, peer, _said(note), note.signature, self._domain):
            raise WireError("a question for mass whose signature is wrong")
        there = self._near.targets.get(taker)
        if giver != self._cell or note.window != self._window:
            return pb.GrantNote(reason="this peer leads another cell, or is in another window")
        if there is None or there.leader != peer:
            return pb.GrantNote(reason="no edge leads to that cell, or another peer leads it")
        answer = self._does(machine.UnitsAsked(taker, note.window, note.since, units))
        if not isinstance(answer, machine.UnitsGranted):
            return pb.GrantNote(reason="in no committed plan yet")
        return pb.GrantNote(
            ready=True, since=answer.since, units=answer.units, agreed=answer.agreed
        )


def _units(told: Mapping[int, int]) -> Units:
    """By stage, with no more stages and units than there can be. Raises WireError."""
    if len(told) > MOST_STAGES or any(n >= MOST_UNITS for n in told.values()):
        raise WireError("units of mass beyond the limit")
    return dict(told)


def _said(note: pb.TakeNote) -> bytes:
    """What the taker's leader signs."""
    rows = sorted(note.units.items())
    said = [note.window, note.giver, note.taker, note.since, rows]
    return json.dumps(said, separators=(",", ":")).encode()
