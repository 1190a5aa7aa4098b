"""Help that the swarm needs, most urgent first. Pure; from the peers in sight and the memory that
stages need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from node.control.text import covers, present
from node.core.ids import ENDS, short_cell
from node.core.numbers import human, several
from protos.ask_pb2 import PeersAnswer

MOST = 12
"""Wishes that are shown."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One line. ``kind``: "urgent" where training waits for it, "thin" where it would wait if one
    peer left, "more" for what makes the swarm faster."""

    kind: str
    text: str


def wishes(answer: PeersAnswer, stage_bytes: Sequence[int]) -> list[Wish]:
    """At most :data:`MOST` lines: stages without a peer, stages with one, then links and speed.
    ``stage_bytes``: memory that a peer needs for the ends, then for each block stage; empty while
    it is not known."""
    if not answer.swarm.stages:
        return []
    seen = covers(answer)
    thin = _thin(seen)
    found = [*_of_stages(thin, stage_bytes, len(seen)), *_of_links(answer)]
    if not thin:
        found.append(_for_speed(seen, stage_bytes))
    return found[:MOST]


def _thin(seen: Mapping[str, Mapping[int, int]]) -> dict[tuple[int, int], list[str]]:
    """Cells by (working replicas, stage), for stages with none and with one, these first."""
    thin: dict[tuple[int, int], list[str]] = {}
    for cell, stages in seen.items():
        for stage, count in stages.items():
            if count < 2:
                thin.setdefault((count, stage), []).append(cell)
    return dict(sorted(thin.items()))


def _of_stages(
    thin: Mapping[tuple[int, int], Sequence[str]], stage_bytes: Sequence[int], cells: int
) -> Iterator[Wish]:
    for (count, stage), where in thin.items():
        place = _place(stage)
        kind = "thin"
        number = "one replica"
        if count == 0:
            kind = "urgent"
            number = "no peer"
        text = f"{place} {_have(stage)} {number}{_cells_said(where, cells)}"
        yield Wish(kind, text + _size(stage, stage_bytes))


def _of_links(answer: PeersAnswer) -> Iterator[Wish]:
    others = [p for p in present(answer.peers) if p.path not in ("", "self")]
    relayed = sum(p.path == "relayed" for p in others)
    if relayed and 2 * relayed >= len(others):
        text = (
            f"{relayed} of {several(len(others), 'peer')} are reached through a relay: a peer with "
            "an open port makes everybody faster"
        )
        yield Wish("more", text)


def _for_speed(seen: Mapping[str, Mapping[int, int]], stage_bytes: Sequence[int]) -> Wish:
    own = next(iter(seen.values()))
    stage = min(own, key=lambda s: (own[s], s))
    text = (
        f"every stage has {own[stage]} replicas or more; another peer makes the swarm faster, "
        f"first at {_place(stage)}{_size(stage, stage_bytes)}"
    )
    return Wish("more", text)


def _place(stage: int) -> str:
    if stage == ENDS:
        return "the ends"
    return f"stage {stage}"


def _have(stage: int) -> str:
    if stage == ENDS:
        return "have"
    return "has"


def _cells_said(where: Sequence[str], cells: int) -> str:
    if cells < 2:
        return ""
    if len(where) == 1:
        return f" in cell {short_cell(where[0])}"
    return f" in {len(where)} cells"


def _size(stage: int, stage_bytes: Sequence[int]) -> str:
    if stage >= len(stage_bytes) or not stage_bytes[stage]:
        return ""
    return f": {human(stage_bytes[stage])}"
