"""Frames of tensors between hops: writes them for the next hop, and checks the head of an arriving
frame, and its document ends, before a byte of the tensor is read."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Hop
from node.pipeline.events import Claim
from node.pipeline.settings import forward_only_wire
from node.transport.port import EOF
from node.wire.coding.formats import BLOCKWISE
from node.wire.tensors import Buffer, TensorReader, chunks, expected_head, nbytes_of
from protos import pipeline_pb2 as pb

PEER_ID_LENGTH = 128
DEADLINE_MAX_S = 86_400.0
CHUNK = 1 << 18
"""Bytes of tensor in one message. gRPC spends 2.2-2.9 ms of CPU on a MiB in such pieces, 3.7 ms in
one of 1 MiB (glibc maps and unmaps every buffer that large) and 4.5 ms in pieces of 32 KiB; grpcio
1.85 over loopback, one core."""
LEFT = 1 << 20
"""Bytes of tensor that are left in shared memory at once; a multiple of :data:`CHUNK`."""
Leave = Callable[[memoryview], bytes | None]
"""Leaves bytes in memory that the receiver of a frame shares. Returns where they are, or None if
they have to be sent."""
Fetch = Callable[[bytes, memoryview], int]
"""Copies bytes that the sender of a frame left. Returns their number. Raises WireError."""


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Shape of this run's activations: at most ``sequences`` x ``length``, always ``width``;
    ``wire``: their number format. ``masked``: frames say where documents end; ``loss_mask``: frames
    say how many other tokens are not trained on."""

    sequences: int
    length: int
    width: int
    wire: str
    stages: int
    masked: bool = False
    loss_mask: bool = False
    context: int = 0
    """Tokens that a text may have while its keys and values are cached."""

    def nbytes(self, sequences: int, length: int, wire: str = "") -> int:
        """Bytes of one activation in the format ``wire``; in the run's by default."""
        return nbytes_of((sequences, length, self.width), wire or self.wire)

    @property
    def forward_only(self) -> str:
        """Number format of activations of work that only goes forward."""
        return forward_only_wire(self.wire)

    def kept(self, sequences: int, length: int) -> int:
        """Bytes of an input and of an output while a visit keeps both. An input in int8 or int4 is
        counted as the fp32 numbers that are made of it."""
        output = self.nbytes(sequences, length)
        if self.wire in BLOCKWISE:
            return self.nbytes(sequences, length, "fp32") + output
        return 2 * output


@dataclass(frozen=True, slots=True)
class Incoming:
    """A head that parsed. ``claim`` is still to be compared with the plan, the tensor of ``head``
    with the expected shape."""

    claim: Claim
    head: pb.FrameHead


class FrameReader(TensorReader):
    """The tensor behind a frame's head. ``document_ends``: the tokens in it that are the last of
    their document, as in :func:`node.model.documents.ends_of`. ``untrained``: number of other
    tokens that are not trained on."""

    def __init__(
        self,
        head: pb.FrameHead,
        shape: tuple[int, ...],
        wire: str,
        masked: bool = False,
        loss_mask: bool = False,
        *,
        locked: bool = False,
    ) -> None:
        """Raises WireError for a head of another tensor; for ends that cannot be, or that are
        there though not ``masked``; and for more untrained tokens than there are, or for one
        without ``loss_mask``."""
        super().__init__([head.tensor], [("", shape)], wire, locked=locked)
        most = shape[0] * shape[1] if masked else 0
        if len(head.document_ends) > most:
            raise WireError(f"{len(head.document_ends)} ends of documents, at most {most} belong")
        self._rms: float | None = None
        self.document_ends = tuple(head.document_ends)
        ends = (-1, *self.document_ends, most)
        if self.document_ends and not all(a < b for a, b in pairwise(ends)):
            raise WireError(f"ends of documents that do not rise from 0 to below {most}")
        self.untrained = head.untrained
        most = 0
        if loss_mask:
            most = shape[0] * shape[1] - len(self.document_ends)
        if self.untrained > most:
            raise WireError(f"{self.untrained} tokens that are not trained on, at most {most}")

    @property
    def blockwise(self) -> bool:
        """True if a look at the numbers is work for a thread of its own: :meth:`rms`."""
        return self.wire in BLOCKWISE

    def rms(self) -> float:
        if self._rms is None:
            self._rms = super().rms()
        return self._rms


def parse_head(frame: pb.Frame, shape: FrameShape) -> Incoming:
    """Read the first message of a stream. Raises WireError for anything that no honest peer
    sends."""
    if frame.WhichOneof("part") != "head":
        raise WireError("a stream starts with a head")
    head = frame.head
    if head.purpose not in (pb.TRAIN, pb.EVALUATE, pb.GENERATE):
        raise WireError(f"unknown purpose {head.purpose}")
    if not 3 <= len(head.journey) <= shape.stages + 2:
        raise WireError(f"a journey of {len(head.journey)} hops")
    train = head.purpose == pb.TRAIN  # only training work has a plan that says who may be left out
    least = 0 if train else 1
    if any(
        not least <= len(hop.peer) <= PEER_ID_LENGTH or hop.stage > shape.stages
        for hop in head.journey
    ):
        raise WireError("a journey with an impossible hop")
    journey = tuple(Hop(hop.stage, PeerId(hop.peer)) for hop in head.journey)
    checks = (
        (
            journey[0] == journey[-1]
            and journey[0].stage == 0
            and journey[0].peer
            and len({h.stage for h in journey}) == len(journey) - 1,
            "a journey goes from its origin through different block stages back to it",
        ),
        (head.position < len(journey), "a position outside the journey"),
        (
            math.isfinite(head.deadline_s) and 0 < head.deadline_s <= DEADLINE_MAX_S,
            "an impossible deadline",
        ),
        (
            len(head.plan_hash) <= 64 and train == bool(head.plan_hash),
            "training work carries a plan hash and other work none",
        ),
        (
            head.purpose == pb.GENERATE or not head.HasField("text"),
            "the turn of a text with other work than generation",
        ),
        (
            head.text.kept <= max(0, head.position - 1),
            "a text that more hops keep than it has passed",
        ),
    )
    for fine, why in checks:
        if not fine:
            raise WireError(why)
    return Incoming(Claim(head.epoch, head.plan_hash, head.index, journey, head.position), head)


def loose_shape(incoming: Incoming, shape: FrameShape) -> tuple[int, int, int]:
    """The shape a forward-only frame announces. Raises WireError when it exceeds the run's
    limits."""
    dims = incoming.head.tensor.shape
    if len(dims) != 3:
        raise WireError(f"an activation has 3 dimensions, not {len(dims)}")
    if not (
        1 <= dims[0] <= shape.sequences and 1 <= dims[1] <= shape.length and dims[2] == shape.width
    ):
        raise WireError(
            f"an activation of shape {list(dims)} is beyond this run's "
            f"{shape.sequences}x{shape.length}x{shape.width}"
        )
    return dims[0], dims[1], dims[2]


def frames(
    claim: Claim,
    purpose: int,
    deadline_s: float,
    tensor_shape: tuple[int, ...],
    buffer: Buffer,
    shape: FrameShape,
    document_ends: Sequence[int] = (),
    patient: bool = False,
    *,
    untrained: int = 0,
    text: pb.TextTurn | None = None,
    wire: str = "",
    leave: Leave | None = None,
) -> Iterator[pb.Frame]:
    """One activation or gradient as messages: the head, then chunks cut only when they are sent.
    ``wire``: the format of ``buffer``, the run's by default. What ``leave`` takes needs no
    chunks."""
    yield pb.Frame(
        head=pb.FrameHead(
            epoch=claim.epoch,
            plan_hash=claim.plan_hash,
            index=claim.index,
            purpose=purpose,  # pyright: ignore[reportArgumentType] - an enum's int
            journey=[pb.PathHop(stage=hop.stage, peer=hop.peer) for hop in claim.journey],
            position=claim.position,
            tensor=expected_head("", tensor_shape, wire or shape.wire),
            deadline_s=min(max(deadline_s, 0.001), DEADLINE_MAX_S),
            document_ends=document_ends,
            patient=patient,
            text=text,
            untrained=untrained,
        )
    )
    view = memoryview(buffer)
    for at in range(0, len(view), LEFT):
        piece = view[at : at + LEFT]
        if leave is not None and (place := leave(piece)) is not None:
            yield pb.Frame(left=place)
            continue
        for chunk in chunks(piece, CHUNK):
            yield pb.Frame(chunk=chunk)


class EndedEarly(WireError):
    """A stream ended within its tensor. A sender that hangs up, or that is lost, looks like that
    too, so it proves no bad intent."""


async def read_chunks(
    read: Callable[[], Any], reader: TensorReader, fetch: Fetch | None = None
) -> None:
    """Feed ``reader`` until it is full. ``fetch`` gets bytes that were left in shared memory; None:
    there is none. Raises EndedEarly for a stream that is too short, and WireError for one that is
    too long, or not made of chunks."""
    while reader.remaining:
        frame = await read()
        if frame is EOF:
            raise EndedEarly(f"the stream ended {reader.remaining} bytes early")
        part = frame.WhichOneof("part")
        if part == "left" and fetch is not None:
            reader.fill(partial(fetch, frame.left))
        elif part == "chunk" and frame.chunk:
            reader.feed(frame.chunk)
        else:
            raise WireError("expected a chunk")
