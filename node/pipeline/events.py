"""Events and actions of a peer's pipeline machine, and the reports of micro-batches to their
origin. Frozen values; no tensor among them."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from node.core.ids import PeerId
from node.core.journey import Hop, Plan


class Direction(Enum):
    """Direction of a tensor."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Crossing(Enum):
    """A tensor that crosses a boundary of a stage. The origin sends its output and gets its
    gradient at its first visit, and has the other two at its last."""

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "output gradient"
    INPUT_GRADIENT = "input gradient"


class Key(NamedTuple):
    """One visit: this peer's part in one micro-batch. The origin has two, at position 0 and at the
    last."""

    epoch: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    position: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The head of a frame, as its sender claims it, known before the tensor is read. ``index``
    numbers the micro-batch; ``position`` is the receiver's index in ``journey``."""

    epoch: int
    plan_hash: str
    index: int
    journey: tuple[Hop, ...]
    position: int

    @property
    def key(self) -> Key:
        return Key(self.epoch, self.index, self.position)


class Trouble(Enum):
    """Reason for which a peer did not finish with a tensor."""

    BUSY = "busy"
    """Its stash is full; it may be asked again."""
    REFUSED = "refused"
    """It will not take this tensor, ever."""
    FAILED = "failed"
    """The stream broke or timed out."""


class Say(Enum):
    """Answers to another peer."""

    TAKE = "take"
    """Yes: read the tensor, or stream the one that was asked for."""
    AGAIN = "again"
    """I hold this already from you or from a peer you replace: ACCEPTED, then DONE when it is
    done."""
    SETTLED = "settled"
    """I hold this already from another peer: DONE alone. A gradient of another replica of your
    stage, or an activation that visited other stages. Yours is not used."""
    BUSY = "busy"
    REFUSED = "refused"
    AWAIT_PLAN = "await plan"
    """Not yet: the plan this belongs to may still be on its way to us."""


@dataclass(frozen=True, slots=True)
class OfMicroBatch:
    """Something about one micro-batch."""

    index: int


@dataclass(frozen=True, slots=True)
class OfVisit:
    """Something about one visit of this peer."""

    key: Key


@dataclass(frozen=True, slots=True)
class OneWay(OfVisit):
    """Something about one direction of a visit."""

    way: Direction


@dataclass(frozen=True, slots=True)
class Frame:
    """A tensor from another peer, with the claim of its head."""

    way: Direction
    claim: Claim
    caller: PeerId


@dataclass(frozen=True, slots=True)
class Note:
    """A message or question of another peer about a micro-batch of a plan."""

    epoch: int
    plan_hash: str
    index: int
    caller: PeerId


# Events
# ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdoptPlan:
    """A new plan is in force, or none. Everything of an earlier one is freed."""

    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Close:
    """The gradients of the epoch were taken for the round: nothing more may count."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Start(OfMicroBatch):
    """The origin begins a micro-batch of its own."""


@dataclass(frozen=True, slots=True)
class Drop(OfMicroBatch):
    """The origin gives a micro-batch up; its samples return to the sampler."""

    reason: str


@dataclass(frozen=True, slots=True)
class Arrived(Frame):
    """A frame's head is here, its tensor is not. ``room``: the stash would take it."""

    room: bool = True


@dataclass(frozen=True, slots=True)
class TensorReceived(Frame):
    """The whole tensor of a frame is here."""


@dataclass(frozen=True, slots=True)
class Asked(Note):
    """A replacement asks for our output, which we sent to the hop that it replaces; ``position`` is
    its own.

    ``skipped``: the positions before its own that its journey leaves out.
    """

    position: int
    skipped: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        """Our visit that made the output."""
        before = self.position - 1
        while before in self.skipped:
            before -= 1
        return Key(self.epoch, self.index, before)


@dataclass(frozen=True, slots=True)
class Fetched(OfVisit):
    """We took a dead replica's place and got its input from ``peer``."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class NotFetched(OfVisit):
    """No peer gave us the input. ``settled``: True if the hop before us has the gradient
    already."""

    settled: bool


@dataclass(frozen=True, slots=True)
class Computed(OneWay):
    """The device is done with it."""


@dataclass(frozen=True, slots=True)
class Broken(OneWay):
    """The device could not compute it. ``lost``: True if no other peer should try, because the
    result is not finite."""

    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Passed(OneWay):
    """``peer`` said ACCEPTED."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Settled(OneWay):
    """``peer`` said DONE."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Turned(OneWay):
    """``peer`` did not finish with what we sent."""

    peer: PeerId
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class Retry(OneWay):
    """The pause of a :class:`Later`, or the wait of a :class:`Hold`, is over."""


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The leader has found this peer dead: nobody of the plan in force is to wait for it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Lost(Note):
    """A hop tells the origin that nobody can finish this micro-batch."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counted(Note):
    """The origin names us: the gradient that came home went through this peer, so its share of this
    micro-batch counts."""


@dataclass(frozen=True, slots=True)
class Expired(OfVisit):
    """This entry's micro-batch is past its deadline."""


VisitEvent = Fetched | NotFetched | Computed | Broken | Passed | Settled | Turned | Retry | Expired
"""Events that are ignored when their visit is not known."""
Event = (
    VisitEvent | AdoptPlan | Close | Start | Drop | Arrived | TensorReceived | Asked | PeerDied
    | Lost | Counted
)  # fmt: skip

# Actions
# ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the peer that sent the frame or note of this event; exactly one per Arrived,
    TensorReceived, Asked, Lost and Counted."""

    say: Say
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Compute(OneWay):
    """A job for the device. ``keep``: False if the share of this gradient is thrown away as soon as
    it is made."""

    keep: bool = True


@dataclass(frozen=True, slots=True)
class Fetch(OfVisit):
    """Ask ``peers``, in order, for the input of ``key``; ``skipped`` are the positions before it
    that are left out."""

    peers: tuple[PeerId, ...]
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Send(OneWay):
    """Stream a result to ``journey[position]``; replaces an attempt that is still under way.
    ``patient``: wait for the peer if it has no room."""

    journey: tuple[Hop, ...]
    position: int
    patient: bool = False

    @property
    def peer(self) -> PeerId:
        return self.journey[self.position].peer


@dataclass(frozen=True, slots=True)
class Later(OneWay):
    """Come back with :class:`Retry` after ``seconds``. ``full``: all peers that might take the
    tensor have no room."""

    seconds: float
    full: bool


@dataclass(frozen=True, slots=True)
class Hold(OfVisit):
    """The gradient of this visit waits: its origin has the most unnamed shares here that it may
    have. Come back with :class:`Retry` when it has waited long enough; Compute may come before
    that."""


@dataclass(frozen=True, slots=True)
class Commit(OfVisit):
    """Add this visit's parameter gradients to the sum. At most once per visit. At position 0 the
    gradients of the origin's last position are added too, so that head and embedding count the same
    micro-batches."""


@dataclass(frozen=True, slots=True)
class Void(OfVisit):
    """Throw this visit's parameter gradients away: they cannot count."""


@dataclass(frozen=True, slots=True)
class AcknowledgeVisit(OneWay):
    """Say DONE to every peer that waits for this visit."""


@dataclass(frozen=True, slots=True)
class Failed(OneWay):
    """Say REFUSED to every peer that waits: another peer may succeed."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellOrigin(OfVisit):
    """No hop before us waits for this micro-batch any more, so tell the origin that it is lost."""

    origin: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class TellCounted(OfMicroBatch):
    """The micro-batch is finished: tell ``peers``, one for each block stage it visited, that their
    shares count."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Skipped(OfVisit):
    """For the record: no replica of ``stage`` can be reached; the micro-batch leaves it out."""

    stage: int


@dataclass(frozen=True, slots=True)
class FreeGraph(OfVisit):
    """Input, output and autograd graph are needed no more."""


@dataclass(frozen=True, slots=True)
class FreeGradient(OfVisit):
    """The gradient we passed on is needed no more; this visit's share still waits to be named."""


@dataclass(frozen=True, slots=True)
class Free(OfVisit):
    """Nothing of this visit is needed any more."""


@dataclass(frozen=True, slots=True)
class Finished(OfVisit):
    """The gradient came home: the micro-batch counts."""


@dataclass(frozen=True, slots=True)
class Dropped(OfMicroBatch):
    """The micro-batch does not count."""

    reason: str


Action = (
    Answer
    | Compute
    | Fetch
    | Send
    | Later
    | Hold
    | Commit
    | Void
    | AcknowledgeVisit
    | Failed
    | TellOrigin
    | TellCounted
    | Skipped
    | FreeGraph
    | FreeGradient
    | Free
    | Finished
    | Dropped
)

# Reports of the origin
# ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Neighbours of this peer on the route of one micro-batch that counts here. ``tokens``: of the
    micro-batch; ``taker``: peer that took this peer's gradient; ``giver``: peer that gave it one.
    (An origin gives to the last hop, and gets from the first.)"""

    index: int
    tokens: int
    taker: PeerId
    giver: PeerId


@dataclass(frozen=True, slots=True)
class VisitSketches:
    """Sketches of the tensors that this peer exchanged with its neighbours in one micro-batch, one
    for each :class:`Crossing`, as they travel. ``taker`` and ``giver`` as in :class:`Neighbours`:
    the taker sent the input and took its gradient, the giver took the output and gave its
    gradient."""

    index: int
    taker: PeerId
    giver: PeerId
    encoded: bytes


@dataclass(frozen=True, slots=True)
class MicroBatchDone:
    """Result of a micro-batch. ``loss_sum`` in nats over its ``tokens``; both 0 if it is not
    counted."""

    index: int
    counted: bool
    loss_sum: float = 0.0
    tokens: int = 0
