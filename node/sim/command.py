"""The command ``tutti simulate``: a swarm of thousands in virtual time, a time line, and
numbers."""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from node.core.errors import ExitCode, UsageFault, writing
from node.core.numbers import several
from node.manifest import Manifest, read_manifest
from node.sim.faults import Schedule, lay
from node.sim.run import ScheduleOutcome, run, shrink
from node.sim.setup import Setup
from node.sim.show import figure, svg, timeline
from node.telemetry import pictures


def run_command(
    setup: Setup,
    scenarios: Sequence[str],
    seed: int,
    *,
    replay: Path | None,
    save: Path | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """``tutti simulate``: run the scenarios, or the faults of a file, and print. Returns DEGRADED
    if an invariant breaks or the run does not finish. Raises UsageFault for scenarios or files that
    cannot be run."""
    if picture:
        pictures.check(picture)
    if replay:
        schedule = _read(replay, setup)
    else:
        schedule = lay(scenarios, setup, seed)
    begin = time.perf_counter()
    outcome = run(setup, schedule)
    took = time.perf_counter() - begin
    if outcome.violation is not None and len(schedule.faults) > 1 and took < 5.0:
        outcome = shrink(setup, outcome, most=60)
    if save:
        with writing(save, "choose another place"):
            save.write_text(outcome.schedule.to_json(), encoding="utf-8")
    name = ", ".join(scenarios)
    if replay:
        name = "replay"
    if picture:
        title = f"{setup.peers} peers, {setup.stages} stages, {name}, seed {schedule.seed}"
        pictures.write(picture, lambda: svg(outcome, title), lambda: figure(outcome, title))
    if as_json:
        text = outcome.summary() | {"scenario": name, "wall_s": round(took, 3)}
        print(json.dumps(text | {"schedule": json.loads(outcome.schedule.to_json())}), flush=True)
    else:
        print("\n".join(report(outcome, name, took)))
        _complain(save, outcome)
    if outcome.violation is None and outcome.finished:
        return ExitCode.OK
    return ExitCode.DEGRADED


def run_averaging(
    name: str, peers: int, grid: str, failure: float, seeds: int, seed: int, *, as_json: bool
) -> int:
    """``tutti simulate --averaging``: one strategy or "all". UsageFault for what cannot be
    simulated."""
    from node.sim import averaging

    trial = averaging.AveragingTrial(peers, averaging.axes(grid), failure, seeds=seeds, seed=seed)
    names = (name,)
    if name == "all":
        names = averaging.NAMES
    begin = time.perf_counter()
    found = [averaging.simulate(each, trial) for each in names]
    took = time.perf_counter() - begin
    if as_json:
        print(json.dumps(averaging.document(trial, found) | {"wall_s": round(took, 3)}), flush=True)
    else:
        print("\n".join(averaging.report(trial, found)))
    return ExitCode.OK


def setup_of(
    manifest: Path | None = None,
    *,
    peers: int = 12,
    ends: int = 0,
    stages: int = 0,
    epochs: int = 0,
    small: bool = False,
) -> Setup:
    """The swarm that is asked for; 0 leaves a number to the manifest. ``ends`` 0: one in twelve.
    Raises UsageFault for numbers that do not fit together."""
    if small:
        return Setup(epochs=epochs or Setup.epochs)
    if manifest:
        agreed = read_manifest(manifest)
    else:
        agreed = Manifest.default_demo()
    return Setup.of(agreed, peers, ends or max(1, peers // 12), epochs or None, stages or None)


def report(outcome: ScheduleOutcome, name: str, took: float) -> list[str]:
    """Lines for people."""
    s = outcome.summary()
    setup = outcome.setup
    width = shutil.get_terminal_size((100, 24)).columns
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    lines = timeline(outcome, width, colour=colour)
    rows = [
        ("swarm", f"{setup.peers} peers, {setup.stages} block stages, {name}, seed {s['seed']}"),
        (
            "epochs",
            f"{s['epochs']} of {s['epochs_wanted']} committed in {s['virtual_s']:.1f} virtual s "
            f"({took:.1f} s here)",
        ),
        ("speed", f"{s['tokens_per_s']:,.0f} tokens per virtual second"),
        (
            "lost",
            f"{s['epochs_abandoned']} epochs begun again, {s['epochs_given_up']} given up, "
            f"{s['went_back']} times back",
        ),
        (
            "samples",
            f"{s['samples_counted']:,} counted, {s['samples_returned']} returned, "
            f"{s['samples_lost']} lost, {s['samples_double']} double",
        ),
        (
            "repairs",
            f"{s['rounds_repaired']} rounds, {s['leaders']} leaders, {s['moves']} moves, "
            f"{s['bans']} bans",
        ),
    ]
    if outcome.cells_lead:
        rows += [
            (
                "cells",
                f"{s['cells']} after {several(s['divisions'], 'division')}, the slowest at epoch "
                f"{s['slowest_cell_epochs']}",
            ),
            (
                "windows",
                f"partners found {several(s['windows_met'], 'time')}, none "
                f"{several(s['windows_alone'], 'time')}; {several(s['outer_rounds'], 'mean')} put "
                "in place",
            ),
        ]
    for key, label in (("recovery_s", "recovery"), ("detection_s", "detection")):
        if s[key]:
            rows.append((label, f"median {s[key]['median']:.2f} s, worst {s[key]['worst']:.2f} s"))
    return lines + [f"{label:<10}{text}"[: max(width, 20)] for label, text in rows]


def _complain(save: Path | None, outcome: ScheduleOutcome) -> None:
    v = outcome.violation
    if v is None:
        if not outcome.finished:
            print("the run did not finish in the time it was given", file=sys.stderr)
        return
    hint = ""
    if not save:
        hint = "   (write FILE with --save FILE)"
    print(
        f"\nVIOLATION  {v}",
        *(f"  {line}" for line in v.recent),
        "the smallest schedule that shows it:",
        outcome.schedule.to_json(),
        f"again:  tutti simulate … --replay {save or 'FILE'}{hint}",
        sep="\n",
        file=sys.stderr,
    )


def _read(path: Path, setup: Setup) -> Schedule:
    try:
        schedule = Schedule.from_json(path.read_bytes())
    except OSError as e:
        raise UsageFault(
            f"cannot read {path}: {e.strerror}", "write one with  tutti simulate --save FILE"
        ) from e
    if (last := max((f.stage for f in schedule.faults), default=0)) > setup.stages:
        raise UsageFault(
            f"{path} has a fault at stage {last} of {setup.stages}", "simulate as many stages"
        )
    return schedule
