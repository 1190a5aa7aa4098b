"""Settings of a simulated swarm: the number of peers, the time that work takes, the width of the
links, and the rules of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from node.averaging.settings import AveragingSettings
from node.averaging.strategies.outer import OuterSettings
from node.core.errors import UsageFault
from node.epoch.settings import TrainingSettings
from node.manifest import Manifest
from node.model.settings import ModelSettings
from node.model.shapes import parameter_shapes
from node.optim.parts import ParameterPart, parts_of
from node.optim.settings import OptimSettings
from node.pipeline.settings import PipelineSettings
from node.scheduler.settings import SchedulerSettings

WIDTH = 2
"""Numbers that stand for one position's activations."""
NUMBERS = 4
"""Numbers that stand for one parameter."""
HEAD = 256
"""Bytes of a message without tensors."""
FLOPS_PER_S = 5e10
"""Operations a second of a simulated peer, used if a manifest gives the number of operations."""


def toy_parts(stages: int, each: int) -> dict[int, tuple[ParameterPart, ...]]:
    """Made-up parameters: ``each`` a stage, of unequal cost."""
    return {
        stage: tuple(
            ParameterPart(f"{stage}.{i}", (8, 8 + i), 1000.0 + 300.0 * i, 4 * 8 * (8 + i), True)
            for i in range(each)
        )
        for stage in range(stages + 1)
    }


@dataclass(frozen=True)
class LinkProfile:
    """First state of every link: latency and jitter in seconds, bandwidth in bits a second (0: no
    limit), loss as a share of messages."""

    latency_s: float = 0.02
    jitter_s: float = 0.02
    bandwidth: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class WorkTimes:
    """Seconds that the fastest peer takes: for a micro-batch at the ends and at a block stage,
    for an optimizer's step of one part, and for a checkpoint. ``unequal``: slowest over fastest
    peer at the start."""

    ends_s: float = 0.01
    forward_s: float = 0.03
    step_s: float = 0.01
    checkpoint_s: float = 0.4
    unequal: float = 1.3


@dataclass(frozen=True)
class Setup:
    """Numbers of peers: ``ends``, ``stages`` block stages of ``replicas`` each, the first ``extra``
    stages one more. Times in seconds, sizes in bytes. ``spread_s``: from a record's change to the
    directory's. ``tokens`` and ``activation`` belong to one micro-batch. ``cell``: most peers of a
    cell (0: all of a stage); cells average with each other as ``outer`` says."""

    ends: int = 2
    stages: int = 2
    replicas: int = 3
    extra: int = 0
    epochs: int = 12
    micro_batches: int = 3
    micro_batch: int = 1
    tokens: int = 16
    parts: Mapping[int, tuple[ParameterPart, ...]] = field(default_factory=lambda: toy_parts(2, 3))
    group_bytes: int = 300
    activation: int = 4096
    min_replicas: int = 1
    epoch_timeout_s: float = 20.0
    round_timeout_s: float = 6.0
    forward_timeout_s: float = 8.0
    eval_every: int = 0
    rebalance_every_s: float = 0.0
    cell: int = 0
    outer: OuterSettings = field(default_factory=OuterSettings)
    in_flight: int = 4
    stash: int = 64
    checkpoint_within_s: float = 0.0
    checkpoint_every: int = 4
    checkpoint_keep: int = 3
    links: LinkProfile = LinkProfile()
    work: WorkTimes = WorkTimes()
    spread_s: float = 0.3
    scheduler: SchedulerSettings | None = None
    """Settings of the paths; None: chosen by the seed, mostly in turns, now and then planned, with
    and without skips."""
    may_skip: float = 0.0

    def scheduling(self, seed: int) -> tuple[SchedulerSettings, float]:
        """Settings of the paths in the schedule of this seed, and the share of the block stages
        that a journey may leave out."""
        if self.scheduler is not None:
            return self.scheduler, self.may_skip
        skip = 0.0
        if seed % 8 == 4:
            skip = 0.5
        kind = "planned"
        if seed % 4:
            kind = "round-robin"
        return SchedulerSettings(kind, skip), max(self.may_skip, skip)

    @property
    def peers(self) -> int:
        return self.ends + self.stages * self.replicas + self.extra

    @property
    def operations_per_s(self) -> float:
        """Operations a second of an optimizer's step here; 0 where it takes no time."""
        costs = [p.cost for p in self.parts[1]]
        if not self.work.step_s:
            return 0.0
        return sum(costs) / len(costs) / self.work.step_s

    def manifest(self, seed: int) -> Manifest:
        """The manifest that the peers of this seed's schedule share, for the few numbers that stand
        for a model here."""
        scheduler, may_skip = self.scheduling(seed)
        return Manifest(
            model=ModelSettings(
                layers=self.stages,
                d_model=WIDTH,
                heads=1,
                kv_heads=1,
                seq_len=max(1, self.tokens // self.micro_batch),
            ),
            pipeline=PipelineSettings(
                self.stages,
                self.micro_batch,
                forward_timeout_s=self.forward_timeout_s,
                may_skip=may_skip,
            ),
            scheduler=scheduler,
            averaging=AveragingSettings(
                self.cell or "all",
                group_bytes=max(1, round(self.group_bytes / self._bulk)),
                round_timeout_s=self.round_timeout_s,
            ),
            outer=self.outer,
            optimizer=OptimSettings(name="adamw"),
            training=TrainingSettings(
                epochs=self.epochs,
                target_batch=self.micro_batches * self.micro_batch,
                epoch_timeout_s=self.epoch_timeout_s,
                eval_every=self.eval_every,
                min_replicas=self.min_replicas,
                rebalance_every_s=self.rebalance_every_s,
            ),
        )

    def weigh(self, method: str, message: Any) -> int:
        """Bytes of a message on a line, as if there were a whole model behind it."""
        if isinstance(message, bytes):
            return HEAD + round(len(message) * self._bulk)
        size: int = message.ByteSize()
        if method.startswith("/tutti.v1.Pipeline/"):
            length = 4 * WIDTH * self.tokens
            return HEAD + (size * self.activation // length if size >= length else size)
        if method == "/tutti.v1.State/Fetch":
            return HEAD + round(size * self._bulk)
        return size + HEAD

    @property
    def _bulk(self) -> float:
        """Ratio of a parameter's size to the size of the numbers that stand for it."""
        found = [p.bytes for parts in self.parts.values() for p in parts]
        return sum(found) / len(found) / (4 * NUMBERS)

    @cached_property
    def names(self) -> Mapping[int, tuple[str, ...]]:
        """Part names of every stage."""
        return {s: tuple(p.name for p in parts) for s, parts in self.parts.items()}

    @classmethod
    def of(
        cls, manifest: Manifest, peers: int, ends: int, epochs: int | None, stages: int | None
    ) -> "Setup":
        """The swarm of a manifest with ``peers`` peers; ``stages`` and ``epochs`` may differ from
        the manifest's.

        Raises UsageFault if its model cannot be cut into this number of stages, or for too few
        peers.
        """
        if stages is not None:
            manifest = replace(
                manifest,
                model=replace(manifest.model, layers=max(stages, manifest.model.layers)),
                pipeline=replace(manifest.pipeline, stages=stages),
                signature=None,
            )
        m = manifest.model
        p = manifest.pipeline
        t = manifest.training
        if peers < ends + p.stages:
            raise UsageFault(
                f"{peers} peers are too few",
                f"{ends} at the ends and one for each of {p.stages} stages",
            )
        parts = {
            s: parts_of(parameter_shapes(m, p.stages, s), manifest.optimizer)
            for s in range(p.stages + 1)
        }
        tokens = p.micro_batch * m.seq_len
        block = sum(q.bytes / 4 for q in parts[1])
        return cls(
            ends=ends,
            stages=p.stages,
            replicas=(peers - ends) // p.stages,
            extra=(peers - ends) % p.stages,
            epochs=epochs or t.epochs,
            micro_batches=t.target_batch // p.micro_batch,
            micro_batch=p.micro_batch,
            tokens=tokens,
            parts=parts,
            activation=tokens * m.d_model * 4,
            min_replicas=t.min_replicas,
            epoch_timeout_s=t.epoch_timeout_s,
            group_bytes=manifest.averaging.group_bytes,
            round_timeout_s=manifest.averaging.round_timeout_s,
            forward_timeout_s=p.forward_timeout_s,
            eval_every=t.eval_every,
            rebalance_every_s=t.rebalance_every_s,
            in_flight=8,
            stash=256,
            checkpoint_every=20,
            scheduler=manifest.scheduler,
            may_skip=p.may_skip,
            cell=manifest.averaging.peers,
            outer=manifest.outer,
            links=LinkProfile(0.04, 0.02, 1e8, 0.001),
            work=WorkTimes(
                ends_s=2 * tokens * m.vocab * m.d_model / FLOPS_PER_S,
                forward_s=2 * tokens * block / FLOPS_PER_S,
                step_s=sum(q.cost for q in parts[1]) / len(parts[1]) / FLOPS_PER_S,
                unequal=2.0,
            ),
        )
