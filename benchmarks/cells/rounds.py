"""Rounds of Moshpit until cells agree, when they form their groups as daemons do: keys from
:func:`~node.averaging.strategies.keys.meeting_keys`, groups from the machines of
:class:`~node.averaging.strategies.group_forming.GroupForming` in virtual time. Beside it the grid
that is computed from a view that all share, with the same values and the same absences."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import Report
from node.sim.averaging import TARGETS, AveragingTrial, simulate
from testbed.planning.meetings import Trial, play, rounds_to

TARGET = 1.1
ABSENT = (0.0, 0.001, 0.01)


def rows(
    report: Report,
    root: Path,
    sizes: Sequence[int] = (512, 1024),
    grid: tuple[int, ...] = (),
    seeds: int = 20,
) -> None:
    """Two rows for each size and each chance of absence; two where cells see different cells."""
    trials = [Trial(size, grid, absent) for size in sizes for absent in ABSENT]
    trials += [Trial(size, grid, unseen=0.001) for size in sizes]
    for trial in trials:
        ours = np.array([rounds_to(play(trial, seed)) for seed in range(seeds)]).mean(0)
        ideal = simulate("moshpit", AveragingTrial(**{**vars(trial.ideal), "seeds": seeds})).rounds
        shape = "x".join(map(str, trial.ideal.shape()))
        for target, mine, best in zip(TARGETS, ours.tolist(), ideal, strict=True):
            what = f"{trial.cells} cells, grid {shape}, absent {trial.absent:g}"
            if trial.unseen:
                what += f", {trial.unseen:g} of the others not seen"
            report.add(
                f"4 {what}: rounds to {target:g}",
                mine,
                f"rounds, mean of {seeds} seeds",
                f"ideal keys {best:.2f}",
                "" if trial.unseen else f"at most {TARGET} of ideal",
                holds=None if trial.unseen else mine <= TARGET * best,
            )
