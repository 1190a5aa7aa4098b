"""What happens in an epoch and what is done about it: inputs and outputs of the leader and the
member."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Plan, Version, Window
from node.pipeline.events import MicroBatchDone
from node.scheduler.costs import NOTHING, Measured
from node.scheduler.router import SearchJob
from node.training.protocol.rules import Rules
from node.training.protocol.votes import Certificate, DoubleVote, Supporter

# ------------------------------------------------------------ what the leader hears


@dataclass(frozen=True)
class Heartbeat:
    """A peer says that it is alive and what it holds.

    ``at``, ``digest``   version and digest of its parameters; ``tokens``: counted in that history
    ``reachable``   other versions that it can put in place
    ``term``        the highest term that it has followed
    ``leaving``     plan without it; its state can still be fetched for a moment
    ``speed``       its own measurement, ``seen``: its measurements of neighbours, both in
                    micro-batches per second
    ``room``        bytes of optimizer state that it can keep as an owner, 0: unknown
    ``costs``       measured costs of its work and its connections
    ``mean``        the newest window whose mean is here, and its digest
    ``anchor``      digest of anchor and momentum, where those of all cells must be equal
    ``orphan``      ``at`` is of a lineage that went on without a majority of its voters

    For the service that receives it, not for the leader's state machine: ``change``, the owner's
    newest change, which is still to be checked; ``support`` for the receiver as leader;
    ``doubles``: proofs that peers voted twice; ``cell``: the sender's, empty if it does not say.
    """

    peer: PeerId
    stage: int
    at: Version
    digest: str
    speed: float = 0.0
    reachable: tuple[Version, ...] = ()
    term: int = 0
    tokens: int = 0
    leaving: bool = False
    seen: tuple[tuple[PeerId, float], ...] = ()
    room: int = 0
    costs: Measured = NOTHING
    change: str = ""
    mean: tuple[int, str] = (0, "")
    orphan: bool = False
    anchor: str = ""
    support: Supporter | None = None
    doubles: tuple[DoubleVote, ...] = ()
    cell: CellId = NO_CELL

    def stands(self) -> "Heartbeat":
        """The same without what is measured, which differs from one word to the next, and what is
        for the service that hears it."""
        own = replace(self, speed=0.0, seen=(), costs=NOTHING)
        return replace(own, change="", support=None, doubles=(), cell=NO_CELL)


@dataclass(frozen=True)
class Grouped:
    """The cell averages with the partners of ``window``. What is not there at ``until``, seconds of
    the own clock, is left out."""

    window: Window
    until: float


@dataclass(frozen=True)
class Recalled:
    """The plan behind a version, and what of it did not count, as a peer remembers it; None when
    nobody does. ``certificate``: the newest that this peer has, of whichever version."""

    version: Version
    plan: Plan | None = None
    dropped: tuple[int, ...] = ()
    certificate: Certificate | None = None


@dataclass(frozen=True)
class Changed:
    """The owner's change to how cells average, checked: it comes into force with the next plan if
    it is newer than what is."""

    rules: Rules


@dataclass(frozen=True)
class MoveRefused:
    """A peer does not change its stage."""

    peer: PeerId


@dataclass(frozen=True)
class Unreachable:
    """A call to this peer failed, or a probe of it did. ``since``: clock when the last attempt
    began; a later message from the peer shows that it lives. Without ``since`` the peer is of no
    use for this epoch even if it lives."""

    peer: PeerId
    since: float = math.inf


@dataclass(frozen=True)
class ProbeAnswered:
    """A probe of this peer was answered: it lives, though its heartbeats are missing. ``ours``
    False: it follows another leader."""

    peer: PeerId
    ours: bool = True


@dataclass(frozen=True)
class Declined:
    """The leader's own member cannot follow this plan; of others that counts as
    :class:`Unreachable`."""

    plan_hash: str
    reason: str


@dataclass(frozen=True)
class Accused:
    """``by`` could not get an answer from ``about``. One word against another: it is probed before
    it counts."""

    about: PeerId
    by: PeerId


@dataclass(frozen=True)
class MicroBatchesReported:
    """An ends peer reports micro-batches of the plan with this hash."""

    peer: PeerId
    plan_hash: str
    results: tuple[MicroBatchDone, ...]


@dataclass(frozen=True)
class Committed:
    """A member holds every fresh part of its stage; ``digest`` names them. ``vote``: its signature
    under that."""

    peer: PeerId
    plan_hash: str
    attempt: int
    digest: str
    speed: float = 0.0
    vote: bytes = b""


@dataclass(frozen=True)
class Incomplete:
    """A member's round ended and parts are missing: ``holds`` it has, ``failed`` owners did not
    serve it, ``impossible`` ones served parameters that no step of the optimizer makes."""

    peer: PeerId
    plan_hash: str
    attempt: int
    holds: tuple[str, ...]
    failed: tuple[PeerId, ...]
    impossible: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Evaluated:
    """The held-out loss, nats per token, of the parameters at ``epoch``; 0 when it could not be
    measured."""

    epoch: int
    loss: float


@dataclass(frozen=True)
class Searched:
    """The search of a job has ended with these routes."""

    job: SearchJob
    routes: tuple[tuple[int, ...], ...]
    makespan: float


@dataclass(frozen=True)
class ClockTick:
    """Time has passed. ``coming``: who is about to take part, at which stage; None: it chooses.
    ``known``: whom the leader has worked with. ``slack``: seconds by which the timers of this
    process ran late lately, so that what others said in time is heard late."""

    coming: Mapping[PeerId, int | None] = field(default_factory=dict)
    known: frozenset[PeerId] = frozenset()
    slack: float = 0.0


# ------------------------------------------------------------ what the leader does


@dataclass(frozen=True)
class SendPlan:
    """Sign the plan and tell every member. ``certificate``: of the version it starts from, where
    that was made under this leader."""

    plan: Plan
    certificate: Certificate | None = None


@dataclass(frozen=True)
class SendRound:
    """Tell ``to`` to average, or to copy where ``round`` names sources."""

    to: tuple[PeerId, ...]
    plan: Plan
    round: "RoundArrived"


@dataclass(frozen=True)
class SendLost:
    """Tell the living members of the epoch under way who is dead, so that nobody waits for them."""

    to: tuple[PeerId, ...]
    plan: Plan
    dead: tuple[PeerId, ...]


@dataclass(frozen=True)
class Recall:
    """Ask ``holders``, one after the other, for the plan behind ``version``; the answer comes back
    as Recalled. ``proof``: the first answer that has a certificate of it comes before others."""

    version: Version
    holders: tuple[PeerId, ...]
    proof: bool = False


@dataclass(frozen=True)
class RequestMove:
    """Ask a peer to host another stage; it may say no."""

    peer: PeerId
    stage: int


@dataclass(frozen=True)
class ProbePeer:
    """Find out whether this peer lives; the answer comes back as ProbeAnswered or Unreachable."""

    peer: PeerId


@dataclass(frozen=True)
class Evaluate:
    """Measure the held-out loss of the parameters at ``epoch`` over these members, then say
    Evaluated."""

    epoch: int
    plan: Plan


@dataclass(frozen=True)
class SearchPaths:
    """Look for better paths, somewhere where it holds up nobody, then say Searched."""

    job: SearchJob


@dataclass(frozen=True)
class CountFault:
    """Count a fault of a peer whose conduct can be no accident."""

    peer: PeerId
    reason: str
    weight: float


@dataclass(frozen=True)
class RecordFact:
    """A fact for the record. ``kind`` is a stable word, ``text`` a sentence, ``facts`` its
    numbers."""

    kind: str
    text: str
    level: str = "info"
    facts: dict[str, object] = field(default_factory=dict)


# ------------------------------------------------------------ what a member hears and does


@dataclass(frozen=True)
class PlanArrived:
    """The leader's signed plan, signature already checked."""

    plan: Plan


@dataclass(frozen=True)
class EnterCell:
    """This peer belongs to the cell that this plan founds."""

    plan: Plan


@dataclass(frozen=True)
class RoundArrived:
    """The leader closes the epoch (attempt 0) or repairs it. ``digest``: what ``sources`` have
    committed; ``tokens``: counted in this epoch."""

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
    digest: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class RoundEnded:
    """The exchange of (epoch, term, attempt) returned. ``missing`` parts did not come, ``failed``
    owners are why; ``impossible`` owners gave parameters that no step of the optimizer makes."""

    epoch: int
    term: int
    attempt: int
    holds: tuple[str, ...]
    missing: tuple[str, ...]
    failed: tuple[PeerId, ...]
    impossible: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Adopted:
    """What this round brought is in place; ``digest`` names it."""

    ended: RoundEnded
    digest: str


@dataclass(frozen=True)
class GoTo:
    """Go to another version. ``how``: roll-back, checkpoint, or left out (the stage was left out
    since the version in place)."""

    version: Version
    how: str


@dataclass(frozen=True)
class Settle:
    """The update that made ``epoch`` is final: optimizer state of it counts, what was kept to undo
    it may go."""

    epoch: int


@dataclass(frozen=True)
class BeginEpoch:
    """Take part in this plan: tell the pipeline, fetch the optimizer state of parts gained, start
    own micro-batches. ``behind``: of a listener, where it stood until now, and the tokens counted
    in that history; None for a current member."""

    plan: Plan
    behind: tuple[Version, int] | None


@dataclass(frozen=True)
class StartRound:
    """Leave the pipeline phase and run this round; where it has ``sources``, fetch from them what
    they have committed."""

    plan: Plan
    round: RoundArrived
    listener: bool


@dataclass(frozen=True)
class AdoptParts:
    """Put the gathered parts in place as ``epoch``."""

    plan: Plan
    ended: RoundEnded


@dataclass(frozen=True)
class TellCommitted:
    """Tell the leader."""

    plan: Plan
    attempt: int
    digest: str


@dataclass(frozen=True)
class TellIncomplete:
    """Tell the leader."""

    plan: Plan
    ended: RoundEnded


@dataclass(frozen=True)
class RefuseCaller:
    """Answer the caller with no, and why."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """The run is complete at ``plan.epoch``: keep serving, train no more."""

    plan: Plan
