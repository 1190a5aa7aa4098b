"""Facts of a run that its leader needs: numbers of the manifest, and the pure functions that plans
are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from node.consensus.rules import Read, Rules
from node.core.ids import PeerId
from node.core.journey import Version
from node.epoch.bounds import Bounds
from node.epoch.pace import RECALL_FROM, RECALL_S
from node.epoch.plan_context import PlanContext
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings


@dataclass(frozen=True)
class Waits:
    """Waiting times of a leader, in seconds.

    ``epoch_s`` and ``round_s``: the least time that an epoch and a round are given, whatever was
    measured. ``settle_s``: wait of a young swarm for more peers. ``late_s``: silence that means
    death. ``lacks_s``: wait of a swarm without peers at a stage, before another peer is asked to
    change its stage. ``patience_s``: wait for a lost version before an older one is taken.
    ``recall_s``: wait for peers' answers about a version. ``probe_every_s``: time between two small
    messages that only measure a connection, 0 for none. ``rebalance_every_s``: time between two
    changes of stage, 0 for none. ``download_s``: time that a change of stage costs.
    """

    epoch_s: float
    round_s: float
    settle_s: float = 1.0
    late_s: float = 4.0
    lacks_s: float = 10.0
    patience_s: float = 10.0
    recall_s: float = RECALL_FROM * RECALL_S + 1.0
    probe_every_s: float = 0.0
    rebalance_every_s: float = 0.0
    download_s: float = 15.0


@dataclass(frozen=True)
class WorkSizes:
    """Amounts of computation and traffic of a run, by stage; empty or 0 if unknown.

    ``parameters``: bytes of a stage's parameters. ``tensor``: bytes of a micro-batch between two
    stages; ``wires``: the same in each number format that a plan may give a link, the run's first.
    ``operations``: floating-point operations of a micro-batch, forward and backward.
    ``steps``: floating-point operations of an optimizer step, by part. ``sequence``: tokens of a
    sample, which bounds the tokens that a peer may report.
    """

    parameters: tuple[int, ...] = ()
    tensor: int = 0
    operations: tuple[float, ...] = ()
    steps: tuple[Mapping[str, float], ...] = ()
    sequence: int = 0
    wires: Mapping[str, int] = field(default_factory=dict)

    @property
    def coarsest(self) -> float:
        """Share of a tensor's bytes that it has in the coarsest format that a plan may choose."""
        if not self.wires:
            return 1.0
        return min(self.wires.values()) / max(1, *self.wires.values())


Assign = Callable[
    [int, Sequence[tuple[PeerId, float]], Mapping[str, PeerId], Mapping[PeerId, int]],
    dict[str, PeerId],
]


@dataclass(frozen=True)
class PlanFunctions:
    """The pure functions that a plan is made of.

    ``assign(stage, ((peer, speed), …), previous owners, room) -> owners`` places the parts of one
    stage. ``room[peer]``: bytes of optimizer state that the peer can hold; absent if unknown.
    Raises OutOfResources if the state does not fit. ``router()`` makes the object that lays the
    paths. ``recall(version)`` is the context in a checkpoint of the version, None without one; it
    reads the disk, so a leader gets its answers as events. ``read(change)``: the settings of the
    owner's change, or of the manifest.
    """

    assign: Assign
    router: Callable[[], Router]
    recall: Callable[[Version], PlanContext | None] = lambda version: None
    read: Read = lambda change: Rules()


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of an epoch. ``target_batch``: all of them; ``micro_batch``: samples that travel
    the pipeline as one."""

    target_batch: int
    micro_batch: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an epoch."""
        return self.target_batch // self.micro_batch


@dataclass(frozen=True)
class EvaluationFacts:
    """Evaluations on the held-out text. ``eval_every``: epochs between two, 0 for none.
    ``reference``: plans carry the losses before the first step. ``warmup``: epochs over which the
    learning rate rises. ``advice``: text for the owner of a run, if the held-out loss is above that
    reference after the warmup."""

    eval_every: int
    reference: bool
    warmup: int
    advice: str


@dataclass(frozen=True)
class RunFacts:
    """Facts that the manifest fixes.

    ``min_replicas``: live peers that every block stage needs before the first epoch. ``prove``:
    only peers that say they reach each other share a path or a cell. ``scheduler``: the settings of
    the paths. ``may_lead(peer)``: returns True if the run lets that peer lead, by this peer's
    knowledge; it changes with time, so a leader finds it in heartbeats. ``invite_of(peer)``: the
    key of the invite for anybody with which that peer came to a private run, None for another peer.
    """

    stages: int
    epochs: int
    batch: GlobalBatch
    min_replicas: int
    evaluation: EvaluationFacts
    waits: Waits
    make: PlanFunctions
    sizes: WorkSizes = field(default_factory=WorkSizes)
    run_id: str = ""
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    prove: bool = False
    may_lead: Callable[[PeerId], bool] = lambda peer: True
    invite_of: Callable[[PeerId], PeerId | None] = lambda peer: None

    @property
    def spare(self) -> int:
        """Number of block stages that a plan may leave out when nobody holds them."""
        return self.stages - self.scheduler.hops(self.stages)

    @property
    def bounds(self) -> Bounds:
        """Bounds on the numbers that other peers report."""
        return Bounds(
            self.epochs,
            self.batch.target_batch * self.sizes.sequence,
            self.stages,
            self.batch.micro_batches,
        )

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a micro-batch; 0 if unknown."""
        return self.batch.micro_batch * self.sizes.sequence
