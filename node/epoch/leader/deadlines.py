"""Time limits on the work of an epoch: a multiple of the expected time, with the manifest's numbers
as floors. Pure.

Enters: the speeds and lines that peers report, the seconds of earlier rounds, the assignments of a
plan. Leaves: seconds. The leader computes them and its plan and its notes carry them, so that all
members wait equally long.

run     the busiest peer's micro-batches one after another, and one more on its way through all
        stages
round   the slowest owner's steps, and the parameters of the stage over the slowest line, there and
        back

Measurements on these peers are preferred to estimates from operations; for a first plan there are
only estimates.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median

from node.core.ids import ENDS, PeerId
from node.core.journey import Path, Plan
from node.core.patience import SPARE, Took
from node.epoch.facts import RunFacts
from node.epoch.leader.roster import Roster
from node.scheduler.costs import BEYOND, NOTHING, LinkCost, Measured

MARGIN = 4.0
"""Multiple of the time expected from measured speeds: peers share machines, and lines with
others."""
FIRST = 10.0
"""Multiple of the time estimated before anything was measured: a product alone is faster than a
stage with everything around its products."""
MOST_S = 3600.0
"""Longest time limit in seconds, whatever is claimed."""
AGAIN = 2.0
"""Factor by which another attempt of a round has longer than the one before it: that one may have
been too short."""
AGAIN_MOST = 4.0
"""Most of that factor over all attempts."""
LEAST_S = 3.0
"""Shortest time, in seconds, after which a round takes unusually long: machines have other work
too."""
LEAST_RUN_S = 5.0
"""The same for the micro-batches of an ends peer."""
MEASURED = 2
"""Number of measurements from which the usual time is known."""
COPIED_S = 1e-8
"""Seconds a byte of parameters costs beside its transfer: it is packed, copied, summed up and
digested, at 100 MB/s at least."""
TERA = 1e12
FETCH_SHARE, FETCH_MOST_S = 0.1, 4.0
"""Share of an epoch's run, and seconds, that a peer may take to fetch the parameters from which the
epoch begins. Tensors wait for a little longer until it has begun."""


class EpochDeadlines:
    """Time limits of one run. ``operations`` of a micro-batch at each stage and ``steps`` of each
    part are the run's (:class:`RunFacts`)."""

    def __init__(self, facts: RunFacts) -> None:
        self._waits = facts.waits
        self._sizes = facts.sizes
        self._runs = Took()
        self._rounds = Took()
        self._changes = Took()
        """Times of rounds with new owners, which may wait for the optimizer's state."""
        self._outer = Took()
        self._run_s = 0.0
        """Seconds of the last run."""

    # ----------------------------------------------------------- measurements

    def took(self, plan: Plan, round_s: float, steady: bool = True) -> None:
        """All members have finished the round of this plan after ``round_s`` seconds. ``steady``:
        no part had a new owner."""
        self._rounds_like(plan, steady).add(round_s)

    def _rounds_like(self, plan: Plan, steady: bool) -> Took:
        if plan.outer:
            return self._outer
        return self._rounds if steady else self._changes

    def ran(self, run_s: float, *, whole: bool = True) -> None:
        """The micro-batches of a plan had their results after ``run_s`` seconds. ``whole``: all of
        them counted."""
        self._run_s = run_s
        if whole:
            self._runs.add(run_s)

    # ----------------------------------------------------------- limits

    def run(self, roster: Roster, paths: tuple[Path, ...], forecast_s: float = 0.0) -> float:
        """Seconds for these micro-batches. ``forecast_s``: the forecast of the router that laid the
        paths, 0 for unknown."""
        said = _believed(roster)
        journeys = [
            [(ENDS, path.origin), *((hop.stage, hop.peer) for hop in path.hops)] for path in paths
        ]
        seconds, known = self._of_visits({visit for visits in journeys for visit in visits}, said)
        busy: dict[PeerId, float] = {}
        longest = 0.0
        for visits in journeys:
            through = 0.0
            for stage, peer in visits:
                took = seconds[stage, peer]
                busy[peer] = busy.get(peer, 0.0) + took
                through += took + 2 * _tensor_s(said.get(peer, NOTHING))
            longest = max(longest, through)
        expected = max(forecast_s, max(busy.values(), default=0.0) + longest)
        return max(self._waits.epoch_s, min((MARGIN if known else FIRST) * expected, MOST_S))

    def _of_visits(
        self, visits: Collection[tuple[int, PeerId]], said: Mapping[PeerId, Measured]
    ) -> tuple[dict[tuple[int, PeerId], float], bool]:
        """Seconds of a micro-batch at these (stage, peer); and whether they rest on measurements.

        Where most were measured, the others are reckoned from operations and then stretched as the
        measured ones are: a stage takes longer than its products. So one newcomer does not stretch
        the time limit of all.
        """
        usual = _median(m.tera_s for m in said.values())  # for peers that do not know it
        operations = self._sizes.operations
        measured: dict[tuple[int, PeerId], float] = {}
        reckoned: dict[tuple[int, PeerId], float] = {}
        for stage, peer in visits:
            costs = said.get(peer, NOTHING)
            measured[stage, peer] = _measured(stage, costs)
            work = operations[stage] if stage < len(operations) else 0.0
            reckoned[stage, peer] = work / TERA * (costs.tera_s or usual)
        sure = [visit for visit, took in measured.items() if took > 0]
        stretch = _median(measured[v] / reckoned[v] for v in sure if reckoned[v] > 0)
        enough = stretch > 0 and 2 * len(sure) > len(measured)
        if not enough:
            stretch = 1.0
        seconds = {v: measured[v] or stretch * reckoned[v] for v in measured}
        known = all(measured[v] > 0 or (enough and reckoned[v] > 0) for v in measured)
        return seconds, known

    def round(self, roster: Roster, plan: Plan, attempt: int = 0) -> float:
        """Seconds for an attempt of the round that ends the epoch of a plan, at any stage."""
        longer = min(AGAIN**attempt, AGAIN_MOST)
        kinds = [self._rounds_like(plan, steady) for steady in (True, False)]
        expected = self._expected(roster, plan, max(took.expected for took in kinds))
        return min(max(self._waits.round_s, expected) * longer, MOST_S)

    def usual_round(
        self,
        roster: Roster,
        plan: Plan,
        attempt: int = 0,
        patience: float = 1.0,
        steady: bool = True,
    ) -> float:
        """Seconds after which an attempt of a round takes unusually long, times ``patience``. The
        full time of :meth:`round` before rounds of its kind were measured here. ``steady`` as for
        :meth:`took`."""
        most = self.round(roster, plan, attempt)
        measured = self._rounds_like(plan, steady)
        if measured.count < MEASURED:
            return most
        longer = patience * min(AGAIN**attempt, AGAIN_MOST)
        expected = self._expected(roster, plan, measured.expected)
        return min(max(LEAST_S, expected) * longer, most)

    def usual_run(self, plan: Plan, patience: float = 1.0) -> float:
        """Seconds after which the micro-batches of a plan take unusually long, times ``patience``.
        The full time of the plan before runs were measured here."""
        if self._runs.count < MEASURED:
            return plan.deadline_s
        expected = max(SPARE * self._runs.expected, MARGIN * plan.forecast[0])
        return min(max(LEAST_RUN_S, expected) * patience, plan.deadline_s)

    def worth_fetching(self, roster: Roster, stage: int) -> bool:
        """Return True if a peer that fetches the parameters of a stage when the plan arrives loses
        little of the epoch by that. False while too little is known."""
        if stage >= len(self._sizes.parameters) or not self._sizes.tensor:
            return False
        size = self._sizes.parameters[stage]
        way = _median(_tensor_s(m) for m in _believed(roster).values())
        expected = size / self._sizes.tensor * way + COPIED_S * size
        return 0.0 < expected <= min(FETCH_MOST_S, FETCH_SHARE * self._run_s)

    def _expected(self, roster: Roster, plan: Plan, measured_s: float) -> float:
        """Seconds for a round with a margin: from speeds and sizes, and from the ``measured_s`` of
        earlier rounds."""
        said = _believed(roster)
        usual = _median(m.tera_s for m in said.values())  # for peers that do not know it
        stages = sorted({m.stage for m in plan.members})
        reckoned = max((self._of_stage(plan, s, said, usual) for s in stages), default=0.0)
        return max(MARGIN * reckoned, SPARE * measured_s)

    # ----------------------------------------------------------- parts of the above

    def _of_stage(
        self, plan: Plan, stage: int, said: Mapping[PeerId, Measured], usual: float
    ) -> float:
        members = plan.stage(stage)
        sizes = self._sizes.parameters
        size = sizes[stage] if stage < len(sizes) else 0
        way = max((_tensor_s(said.get(m.peer, NOTHING)) for m in members), default=0.0)
        others = 1 - 1 / len(members)
        moved = 2 * others * (size / self._sizes.tensor) * way if self._sizes.tensor else 0.0
        return self._steps(plan, stage, said, usual) + moved + COPIED_S * size

    def _steps(
        self, plan: Plan, stage: int, said: Mapping[PeerId, Measured], usual: float
    ) -> float:
        if plan.outer or stage >= len(self._sizes.steps):
            return 0.0
        busy: dict[PeerId, float] = {}
        for part, operations in self._sizes.steps[stage].items():
            owner = plan.owners.get(part)
            if owner is not None:
                each = said.get(owner, NOTHING).tera_s or usual
                busy[owner] = busy.get(owner, 0.0) + operations / TERA * each
        return max(busy.values(), default=0.0)


def _believed(roster: Roster) -> dict[PeerId, Measured]:
    """The costs that peers report, each bounded by :data:`~node.scheduler.costs.BEYOND` times the
    median of its kind: nobody makes the others wait by calling itself, or its connections, slow."""
    said = {p: c.capacity.costs for p, c in roster.peers.candidates.items()}
    most = {
        name: BEYOND * _median(getattr(m, name) for m in said.values())
        for name in ("forward_s", "backward_s", "loss_s", "tera_s")
    }
    tensor_s = BEYOND * _median(_tensor_s(m) for m in said.values())
    return {
        p: replace(
            m,
            **{name: min(getattr(m, name), limit) for name, limit in most.items()},
            ways=_within(m, tensor_s),
        )
        for p, m in said.items()
    }


def _within(m: Measured, tensor_s: float) -> tuple[tuple[PeerId, LinkCost], ...]:
    """The peer's connections, none slower than ``tensor_s`` seconds for a tensor."""
    if _tensor_s(m) <= tensor_s:
        return m.ways
    return tuple((p, replace(way, tensor_s=min(way.tensor_s, tensor_s))) for p, way in m.ways)


def _median(claims: Iterable[float]) -> float:
    """The median of the known (positive) numbers; 0 if none is known."""
    known = [seconds for seconds in claims if seconds > 0]
    return median(known) if known else 0.0


def _measured(stage: int, m: Measured) -> float:
    """Seconds of a micro-batch at a stage; 0 if unknown."""
    loss_s = m.loss_s if stage == ENDS else 0.0
    return m.forward_s + m.backward_s + loss_s if m.forward_s and m.backward_s else 0.0


def _tensor_s(m: Measured) -> float:
    """Seconds of a tensor over the peer's slowest connection that carries tensors."""
    return max((way.tensor_s for _, way in m.ways), default=0.0)
