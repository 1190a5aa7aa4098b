"""Pictures of the swarm from what daemons say about themselves. Pure projections, no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import Snapshot

TIME_KINDS = ("compute", "wire", "wait", "round")
ABSENT = ("lost", "draining", "joining", "moving", "choosing", "starting", "stopping")
"""States in which a peer does no work for its stage."""


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON-ready values: every field present, numbers stay numbers (64-bit ones
    too)."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            result[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            result[field.name] = [plain(v) if isinstance(v, Message) else v for v in value]
        elif isinstance(value, Message):
            result[field.name] = plain(value)
        else:
            result[field.name] = value.hex() if isinstance(value, bytes) else value
    return result


def cover(answer: PeersAnswer) -> dict[int, int]:
    """Working replicas of every stage, 0 (ends) to the last, so that a hole shows as 0; where cells
    lead themselves those of the own cell, if whoever answers has one."""
    own = _own_cell(answer)
    live = Counter(p.stage for p in _working(answer) if not own or p.cell == own)
    return {stage: live[stage] for stage in range(max([answer.swarm.stages, *live]) + 1)}


def has_cells(answer: PeersAnswer) -> bool:
    """Whether the run has cells that lead themselves."""
    return any(p.cell for p in answer.peers)


def other_cells(answer: PeersAnswer) -> tuple[int, int]:
    """How many cells there are besides the own one, and in how many of them nobody works for some
    stage."""
    own = _own_cell(answer)
    there = {p.cell for p in answer.peers if p.cell and p.cell != own and p.state != "lost"}
    held = {(p.cell, p.stage) for p in _working(answer)}
    stages = range(answer.swarm.stages + 1)
    return len(there), sum(any((cell, s) not in held for s in stages) for cell in there)


def cell_order(answer: PeersAnswer) -> Callable[[PeerLine], tuple[bool, bool, str]]:
    """A key that sorts by cell, the own one first, who belongs to none last."""
    own = _own_cell(answer)
    return lambda p: (p.cell != own, not p.cell, p.cell)


def _own_cell(answer: PeersAnswer) -> str:
    return next((p.cell for p in answer.peers if p.path == "self"), "")


def _working(answer: PeersAnswer) -> Iterable[PeerLine]:
    return (p for p in answer.peers if p.state not in ABSENT and p.role != "rendezvous")


def furthest(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Of the peer furthest ahead, which speaks for the swarm's curve; an empty one of nobody."""
    return max(
        snapshots, key=lambda s: (s.epoch, len(s.loss_history), s.tokens), default=Snapshot()
    )


def by_stage(snapshots: Iterable[Snapshot], stages: int) -> dict[int, list[Snapshot]]:
    """Who hosts what, by name; a block stage of which there is nobody has an empty list."""
    found: dict[int, list[Snapshot]] = {stage: [] for stage in range(1, stages + 1)}
    for snapshot in sorted(snapshots, key=lambda s: (s.stage, s.name, s.peer)):
        if snapshot.role != "rendezvous":
            found.setdefault(snapshot.stage, []).append(snapshot)
    return dict(sorted(found.items()))


def compare_digests(snapshots: Iterable[Snapshot]) -> tuple[int, tuple[int, ...]]:
    """How many replicas could be compared with another of their cell at the same epoch, and the
    stages that differ."""
    at: dict[tuple[int, str, int], list[str]] = {}
    for s in snapshots:
        if s.digest and s.state != "lost":
            at.setdefault((s.stage, s.cell.cell, s.epoch), []).append(s.digest)
    together = {key: digests for key, digests in at.items() if len(digests) > 1}
    return sum(map(len, together.values())), tuple(
        sorted({stage for (stage, *_), d in together.items() if len(set(d)) > 1})
    )
