"""The peers that are here and the versions they hold, as the leader has heard: the versions that
every stage could start from.

Pure. A *version* is an epoch and its history; two sides of a partitioned network hold different
versions of the same epoch, so peers are matched by version and never by epoch alone.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from statistics import median
from types import MappingProxyType
from typing import TypeVar

from node.core.ids import ENDS, PeerId
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.pace import ALL_OWN, MOST_LACKING
from node.scheduler.costs import NOTHING, Measured, quantise

FORGIVE_AFTER = 8
"""Epochs without a micro-batch after which a replica's measured speed is no longer believed."""

CEILING = 2.0
"""Multiple of the neighbours' measurement that bounds a claimed speed."""

HALF_LIFE_S = 60.0
"""Seconds after which a remembered silence counts half."""
PAUSES = 2.0
"""Multiple of a peer's longest recent silence after which a new one is too long."""
MOST_PAUSE_S = 30.0
"""Most seconds of that longest silence that count."""

H = TypeVar("H", bound=Hashable)
NO_LEADER = PeerId("")
NO_OWNERS: Mapping[int, set[PeerId]] = MappingProxyType({})


class Roster:
    """The roster of one leader. ``base``: the version the swarm last agreed on; ``agreed``: the
    digest of each stage at it. ``prove``: only peers take part that are proven to reach the
    ``leader`` and every owner of their stage; ``known``: peers that the leader has worked with;
    ``owning``: owners in the last plan, by stage."""

    def __init__(
        self,
        stages: int,
        leader: PeerId = NO_LEADER,
        prove: bool = False,
        known: frozenset[PeerId] = frozenset(),
        owning: Mapping[int, set[PeerId]] = NO_OWNERS,
    ) -> None:
        self._stages = stages
        self._leader = leader
        self._prove = prove
        self.known = known
        self._together: dict[int, set[PeerId]] = {}
        self._owning = dict(owning)
        self._wanted: dict[int, list[PeerId]] = {}
        """The owners of each stage, and those that would be the next."""
        self._reach: dict[PeerId, frozenset[PeerId]] = {}
        self.candidates: dict[PeerId, ev.Heartbeat] = {}
        """The last heartbeat of each peer, updated with its commits since."""
        self.heard: dict[PeerId, float] = {}
        """Time of the last sign of life of each peer."""
        self._pauses: dict[PeerId, float] = {}
        """The longest recent silence of each peer, which counts half after :data:`HALF_LIFE_S`."""
        self.base: Version | None = None
        self.agreed: dict[int, str] = {}
        self.stood: Callable[[Version], Mapping[int, Version]] = lambda version: {}
        """Returns the stages that have an older version's parameters at a version, because nobody
        had them in the epochs between; with that older version."""
        self.fallen: dict[int, Version] = {}
        """The same for stages that go on from an older version than they could, because nobody
        holds the newer one any more."""
        self.undone: set[Version] = set()
        """Versions that an epoch has made and that do not count, though peers hold them until the
        next plan."""
        self.unproven: set[Version] = set()
        """Versions that were not made here, and that too few of the voters can have committed."""
        self.probation: frozenset[PeerId] = frozenset()
        """Peers on probation: they do no work if their stage can do without them."""
        self._speeds: dict[PeerId, float] = {}
        self._idle: dict[PeerId, int] = {}
        self._table: tuple[dict[PeerId, float], dict[int, list[tuple[PeerId, float]]]] | None = None
        self._here: dict[int, list[PeerId]] | None = None
        self._taking: dict[int, list[PeerId]] | None = None

    def hear(self, e: ev.Heartbeat, now: float) -> None:
        """Take a peer's heartbeat."""
        old = self.candidates.get(e.peer)
        reach = frozenset(p for p, _ in e.costs.ways)
        self._table = None
        same = old is not None and (old.stage, old.leaving) == (e.stage, e.leaving)
        if not same or reach != self._reach.get(e.peer):
            self._reach[e.peer] = reach
            self._here = None
            self._taking = None
        self.candidates[e.peer] = e
        self.alive(e.peer, now)

    def anchor(self) -> str:
        """64 hex digits for the anchors of all stages, each as most replicas have it; empty if a
        stage has none."""
        said = []
        # On a copy: to be asked from outside must not change the choice of replicas.
        for stage, peers in sorted(self.without(()).replicas().items()):
            votes = Counter(c for p in peers if (c := self.candidates[p].anchor))
            if not votes:
                return ""
            said.append(f"{stage}:{min(votes, key=lambda name: (-votes[name], name))}")
        if not said:
            return ""
        return hashlib.sha256("/".join(said).encode()).hexdigest()

    def gone(self, peer: PeerId) -> ev.Heartbeat | None:
        """The peer is here no more. Returns its last heartbeat, None for a stranger."""
        self._here = self._taking = self._table = None
        self.heard.pop(peer, None)
        self._pauses.pop(peer, None)
        self._reach.pop(peer, None)
        return self.candidates.pop(peer, None)

    def without(self, away: Collection[PeerId]) -> "Roster":
        """A copy of this roster for planning, as if these peers had left. It takes no
        heartbeats."""
        rest = copy(self)
        rest.candidates = {p: c for p, c in self.candidates.items() if p not in away}
        rest._together = dict(self._together)
        rest._owning = dict(self._owning)
        rest._wanted = dict(self._wanted)
        rest._here = rest._taking = rest._table = None
        return rest

    def alive(self, peer: PeerId, now: float) -> None:
        """Note a sign of life of a peer that is here."""
        silent = now - self.heard.get(peer, now)
        pause = self._pauses.get(peer, 0.0) * 0.5 ** (silent / HALF_LIFE_S)
        self._pauses[peer] = max(silent, pause)
        self.heard[peer] = now

    def silence(self, peer: PeerId, least_s: float) -> float:
        """Seconds of silence that are unusual for this peer, at least ``least_s``: a peer on a busy
        machine is heard less regularly."""
        return max(least_s, PAUSES * min(self._pauses[peer], MOST_PAUSE_S))

    def replicas(self) -> Mapping[int, Sequence[PeerId]]:
        """Peers that would take part, by stage."""
        if not self._prove:
            return self.present()
        if self._taking is None:
            self._taking = {s: self._joined(s, peers) for s, peers in self.present().items()}
        return self._taking

    def present(self) -> Mapping[int, Sequence[PeerId]]:
        """Peers that are here and do not leave, by stage."""
        if self._here is None:
            stages = self._here = {stage: list[PeerId]() for stage in range(self._stages + 1)}
            for peer in sorted(self.candidates):
                c = self.candidates[peer]
                if c.stage in stages and not c.leaving:
                    stages[c.stage].append(peer)
        return self._here

    def proven(self, a: PeerId, b: PeerId) -> bool:
        """Return True if two peers reach each other: both say so. Always True if no proof is asked
        for."""
        return (
            not self._prove
            or a == b
            or (b in self._reach.get(a, ()) and a in self._reach.get(b, ()))
        )

    def apart(self) -> list[tuple[PeerId, PeerId]]:
        """Pairs of peers without proof that they reach each other. Each pair keeps its first peer
        out; the second is the leader, if it is heard itself, or an owner of the same stage."""
        taking = self.replicas()
        return [
            (peer, other)
            for stage, peers in self.present().items()
            for peer in peers
            if peer not in taking[stage]
            for other in dict.fromkeys([self._leader, *sorted(self._owning[stage])])
            if other in self.candidates and not self.proven(peer, other)
        ]

    def _joined(self, stage: int, peers: Sequence[PeerId]) -> list[PeerId]:
        """Replicas that reach the leader and every owner of the stage, so that each can give to
        every owner. Peers chosen before stay as long as that holds, before others come in.

        The owners reach each other: :data:`ALL_OWN` replicas, and all that owned parts before.
        Every replica that all chosen ones reach becomes an owner too.
        """
        before = self._together.get(stage, set())
        owned = self._owning.get(stage, set())
        here = {p for p in peers if self.proven(p, self._leader)}
        # A peer reports few ways, so this is no look at every pair.
        reached = {
            p: {p} | {other for other in self._reach[p] & here if p in self._reach[other]}
            for p in here
        }

        def rank(peer: PeerId) -> tuple[bool, bool, bool, bool, bool, int, PeerId]:
            # Peers that the leader has worked with come before a crowd that vouches for itself.
            new = peer not in owned, peer not in before, peer not in self.known
            tried = peer in self.probation
            return peer != self._leader, *new, tried, -len(reached[peer]), peer

        order = sorted(here, key=rank)
        owners: set[PeerId] = set()
        for peer in order:
            if (len(owners) < ALL_OWN or peer in owned) and owners <= reached[peer]:
                owners.add(peer)
        chosen = {p for p in here if owners <= reached[p]}
        next_ones = [p for p in order if p not in owners]
        self._wanted[stage] = [*sorted(owners), *next_ones[: max(0, ALL_OWN - len(owners))]]
        self._owning[stage] = owners | {p for p in chosen if chosen <= reached[p]}
        self._together[stage] = chosen
        return sorted(chosen)

    def lacking(self, peer: PeerId) -> list[PeerId]:
        """Peers to which ``peer`` should find a way, at most :data:`MOST_LACKING`: the peers of any
        stage with a way to it; for an owner also all replicas of its stage, for others the owners,
        and while these are few their successors. The last choice of replicas decides; this method
        makes no new one, because no recording holds the moment of a question."""
        here = self.candidates.get(peer)
        if not self._prove or here is None or here.stage not in self.present():
            return []
        stage = here.stage
        wanted = dict.fromkeys(self._wanted.get(stage, ()))
        if peer in wanted:
            wanted = dict.fromkeys(p for p in self.present()[stage] if self.proven(p, self._leader))
        # Those that have found a way themselves first: an owner's list may be full of others.
        wanted = dict.fromkeys(p for p, reach in self._reach.items() if peer in reach) | wanted
        return [p for p in wanted if p != peer and p not in self._reach[peer]][:MOST_LACKING]

    def may_own(self, stage: int) -> set[PeerId]:
        """Replicas of a stage that may own parts of it: every other replica reaches them."""
        taking = self.replicas()[stage]
        if self._prove:
            return self._owning[stage]
        return set(taking)

    def can_start(self, peer: PeerId, version: Version) -> bool:
        """Return True if a peer could be current: it holds the version, with the digest on which
        its stage has agreed, if it has; or it can go back to it. Else it is a listener."""
        c = self.candidates[peer]
        able = {version, self.held(c.stage, version)}
        if c.at not in able:
            return bool(able & set(c.reachable))
        return version != self.base or self.agreed.get(c.stage, c.digest) == c.digest

    def workers(self, stage: int, version: Version) -> list[PeerId]:
        """Replicas of a stage that work on an epoch from a version. Replicas on probation only do
        if no other could start."""
        able = [p for p in self.replicas()[stage] if self.can_start(p, version)]
        return [p for p in able if p not in self.probation] or able

    def held(self, stage: int, version: Version) -> Version:
        """The version that a stage's parameters have at ``version``: an older one if the stage was
        left out in between."""
        here = self.fallen.get(stage) if version == self.base else None
        return here or self.stood(version).get(stage, version)

    def stages_that_stood(self, version: Version) -> dict[int, Version]:
        """The stages that have an older version's parameters at ``version``, with that version, for
        a plan that starts from it. Stages that the plan goes around are included."""
        here = self.fallen if version == self.base else {}
        return {
            s: self.held(s, version)
            for s in sorted({*self.stood(version), *here, *self.bare(version)})
        }

    def bare(self, version: Version) -> list[int]:
        """Stages at which nobody could start from ``version``."""
        return [
            s
            for s, peers in self.replicas().items()
            if not any(self.can_start(p, version) for p in peers)
        ]

    def older(self, stage: int) -> Version | None:
        """The version of most peers of a stage, among peers with more than the version that a run
        begins with; None if there are none."""
        held = {p: at for p in self.replicas()[stage] if (at := self.candidates[p].at).epoch}
        return majority(held, None)

    def fall_back(self, stage: int) -> Version | None:
        """Let a stage go on from the version that :meth:`older` gives, and return it."""
        held = self.older(stage)
        if held is not None:
            self.fallen[stage] = held
            self.agreed.pop(stage, None)
        return held

    def startable(self, spare: int = 0) -> list[Version]:
        """Versions that every stage could start from, the best first: those that always had a
        majority of their voters, then by tokens counted in the history, then the newest. ``spare``
        block stages may be missing.

        Some peer of every other stage must be able to start from a version, so the claim of a
        single peer adds none.
        """
        known = {
            v
            for p in self._present()
            for v in (self.candidates[p].at, *self.candidates[p].reachable)
        }
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
        held = {self.candidates[p].at for p in self._present()}
        known = held - self.undone - self.unproven
        lacking = {v: self.bare(v) for v in known}
        best = min(lacking, key=lambda v: (len(lacking[v]), -v.epoch), default=None)
        if best is None:
            return None, []
        return best, lacking[best]

    def is_own(self, version: Version) -> bool:
        """Return True if it was agreed on last, or the leader can put it in place itself."""
        own = self.candidates.get(self._leader)
        return version == self.base or (own is not None and version in (own.at, *own.reachable))

    def _vouched(self, version: Version) -> bool:
        """Return True if more than strangers vouch for this history. It is the leader's own; or
        wherever the leader's colleagues are, one of them could start from the version too."""
        if not self.known or self.is_own(version):
            return True
        return not any(
            (mine := self.known.intersection(peers))
            and not any(self.can_start(p, version) for p in mine)
            and any(self.can_start(p, version) for p in peers)
            for peers in self.replicas().values()
        )

    def richer(self, tokens: int, best: Version) -> list[PeerId]:
        """Peers that claim a better history than ``best`` has: one that always had a majority of
        its voters if ``best`` had not, or one with more than ``tokens`` tokens. If the leader has
        colleagues, only they are listed."""
        others = [
            (p, self.candidates[p]) for p in self._present() if not self.known or p in self.known
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
        return majority({p: _certain(c) for p, c in self._standing(version)}, None)

    def tokens_of(self, version: Version) -> int:
        """Tokens counted in the history of a version, by the reports of most participants that hold
        it; -1 if nobody does."""
        return majority({p: c.tokens for p, c in self._standing(version)}, -1)

    def _standing(self, version: Version) -> list[tuple[PeerId, ev.Heartbeat]]:
        return [(p, c) for p in self._present() if (c := self.candidates[p]).at == version]

    def holders(self, version: Version) -> tuple[PeerId, ...]:
        """Peers that hold the version or came from it; ends peers first, because they are the
        likeliest to know its history."""
        found = [
            (c.stage != ENDS, c.at != version, p)
            for p, c in self.candidates.items()
            if version in (c.at, *c.reachable)
        ]
        return tuple(p for *_, p in sorted(found))

    def agree(self, base: Version) -> None:
        """Agree on the digest of every stage at ``base``: the committed digest, else the one that
        most participants report."""
        for stage, peers in self.replicas().items():
            if base == self.base and stage in self.agreed:
                continue
            self.agreed.pop(stage, None)
            able = (base, self.held(stage, base))
            said = {p: c.digest for p in peers if (c := self.candidates[p]).at in able and c.digest}
            if said:
                self.agreed[stage] = majority(said, "")
        self.base = base

    def undo(self, version: Version) -> None:
        """Nobody starts from this version, whoever holds it. Versions of other epochs that were
        undone before are forgotten."""
        self.undone = {version, *(v for v in self.undone if v.epoch == version.epoch)}

    def drop_agreement(self) -> tuple[int, ...]:
        """Forget the agreed digest of each stage in which peers claim the version but none holds
        these parameters: to go on from the parameters they hold is better than never to go on.
        Returns these stages."""
        gone = [
            stage
            for stage, peers in self.replicas().items()
            if self.base is not None
            and stage in self.agreed
            and not any(self.can_start(p, self.base) for p in peers)
            and any(self.candidates[p].at == self.base for p in peers)
        ]
        for stage in gone:
            del self.agreed[stage]
        return tuple(gone)

    def speed(self, peer: PeerId) -> float:
        """Micro-batches per second to plan with, quantised; 0 for unknown."""
        believed = self.believed(peer)
        if believed > 0:
            believed = self._speeds[peer] = quantise(
                believed, self._speeds.get(peer, 0.0), per_octave=2
            )
        return believed

    def believed(self, peer: PeerId) -> float:
        """Micro-batches per second, by the peer's claim and its neighbours' measurements; 0 for
        unknown."""
        # A peer without work is not measured either: now and then its speed counts as unknown, and
        # it is tried again.
        if self._idle.get(peer, 0) >= FORGIVE_AFTER:
            return 0.0
        return min(self.candidates[peer].speed, self._bound(peer))

    def measured(self) -> dict[PeerId, Measured]:
        """The costs that each peer reports, without peers that leave; nothing for a peer that got
        no work for long, because its measurements are out of date."""
        return {
            p: c.costs if self._idle.get(p, 0) < FORGIVE_AFTER else NOTHING
            for p, c in sorted(self.candidates.items())
            if not c.leaving
        }

    def known_cost(self) -> set[PeerId]:
        """Peers that have ever reported the cost of a micro-batch."""
        return {p for p, c in self.candidates.items() if c.costs.forward_s}

    def doubts(self) -> dict[PeerId, float]:
        """For each peer that claims more than ``CEILING`` times the speed that its neighbours see:
        its claim divided by the most that is believed."""
        return {
            p: c.speed / b
            for p, c in self.candidates.items()
            if c.speed > (b := self._bound(p)) > 0
        }

    def _bound(self, peer: PeerId) -> float:
        """The most that is believed of a peer's claimed speed: ``CEILING`` times the neighbours'
        measurement, in the units of its siblings.

        Neighbours see a peer through its link and its next hop, so their numbers only compare
        replicas of one stage.
        """
        if self._table is None:
            self._table = self._measured()
        rates, units = self._table
        mine = rates.get(peer, 0.0)
        others = [unit for p, unit in units.get(self.candidates[peer].stage, ()) if p != peer]
        if mine > 0 and others:
            return CEILING * mine * median(others)
        return math.inf

    def _measured(self) -> tuple[dict[PeerId, float], dict[int, list[tuple[PeerId, float]]]]:
        """The speed of each peer that its neighbours measure (the median), and for each stage the
        ratios of claimed to measured speeds."""
        said: dict[PeerId, list[float]] = {}
        for by, c in self.candidates.items():
            for about, rate in c.seen:
                if about != by and rate > 0:
                    said.setdefault(about, []).append(rate)
        rates = {peer: median(words) for peer, words in said.items()}
        units: dict[int, list[tuple[PeerId, float]]] = {}
        for p, c in self.candidates.items():
            if c.speed > 0 and p in rates:
                units.setdefault(c.stage, []).append((p, c.speed / rates[p]))
        return rates, units

    def worked(self, current: set[PeerId], working: set[PeerId]) -> None:
        """A plan was made: of the ``current`` members only ``working`` have micro-batches."""
        self._idle = {p: 0 if p in working else self._idle.get(p, 0) + 1 for p in current}
        self._speeds = {p: s for p, s in self._speeds.items() if p in self.candidates}

    def _present(self) -> list[PeerId]:
        return [p for peers in self.replicas().values() for p in peers]


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
