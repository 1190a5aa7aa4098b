"""One schedule from beginning to end, its outcome, and the smallest schedule that fails in the same
way."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from node.core.journey import Version
from node.epoch.waiting import Lack, Wait
from node.sim.faults import Fault, Schedule, strike
from node.sim.invariants import InvariantViolation
from node.sim.setup import Setup
from node.sim.swarm import MachineFactory, SimSwarm
from node.sim.watch import CommitSeen
from node.sim.world.loop import bury, quiet

EVERY = 24
"""Runs between two collections of their garbage."""
LIMIT_S = 3600.0
"""Virtual seconds after which a run is ended."""
PATIENCE_S = 120.0
"""Virtual seconds within which the swarm commits again after every fault is over."""
MOST_RUNS = 300
"""Most runs to make a schedule smaller."""


@dataclass
class ScheduleOutcome:
    """Outcome of a run. Times are virtual seconds. ``cells``: the newest epoch of each cell in
    which every stage has a live peer at the end; a single cell without a name if cells do not lead
    themselves."""

    setup: Setup
    schedule: Schedule
    seconds: float
    events: int
    violation: InvariantViolation | None
    finished: bool
    stage_lost: bool
    """Every copy of a stage's newest parameters was destroyed: the swarm waits for somebody to
    bring them, and says so."""
    commits: list[CommitSeen]
    cells: Mapping[str, int]
    struck: list[tuple[float, str, str, float]]
    counts: Counter[str]
    recoveries: list[float]
    detections: list[float]
    samples_lost: int
    moments_lost: int

    @property
    def cells_lead(self) -> bool:
        """Every cell has a leader of its own."""
        return self.setup.outer.windows

    @property
    def epochs(self) -> int:
        """The newest epoch that was committed."""
        return max((c.epoch for c in self.commits), default=0)

    @property
    def repeated(self) -> int:
        """Commits of an epoch that had been committed before: epochs given up and repeated, or done
        on two sides."""
        return len(self.commits) - len({(c.cell, c.epoch) for c in self.commits})

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens a second; repeated epochs count once."""
        last = {(c.cell, c.epoch): c.tokens for c in self.commits}
        if not self.seconds:
            return 0.0
        return sum(last.values()) / self.seconds

    def summary(self) -> dict[str, Any]:
        """Numbers, for ``--json``."""
        cells = {
            "cells": len(self.cells),
            "slowest_cell_epochs": min(self.cells.values(), default=0),
            "divisions": self.counts["cell-divided"],
            "windows_met": self.counts["windows-met"],
            "windows_alone": self.counts["windows-alone"],
            "outer_rounds": self.counts["means-in-place"],
        }
        samples_double = 0
        violation = None
        if self.violation is not None:
            if self.violation.id in ("I3", "I4"):
                samples_double = 1
            violation = {
                "id": self.violation.id,
                "time": self.violation.time,
                "what": self.violation.what,
            }
        return {
            "seed": self.schedule.seed,
            "peers": self.setup.peers,
            "stages": self.setup.stages,
            "epochs": self.epochs,
            "epochs_wanted": self.setup.epochs,
            "finished": self.finished,
            "stage_lost": self.stage_lost,
            "virtual_s": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "events": self.events,
            "faults": len(self.struck),
            "epochs_abandoned": self.counts["epoch-abandoned"],
            "epochs_repeated": self.repeated,
            "epochs_given_up": self.counts["epochs-given-up"],
            "tokens_given_up": self.counts["tokens-given-up"],
            "rounds_repaired": self.counts["round-repaired"],
            "went_back": self.counts["went-back"],
            "leaders": self.counts["leaders"],
            "moves": self.counts["moves"],
            "bans": self.counts["bans"],
            "samples_counted": self.counts["samples-counted"],
            "samples_returned": self.counts["samples-returned"],
            "samples_lost": self.samples_lost,
            "samples_double": samples_double,
            "moments_lost": self.moments_lost,
            "recovery_s": _spread(self.recoveries),
            "detection_s": _spread(self.detections),
            **(cells if self.cells_lead else {}),
            "violation": violation,
        }


def run(setup: Setup, schedule: Schedule, make: MachineFactory | None = None) -> ScheduleOutcome:
    """Play a schedule until the run is finished, an invariant breaks, or :data:`LIMIT_S` are over.

    A swarm that does not commit again within :data:`PATIENCE_S` after its faults violates
    "liveness". There is one exception: no version is left for which a live peer of every stage has
    the parameters, in memory or on its disk, and the leader says so.
    """
    with quiet():
        swarm = SimSwarm(setup, schedule.seed, make)
        lost = False
        violation = None
        try:
            for fault in schedule.faults:
                swarm.world.push(fault.at, strike, swarm, fault)
            lost = not _play(swarm, schedule.healed)
        except InvariantViolation as e:
            violation = e
        outcome = _outcome(swarm, schedule, violation, lost)
        bury(EVERY)
    return outcome


def _play(swarm: SimSwarm, healed: float) -> bool:
    """Run until the end. Returns False if the swarm cannot go on, because nobody holds the
    parameters that it would need. Raises InvariantViolation if it stops committing without such a
    reason."""
    world = swarm.world
    watch = swarm.watch
    count = -1
    since = healed
    world.run(min(LIMIT_S, healed), None)
    while world.now < LIMIT_S and not _finished(swarm):
        if len(watch.commits) > count:
            count = len(watch.commits)
            since = max(world.now, healed)
        elif world.now - since > PATIENCE_S and not swarm.troubles:
            chief = swarm.chief()
            leader = None
            if chief is not None:
                leader = chief.leader
            why = Wait(Lack.ENDS)
            if leader is not None:
                why = leader.gathering.waiting
            if why is not None and why.lack is Lack.COMMON and not _common(swarm):
                return False
            text = f"no commit in {PATIENCE_S:.0f} s: {why or 'nothing is waited for'}"
            raise watch.violation("liveness", text)
        world.run(world.now + 5.0, lambda seen=count: len(watch.commits) > seen or _finished(swarm))
    return True


def _common(swarm: SimSwarm) -> set[Version]:
    """Versions of which somebody alive in every stage has the parameters."""
    held: dict[int, set[Version]] = {stage: set() for stage in range(swarm.setup.stages + 1)}
    for peer in swarm.live():
        held[peer.stage] |= {
            peer.member.at,
            *peer.member.reachable,
            *peer.work.local_checkpoints.versions(),
        }
    return set.intersection(*held.values())


def _finished(swarm: SimSwarm) -> bool:
    """Return True if every cell has committed its last epoch. A cell that has lost all peers of a
    stage is not waited for."""
    if not swarm.manifest.averaging.peers:
        return bool(swarm.watch.ended)
    whole = swarm.cells()
    return bool(whole) and swarm.watch.ended >= whole


def _outcome(
    swarm: SimSwarm, schedule: Schedule, violation: InvariantViolation | None, lost: bool
) -> ScheduleOutcome:
    watch = swarm.watch
    newest = {c.cell: c.epoch for c in sorted(watch.commits, key=lambda c: c.epoch)}
    times = [c.at for c in watch.commits]
    after = ((at, times[bisect_right(times, at) :][:1]) for at, *_ in swarm.struck)
    return ScheduleOutcome(
        swarm.setup,
        schedule,
        seconds=swarm.world.now,
        events=swarm.world.events,
        violation=violation,
        finished=_finished(swarm),
        stage_lost=lost,
        commits=watch.commits,
        cells={cell: newest.get(cell, 0) for cell in swarm.cells()},
        struck=swarm.struck,
        counts=watch.counts,
        recoveries=[again - at for at, first in after for again in first],
        detections=watch.detections,
        samples_lost=max((abs(b.lost) for b in watch.samples.books.values()), default=0),
        moments_lost=sum(p.work.state_export.taking.lost for p in swarm.live()),
    )


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(median(values), 3), "worst": round(max(values), 3)}


def shrink(
    setup: Setup,
    outcome: ScheduleOutcome,
    make: MachineFactory | None = None,
    most: int = MOST_RUNS,
) -> ScheduleOutcome:
    """The smallest outcome found that violates the same invariant: fewer faults, then rounder times
    and shorter troubles; ``outcome`` itself when it violates none.

    Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input",
    IEEE TSE 2002): chunks of faults are left out, smaller and smaller ones, while the remaining
    faults still fail. At most ``most`` schedules are tried.
    """
    if outcome.violation is None:
        return outcome
    wanted = outcome.violation.id
    best = outcome
    faults = outcome.schedule.faults
    candidates = _smaller(faults, max(1, len(faults) // 2), 0)
    for _ in range(most):
        faults, size, start = next(candidates, (None, 0, 0))
        if faults is None:
            break
        tried = run(setup, replace(best.schedule, faults=faults), make)
        if tried.violation is not None and tried.violation.id == wanted:
            best = tried
            candidates = _smaller(faults, size, start)
    return best


def _smaller(
    faults: tuple[Fault, ...], size: int, begin: int
) -> Iterator[tuple[tuple[Fault, ...], int, int]]:
    """Without ``size`` of them from ``begin`` on, then without fewer, then with one of them
    plainer; and where to go on from there."""
    while size:
        for start in range(begin, len(faults), size):
            yield faults[:start] + faults[start + size :], size, start
        size = size // 2
        begin = 0
    for i, fault in enumerate(faults):
        for plainer in _plainer(fault):
            if plainer != fault:
                changed = (*faults[:i], plainer, *faults[i + 1 :])
                yield tuple(sorted(changed, key=lambda f: f.at)), 1, 0


def _plainer(fault: Fault) -> Iterator[Fault]:
    """The same fault with one thing plainer, or unchanged."""
    for digits in (0, 1):
        yield replace(fault, at=round(fault.at, digits))
        yield replace(fault, seconds=round(fault.seconds, digits))
    yield replace(fault, seconds=round(fault.seconds / 2, 1))
    for who in range(min(4, fault.who)):
        yield replace(fault, who=who)
