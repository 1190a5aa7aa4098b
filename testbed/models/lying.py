"""The pipeline of a cell in one process, with real tensors, in which one peer may send other
tensors than it computed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan
from node.model.settings import ModelSettings
from node.model.stages import build
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.pipeline.events import Crossing, Direction, VisitSketches
from node.pipeline.frames import FrameReader
from node.pipeline.gradients import Share
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.wire.sketch import Sketch, encode_all
from node.wire.sketcher import Sketcher, read_sketch
from node.wire.tensors import dtype_of, encode, expected_head
from protos import pipeline_pb2 as pb
from testbed.reference.swarm import step_all

SCALE = 3.0
"""Factor of a scaled tensor."""
NOISE = 1.0
"""Root mean square of the noise in a noisy tensor, as a share of the tensor's."""
STALE = 4
"""Micro-batches between a tensor and the stale one that is sent in its place."""


@dataclass(frozen=True)
class Lie:
    """One peer's lie. ``kind``: one of :data:`KINDS`, or "accused" if it sends true tensors and
    reports false sketches of those that it received; ``way``: direction of the tensors; ``since``:
    first epoch of the lie; ``alibi``: sketches that it reports of false tensors: "true" of what it
    sent, "false" of what it should have sent, "disputed" of what it sent and false ones of what it
    received, "none" reports nothing at all."""

    peer: PeerId
    kind: str
    way: Direction
    since: int = 0
    alibi: str = "true"


def _flipped(tensor: Tensor, came: Tensor, earlier: list[Tensor], dice: torch.Generator) -> Tensor:
    return -tensor


def _scaled(tensor: Tensor, came: Tensor, earlier: list[Tensor], dice: torch.Generator) -> Tensor:
    return SCALE * tensor


def _stale(tensor: Tensor, came: Tensor, earlier: list[Tensor], dice: torch.Generator) -> Tensor:
    return earlier[max(0, len(earlier) - STALE)]


def _noisy(tensor: Tensor, came: Tensor, earlier: list[Tensor], dice: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=dice)
    return tensor + NOISE * tensor.square().mean().sqrt() * noise


def _copied(tensor: Tensor, came: Tensor, earlier: list[Tensor], dice: torch.Generator) -> Tensor:
    """The tensor that the liar received, as if its stage were empty."""
    return came


ACCUSED = "accused"
"""The lie of a peer that accuses its neighbours."""
Distort = Callable[[Tensor, Tensor, list[Tensor], torch.Generator], Tensor]
KINDS: Mapping[str, Distort] = {
    "flipped": _flipped,
    "scaled": _scaled,
    "stale": _stale,
    "noisy": _noisy,
    "copied": _copied,
}
"""Name of a lie to the function of (tensor to send, tensor received, tensors sent before, random
numbers) that makes the false tensor."""


class LyingCell:
    """A model cut into ``stages`` block stages. The replicas of a stage share its parameters.
    ``low``: peers that compute in bf16; ``tokens``: the text, as ids; ``wire``: number format of
    the tensors between peers."""

    def __init__(
        self,
        model: ModelSettings,
        stages: int,
        tokens: Tensor,
        *,
        low: frozenset[PeerId] = frozenset(),
        optimizer: OptimSettings | None = None,
        epochs: int = 0,
        wire: str = "fp32",
    ) -> None:
        self.model = model
        self.modules = {s: build(model, stages, s) for s in range(stages + 1)}
        self.lie: Lie | None = None
        self._tokens = tokens
        self._low = low
        self._wire = wire
        self._maths: dict[PeerId, StageMath] = {}
        self._owner = Owner(optimizer or OptimSettings(), epochs)
        self._sent: list[Tensor] = []
        self._dice = torch.Generator().manual_seed(0)
        self._sketches = True

    def without_sketches(self) -> None:
        """Make no sketches, to measure their cost."""
        self._sketches = False

    def parameters(self) -> dict[str, Tensor]:
        """All parameters by name."""
        return {n: p for module in self.modules.values() for n, p in module.named_parameters()}

    def epoch(self, plan: Plan) -> tuple[float, dict[PeerId, list[VisitSketches]]]:
        """Compute the micro-batches of a plan. Return the loss, in nats per token, and what each
        peer would report. The parameters change by :meth:`step`."""
        rows: dict[PeerId, list[VisitSketches]] = {}
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        total = 0.0
        for m in plan.members:
            math = self._math(m.peer, m.stage)
            if self._sketches:
                math.sketch_as(plan.hash)
        self._sketcher = Sketcher(plan.hash)
        for path in plan.paths:
            total += self._micro_batch(plan, path, rows)
        self._dice.manual_seed(plan.epoch)
        return total / self._count, rows

    def step(self, epoch: int) -> None:
        """Step all parameters with the gradients of the last epoch."""
        mean = {name: g / self._count for name, g in self._sums.items()}
        live = self.parameters()
        with torch.no_grad():
            now = {n: p.data for n, p in live.items()}
            for name, fresh in step_all(self._owner, now, mean, epoch).items():
                live[name].data = fresh

    def batch(self, path: Path) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a micro-batch."""
        length = self.model.seq_len
        starts = [s * length % (len(self._tokens) - length - 1) for s in path.samples]
        rows = torch.stack([self._tokens[s : s + length + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    # ----------------------------------------------------------- one micro-batch

    def _math(self, peer: PeerId, stage: int) -> StageMath:
        if peer not in self._maths:
            context = nullcontext
            if peer in self._low:
                context = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
            self._maths[peer] = StageMath(self.modules[stage], self._wire, context)
        return self._maths[peer]

    def _micro_batch(
        self, plan: Plan, path: Path, rows: dict[PeerId, list[VisitSketches]]
    ) -> float:
        """Compute one micro-batch; returns its loss sum."""
        shape = (len(path.samples), self.model.seq_len, self.model.d_model)
        first = VisitBuffers(float("inf"), shape, batch=partial(self.batch, path))
        ends = self._math(path.origin, ENDS)
        ends.embed(first)
        came = self._tensor(first.output, shape)
        visits: list[VisitBuffers] = []
        for hop in path.hops:
            work = VisitBuffers(float("inf"), shape, input=self._reader(came))
            self._math(hop.peer, hop.stage).forward(work)
            sent = self._tensor(work.output, shape)
            came = self._told(plan, hop, Direction.FORWARD, sent, came, work)
            visits.append(work)
        last = VisitBuffers(float("inf"), shape, input=self._reader(came), targets=first.targets)
        ends.loss(last)
        came = self._tensor(last.upstream, shape)
        for hop, work in zip(path.hops[::-1], visits[::-1], strict=True):
            work.gradient = self._reader(came)
            self._math(hop.peer, hop.stage).backward(work)
            sent = self._tensor(work.upstream, shape)
            came = self._told(plan, hop, Direction.BACKWARD, sent, came, work)
        first.gradient = self._reader(came)
        ends.embed_backward(first)
        first.sketches |= last.sketches
        self._count += last.tokens
        for work in (first, last, *visits):
            self._add(work.share)
        self._report(plan, path, [first, *visits], rows)
        return last.loss_sum

    def _told(
        self,
        plan: Plan,
        hop: Hop,
        way: Direction,
        sent: Tensor,
        came: Tensor,
        work: VisitBuffers,
    ) -> Tensor:
        """The tensor that a peer sends."""
        lie = self.lie
        if lie is None or hop.peer != lie.peer or way is not lie.way or plan.epoch < lie.since:
            return sent
        if lie.kind == ACCUSED or lie.alibi == "disputed":
            received = Crossing.INPUT if way is Direction.FORWARD else Crossing.OUTPUT_GRADIENT
            work.sketches[received] = self._sketch(-came)
        if lie.kind == ACCUSED:
            return sent
        self._sent = [*self._sent[-STALE:], sent]
        false = KINDS[lie.kind](sent, came, self._sent, self._dice)
        if lie.alibi in ("true", "disputed") and self._sketches:
            crossing = Crossing.OUTPUT if way is Direction.FORWARD else Crossing.INPUT_GRADIENT
            work.sketches[crossing] = self._sketch(false)
        return false

    def _sketch(self, tensor: Tensor) -> Sketch:
        return read_sketch(self._sketcher.sketch(tensor).tolist())

    def _report(
        self,
        plan: Plan,
        path: Path,
        visits: list[VisitBuffers],
        rows: dict[PeerId, list[VisitSketches]],
    ) -> None:
        if not self._sketches:
            return
        ring = [path.origin, *(hop.peer for hop in path.hops)]
        for i, (peer, work) in enumerate(zip(ring, visits, strict=True)):
            lie = self.lie
            if lie and peer == lie.peer and lie.alibi == "none" and plan.epoch >= lie.since:
                continue
            found = encode_all([work.sketches[c] for c in Crossing])
            row = VisitSketches(path.index, ring[i - 1], ring[(i + 1) % len(ring)], found)
            rows.setdefault(peer, []).append(row)

    def _add(self, share: Share | None) -> None:
        for name, g in (share or {}).items():
            known = self._sums.get(name)
            self._sums[name] = g if known is None else known + g

    def _tensor(self, raw: memoryview | None, shape: tuple[int, ...]) -> Tensor:
        """The numbers that travel as these bytes."""
        if raw is None:
            raise RuntimeError("a visit without a result")
        return torch.frombuffer(bytearray(raw), dtype=dtype_of(self._wire)).view(shape).float()

    def _reader(self, tensor: Tensor) -> FrameReader:
        head = pb.FrameHead(tensor=expected_head("", tensor.shape, self._wire))
        reader = FrameReader(head, tuple(tensor.shape), self._wire)
        reader.feed(encode(tensor, self._wire))
        return reader


def peers(*replicas: int) -> Iterator[tuple[PeerId, int]]:
    """Name and stage of peers: ``replicas[s]`` of stage ``s``."""
    for stage, count in enumerate(replicas):
        for i in range(count):
            yield PeerId(f"s{stage}{'abcdefgh'[i]}"), stage
