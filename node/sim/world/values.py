"""Stand-ins for model, data and checkpoints behind the device: parameters of a few numbers, and
gradients that say which samples they are of.

A sample's gradient is made of small whole numbers that belong to it alone, so that sums of them are
exact, and a mean shows which peers and samples contributed. Parameters are stepped by the product's
own optimizer: two peers hold the same bits only if the very same steps reached both.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from node.checkpoint.schedule import kept
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import Checkpoint, CheckpointStore
from node.coordinator.ledger import VoteLedger
from node.core.errors import Refused, StepFault
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.pipeline.gradients import GradientSum, Share
from node.pipeline.visit_buffers import StageMath, VisitBuffers, _there
from node.sim.setup import NUMBERS, WIDTH
from node.sim.world.loop import SimDevice
from node.stage.text import Text
from node.wire.remote import HeldTensor, collected
from node.wire.tensors import TensorReader, digest, encode

FIRST = 64.0
"""First number of every sample's gradient."""
SPREAD = 16
"""Bound of the absolute values of the other numbers of a sample's gradient."""
_UNIT = 2.0**-23
LOSS = 2.0


@lru_cache(1 << 16)
def code(sample: int) -> Tensor:
    """The gradient of one token of a sample [NUMBERS]: FIRST, then whole numbers that
    are its own."""
    raw = blake2b(str(sample).encode(), digest_size=NUMBERS - 1).digest()
    return torch.tensor([FIRST, *(float(b % (2 * SPREAD) - SPREAD) for b in raw)])


def first_value(name: str) -> Tensor:
    """The first value of a parameter, which every peer builds from its name."""
    raw = blake2b(name.encode(), digest_size=NUMBERS).digest()
    return torch.tensor([b / 256.0 - 0.5 for b in raw])


class Values(nn.Module):
    """The parameters of one stage, where a model would be."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._named = {n: nn.Parameter(first_value(n), requires_grad=True) for n in names}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named.items())


class ValueShare(dict[str, Tensor]):
    """The gradients of one micro-batch, with the samples that they are from."""

    samples: tuple[int, ...] = ()


class ValueMath(StageMath):
    """Forward and backward: the samples go through, and the time that the work would take is
    spent. ``forward_s``: of a micro-batch forward; backward takes twice as long."""

    def __init__(
        self, module: nn.Module, wire: str, device: SimDevice, forward_s: float, ends_s: float
    ) -> None:
        self.module = module
        self.wire = wire
        self._names = [n for n, _ in module.named_parameters()]
        self._spend = device.spend
        self._forward_s = forward_s
        self._ends_s = ends_s
        self.graph_bytes: dict[tuple[int, ...], int] = {}

    def forward(self, work: VisitBuffers) -> None:
        self._spend(self._forward_s)
        work.x = work.y = _read(work.input)
        work.input = None
        self.graph_bytes[work.shape] = 0
        work.output = _bytes(work.x)
        work.tokens = work.shape[0] * work.shape[1]

    def backward(self, work: VisitBuffers) -> None:
        self._spend(2 * self._forward_s)
        work.upstream = _bytes(_read(work.gradient))
        work.share = self._of(work.x)

    def forward_only(
        self, reader: TensorReader, positions: int = 0
    ) -> tuple[memoryview, tuple[int, ...]]:
        self._spend(self._forward_s)
        y = _read(reader)[:, -positions:]
        return _bytes(y), tuple(y.shape)

    def embed(self, work: VisitBuffers) -> None:
        self._spend(self._ends_s)
        tokens, work.targets = _there(work.batch)()
        work.batch = None
        work.y = _hidden(tokens)
        work.output = _bytes(work.y)

    def loss(self, work: VisitBuffers) -> None:
        self._spend(2 * self._ends_s)
        h = _read(work.input)
        work.tokens = h.shape[0] * h.shape[1]
        work.loss_sum = LOSS * work.tokens
        work.upstream, work.share = _bytes(h), self._of(h)

    def embed_backward(self, work: VisitBuffers) -> None:
        """The samples' share of this stage is made with the loss."""
        self._spend(self._ends_s)
        work.share = {}

    def embed_only(self, tokens: Tensor, document_ends: Sequence[int] = ()) -> memoryview:
        return _bytes(_hidden(tokens))

    def loss_only(self, reader: TensorReader, targets: Tensor) -> tuple[float, int]:
        self._spend(self._ends_s)
        return LOSS * targets.numel(), targets.numel()

    def _of(self, hidden: Tensor | None) -> ValueShare:
        hidden = _there(hidden)
        samples = tuple(round((v - 1.0) / _UNIT) for v in hidden[:, 0, 0].tolist())
        length = float(hidden.shape[1])
        whole = sum(map(code, samples[1:]), start=code(samples[0]))
        share = ValueShare(dict.fromkeys(self._names, whole * length))
        share.samples = samples
        return share


def _read(reader: TensorReader | None) -> Tensor:
    return _there(reader).finish()[0]


def _hidden(tokens: Tensor) -> Tensor:
    """[B, T] numbers of samples as activations [B, T, WIDTH], all of nearly the same size."""
    return (
        (tokens.to(torch.float64) * _UNIT + 1.0).to(torch.float32).unsqueeze(-1).repeat(1, 1, WIDTH)
    )


def _bytes(tensor: Tensor) -> memoryview:
    return encode(tensor, "fp32")


class SampleText(Text):
    """Data of which every token is the number of its sample."""

    def __init__(self, length: int, size: int) -> None:
        object.__setattr__(self, "_length", length)
        object.__setattr__(self, "size", size)

    def at(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        length: int = self._length  # type: ignore[attr-defined]
        tokens = torch.tensor(samples, dtype=torch.int64).unsqueeze(1).expand(-1, length)
        return tokens, tokens

    def held_out_count(self) -> int:
        return 1

    def held_out(self, i: int) -> tuple[Tensor, Tensor]:
        return self.at([0] * self.size)


class ValueSum(GradientSum):
    """A sum that knows its samples. ``gave(samples, sums, tokens)`` is called with the sum that is
    taken, and may return another number of tokens."""

    def __init__(self, gave: Callable[[tuple[int, ...], Mapping[str, Tensor], int], int]) -> None:
        super().__init__()
        self._gave = gave
        self._samples = list[int]()

    def offer(self, shares: Sequence[Share], tokens: int) -> None:
        for share in shares:
            self._samples += getattr(share, "samples", ())
        super().offer(shares, tokens)

    def reset(self) -> None:
        super().reset()
        self._samples = []

    def whole(self) -> tuple[Mapping[str, Tensor], int]:
        sums, tokens = super().whole()
        return sums, self._gave(tuple(self._samples), sums, tokens)


class ValueOwner(Owner):
    """The product's optimizer; its steps take virtual time, may fail and are watched."""

    def __init__(
        self,
        settings: OptimSettings,
        epochs: int,
        device: SimDevice,
        step_s: float,
        stepping: Callable[[Owner, Mapping[str, Tensor]], None],
        settling: Callable[[Owner, frozenset[str]], None],
        gives: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda fresh: fresh,
    ) -> None:
        super().__init__(settings, epochs)
        self._device = device
        self._step_s = step_s
        self._stepping = stepping
        self._settling = settling
        self._gives = gives
        self.broken = 0
        """Steps that fail."""

    def step_parts(
        self, parameters: Mapping[str, Tensor], mean_gradients: Mapping[str, Tensor], epoch: int
    ) -> dict[str, Tensor]:
        self._device.spend(self._step_s * len(mean_gradients))
        if self.broken:
            self.broken -= 1
            raise StepFault("out of memory", "begin the epoch anew")
        self._stepping(self, mean_gradients)
        return self._gives(super().step_parts(parameters, mean_gradients, epoch))

    def commit(self, epoch: int, names: Any = None) -> frozenset[str]:
        committed = super().commit(epoch, names)
        self._settling(self, committed)
        return committed


@dataclass
class SimDisk:
    """A peer's disk: its checkpoints, and the other files of a daemon. It survives the process; a
    write under way when the process died is not there afterwards. ``seconds``: time to write a
    checkpoint."""

    seconds: float
    places: dict[tuple[int, int], Checkpoint] = field(default_factory=dict)
    change: str = ""
    """The owner's newest change to how cells average that was known."""
    cell: str = ""
    """The cell that it belongs to."""
    votes: VoteLedger = field(default_factory=VoteLedger)
    writing: tuple[float, dict[tuple[int, int], Checkpoint]] = (0.0, {})
    """End of a write under way, and the places that remain if it is cut short."""

    def change_cell(self, cell: str) -> None:
        """The next process begins in that cell, with none of the checkpoints of this one."""
        self.cell = cell
        self.places = {}
        self.writing = (0.0, {})

    def died(self, now: float) -> None:
        """The process is gone: a write under way never got its name."""
        until, before = self.writing
        if now < until:
            self.places = before
        self.writing = (0.0, {})


class DiskStore(CheckpointStore):
    """The checkpoints on a :class:`SimDisk`; ``read`` is called with every checkpoint that is
    loaded."""

    def __init__(
        self,
        disk: SimDisk,
        settings: CheckpointSettings,
        run_id: str,
        now: Callable[[], float],
        read: Callable[[Checkpoint], None],
    ) -> None:
        super().__init__(Path("/simulated"), settings, run_id)
        self._on = disk
        self._now = now
        self._read_back = read
        self._blocked = 0.0

    def blocked(self) -> float:
        """Seconds that the last call would have taken a thread; asked once."""
        seconds = self._blocked
        self._blocked = 0.0
        return seconds

    def save(
        self,
        stage: int,
        epoch: int,
        parameters: Mapping[str, Tensor],
        optimizer: Mapping[str, Mapping[str, HeldTensor]],
        meta: Mapping[str, Any],
        *,
        stride: int = 1,
        beside: Collection[int] = (),
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Path:
        state = {n: {k: collected(t) for k, t in s.items()} for n, s in optimizer.items()}
        made = Checkpoint(stage, epoch, dict(parameters), state, dict(meta), digest(parameters))
        before = self._on.places
        places = {place: old for place, old in before.items() if place != (stage, epoch)}
        # In the order in which they were written.
        self._on.places = places | {(stage, epoch): made}
        written = [e for s, e in self._on.places if s == stage]
        keep = self.settings.keep
        stay = kept(written, {epoch, *beside}, keep=keep, stride=stride)
        for old in set(written) - stay:
            del self._on.places[stage, old]
        self._blocked = self._on.seconds
        self._on.writing = self._now() + self._blocked, before
        return self.path(stage, epoch)

    def epochs(self, stage: int) -> list[int]:
        return sorted(e for s, e in self._on.places if s == stage)

    def metas(self, stage: int) -> dict[int, dict[str, Any]]:
        return {e: dict(c.meta) for (s, e), c in sorted(self._on.places.items()) if s == stage}

    def problems(self, stage: int) -> list[tuple[str, str]]:
        return []

    def distrust(self, stage: int, epoch: int, why: str) -> None:
        self._on.places.pop((stage, epoch), None)

    def load(
        self, stage: int, epoch: int, goes_on: Callable[[], bool] = lambda: True
    ) -> Checkpoint:
        found = self._on.places.get((stage, epoch))
        if found is None:
            raise Refused(f"no checkpoint of stage {stage} at epoch {epoch}", "use another epoch")
        self._read_back(found)
        return found

    def free(self) -> int:
        return 1 << 50
