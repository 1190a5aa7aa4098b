"""What happens in an epoch and what is done about it: inputs and outputs of the leader and the member."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.core.ids import PeerId
from node.core.journey import Plan

# ---------------------------------------------------------------- what the leader hears


@dataclass(frozen=True)
class Heard:
    """A peer says it is alive and what it holds. ``holds`` is the version of its parameters."""

    peer: PeerId
    stage: int
    holds: int
    digest: str
    speed: float = 0.0
    checkpoints: tuple[int, ...] = ()
    term: int = 0


@dataclass(frozen=True)
class Left:
    """A peer said goodbye."""

    peer: PeerId


@dataclass(frozen=True)
class Unreachable:
    """A call to this peer failed, or a probe of it did."""

    peer: PeerId


@dataclass(frozen=True)
class Accused:
    """``by`` could not get an answer from ``about``. One word against another: it is probed before it counts."""

    about: PeerId
    by: PeerId
    reason: str


@dataclass(frozen=True)
class Result:
    """What became of one micro-batch; ``loss_sum`` in nats over ``tokens`` tokens."""

    index: int
    counted: bool
    loss_sum: float
    tokens: int


@dataclass(frozen=True)
class Finished:
    """An ends peer reports micro-batches of the plan with this hash."""

    peer: PeerId
    plan_hash: str
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Committed:
    """A member holds every fresh part of its stage; ``digest`` names them."""

    peer: PeerId
    plan_hash: str
    attempt: int
    digest: str
    speed: float = 0.0
    contributors: int = 0


@dataclass(frozen=True)
class Incomplete:
    """A member's round ended and parts are missing: ``holds`` it has, ``failed`` owners did not serve it."""

    peer: PeerId
    plan_hash: str
    attempt: int
    holds: tuple[str, ...]
    failed: tuple[PeerId, ...]


@dataclass(frozen=True)
class Evaluated:
    """The held-out loss, nats per token, of the parameters at ``epoch``; 0 when it could not be measured."""

    epoch: int
    loss: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


# ---------------------------------------------------------------- what the leader does


@dataclass(frozen=True)
class SendPlan:
    """Sign the plan and tell every member."""

    plan: Plan


@dataclass(frozen=True)
class SendRound:
    """Tell ``to`` to average: attempt 0 closes the epoch, later attempts repair it."""

    to: tuple[PeerId, ...]
    plan: Plan
    attempt: int
    dead: tuple[PeerId, ...]
    owners: dict[str, PeerId] = field(default_factory=dict)
    sources: tuple[PeerId, ...] = ()
    dropped: tuple[int, ...] = ()
    deadline_s: float = 30.0


@dataclass(frozen=True)
class Probe:
    """Find out whether this peer is alive; the answer comes back as Heard or Unreachable."""

    peer: PeerId


@dataclass(frozen=True)
class Evaluate:
    """Measure the held-out loss of the parameters at ``epoch`` over these members, then say Evaluated."""

    epoch: int
    plan: Plan


@dataclass(frozen=True)
class Report:
    """A fact for the record. ``kind`` is a stable word, ``text`` a sentence, ``facts`` its numbers."""

    kind: str
    text: str
    level: str = "info"
    facts: dict[str, object] = field(default_factory=dict)


# ---------------------------------------------------------------- what a member hears and does


@dataclass(frozen=True)
class PlanArrived:
    """The leader's signed plan, signature already checked."""

    plan: Plan


@dataclass(frozen=True)
class RoundArrived:
    """The leader closes or repairs the epoch."""

    leader: PeerId
    epoch: int
    term: int
    plan_hash: str
    attempt: int
    dead: tuple[PeerId, ...]
    owners: dict[str, PeerId]
    sources: tuple[PeerId, ...]
    dropped: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True)
class RoundEnded:
    """The exchange of (epoch, term, attempt) returned. ``missing`` parts did not come, ``failed`` owners are why."""

    epoch: int
    term: int
    attempt: int
    holds: tuple[str, ...]
    missing: tuple[str, ...]
    failed: tuple[PeerId, ...]
    contributors: int = 0


@dataclass(frozen=True)
class Adopted:
    """The fresh parameters are in place; ``digest`` names them."""

    epoch: int
    term: int
    attempt: int
    digest: str
    contributors: int = 0


@dataclass(frozen=True)
class GoTo:
    """Make ``epoch`` the version in place: ``how`` is keep, roll-back or checkpoint."""

    epoch: int
    how: str


@dataclass(frozen=True)
class Settle:
    """The update that made ``epoch`` is final: optimizer state of it counts, what was kept to undo it may go."""

    epoch: int


@dataclass(frozen=True)
class Begin:
    """Take part in this plan: tell the pipeline, fetch the optimizer state of parts gained, start own micro-batches."""

    plan: Plan
    listener: bool


@dataclass(frozen=True)
class Average:
    """Leave the pipeline phase and run this round."""

    plan: Plan
    round: RoundArrived
    listener: bool


@dataclass(frozen=True)
class CopyFrom:
    """Fetch the stage at ``plan.epoch + 1`` from ``sources``, which have committed it."""

    plan: Plan
    round: RoundArrived


@dataclass(frozen=True)
class Adopt:
    """Put the gathered parts in place as ``epoch``."""

    plan: Plan
    ended: RoundEnded


@dataclass(frozen=True)
class TellCommitted:
    """Tell the leader."""

    plan: Plan
    attempt: int
    digest: str
    contributors: int = 0


@dataclass(frozen=True)
class TellIncomplete:
    """Tell the leader."""

    plan: Plan
    ended: RoundEnded


@dataclass(frozen=True)
class Refuse:
    """Answer the caller with no, and why."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """The run is complete at ``plan.epoch``: keep serving, train no more."""

    plan: Plan
