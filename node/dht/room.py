"""Room for records: a node keeps those of few writers, and decides here which writers. Pure.

A record is charged to the peer that wrote it when the writer brought it, to the peer that brought
it otherwise. Whoever brings many records loses them first, and a writer that is connected or was
reached outstays one that is gone.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from node.core.errors import WireError
from node.core.ids import PeerId
from node.identity.places import PlacesByPeer

H = TypeVar("H", bound=Hashable)

OTHERS = 32
"""Places for records that a stranger stores here and did not write. A node that is new near a key
gets the records there from its neighbours; all others come from their writers within seconds."""


class NoRoom(WireError):
    """A record that was refused for want of a place."""


def nobody(peer: PeerId) -> bool:
    """No peer is established, or proven."""
    return False


def nowhere(peer: PeerId) -> str:
    """The same block for every peer."""
    return ""


@dataclass(frozen=True)
class Company:
    """Knowledge about other peers that decides who keeps a place."""

    established: Callable[[PeerId], bool] = nobody
    """True for a member of the run and for a peer that this one has worked with."""
    proven: Callable[[PeerId], bool] = nobody
    """True for a peer that is connected now or whose address was reached."""
    block: Callable[[PeerId], str] = nowhere
    """Address block of a peer's connection (:func:`node.identity.places.block_of`)."""


NO_COMPANY = Company()
"""Knows nobody: all others are strangers."""


@dataclass(frozen=True, slots=True)
class Source:
    """The connected peer that a record came from. ``asked``: it came in an answer to a question of
    this node."""

    peer: PeerId
    block: str = ""
    asked: bool = False


@dataclass(frozen=True, slots=True)
class _Charge:
    """The writer of a record, the peer that pays for its place, and the kind of place."""

    writer: PeerId
    payer: PeerId
    established: bool


class Room(Generic[H]):
    """Places for ``strangers`` records of strangers, and the same number for established writers.
    One peer has at most ``each``; 0: no such limit."""

    def __init__(self, strangers: int, company: Company, each: int = 0) -> None:
        self._company = company
        self._each = each or 2 * strangers
        self._places = PlacesByPeer[H]("records", 2 * strangers, self._each, company.established)
        self._charges: dict[H, _Charge] = {}
        """The charge of each holder, oldest first."""
        self._brought: set[H] = set()

    def __len__(self) -> int:
        return len(self._charges)

    def enter(self, holder: H, writer: PeerId, source: Source | None = None) -> H | None:
        """Give a place to ``holder``, a record of ``writer``; returns the holder that lost its
        place to it. A holder that is inside keeps its place. Raises NoRoom."""
        source = source or Source(writer)
        charge = self._charge(writer, source)
        inside = self._charges.get(holder)
        if inside is not None:
            better = charge.payer == writer and charge != inside
            if not better:
                return None
            self.leave(holder)
        brought = charge.payer != writer and not source.asked
        if brought and len(self._brought) >= OTHERS:
            raise NoRoom(f"{OTHERS} records are kept that somebody else than their writer stored")
        evicted = self._take(holder, charge, source.block)
        if evicted is not None:
            self.leave(evicted)
        self._charges[holder] = charge
        if brought:
            self._brought.add(holder)
        return evicted

    def leave(self, holder: H) -> None:
        """Give a place back; a holder without a place changes nothing."""
        self._charges.pop(holder, None)
        self._brought.discard(holder)
        self._places.leave(holder)

    def _take(self, holder: H, charge: _Charge, block: str) -> H | None:
        """Take a place; returns the holder that lost it. Raises NoRoom."""
        taken = self._places.take(holder, charge.payer, block)
        if taken:
            return taken.evicted
        own = charge.payer == charge.writer and self._places.held_by(charge.payer) < self._each
        absent = None
        if own:
            absent = self._absent()
        if absent is None:
            raise NoRoom(taken.refusal)
        self.leave(absent)
        self._places.take(holder, charge.payer, block)
        return absent

    def _charge(self, writer: PeerId, source: Source) -> _Charge:
        established = self._company.established(writer)
        payer = writer
        if not established and source.peer != writer:
            payer = _bearer(source)
        return _Charge(writer, payer, established)

    def _absent(self) -> H | None:
        """The oldest record of a stranger that is neither connected nor was ever reached."""
        proven = self._company.proven
        strangers = (h for h, charge in self._charges.items() if not charge.established)
        return next((h for h in strangers if not proven(self._charges[h].writer)), None)


def _bearer(source: Source) -> PeerId:
    """The name under which a peer pays for records that it did not write: its own record does not
    count among them, and an established peer's place is not theirs."""
    verb = "store"
    if source.asked:
        verb = "answer"
    return PeerId(f"{verb} {source.peer}")
