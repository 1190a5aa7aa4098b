"""What happens to an owner's exchanges, and what it may do about it: the values that pass between
the machine and the server that drives it. Enters: events. Leaves: actions. Never: a decision."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from node.averaging.exchange.groups import Group
from node.core.ids import PeerId, RoundId


class Kind(StrEnum):
    """Why an exchange is refused. The names are those of ``RefusalKind`` on the wire."""

    PLAN = "plan-hash"
    """The other side works from another plan."""
    OWNERSHIP = "ownership-hash"
    """The other side computed other owners."""
    STRANGER = "not-a-member"
    """Not in this round's view, or gives gradients though it is a listener."""
    HEADS = "heads"
    """Names, shapes or sizes are not those of our parts."""
    VALUES = "values"
    """Not finite, too large, or more tokens than the epoch has."""
    BUSY = "busy"
    """Too many exchanges wait for a round that is not open here."""
    LATE = "late"
    """The round ended, or never opened here, before this exchange got anywhere."""
    SUPERSEDED = "superseded"
    """A newer attempt, or a newer exchange of the same peer, has taken its place."""
    FORGOTTEN = "forgotten"
    """The epoch is committed and gone."""
    FAILED = "failed"
    """This owner could not step; the next attempt may."""
    GROUPS = "groups"
    """The other side cut our parts into other groups."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Our own round begins. ``groups``: the parts we own in it, in the order of their steps;
    ``held``: parts whose fresh bytes we already have (from this or a former owner); ``tokens``:
    behind our own gradients, 0 for none; ``contribute_by``: when to step each group without the
    late; ``may_hold``: parts that nobody gives anything to stay as they are, which is no
    fault."""

    round: RoundId
    me: PeerId
    plan_hash: str
    ownership_hash: str
    members: frozenset[PeerId]
    listeners: frozenset[PeerId]
    groups: tuple[Group, ...]
    held: frozenset[str]
    tokens: int
    contribute_by: tuple[float, ...]
    token_limit: int
    may_hold: bool = False


@dataclass(frozen=True, slots=True)
class Began:
    """A stream's head has come; nothing has been set aside for it. It is for one of our groups,
    which its peer calls ``digest``. No tokens: it only wants to be served."""

    stream: int
    peer: PeerId
    round: RoundId
    plan_hash: str
    ownership_hash: str
    group: int
    digest: str
    tokens: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """All bytes of the stream are here and their values are fit to be summed."""

    stream: int


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The received bytes do not parse, or their values are not fit to be summed."""

    stream: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream is closed, for whatever reason."""

    stream: int


@dataclass(frozen=True, slots=True)
class PeerFoundDead:
    """This peer was found dead, by the leader or by our own exchange with it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The optimizer is done with these parts, or gave up on them because of ``fault``."""

    epoch: int
    names: frozenset[str]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Forgot:
    """Epochs up to this one are over."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Voided:
    """Nothing of this epoch and later ones counts: the swarm has gone back and begins it anew."""

    epoch: int


Event = (
    Opened
    | Began
    | Uploaded
    | Spoiled
    | Ended
    | PeerFoundDead
    | TimePassed
    | Stepped
    | Forgot
    | Voided
)


@dataclass(frozen=True, slots=True)
class Read:
    """Set memory aside for the stream's tensors and read them."""

    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The stream's round is open here and has nothing for it yet: be patient until the round's
    deadline, and stop reading it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Send the stream the fresh bytes of these parts, sorted by name; stop reading it."""

    stream: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the stream with this reason; ``weight`` counts against its peer."""

    stream: int
    kind: Kind
    text: str
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class ReduceAndStep:
    """Reduce the contributions of these peers to a group, and step ``names``. One at a time.
    Without contributors: keep the parts as they are."""

    round: RoundId
    group: int
    names: tuple[str, ...]
    contributors: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """Our own parts will not get fresh in this attempt."""

    epoch: int
    text: str


Action = Read | Wait | Serve | EndStream | ReduceAndStep | Fail
