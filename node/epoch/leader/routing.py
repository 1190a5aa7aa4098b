"""The leader's side of the paths: passes the costs that peers report to the router, and the results
of a plan back to it. Pure.

The router is :mod:`node.scheduler.router`. This module adds the leader's own knowledge: the costs
by peer, the seconds of rounds, the plans that counted.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Any

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.epoch.leader.roster import Roster
from node.epoch.plan_context import PastPlan
from node.scheduler.costs import Costs, SecondsPerUnit, believe, least
from node.scheduler.link_formats import link_formats
from node.scheduler.proven import NoWay, complete, missing, reroute
from node.scheduler.router import Laid

ROUNDS = 0.3
"""Weight of the newest round in the expected seconds of the next one."""

UNPROVEN_S = 1000.0
"""Assumed seconds of a tensor between two peers that are not proven to reach each other."""

Stages = Mapping[int, Sequence[tuple[PeerId, float]]]

PARTNERS = 128
"""Paths that are tried for an exchange with one path. Neighbouring paths visit different replicas,
so one that helps is among the next few; what peers report must not cost the leader more."""


class Routing:
    """Paths of one leader's plans. ``history``: the newest plan that is known."""

    def __init__(self, facts: RunFacts, history: PastPlan | None) -> None:
        self.router = facts.make.router()
        self._sizes = facts.sizes.parameters
        self._tensor = facts.sizes.tensor
        self._wires = facts.sizes.wires
        self._coarsest = facts.sizes.coarsest
        self._formats: Mapping[tuple[PeerId, PeerId], str] = {}
        self.laid: Laid | None = None
        self.costs = Costs()
        self._apart: frozenset[frozenset[PeerId]] = frozenset()
        """Pairs that are no neighbours on a path if there is another way."""
        self._rounds: tuple[frozenset[PeerId], SecondsPerUnit] | None = None
        if history is not None:
            self._formats = history.plan.wires
        if history is not None and history.plan.paths:
            self.router.rotation.counted(history.counted)

    def lay(
        self,
        roster: Roster,
        by_stage: Stages,
        samples: Sequence[tuple[int, ...]],
    ) -> tuple[Path, ...]:
        """Paths for the micro-batches of an epoch.

        Only pairs of peers that are proven to reach each other are neighbours on a path. An ends
        peer whose paths cannot be completed starts nothing. Raises NoWay if that holds for all.
        """
        self.laid = None
        ends = self._with_a_path(by_stage, roster)
        everybody = [p for row in by_stage.values() for p, _ in row]
        self.costs = self._believed(roster, {p for p, _ in by_stage[ENDS]}, everybody)
        self.laid, paths = self._laid(ends, by_stage, samples, roster)
        proven = roster.participants.proven
        paths = with_trials(paths, by_stage, roster.speeds.known_cost(), proven)
        if self._apart:
            paths = crossed(paths, self._apart, proven)
        if paths != self.laid.paths:
            self.laid = replace(self.laid, paths=paths, run_s=0.0)
        return paths

    def _laid(
        self,
        ends: Sequence[tuple[PeerId, float]],
        by_stage: Stages,
        samples: Sequence[tuple[int, ...]],
        roster: Roster,
    ) -> tuple[Laid, tuple[Path, ...]]:
        """The router's paths, and the same paths over proven pairs. Raises NoWay if the paths of no
        ends peer can be completed."""
        blocks = {s: row for s, row in by_stage.items() if s != ENDS}
        while True:
            laid = self.router.lay(ends, blocks, samples, self.costs)
            try:
                paths = reroute(
                    laid.paths, lambda hop: by_stage[hop.stage], roster.participants.proven
                )
            except NoWay as e:
                ends = [(p, speed) for p, speed in ends if p not in e.origins]
                if not ends:
                    raise
            else:
                return laid, paths

    def keep_apart(self, pairs: frozenset[frozenset[PeerId]]) -> None:
        """These pairs of peers should not be neighbours on a path: they contradict each other."""
        self._apart = pairs

    def formats(self, paths: Sequence[Path]) -> Mapping[tuple[PeerId, PeerId], str]:
        """Number formats for the links of ``paths``, which were laid last, where they are not the
        run's."""
        self._formats = link_formats(paths, self.costs, self._wires, self._formats)
        return self._formats

    def _believed(self, roster: Roster, ends: set[PeerId], peers: Sequence[PeerId]) -> Costs:
        """The costs known of these peers. Pairs that are not proven are put so far apart that the
        search for paths leaves them alone."""
        costs = believe(
            roster.speeds.measured(), ends, roster.speeds.doubts(), self._tensor, self._coarsest
        )
        proven = roster.participants.proven
        far = {(a, b): UNPROVEN_S for a in peers for b in peers if not proven(a, b)}
        if not far:
            return costs
        return replace(costs, ways={**costs.ways, **far})

    def _with_a_path(self, by_stage: Stages, roster: Roster) -> Sequence[tuple[PeerId, float]]:
        """Ends peers from which a path through every stage leads back. If paths leave out stages,
        all ends peers: the stages that a path visits are not known yet."""
        stages = [s for s in sorted(by_stage) if s != ENDS]
        if self.router.settings.hops(self.router.stages) < len(stages):
            return by_stage[ENDS]
        replicas = {s: [p for p, _ in row] for s, row in by_stage.items()}
        proven = roster.participants.proven
        able = [(p, v) for p, v in by_stage[ENDS] if complete(p, stages, replicas, proven)]
        if not able:
            raise NoWay(missing([p for p, _ in by_stage[ENDS]], stages, replicas, proven))
        return able

    def forecast(self, by_stage: Stages) -> tuple[float, float]:
        """Seconds that the paths laid last and the round after them should take; zeros if too
        little is known."""
        laid = self.laid
        if laid is None or not self.costs.compute or not laid.run_s:
            return 0.0, 0.0
        who = frozenset(p for row in by_stage.values() for p, _ in row)
        if self._rounds is not None and self._rounds[0] == who:
            return laid.run_s, self._rounds[1].seconds_per_unit
        return laid.run_s, self._round_model(by_stage)

    def _round_model(self, by_stage: Stages) -> float:
        """Estimate the seconds of a round. Every member sends gradients to the owners of the other
        parts and fresh parameters to the others, and receives the same amount: twice its stage over
        its line, without the parts it owns itself; and two trips there and back. A capped line is
        no faster than its cap."""
        longest = 0.0
        for stage, row in by_stage.items():
            if len(row) > 1:
                moved = 0.0
                if self._sizes:
                    moved = 2 * (1 - 1 / len(row)) * self._sizes[stage]
                line = least(*(self.costs.lines.get(p, 0.0) for p, _ in row))
                capped = 0.0
                if line:
                    capped = moved / line
                body = max(moved / max(1, self._tensor) * self.costs.body_s, capped)
                longest = max(longest, body + 4 * self.costs.delay_s)
        return longest

    def committed(self, plan: Plan, dropped: Sequence[int], round_s: float) -> None:
        """This epoch counts, without the micro-batches that were dropped; its round took
        ``round_s`` seconds."""
        who = frozenset(m.peer for m in plan.members if m.current)
        if self._rounds is None or self._rounds[0] != who:
            self._rounds = who, SecondsPerUnit(ROUNDS)
        if round_s > 0:
            self._rounds[1].observe(1.0, round_s)
        self.router.rotation.counted([p for p in plan.paths if p.index not in dropped])

    def search(self, roster: Roster) -> list[Any]:
        """Search paths for the next epoch while the members average; no action if a search would
        bring nothing."""
        if self.laid is None or self.laid.task is None:
            return []
        task = self.laid.task
        costs = self._believed(roster, {o for o, _ in task.counts}, task.peers)
        job = self.router.job(self.laid, costs)
        if job is None:
            return []
        return [ev.SearchPaths(job)]

    def about(self, by_stage: Stages) -> dict[str, object]:
        """Facts for the record about the paths laid last."""
        laid = self.laid
        if laid is None:
            return {}
        run_s, round_s = self.forecast(by_stage)
        facts: dict[str, object] = {
            "paths": self.router.settings.paths,
            "laid_by": laid.how,
            "skip": self.router.settings.skip,
        }
        if run_s:
            facts |= {"predicted_run_s": round(run_s, 4), "predicted_round_s": round(round_s, 4)}
        if self._formats:
            facts["wires"] = dict(Counter(self._formats.values()))
        if laid.owed:
            facts["owed"] = [list(d) for d in laid.owed]
        return facts


def crossed(
    paths: Sequence[Path],
    apart: Container[frozenset[PeerId]],
    proven: Callable[[PeerId, PeerId], bool],
) -> tuple[Path, ...]:
    """These paths with fewer neighbours that should be ``apart``: two paths exchange what comes
    after such a pair, so that every peer keeps its work. Other paths stay as they are."""

    def bad(*some: Path) -> int:
        pairs = [(a.peer, b.peer) for path in some for a, b in pairwise(path.journey)]
        if not all(proven(a, b) for a, b in pairs):
            return len(pairs)
        return sum(frozenset(pair) in apart for pair in pairs)

    found = list(paths)
    hopeless: set[tuple[PeerId, PeerId, int]] = set()
    for i in range(len(found)):
        for at in range(len(found[i].hops)):
            before, after = (hop.peer for hop in found[i].journey[at : at + 2])
            # The last hop has the origin behind it: other hops for the origin part these two.
            last = found[i].hops[-1].peer
            ring = at == 0 and frozenset((last, before)) in apart
            key = before, last if ring else after, at
            if key in hopeless or not (ring or frozenset((before, after)) in apart):
                continue
            hopeless.add(key)
            for j in islice(chain(range(i + 1, len(found)), range(i)), PARTNERS):
                exchanged = _exchanged(found[i], found[j], at)
                if exchanged and bad(*exchanged) < bad(found[i], found[j]):
                    found[i], found[j] = exchanged
                    hopeless.discard(key)
                    break
    return tuple(found)


def _exchanged(one: Path, other: Path, at: int) -> tuple[Path, ...]:
    """Two paths that have exchanged their hops from ``at`` on; none if the stages differ."""
    if [hop.stage for hop in one.hops] != [hop.stage for hop in other.hops]:
        return ()
    return (
        replace(one, hops=one.hops[:at] + other.hops[at:]),
        replace(other, hops=other.hops[:at] + one.hops[at:]),
    )


def with_trials(
    paths: Sequence[Path],
    by_stage: Stages,
    measured: Container[PeerId],
    proven: Callable[[PeerId, PeerId], bool],
) -> tuple[Path, ...]:
    """These paths with one visit added at every replica without measurements whose stage has
    measured ones: it takes a visit over from the busiest replica of its stage.

    A plan that is shortest without a replica would leave it without work for ever, however fast it
    is, because only work shows its speed.
    """
    done = list(paths)
    for stage, row in by_stage.items():
        used = Counter(h.peer for path in done for h in path.hops if h.stage == stage)
        unknown = [p for p, _ in row if p not in measured and not used[p]]
        if stage == ENDS or all(p not in measured for p, _ in row):
            continue
        for peer in unknown:
            for i, path in sorted(
                enumerate(done), key=lambda at: (-_load(at[1], stage, used), -at[0])
            ):
                moved = tuple(Hop(stage, peer) if h.stage == stage else h for h in path.hops)
                other = replace(path, hops=moved)
                if _load(path, stage, used) > 1 and all(
                    proven(a.peer, b.peer) for a, b in pairwise(other.journey)
                ):
                    used[next(h.peer for h in path.hops if h.stage == stage)] -= 1
                    used[peer] = 1
                    done[i] = other
                    break
    return tuple(done)


def _load(path: Path, stage: int, used: Counter[PeerId]) -> int:
    """Visits of the replica that a path goes to at a stage; 0 where it leaves the stage out."""
    return next((used[h.peer] for h in path.hops if h.stage == stage), 0)
