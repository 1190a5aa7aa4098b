"""Admission of plans: the one place that says which plan a peer follows and why it refuses another.
Pure. Enters: a plan as a proposal, the facts about its way here, the versions held here. Leaves: a
refusal, or nothing. Never: a micro-batch; the epoch's own check of the work in a plan enters as a
reason (:mod:`node.epoch.plan_validation`).

A plan passes three gates, because each may cost more than the one before it:

1. :meth:`Admission.admit_sender`, before the plan is parsed: its sender and its size;
2. :meth:`Admission.admit`: its numbers, its cell, its work, its settings, its voters;
3. :func:`unfollowable`, when the member takes it: its term, and the versions in place by then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from node.consensus.equivocation import DoubleVote
from node.consensus.proposal import Proposal
from node.consensus.rules import ChangeStatus, Rules
from node.consensus.terms import Terms
from node.consensus.trust import NO_WARRANT, Trust, Warrant
from node.core.ids import CellId, PeerId
from node.core.journey import Version

LARGE_PLAN = 256 << 10
"""Bytes from which a plan is large: only the leader's is parsed, and beside the event loop."""
OTHER_LEADER = "this peer follows another leader"


class Ground(Enum):
    """The ground of a refusal, which says what follows from it."""

    FAULT = "fault"
    """No honest peer sends such a plan: it counts against the sender."""
    ELSEWHERE = "elsewhere"
    """The plan is none of this peer's business: another leader, another cell."""
    OUTDATED = "outdated"
    """The leader lacks something that this peer knows, and hears of it at once."""
    UNSUPPORTED = "unsupported"
    """The voters do not stand behind it. The leader hears from this peer at once."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A plan is not followed: ``reason``, for its sender."""

    ground: Ground
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A plan's way to this peer. ``heeded``: this peer took the sender for its leader, and reported
    to it, a short time ago. Reasons of the epoch's checks, "" for none: ``numbers``, why no leader
    of this run makes such a plan; ``work``, why nobody could work by it. ``rules``: the settings of
    the plan, as read if nothing is against its work."""

    sender: PeerId
    heeded: bool
    numbers: str = ""
    work: str = ""
    rules: Rules = Rules()
    warrant: Warrant = NO_WARRANT


@dataclass(frozen=True, slots=True)
class Here:
    """The receiver of a plan. ``follows``: leader of the plan in force; ``committed``: ``at`` was
    reported to that leader as committed, and no plan has settled it yet; ``heard``: the leader that
    accepted the last heartbeat, with the version in it; ``now`` and ``wall``: seconds of the
    monotonic clock and Unix time."""

    cell: CellId
    at: Version
    follows: PeerId | None
    committed: bool
    heard: tuple[PeerId, Version] | None
    now: float
    wall: float


@dataclass(frozen=True, slots=True)
class Holdings:
    """Versions that a member holds. ``before``: the version to which an undo returns; ``digest``:
    digest of the parameters at ``at``, empty if unknown; ``term``: term of its newest plan."""

    at: Version
    before: Version | None
    checkpoints: tuple[Version, ...]
    term: int
    digest: str = ""


class Admission:
    """Admission of plans at one peer. ``admitted(peer)``: True if the owner of the run lets that
    peer lead."""

    def __init__(
        self,
        terms: Terms,
        trust: Trust,
        changes: ChangeStatus,
        admitted: Callable[[PeerId], bool],
    ) -> None:
        self.terms = terms
        self.trust = trust
        self.changes = changes
        self._admitted = admitted
        self._told: tuple[PeerId | None, frozenset[PeerId]] = None, frozenset()
        """A leader, and the peers that its last plan proved to have voted twice."""

    def may_lead(self, peer: PeerId) -> bool:
        """Return True if plans of ``peer`` may be followed in this run at all."""
        return self.trust.counts(peer) and self._admitted(peer)

    def untold(self, leader: PeerId) -> tuple[DoubleVote, ...]:
        """Proofs of double votes that the last plan of ``leader`` did not carry."""
        knows = frozenset[PeerId]()
        if self._told[0] == leader:
            knows = self._told[1]
        return tuple(d for d in self.trust.doubles.told() if d.peer not in knows)

    def admit_sender(
        self, sender: PeerId, heeded: bool, nbytes: int, signed: Callable[[], bool]
    ) -> Refusal | None:
        """Return the reason not to parse a plan of ``nbytes``; None if it is parsed. ``signed()``
        checks the sender's signature under the plan. A small plan of a peer that is not heeded is
        parsed unsigned: its claims may show a fault, and it is never followed."""
        if not heeded:
            if nbytes > LARGE_PLAN:
                return Refusal(Ground.ELSEWHERE, OTHER_LEADER)
            return None
        if not self.may_lead(sender):
            why = "in this run only peers that its owner has admitted may lead"
            return Refusal(Ground.ELSEWHERE, why)
        if not signed():
            return Refusal(Ground.FAULT, "a plan whose signature is wrong")
        return None

    def admit(self, plan: Proposal, came: Received, here: Here) -> Refusal | None:
        """Return the reason not to follow ``plan``; None if the member may take it.

        An acceptable plan is led by its sender; it claims numbers and a term that a run can have
        reached; its leader is the one that this peer reports to; it is of this peer's cell; the
        members can work by it; its settings are not older than those in force; it does not undo
        what this peer committed without knowing of it; the voters stand behind it. A certificate
        that comes with a plan and is believed is kept, also when the plan is not followed.
        """
        if plan.leader != came.sender:
            return Refusal(Ground.FAULT, "a plan that its sender does not lead")
        if came.numbers:
            return Refusal(Ground.FAULT, f"invalid plan: {came.numbers}")
        most = self.terms.most(here.wall)
        if plan.term > most:
            why = f"a plan of term {plan.term}, and at most {most} can have been reached"
            return Refusal(Ground.FAULT, why)
        if not came.heeded:
            return Refusal(Ground.ELSEWHERE, OTHER_LEADER)
        if here.cell not in (plan.cell_id, plan.parent) or (plan.parent and not plan.cell_id):
            why = f"a plan of cell {plan.cell_id or 'none'}, and this peer is in {here.cell}"
            return Refusal(Ground.ELSEWHERE, why)
        if came.work:
            return Refusal(Ground.FAULT, f"invalid plan: {came.work}")
        if why := self.changes.refuses(plan, came.rules) or undoes(plan, here):
            return Refusal(Ground.OUTDATED, why)
        return self._unsupported(plan, came.warrant, here)

    def _unsupported(self, plan: Proposal, warrant: Warrant, here: Here) -> Refusal | None:
        """The reason why the last voters do not stand behind this plan, by this peer's
        knowledge."""
        doubles = self.trust.doubles
        # Every proof is kept, whatever the others prove.
        if not all([doubles.shown(proof) for proof in warrant.doubles]):
            why = "two votes that do not prove that their peer has voted twice"
            return Refusal(Ground.FAULT, why)
        self._told = plan.leader, frozenset(proof.peer for proof in warrant.doubles)
        why = self.trust.objection(plan, warrant, here.follows, here.at, here.now, here.wall)
        if why:
            return Refusal(Ground.UNSUPPORTED, why)
        return None


def undoes(plan: Proposal, here: Here) -> str:
    """The reason to refuse a new leader's plan if it would undo a version that this peer has
    reported as committed to the previous leader; "" otherwise. Others may have committed the same
    version, and together that may be a commit, so the new leader must hear of it first."""
    knows = plan.base == here.at or here.heard == (plan.leader, here.at)
    if not here.committed or plan.leader == here.follows or knows:
        return ""
    return f"epoch {here.at.epoch} is committed here, and the leader does not know it"


def unfollowable(plan: Proposal, me: PeerId, held: Holdings) -> str:
    """The reason why the member ``me`` cannot take part in ``plan`` now; "" if it can. A listener
    can from any version; a current member needs the plan's base, or one with the same parameters
    of its stage. A current member with an older version fetches the base, if the plan has its
    digest."""
    row = plan.member(me)
    if plan.term <= held.term:
        return f"term {plan.term} is over, this is term {held.term}"
    if row is None:
        return "this peer is not in the plan"
    if not row.current:
        return ""
    if plan.base == held.at:
        # The leader's knowledge of this peer may date from before a restart after which the peer
        # fetched another cell's parameters.
        if held.digest and held.digest != plan.digests.get(row.stage, held.digest):
            return f"the parameters of epoch {plan.epoch} here are not those of the cell"
        return ""
    reachable = (held.before, *held.checkpoints)
    if plan.base in reachable:
        return ""
    stood = plan.stood.get(row.stage)
    if stood is not None and stood in (held.at, *reachable):
        return ""
    if stood is None and held.at.epoch < plan.epoch and plan.digests.get(row.stage):
        return ""
    return f"epoch {plan.epoch} of that history is not here, only {held.at.epoch}"
