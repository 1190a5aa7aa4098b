"""Events and actions of an owner's exchanges: the values that pass between the machine and the
server that drives it. Enters: events. Leaves: actions. Never: a decision.

Parts travel and are stepped in micro-groups, so that the transfer of one group overlaps with the
step of another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from node.core.ids import PeerId, RoundId

LET_IN = 2
"""Groups of an attempt for which an owner holds gradients at once: one is stepped while the
gradients of the next arrive."""
UNDER_WAY = 3
"""Groups of one owner that a member has under way: one leaves the owner, one is stepped there, one
goes up."""


@dataclass(frozen=True, slots=True)
class Group:
    """``names`` sorted; ``digest`` is a hash of these names: a peer with another digest at this
    index has cut the parts into other groups."""

    index: int
    names: tuple[str, ...]
    digest: str


def micro_groups(sizes: Mapping[str, int], most: int) -> tuple[Group, ...]:
    """Parts in order of names, in about as few groups as ``most`` bytes each allow, of about equal
    bytes.

    A part larger than ``most`` is a group of its own. The same at every member, in whatever order
    ``sizes`` comes: whole numbers only. Equal groups, because the transfers that do not overlap are
    the first one's to the owner and the last one's back.
    """
    total = sum(sizes.values())
    count = max(1, -(-total // most))
    made: list[list[str]] = []
    used = done = 0
    for name in sorted(sizes):
        size = sizes[name]
        # Too much for this group, or its middle lies in the next group's share of the bytes.
        if (
            not made
            or used
            and (used + size > most or (2 * done + size) * count > 2 * total * len(made))
        ):
            made.append([])
            used = 0
        made[-1].append(name)
        used = used + size
        done = done + size
    return tuple(Group(index, tuple(names), _digest(names)) for index, names in enumerate(made))


def contribute_until(started: float, deadline_s: float, count: int) -> tuple[float, ...]:
    """Times at which each of ``count`` groups is stepped without the late: contributions have three
    fifths of a round; the steps and the way back have the rest, and a group may wait until its
    equal share of that begins."""
    return tuple(started + deadline_s * (0.6 + 0.4 * index / count) for index in range(count))


def _digest(names: list[str]) -> str:
    return blake2b(
        "".join(f"{len(name)}:{name}" for name in names).encode(), digest_size=16
    ).hexdigest()


class Kind(StrEnum):
    """Reason for which an exchange is refused. The names are the same as in ``RefusalKind`` on the
    wire."""

    PLAN = "plan-hash"
    """The other side works from another plan."""
    OWNERSHIP = "ownership-hash"
    """The other side computed other owners."""
    STRANGER = "not-a-member"
    """The peer is not in this round's view, or gives gradients though it is a listener."""
    HEADS = "heads"
    """Names, shapes or sizes differ from our parts."""
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
    ``held``: parts that we already have as fresh bytes (from this or a former owner); ``tokens``:
    tokens behind our own gradients, 0 for none; ``contribute_by``: times at which to step each
    group without the late; ``may_hold``: True if parts to which no member has anything to give stay
    as they are, which is no fault."""

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
class Planned:
    """A plan is in force for ``epoch``: ``members`` may open exchanges for its rounds before the
    round is open here."""

    epoch: int
    plan_hash: str
    members: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Knocked:
    """A stream's first message has come. Only its size was checked, and its round was read."""

    stream: int
    peer: PeerId
    round: RoundId
    plan_hash: str

    def unread(self) -> "Began":
        """Return the stream as Began, without the group and the parts: they are not known yet."""
        return Began(self.stream, self.peer, self.round, self.plan_hash, "", -1, "", 0, ())


@dataclass(frozen=True, slots=True)
class Began:
    """A stream's head was read; nothing has been set aside for it. It is for one of our groups,
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
    """The head or the received bytes do not parse, or their values are not fit to be summed."""

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
    | Planned
    | Knocked
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
class ReadHead:
    """Read the stream's head and say Began, or Spoiled where it does not parse."""

    stream: int


@dataclass(frozen=True, slots=True)
class Read:
    """Set memory aside for the stream's tensors and read them."""

    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The stream's round is open here, or planned, and has nothing for it yet: be patient until the
    round's deadline, and stop reading it."""

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


Action = ReadHead | Read | Wait | Serve | EndStream | ReduceAndStep | Fail
