"""A statement of work: one peer's signed list of its neighbours on the routes of micro-batches in
one epoch. Pure.

The route of a micro-batch forms a ring: origin, hops, and the origin again. In the backward pass
each peer of the ring takes a gradient from the peer behind it, the *giver*, and gives its own
gradient to the peer before it, the *taker*. A statement names both for each micro-batch, so one
signature an epoch confirms the work of all neighbours.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from node.consensus.votes import signing_domain
from node.core.errors import WireError
from node.core.ids import CellId, PeerId, is_cell
from node.core.journey import Plan, Version, lineage
from node.core.numbers import few, peer_name, whole
from node.identity.keys import SIGNATURE_BYTES
from node.pipeline.events import Neighbours
from node.wire import bounds
from protos import training_pb2 as pb

MOST_MEMBERS = 1 << 16
"""Places of members that a statement can name."""
HASH_BYTES = 32


def work_domain(run_id: str) -> str:
    """Domain of the signatures under statements of work in this run."""
    return signing_domain("work", run_id)


@dataclass(frozen=True, slots=True)
class Statement:
    """The content of a statement of work.

    ``made``: version that the epoch made, whose lineage covers the plan and its dropped
    micro-batches; ``tokens``: counted in the whole epoch; ``before``: sha256 of the signer's
    previous statement, empty for none. The columns have one entry for each micro-batch: its number,
    rising, its tokens, and the places of taker and giver in the plan's members.
    """

    cell: CellId
    made: Version
    tokens: int
    before: bytes
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    takers: tuple[int, ...]
    givers: tuple[int, ...]

    def is_of(self, plan: Plan, made: Version) -> bool:
        """Return True if this is a statement about the epoch of ``plan`` that made ``made``."""
        return (self.cell, self.made) == (plan.cell_id, made)

    def said(self) -> bytes:
        """The bytes that are signed and sent."""
        sizes = self.sizes
        if len(set(sizes)) == 1:
            sizes = sizes[:1]
        differences = [b - a for a, b in pairwise((0, *self.indices))]
        return pb.WorkNote(
            cell=self.cell,
            made=pb.VersionNote(epoch=self.made.epoch, lineage=self.made.lineage),
            tokens=self.tokens,
            before=self.before,
            indices=differences,
            sizes=sizes,
            takers=self.takers,
            givers=self.givers,
        ).SerializeToString(deterministic=True)

    @classmethod
    def parse(cls, said: bytes) -> "Statement":
        """The inverse of :meth:`said`. Raises WireError for anything that is no statement."""
        note = bounds.parse(pb.WorkNote, said, "a statement of work")
        indices = tuple(accumulate(note.indices))
        count = len(indices)
        sizes = tuple(note.sizes)
        if len(sizes) == 1:
            sizes = sizes * count
        takers = tuple(note.takers)
        givers = tuple(note.givers)
        if not len(sizes) == len(takers) == len(givers) == count:
            raise WireError("a statement of work with columns of different lengths")
        if 0 in note.indices[1:]:
            raise WireError("a statement of work that names a micro-batch twice")
        if not is_cell(note.cell) or len(note.before) not in (0, HASH_BYTES):
            raise WireError("a statement of work of no cell, or behind no statement")
        try:
            whole(max(indices, default=0))
            whole(sum(sizes))
            made = Version(whole(note.made.epoch), lineage(note.made.lineage))
            tokens = whole(note.tokens)
        except ValueError as e:
            raise WireError(f"a statement of work: {e}") from e
        return cls(CellId(note.cell), made, tokens, note.before, indices, sizes, takers, givers)


def statement_of(
    plan: Plan, made: Version, tokens: int, before: bytes, neighbours: Sequence[Neighbours]
) -> Statement | None:
    """The statement of a peer with these neighbours, in the order of micro-batches; rows with peers
    that are no members of the plan are left out. None if nothing is left."""
    place = {m.peer: i for i, m in enumerate(plan.members[:MOST_MEMBERS])}
    rows = [
        (w.index, w.tokens, place[w.taker], place[w.giver])
        for w in sorted(neighbours, key=lambda w: w.index)
        if w.taker in place and w.giver in place
    ]
    if not rows:
        return None
    indices, sizes, takers, givers = zip(*rows, strict=True)
    return Statement(plan.cell_id, made, tokens, before, indices, sizes, takers, givers)


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement as it travels: its signer, its bytes, the signature. Nothing is checked yet."""

    peer: PeerId
    said: bytes
    signature: bytes

    @property
    def hash(self) -> bytes:
        """The sha256 by which the signer's next statement names this one."""
        return hashlib.sha256(self.said).digest()

    def note(self) -> pb.WorkReceipt:
        """This statement as a message."""
        return pb.WorkReceipt(peer=self.peer, work=self.said, signature=self.signature)

    @classmethod
    def of(cls, note: pb.WorkReceipt) -> "Signed":
        """A statement in a message. Raises WireError for a name or a signature that is none."""
        signature = few(note.signature, SIGNATURE_BYTES, "bytes of a signature")
        return cls(peer_name(note.peer), note.work, signature)
