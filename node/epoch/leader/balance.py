"""Moves of peers between stages: the slowest stage gets a peer from one that can spare it. Pure.

The rules are :func:`node.scheduler.placement.choose_moves` while epochs follow each other, and
:func:`~node.scheduler.placement.level` while a stage has too few peers to begin one. This file adds
the waiting times that keep peers from moving back and forth.

Peers that came while an epoch was under way have no work in it, so they lose none by a move. Others
may have gone since they chose their stages: when the epoch closes, they are dealt out anew, over
all stages. An epoch of few members begins anew when newcomers make it much faster
(docs/decisions/040-few-do-not-keep-many-waiting.md).
"""

import math
from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from node.core.ids import ENDS, PeerId
from node.core.journey import Plan, Version
from node.epoch.leader.attempt import EpochAttempt
from node.epoch.leader.roster import Roster
from node.epoch.leader.takeover import work_by_peer
from node.epoch.peers.speeds import CEILING
from node.scheduler.placement import Move, StageTerms, View, choose_moves, level
from node.scheduler.settings import SchedulerSettings

SETTLED_MOVES = 10
"""Multiple of ``every_s`` for which a peer that was asked to change its stage is left alone."""

AT_ONCE = 8
"""One in AT_ONCE peers may be asked to move at a time, and always two."""

COMING_S = 60.0
"""Most seconds to wait for a peer on its way to a stage, unless its record says that it is still
coming."""

ENDS_KEPT = 2
"""Peers that the ends keep: the leader, and another one that can lead after it."""

OUTGROWN = 2.0
"""Least speed-up for which an epoch begins anew: time for its rest with its members, over time for
all of it with every peer of the swarm."""

OUTGROWN_S = 10.0
"""Least age of an epoch that begins anew, and the interval of the comparisons, in seconds."""

OUTGROWN_TIMES = 2
"""Most new beginnings from one version: a newcomer's claim of speed costs nothing."""

REST_S = 100.0
"""Least seconds for which a peer that was asked to help such a stage is left alone."""

NOBODY: Mapping[PeerId, int | None] = MappingProxyType({})
UNKNOWN: Mapping[int, float] = MappingProxyType({})

PLAIN = SchedulerSettings()
"""Settings of paths that visit every stage."""


class Balance:
    """Moves of one swarm of ``stages`` block stages. ``every_s``: seconds between two looks, 0
    never looks; ``download_s``: seconds that a move costs the peer that moves; ``scheduler``: the
    settings of the paths, which say how often each stage is visited."""

    def __init__(
        self,
        stages: int,
        every_s: float,
        download_s: float,
        scheduler: SchedulerSettings = PLAIN,
    ) -> None:
        self._visits = scheduler.shares_of_visits(stages)
        self._every = every_s
        self._download = download_s
        self._asked: dict[PeerId, tuple[float, int, float]] = {}
        """For each peer that was asked to move: the time, the target stage, and its speed; stage
        and speed are 0 if it has refused."""
        self._not_ends: dict[PeerId, float] = {}
        """Peers that refused the ends, and the time: many have no copy of the data."""
        self._behind: dict[PeerId, float] = {}
        self._looked = math.inf
        self._known: set[PeerId] = set()
        self._lacking: dict[int, float] = {}
        """Stages with too few peers that others could help, and the time since when."""
        self._changes: list[float] = []
        """Times at which a peer came or went; peers that only changed their stage are left out."""
        self._counted = -math.inf
        """Time of the last look whether an epoch is outgrown."""
        self._anew: tuple[Version | None, int] = None, 0
        """The version from which an epoch began anew last, and how often."""

    def refused(self, peer: PeerId, now: float) -> None:
        """The peer stays; it is not asked again soon. One that refused the ends may still be asked
        to change to a block stage."""
        _, target, speed = self._asked.get(peer, (now, 0, 0.0))
        if target == ENDS and speed:
            self._not_ends[peer] = now
            del self._asked[peer]
        else:
            self._asked[peer] = now, 0, 0.0

    def look(
        self,
        roster: Roster,
        base: Version | None,
        now: float,
        epoch_s: float = 0.0,
        *,
        coming: Mapping[PeerId, int | None] = NOBODY,
        fetch_s: Mapping[int, float] = UNKNOWN,
    ) -> list[Move]:
        """The moves that pay: often none, and none before the next look is due. ``epoch_s``:
        seconds of an epoch, which a member that moves may miss; ``coming``: peers about to take
        part, with their stage; ``fetch_s``: seconds in which a peer fetches each stage, if known.

        A peer that was asked to move and is absent is on its way for a minute, and while it is
        ``coming`` to the new stage: it counts there, and so does one that :meth:`deal` asked at
        this moment. A newcomer that was not measured yet, or does not hold ``base`` yet, counts
        where it is and does not move. A peer that has not held ``base`` for long does not count.
        The leader stays, and another peer beside it at the ends.
        """
        self._looked = min(self._looked, now)
        if not self._every or now - self._looked < self._every or base is None:
            return []
        self._looked = now
        settled = SETTLED_MOVES * self._every
        self._forget(now)
        here = {
            p: c
            for p, c in roster.peers.candidates.items()
            if not c.leaving and c.stage in self._visits
        }
        behind = [p for p in here if not roster.versions.can_start(p, base)]
        self._behind = {p: self._behind.get(p, now) for p in behind}
        view: dict[int, dict[PeerId, float]] = {s: {} for s in self._visits}
        on_their_way = self._on_their_way(here, coming, now)
        away = {*self._behind, *on_their_way}
        for p, c in here.items():
            if p not in on_their_way and now - self._behind.get(p, now) < settled:
                view[c.stage][p] = roster.speeds.believed(p)
                if c.capacity.speed <= 0:
                    away.add(p)
        for p, (target, speed) in on_their_way.items():
            view[target][p] = speed
        if not view[ENDS]:
            del view[ENDS]
        return self._choose(
            view,
            now,
            fetch_s,
            download_s=max(self._download, epoch_s),
            horizon_s=max(self._lasts(roster, now), epoch_s),
            stay={*self._asked, roster.peers.leader},
            away=away,
            most=max(2, len(here) // AT_ONCE),
        )

    def deal(
        self,
        roster: Roster,
        members: Collection[PeerId],
        now: float,
        epoch_s: float = 0.0,
        *,
        coming: Mapping[PeerId, int | None] = NOBODY,
        fetch_s: Mapping[int, float] = UNKNOWN,
    ) -> list[Move]:
        """The moves that pay among waiting peers: those ready for work that are not ``members`` of
        the closing epoch and were not asked lately. ``epoch_s``: seconds of an epoch; ``coming``
        and ``fetch_s`` as for :meth:`look`."""
        if not self._every:
            return []
        self._forget(now)
        by_stage = _ready(roster)
        here = {p for peers in by_stage.values() for p in peers}
        free = here - set(members) - self._asked.keys()
        # A peer that slept through an epoch believes in it until it gets another plan.
        free -= {p for p in free if roster.peers.candidates[p].capacity.running.plan_hash}
        if not free:
            return []
        view = _expected(roster, by_stage, members)
        away = self._on_their_way(here, coming, now)
        for p, (target, speed) in away.items():
            view[target][p] = speed
        return self._choose(
            view,
            now,
            fetch_s,
            download_s=self._download,
            horizon_s=max(self._lasts(roster, now), epoch_s),
            stay=here - free,
            away=away,
            most=len(free),
        )

    def _choose(
        self, view: View, now: float, fetch_s: Mapping[int, float], **limits: Any
    ) -> list[Move]:
        """Choose moves by :func:`~node.scheduler.placement.choose_moves` with ``limits`` as its
        arguments, and note their peers as asked."""
        terms = {
            s: StageTerms(share, fetch_s=fetch_s.get(s, 0.0)) for s, share in self._visits.items()
        }
        terms[ENDS] = replace(terms[ENDS], keep=ENDS_KEPT, barred=self._not_ends)
        moves = choose_moves(view, terms=terms, **limits)
        for move in moves:
            self._asked[move.peer] = now, move.target, view[move.source][move.peer]
        return moves

    def outgrown(self, roster: Roster, attempt: EpochAttempt, now: float) -> bool:
        """Return True, at most :data:`OUTGROWN_TIMES` for a version, if the epoch of ``attempt``
        should begin anew: with all peers that can start from its version, it would end in less than
        half of the time that its living members need for the rest of it."""
        plan = attempt.plan
        if now - max(attempt.timing.started, self._counted) < OUTGROWN_S:
            return False
        self._counted = now
        base, times = self._anew
        if base == plan.base and times >= OUTGROWN_TIMES:
            return False
        here = roster.peers.candidates
        working = {
            stage: [m.peer for m in attempt.living(stage) if m.current and m.peer in here]
            for stage in attempt.stages
        }
        members = {p for peers in working.values() for p in peers}
        ready = {
            stage: [p for p in peers if roster.versions.can_start(p, plan.base)]
            for stage, peers in _ready(roster).items()
            if stage in working
        }
        if all(p in members for peers in ready.values() for p in peers):
            return False
        # A member that leaves ends this epoch, but is in no other.
        visits = _visits(plan)
        few = _slowest(_expected(roster, working, members), visits)
        everybody = _slowest(_expected(roster, ready, members), visits)
        left = 1 - _done(roster, attempt)
        if not few or left * everybody < OUTGROWN * few:
            return False
        if base != plan.base:
            times = 0
        self._anew = plan.base, times + 1
        return True

    def mend(
        self,
        roster: Roster,
        me: PeerId,
        lacking: Collection[int],
        coming: Mapping[PeerId, int | None],
        patience_s: float,
        now: float,
    ) -> Move | None:
        """The move that brings a peer to a block stage of ``lacking``, which has too few peers to
        plan an epoch; None while ``patience_s`` is not over, or no peer can be spared.

        Call it repeatedly while stages lack peers, and with an empty ``lacking`` when none does.
        One peer at a time is asked for each stage: not ``me``, no peer that was asked lately, and
        not the only one of its stage that can start from the version last agreed on. The wait is
        longer for a stage that a peer is ``coming`` to (None: a peer is choosing its stage).
        """
        rest = max(SETTLED_MOVES * self._every, REST_S)
        self._asked = {p: told for p, told in self._asked.items() if now - told[0] < rest}
        here = roster.participants.by_stage()
        under_way = {
            p: to
            for p, (at, to, _) in self._asked.items()
            if to and now - at < COMING_S and p not in here[to]
        }
        lacking = {stage for stage in lacking if stage != ENDS}
        if not lacking:
            self._lacking = {}
            return None
        helped = {stage for stage in under_way.values() if stage in lacking}
        view: dict[int, dict[PeerId, float]] = {}
        free: dict[PeerId, Collection[int]] = {}
        for stage, peers in here.items():
            stay = [p for p in peers if p not in under_way]
            holds = {p for p in stay if _holds(roster, p, peers)}
            view[stage] = {p: roster.speeds.believed(p) if p in holds else 0.0 for p in stay}
            free |= {p: lacking for p in stay if holds != {p} and p != me and p not in self._asked}
        moves = level(view, free, lacking - helped)
        could = {*helped, *(m.target for m in moves)}
        self._lacking = {stage: self._lacking.get(stage, now) for stage in could}
        expected = {to for p, to in coming.items() if to is None or p not in here.get(to, ())}
        # A peer that is here but not proven to reach the others may be so in a moment.
        present = roster.peers.present()
        expected |= {stage for stage, peers in present.items() if len(peers) > len(here[stage])}
        for m in moves:
            waits = COMING_S if expected & {m.target, None} else patience_s
            if now - self._lacking[m.target] >= max(waits, patience_s):
                self._asked[m.peer] = now, m.target, 0.0
                return m
        return None

    def _on_their_way(
        self, here: Container[PeerId], coming: Mapping[PeerId, int | None], now: float
    ) -> dict[PeerId, tuple[int, float]]:
        """Peers that are not ``here`` and were asked to move a moment ago or are still ``coming``
        to the target, or are asked now; with the target stage and the speed of each."""
        most_s = max(COMING_S, self._every)
        return {
            p: (target, speed)
            for p, (at, target, speed) in self._asked.items()
            if (p not in here or at == now) and speed
            if now - at < most_s or coming.get(p) == target
        }

    def _forget(self, now: float) -> None:
        """Peers that were asked long ago may be asked again."""
        settled = SETTLED_MOVES * self._every
        self._asked = {p: told for p, told in self._asked.items() if now - told[0] < settled}
        self._not_ends = {p: at for p, at in self._not_ends.items() if now - at < settled}

    def _lasts(self, roster: Roster, now: float) -> float:
        """Seconds for which an improvement lasts: until another peer comes or goes, judged by the
        number of such changes lately."""
        settled = SETTLED_MOVES * self._every
        known = roster.peers.candidates.keys() | self._asked.keys()
        if self._known:
            self._changes += [now] * len(known ^ self._known)
        self._known = known
        self._changes = [at for at in self._changes if now - at < settled]
        return max(self._every, settled / (1 + len(self._changes)))


def _done(roster: Roster, attempt: EpochAttempt) -> float:
    """The share of an epoch's work that is done, by the reported results and by the work that its
    members say they have computed. Where all micro-batches are under way at once, no result is
    reported until most of the work is done."""
    plan = attempt.plan
    reported = attempt.results.count / len(plan.paths)
    work = work_by_peer(plan)
    running = {p: c.capacity.running for p, c in roster.peers.candidates.items() if work[p]}
    there = {p: r.computed for p, r in running.items() if r.plan_hash == plan.hash}
    if not there:
        return reported
    computed = sum(min(work[p], done) for p, done in there.items())
    return max(reported, computed / sum(work[p] for p in there))


def _ready(roster: Roster) -> dict[int, list[PeerId]]:
    """Peers that take part and are not on probation, by stage."""
    return {
        stage: [p for p in peers if p not in roster.peers.probation]
        for stage, peers in roster.participants.by_stage().items()
    }


def _expected(
    roster: Roster, by_stage: Mapping[int, Collection[PeerId]], members: Container[PeerId]
) -> dict[int, dict[PeerId, float]]:
    """Speeds of these peers. Nobody has measured those that are not ``members``, and their claims
    cost nothing: they count for at most :data:`~node.epoch.peers.speeds.CEILING` times the fastest
    member of their stage."""
    view = {
        stage: {p: roster.speeds.expected(p) for p in peers} for stage, peers in by_stage.items()
    }
    for peers in view.values():
        known = [speed for p, speed in peers.items() if p in members]
        if known:
            most = CEILING * max(known)
            peers.update({p: min(v, most) for p, v in peers.items() if p not in members})
    return view


def _visits(plan: Plan) -> dict[int, float]:
    """Share of the micro-batches of a plan that visit each of their stages."""
    counts = Counter(hop.stage for path in plan.paths for hop in path.hops)
    shares = {stage: count / len(plan.paths) for stage, count in counts.items()}
    return {ENDS: 1.0, **shares}


def _slowest(view: View, visits: Mapping[int, float]) -> float:
    """Micro-batches per second of the slowest stage that is visited, by its speeds and share of
    visits; 0 if it is unknown."""
    speeds = {stage: math.fsum(peers.values()) for stage, peers in view.items()}
    return min(speed / visits[stage] for stage, speed in speeds.items() if stage in visits)


def _holds(roster: Roster, peer: PeerId, mates: Collection[PeerId]) -> bool:
    """Return True if a peer holds the version that its stage goes on from; before a version was
    agreed on, the newest epoch at the stage."""
    base = roster.versions.base
    if base is not None:
        return roster.versions.can_start(peer, base)
    epochs = {p: roster.peers.candidates[p].at.epoch for p in mates}
    return epochs[peer] == max(epochs.values())
