"""Events and actions of an epoch: inputs and outputs of the leader and the member."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from node.consensus.rules import Rules
from node.consensus.voters import Quorum
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Plan, Version, Window
from node.epoch.plan_context import PlanContext
from node.pipeline.events import MicroBatchDone, VisitSketches
from node.scheduler.costs import NOTHING, Measured
from node.scheduler.router import SearchJob

# ------------------------------------------------------------ events of the leader


@dataclass(frozen=True)
class Running:
    """A peer's work in the plan in force. ``plan_hash``: hash of the plan, empty once it is closed
    here, and where the peer itself leads; ``computed``: the forwards, losses and backwards of it
    that were computed here."""

    plan_hash: str = ""
    computed: int = 0


@dataclass(frozen=True)
class Capacity:
    """A peer's capacity for work, as it reports it itself.

    ``speed``   its own measurement, in micro-batches per second
    ``room``    bytes of optimizer state that it can keep as an owner, 0: unknown
    ``seen``    its measurements of neighbours, in micro-batches per second
    ``costs``   measured costs of its work and its connections
    ``running`` its work in the plan in force
    """

    speed: float = 0.0
    room: int = 0
    seen: tuple[tuple[PeerId, float], ...] = ()
    costs: Measured = NOTHING
    running: Running = Running()

    def stands(self) -> "Capacity":
        """The capacity without its measurements and its progress, which differ from one heartbeat
        to the next."""
        return Capacity(room=self.room)


@dataclass(frozen=True)
class OuterReport:
    """A peer's report for averaging between cells. ``mean``: the newest window for which it has the
    mean, and the mean's digest; ``anchor``: digest of anchor and momentum, if they must be equal in
    all cells."""

    mean: tuple[int, str] = (0, "")
    anchor: str = ""


@dataclass(frozen=True)
class Membership:
    """A peer's place in the run. ``cell``: its cell, empty if it does not say. ``change``: the
    owner's newest change that it knows, not checked yet. Both are for the service that receives the
    heartbeat, not for the leader's state machine. ``may_lead``: the run lets the peer lead, by the
    receiver's knowledge."""

    cell: CellId = NO_CELL
    change: str = ""
    may_lead: bool = True


@dataclass(frozen=True)
class Heartbeat:
    """A peer's report that it is alive, with the state it holds.

    ``at``, ``digest``   version and digest of its parameters; ``tokens``: counted in that history
    ``reachable``   other versions that it can put in place
    ``term``        the highest term that it has followed
    ``leaving``     plan without it; its state can still be fetched for a moment
    ``orphan``      ``at`` is of a lineage that went on without a majority of its voters
    """

    peer: PeerId
    stage: int
    at: Version
    digest: str
    capacity: Capacity = Capacity()
    reachable: tuple[Version, ...] = ()
    term: int = 0
    tokens: int = 0
    leaving: bool = False
    outer: OuterReport = OuterReport()
    orphan: bool = False
    membership: Membership = Membership()

    def stands(self) -> "Heartbeat":
        """The heartbeat without its measurements, which differ from one to the next, and without
        the fields for the receiving service."""
        membership = Membership(may_lead=self.membership.may_lead)
        return replace(self, capacity=self.capacity.stands(), membership=membership)


@dataclass(frozen=True)
class Grouped:
    """The cell averages with the partners of ``window``. Contributions that have not arrived by
    ``until``, seconds of the own clock, are left out."""

    window: Window
    until: float


@dataclass(frozen=True)
class Recalled:
    """A peer's memory of the plan behind a version, and of the micro-batches that did not count in
    it; None if nobody remembers it. ``certified``: the version of a quorum certificate that came
    with it, if this peer believes the certificate; it may be another version."""

    version: Version
    plan: Plan | None = None
    dropped: tuple[int, ...] = ()
    certified: Version | None = None


@dataclass(frozen=True)
class Changed:
    """The owner's change to how cells average, checked. It comes into force with the next plan if
    it is newer than the change in force."""

    rules: Rules


@dataclass(frozen=True)
class QuorumChanged:
    """The newest certificate that this peer believes is another one, or was shown again."""

    quorum: Quorum


@dataclass(frozen=True)
class Equivocated:
    """All peers that are proven to have voted twice: their votes do not count."""

    peers: frozenset[PeerId]


@dataclass(frozen=True)
class ContextsKept:
    """The versions on the disk of this peer, with the context that each checkpoint has."""

    contexts: tuple[tuple[Version, PlanContext], ...]


@dataclass(frozen=True)
class Resigning:
    """``resigns``: finish the epoch under way and plan no other, because another peer is to lead;
    False takes that back."""

    resigns: bool


@dataclass(frozen=True)
class MoveRefused:
    """A peer does not change its stage."""

    peer: PeerId


@dataclass(frozen=True)
class Unreachable:
    """A call to this peer failed, or a probe of it did. ``since``: clock when the last attempt
    began; a later message from the peer shows that it lives. Without ``since`` the peer is of no
    use for this epoch even if it lives. ``plan_hash``: the peer lives, and has refused what belongs
    to this plan; "" where it has not answered."""

    peer: PeerId
    since: float = math.inf
    plan_hash: str = ""


@dataclass(frozen=True)
class ProbeAnswered:
    """A probe of this peer was answered: it lives, though its heartbeats are missing. ``ours``
    False: it follows another leader."""

    peer: PeerId
    ours: bool = True


@dataclass(frozen=True)
class Declined:
    """The leader's own member cannot follow this plan. A refusal of another member counts as
    :class:`Unreachable`."""

    plan_hash: str
    reason: str


@dataclass(frozen=True)
class Accused:
    """``by`` could not get an answer from ``about``. This is one peer's claim: ``about`` is probed
    before it counts as dead."""

    about: PeerId
    by: PeerId


@dataclass(frozen=True)
class MicroBatchesReported:
    """An ends peer reports micro-batches of the plan with this hash."""

    peer: PeerId
    plan_hash: str
    results: tuple[MicroBatchDone, ...]


@dataclass(frozen=True)
class Sketched:
    """A member reports sketches of the tensors that it sent and received in micro-batches of the
    plan with this hash."""

    peer: PeerId
    plan_hash: str
    visits: tuple[VisitSketches, ...]


@dataclass(frozen=True)
class Committed:
    """A member holds every fresh part of its stage; ``digest`` is their digest. ``voted``: it has
    signed that."""

    peer: PeerId
    plan_hash: str
    attempt: int
    digest: str
    speed: float = 0.0
    voted: bool = False


@dataclass(frozen=True)
class Incomplete:
    """A member's round ended and parts are missing. ``holds``: the parts it has; ``failed``: owners
    that did not serve it; ``impossible``: owners that served parameters which no step of the
    optimizer makes."""

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
    """Time has passed. ``coming``: peers that are about to take part, with their stage; None while
    they choose one. ``known``: peers that the leader has worked with. ``slack``: seconds by which
    the timers of this process ran late lately, so that timely messages of others are heard late."""

    coming: Mapping[PeerId, int | None] = field(default_factory=dict)
    known: frozenset[PeerId] = frozenset()
    slack: float = 0.0


# ------------------------------------------------------------ actions of the leader


@dataclass(frozen=True)
class SendPlan:
    """Sign the plan and send it to every member. ``certified``: send the quorum certificate of the
    version it starts from along; it was made under this leader, or shown to it by another peer."""

    plan: Plan
    certified: bool = False


@dataclass(frozen=True)
class SendRound:
    """Tell ``to`` to average, or to copy if ``round`` names sources."""

    to: tuple[PeerId, ...]
    plan: Plan
    round: "RoundArrived"


@dataclass(frozen=True)
class SendTakeover:
    """Tell ``to`` that this leader goes on with the epoch of ``plan``, without the members of
    ``dead``."""

    to: tuple[PeerId, ...]
    plan: Plan
    dead: tuple[PeerId, ...]


@dataclass(frozen=True)
class SendLost:
    """Tell the living members of the epoch under way which members are dead, so that nobody waits
    for these."""

    to: tuple[PeerId, ...]
    plan: Plan
    dead: tuple[PeerId, ...]


@dataclass(frozen=True)
class Recall:
    """Ask ``holders``, one after the other, for the plan behind ``version``; the answer comes back
    as Recalled. ``proof``: prefer the first answer that has a certificate of the version."""

    version: Version
    holders: tuple[PeerId, ...]
    proof: bool = False


@dataclass(frozen=True)
class RequestMove:
    """Ask a peer to host another stage; it may refuse."""

    peer: PeerId
    stage: int


@dataclass(frozen=True)
class ProbePeer:
    """Find out whether this peer lives; the answer comes back as ProbeAnswered or Unreachable."""

    peer: PeerId


@dataclass(frozen=True)
class Evaluate:
    """Measure the held-out loss of the parameters at ``epoch`` over these members; the result comes
    back as Evaluated."""

    epoch: int
    plan: Plan


@dataclass(frozen=True)
class SearchPaths:
    """Look for better paths in the background; the result comes back as Searched."""

    job: SearchJob


@dataclass(frozen=True)
class CountFault:
    """Count a fault of a peer for conduct that can be no accident."""

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


# ------------------------------------------------------------ events and actions of a member


@dataclass(frozen=True)
class PlanArrived:
    """The leader's signed plan, signature already checked. ``digest``: digest of the parameters in
    place here; empty if it is not known."""

    plan: Plan
    digest: str = ""


@dataclass(frozen=True)
class VersionPlaced:
    """The version in place did not come from the epoch under way: it was read from the disk or
    fetched, or the version of the plan in force could not be put in place. This peer takes no part
    in that plan. ``checkpoints``: versions on the disk that can be put in place; ``tokens``:
    counted in the history of ``at``; ``term``: the highest term in which this peer has voted, 0 for
    none."""

    at: Version
    checkpoints: tuple[Version, ...]
    tokens: int
    term: int = 0


@dataclass(frozen=True)
class CheckpointsKept:
    """The versions on the disk that can be put in place have changed."""

    versions: tuple[Version, ...]


@dataclass(frozen=True)
class EnterCell:
    """This peer belongs to the cell that this plan founds."""

    plan: Plan


@dataclass(frozen=True)
class TakenOver:
    """A new leader, which this peer takes for the leader too, goes on with the epoch under way."""

    leader: PeerId
    plan_hash: str


@dataclass(frozen=True)
class EpochTally:
    """The leader's count at the close of an epoch. ``tokens``: tokens counted; ``sample``: seed of
    the micro-batches of which sketches are reported."""

    tokens: int = 0
    sample: str = ""


@dataclass(frozen=True)
class RoundArrived:
    """The leader closes the epoch, by its first attempt, or repairs it. ``digest``: digest of the
    state that ``sources`` have committed."""

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
    tally: EpochTally = EpochTally()


@dataclass(frozen=True)
class RoundEnded:
    """The exchange of (epoch, term, attempt) returned. ``missing``: parts that did not come;
    ``failed``: the owners responsible; ``impossible``: owners that gave parameters which no step of
    the optimizer makes."""

    epoch: int
    term: int
    attempt: int
    holds: tuple[str, ...]
    missing: tuple[str, ...]
    failed: tuple[PeerId, ...]
    impossible: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Adopted:
    """The result of this round is in place; ``digest`` is its digest."""

    ended: RoundEnded
    digest: str


@dataclass(frozen=True)
class GoTo:
    """Go to another version. ``how``: roll-back, checkpoint, or left out (the stage was left out
    since the version in place)."""

    version: Version
    how: str


@dataclass(frozen=True)
class FetchBase:
    """Fetch the parameters that a plan begins from within ``within_s`` seconds, and let the plan
    arrive again once they are in place. Until then the version in place stays. ``digest``: the
    only one to accept."""

    version: Version
    donors: tuple[PeerId, ...]
    digest: str
    within_s: float


@dataclass(frozen=True)
class Settle:
    """The update that made ``epoch`` is final: its optimizer state counts, and the copies kept to
    undo it may be dropped."""

    epoch: int


@dataclass(frozen=True)
class BeginEpoch:
    """Take part in this plan: tell the pipeline, fetch the optimizer state of gained parts, start
    own micro-batches. ``behind``: for a listener, the version that it held until now and the tokens
    counted in that history; None for a current member."""

    plan: Plan
    behind: tuple[Version, int] | None


@dataclass(frozen=True)
class ReportAgain:
    """Report the results of this plan's micro-batches to its new leader."""

    plan: Plan


@dataclass(frozen=True)
class StartRound:
    """Leave the pipeline phase and run this round; if it has ``sources``, fetch the committed state
    from them."""

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
    """Tell the leader that this member has committed."""

    plan: Plan
    attempt: int
    digest: str


@dataclass(frozen=True)
class TellIncomplete:
    """Tell the leader that parts are missing."""

    plan: Plan
    ended: RoundEnded


@dataclass(frozen=True)
class RefuseCaller:
    """Refuse the caller's message, with a reason."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """The run is complete at ``plan.epoch``: keep serving, train no more."""

    plan: Plan


# ------------------------------------------------------------ what each machine takes and gives

LeaderEvent = (
    Heartbeat
    | Grouped
    | Recalled
    | Changed
    | QuorumChanged
    | Equivocated
    | ContextsKept
    | Resigning
    | MoveRefused
    | Unreachable
    | ProbeAnswered
    | Declined
    | Accused
    | MicroBatchesReported
    | Sketched
    | Committed
    | Incomplete
    | Evaluated
    | Searched
    | ClockTick
)
LeaderAction = (
    SendPlan
    | SendRound
    | SendTakeover
    | SendLost
    | Recall
    | RequestMove
    | ProbePeer
    | Evaluate
    | SearchPaths
    | CountFault
    | RecordFact
)
MemberEvent = (
    PlanArrived | TakenOver | RoundArrived | RoundEnded | Adopted | VersionPlaced | CheckpointsKept
)
MemberAction = (
    RefuseCaller
    | GoTo
    | FetchBase
    | Settle
    | BeginEpoch
    | EnterCell
    | ReportAgain
    | StartRound
    | AdoptParts
    | TellCommitted
    | TellIncomplete
    | Finish
)
