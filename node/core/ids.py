"""Identifiers that travel between packages."""

import hashlib
from collections.abc import Collection
from typing import NamedTuple, NewType

PeerId = NewType("PeerId", str)
"""base58 of the identity multihash of an Ed25519 public key, "12D3Koo…"; contains the key
itself."""

RunId = NewType("RunId", str)
"""Lower-case hex sha256 of the manifest's immutable part: the name of one training run."""

CellId = NewType("CellId", str)
"""The name of a cell: peers that hold every stage of the model between them. Lower-case hex digits;
empty in a run that has one cell only."""

NO_CELL = CellId("")
CELL_DIGITS = 16

ENDS = 0
"""Stage number of the ends (embedding, final norm, head, data). Block stages are 1..S."""


def stage_name(stage: int) -> str:
    """A stage, for people."""
    if stage == ENDS:
        return "the ends"
    return f"stage {stage}"


def stage_names(stages: Collection[int]) -> str:
    """Several stages, for people: "the ends and stages 1, 2"."""
    blocks = [str(stage) for stage in stages if stage != ENDS]
    parts = [stage_name(ENDS)] if ENDS in stages else []
    if blocks:
        parts.append(f"stage{'s' * (len(blocks) > 1)} {', '.join(blocks)}")
    return " and ".join(parts)


class RoundId(NamedTuple):
    """One attempt at averaging. ``attempt`` grows with every repair inside an epoch."""

    epoch: int
    term: int
    attempt: int


def first_cell(run_id: str) -> CellId:
    """The cell that a run begins as."""
    return CellId(hashlib.sha256(f"tutti/cell/{run_id}".encode()).hexdigest()[:CELL_DIGITS])


def child_cell(parent: CellId, lineage: str, term: int) -> CellId:
    """The cell that ``parent`` founds by its plan of this term, from a version of this lineage."""
    said = f"tutti/cell/{parent}/{lineage}/{term}"
    return CellId(hashlib.sha256(said.encode()).hexdigest()[:CELL_DIGITS])


def is_cell(text: str) -> bool:
    """Return True for the name of a cell, and for "", the cell of a run that has one cell only."""
    return not text or (len(text) == CELL_DIGITS and set(text) <= set("0123456789abcdef"))


def short_cell(cell: str) -> str:
    """First six digits, enough to tell the cells of a run apart on a screen."""
    return cell[:6]


def short(peer: PeerId) -> str:
    """Last six characters, enough to tell the peers of a swarm apart on a screen."""
    return peer[-6:]


def named(peer: PeerId, name: str = "") -> str:
    """A peer for people: ``brisk-otter (kJ4m2a)``, or the short id alone without a name."""
    if name:
        return f"{name} ({short(peer)})"
    return short(peer)
