"""The versions that the peers hold, and the one that the swarm agreed on last. Pure. Enters: the
peers that take part, commits of the leader's epochs. Leaves: the versions that every stage could
start from. Never: the choice among them (:mod:`node.epoch.leader.starting_point`).

A *version* is an epoch and its history; two sides of a partitioned network hold different versions
of the same epoch, so peers are matched by version and never by epoch alone.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from typing import TypeVar

from node.core.ids import ENDS, PeerId
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.peers.participants import Participants
from node.epoch.peers.peers import Peers

H = TypeVar("H", bound=Hashable)
Stood = Callable[[Version], Mapping[int, Version]]


class Versions:
    """Versions of these peers. ``base``: the version the swarm last agreed on; ``agreed``: the
    digest of each stage at it. ``stood`` returns the stages that have an older version's parameters
    at a version, because nobody had them in the epochs between; with that older version."""

    def __init__(self, peers: Peers, participants: Participants, stood: Stood) -> None:
        self._peers = peers
        self._participants = participants
        self._stood = stood
        self.base: Version | None = None
        self.agreed: dict[int, str] = {}
        self._fallen: dict[int, Version] = {}
        """Stages that go on from an older version than they could, because nobody holds the newer
        one any more; with that older version."""
        self.undone: set[Version] = set()
        """Versions that an epoch has made and that do not count, though peers hold them until the
        next plan."""
        self.unproven: set[Version] = set()
        """Versions that were not made here, and that too few of the voters can have committed."""

    def over(self, peers: Peers, participants: Participants) -> "Versions":
        """The versions of other peers, with the same agreement."""
        rest = copy(self)
        rest._peers = peers
        rest._participants = participants
        return rest

    # ----------------------------------------------------------- the agreement

    def agree(self, base: Version) -> None:
        """Agree on the digest of every stage at ``base``: the committed digest, else the one that
        most participants report."""
        here = self._peers.candidates
        for stage, peers in self._participants.by_stage().items():
            if base == self.base and stage in self.agreed:
                continue
            self.agreed.pop(stage, None)
            able = (base, self.held(stage, base))
            said = {p: c.digest for p in peers if (c := here[p]).at in able and c.digest}
            if said:
                self.agreed[stage] = majority(said, "")
        self.base = base

    def planned(self, digests: Mapping[int, str]) -> None:
        """A plan was made with these digests of its stages."""
        self.agreed |= digests

    def committed(self, made: Version, digests: Mapping[int, str]) -> None:
        """The swarm has agreed on ``made``, with these digests of its stages."""
        self.agreed |= digests
        self._fallen.clear()
        self.base = made

    def undo(self, version: Version) -> None:
        """Nobody starts from this version, whoever holds it. Versions of other epochs that were
        undone before are forgotten."""
        self.undone = {version, *(v for v in self.undone if v.epoch == version.epoch)}

    def redo(self) -> bool:
        """Let undone versions count, if the swarm can start from one of them then. Returns True if
        it can."""
        undone = self.undone
        self.undone = set()
        if self.startable():
            return True
        self.undone = undone
        return False

    def pass_over(self, version: Version) -> None:
        """Nobody starts from this version until it is proven."""
        self.unproven.add(version)

    def look_again(self, doubts: Callable[[Version], bool]) -> None:
        """Pass over only versions that the leader still doubts, and that somebody holds."""
        self.unproven = {v for v in self.unproven if doubts(v) and self.holders(v)}

    def drop_agreement(self) -> tuple[int, ...]:
        """Forget the agreed digest of each stage in which peers claim the version but none holds
        these parameters: to go on from the parameters they hold is better than never to go on.
        Returns these stages."""
        gone = [
            stage
            for stage, peers in self._participants.by_stage().items()
            if self.base is not None
            and stage in self.agreed
            and not any(self.can_start(p, self.base) for p in peers)
            and any(self._peers.candidates[p].at == self.base for p in peers)
        ]
        for stage in gone:
            del self.agreed[stage]
        return tuple(gone)

    # ----------------------------------------------------------- stages with an older version

    def held(self, stage: int, version: Version) -> Version:
        """The version that a stage's parameters have at ``version``: an older one if the stage was
        left out in between."""
        here = self._fallen.get(stage) if version == self.base else None
        return here or self._stood(version).get(stage, version)

    def stages_that_stood(self, version: Version) -> dict[int, Version]:
        """The stages that have an older version's parameters at ``version``, with that version, for
        a plan that starts from it. Stages that the plan goes around are included."""
        here = self._fallen if version == self.base else {}
        return {
            s: self.held(s, version)
            for s in sorted({*self._stood(version), *here, *self.bare(version)})
        }

    def older(self, stage: int) -> Version | None:
        """The version of most peers of a stage, among peers with more than the version that a run
        begins with; None if there are none."""
        peers = self._participants.by_stage()[stage]
        held = {p: at for p in peers if (at := self._peers.candidates[p].at).epoch}
        return majority(held, None)

    def fall_back(self, stage: int) -> Version | None:
        """Let a stage go on from the version that :meth:`older` gives, and return it."""
        held = self.older(stage)
        if held is not None:
            self._fallen[stage] = held
            self.agreed.pop(stage, None)
        return held

    # ----------------------------------------------------------- where peers could start

    def can_start(self, peer: PeerId, version: Version) -> bool:
        """Return True if a peer could be current: it holds the version, with the digest on which
        its stage has agreed, if it has; or it can go back to it. Else it is a listener."""
        c = self._peers.candidates[peer]
        able = {version, self.held(c.stage, version)}
        if c.at not in able:
            return bool(able & set(c.reachable))
        return version != self.base or self.agreed.get(c.stage, c.digest) == c.digest

    def workers(self, stage: int, version: Version) -> list[PeerId]:
        """Replicas of a stage that work on an epoch from a version. Replicas on probation only do
        if no other could start."""
        peers = self._participants.by_stage()[stage]
        able = [p for p in peers if self.can_start(p, version)]
        return [p for p in able if p not in self._peers.probation] or able

    def bare(self, version: Version) -> list[int]:
        """Stages at which nobody could start from ``version``."""
        return [
            s
            for s, peers in self._participants.by_stage().items()
            if not any(self.can_start(p, version) for p in peers)
        ]

    def startable(self, spare: int = 0) -> list[Version]:
        """Versions that every stage could start from, the best first: those that always had a
        majority of their voters, then by tokens counted in the history, then the newest. ``spare``
        block stages may be missing.

        Some peer of every other stage must be able to start from a version, so the claim of a
        single peer adds none.
        """
        here = self._peers.candidates
        known = {v for p in self._participants.all() for v in (here[p].at, *here[p].reachable)}
        able = [
            v
            for v in known - self.undone - self.unproven
            if len(bare := self.bare(v)) <= spare and ENDS not in bare
        ]
        return sorted(
            (v for v in able if self._vouched(v)),
            key=lambda v: (bool(self.certain(v)), self.tokens_of(v), v),
            reverse=True,
        )

    def nearest(self) -> tuple[Version | None, list[int]]:
        """The version that the fewest stages lack, the newest if there are several, and these
        stages; (None, []) if nobody holds one."""
        held = {self._peers.candidates[p].at for p in self._participants.all()}
        known = held - self.undone - self.unproven
        lacking = {v: self.bare(v) for v in known}
        best = min(lacking, key=lambda v: (len(lacking[v]), -v.epoch), default=None)
        if best is None:
            return None, []
        return best, lacking[best]

    # ----------------------------------------------------------- claims about histories

    def is_own(self, version: Version) -> bool:
        """Return True if it was agreed on last, or the leader can put it in place itself."""
        own = self._peers.candidates.get(self._peers.leader)
        return version == self.base or (own is not None and version in (own.at, *own.reachable))

    def _vouched(self, version: Version) -> bool:
        """Return True if more than strangers vouch for this history. It is the leader's own; or
        wherever the leader's colleagues are, one of them could start from the version too."""
        known = self._peers.known
        if not known or self.is_own(version):
            return True
        return not any(
            (mine := known.intersection(peers))
            and not any(self.can_start(p, version) for p in mine)
            and any(self.can_start(p, version) for p in peers)
            for peers in self._participants.by_stage().values()
        )

    def richer(self, tokens: int, best: Version) -> list[PeerId]:
        """Peers that claim a better history than ``best`` has: one that always had a majority of
        its voters if ``best`` had not, or one with more than ``tokens`` tokens. If the leader has
        colleagues, only they are listed."""
        known = self._peers.known
        others = [
            (p, self._peers.candidates[p])
            for p in self._participants.all()
            if not known or p in known
        ]
        return [
            p
            for p, c in others
            if (_certain(c), c.tokens) > (bool(self.certain(best)), tokens)
            and not {best, *self.undone, *self.unproven} & {c.at, *c.reachable}
        ]

    def certain(self, version: Version) -> bool | None:
        """True if the lineage of a version always had a majority of its voters, by the reports of
        most participants that hold it; None if nobody holds it. Such a lineage comes before all
        others, however many tokens these have counted."""
        return majority({p: _certain(c) for p, c in self._at(version)}, None)

    def tokens_of(self, version: Version) -> int:
        """Tokens counted in the history of a version, by the reports of most participants that hold
        it; -1 if nobody does."""
        return majority({p: c.tokens for p, c in self._at(version)}, -1)

    def _at(self, version: Version) -> list[tuple[PeerId, ev.Heartbeat]]:
        """Participants that hold a version, with their last heartbeats."""
        here = self._peers.candidates
        return [(p, c) for p in self._participants.all() if (c := here[p]).at == version]

    def holders(self, version: Version) -> tuple[PeerId, ...]:
        """Peers that hold the version or came from it; ends peers first, because they are the
        likeliest to know its history."""
        found = [
            (c.stage != ENDS, c.at != version, p)
            for p, c in self._peers.candidates.items()
            if version in (c.at, *c.reachable)
        ]
        return tuple(p for *_, p in sorted(found))


def _certain(c: ev.Heartbeat) -> bool:
    """Return True if a peer says that its lineage always had a majority. The version that a run
    begins with was made by no vote, so nothing is given up for it."""
    return not c.orphan and c.at.epoch > 0


def majority(said: Mapping[PeerId, H], nobody: H) -> H:
    """The value that most peers report; ``nobody`` if there is none. A tie goes to the value of the
    smallest PeerId, so every leader decides alike."""
    count = Counter(said.values())
    return max(
        ((count[said[p]], -i, said[p]) for i, p in enumerate(sorted(said))),
        key=lambda t: t[:2],
        default=(0, 0, nobody),
    )[2]
