"""Sketches of tensors in a peer's report of a commit. Pure. Enters: the sketches of this peer's
micro-batches, or the message of another peer. Leaves: the other. Never: a verdict about them
(:mod:`node.epoch.leader.inspection`).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from node.core.errors import WireError
from node.core.journey import Plan
from node.epoch.peers.observations import sampled
from node.pipeline.events import Crossing, VisitSketches
from node.wire.sketch import BYTES
from protos import training_pb2 as pb

VISIT = BYTES * len(Crossing)
"""Bytes of the sketches of one micro-batch."""


def sketches_note(plan: Plan, sample: str, visits: Sequence[VisitSketches]) -> pb.SketchesNote:
    """The message with the sketches of these micro-batches that are reported. ``sample``:
    the seed of the choice; ``visits``: in the order of their numbers."""
    place = {m.peer: i for i, m in enumerate(plan.members)}
    wanted = sampled(plan, sample)
    found = [v for v in visits if v.index in wanted and v.taker in place and v.giver in place]
    return pb.SketchesNote(
        indices=[b - a for a, b in pairwise((0, *(v.index for v in found)))],
        takers=[place[v.taker] for v in found],
        givers=[place[v.giver] for v in found],
        sketches=b"".join(v.encoded for v in found),
    )


def parse_sketches(plan: Plan, note: pb.SketchesNote) -> tuple[VisitSketches, ...]:
    """The inverse of :func:`sketches_note`. Raises WireError for anything else."""
    members = plan.members
    count = len(note.indices)
    if not len(note.takers) == len(note.givers) == count or len(note.sketches) != VISIT * count:
        raise WireError("sketches with columns of different lengths")
    if max((*note.takers, *note.givers), default=0) >= len(members):
        raise WireError("sketches of a neighbour that is no member")
    if 0 in note.indices[1:]:
        raise WireError("sketches that name a micro-batch twice")
    return tuple(
        VisitSketches(
            index,
            members[note.takers[i]].peer,
            members[note.givers[i]].peer,
            note.sketches[i * VISIT : (i + 1) * VISIT],
        )
        for i, index in enumerate(accumulate(note.indices))
    )
