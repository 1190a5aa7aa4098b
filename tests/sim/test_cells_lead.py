"""Cells that lead themselves, in the simulated swarm: results of their runs, and reports of
them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cli
from node.averaging.strategies.outer import OuterSettings
from node.sim.faults import Schedule
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.show import svg, timeline
from node.sim.swarm import SimSwarm
from tests.sim.outcomes import finished

NEAR = Setup(
    cell=1,
    outer=OuterSettings("gossip", window_s=10.0),
    ends=2,
    stages=1,
    replicas=2,
    parts=toy_parts(1, 2),
    epochs=40,
    spread_s=0.05,
    links=LinkProfile(0.002, 0.002),
)
"""Setup that becomes two cells, with a directory and lines quick enough for windows this short."""


def test_the_run_is_over_when_every_cell_is() -> None:
    outcome = finished(NEAR, Schedule(1, ()))
    said = outcome.summary()
    assert (said["cells"], said["divisions"]) == (2, 1)
    assert set(outcome.cells.values()) == {NEAR.epochs}
    assert said["slowest_cell_epochs"] == NEAR.epochs
    assert said["epochs_repeated"] == 0, "two cells make an epoch of one number each"
    assert 0 < said["outer_rounds"] <= said["windows_met"]
    assert said["outer_rounds"] == sum(c.cell != "" and not c.tokens for c in outcome.commits)
    assert svg(outcome, "cells").count("<polyline") == 2, "a line for each cell"
    assert "40" in timeline(outcome, 60)[0]


def test_the_old_cells_leader_does_not_lead_the_new_one() -> None:
    slow = replace(NEAR, epochs=8, links=LinkProfile(0.3, 0.1))
    outcome = finished(slow, Schedule(2, ()))
    assert set(outcome.cells.values()) == {slow.epochs}, "both cells train"


def test_one_cell_says_nothing_of_cells() -> None:
    said = finished(Setup(epochs=3), Schedule(1, ())).summary()
    assert not {"cells", "divisions", "outer_rounds"} & said.keys()


def test_simulate_runs_a_manifest_of_such_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "swarm.toml"
    manifest.write_text(
        '[averaging]\ncell = 1\n[outer]\nstrategy = "gossip"\nwindow_s = 20.0\n'
        "[model]\nlayers = 1\nd_model = 32\nheads = 2\nkv_heads = 1\nd_ff = 64\nseq_len = 32\n"
        "[pipeline]\nstages = 1\nmicro_batch = 4\n[training]\ntarget_batch = 8\n"
        "rebalance_every_s = 0.0\n"
    )
    words = ["simulate", str(manifest), "--peers", "4", "--ends", "2", "--epochs", "12"]
    assert cli.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["cells"], said["divisions"], said["slowest_cell_epochs"]) == (2, 1, 12)
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "cells     2 after 1 division, the slowest at epoch 12" in text
    assert "windows   partners found" in text


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("codec", ["fp32", "top-k"])
def test_cells_that_give_differences_keep_equal_anchors(codec: str) -> None:
    deltas = OuterSettings(
        "butterfly",
        "deltas",
        window_s=10.0,
        optimizer="nesterov",
        momentum=0.5,
        codec=codec,
        feedback=codec == "top-k",
    )
    slow = replace(NEAR, work=WorkTimes(ends_s=0.1, forward_s=0.3, step_s=0.1))
    swarm = SimSwarm(replace(slow, ends=3, replicas=3, epochs=1000, outer=deltas), 1)
    anchors: list[set[str]] = []
    for second in range(20, 75):
        swarm.world.run(float(second), None)
        anchors.append({p.work.anchor.name for p in swarm.live(1)})
    rounds = sum(c.cell != "" and not c.tokens for c in swarm.watch.commits)
    assert len({p.training.cell for p in swarm.live()}) == 3
    assert rounds >= 6, "every cell steps in most windows"
    equal = {min(a) for a in anchors if len(a) == 1 and a != {""}}
    assert len(equal) >= 3, "window after window all cells come to one anchor"


@pytest.mark.usefixtures("silence")
def test_cells_that_average_parameters_stay_together() -> None:
    """Cells that never meet, for comparison, have values that drift apart."""
    slow = replace(NEAR, work=WorkTimes(ends_s=0.05, forward_s=0.25, step_s=0.05))
    apart: list[float] = []
    for outer in (
        OuterSettings("moshpit", grid=(2, 2), window_s=20.0),
        OuterSettings("gossip", window_s=100_000.0),
    ):
        swarm = SimSwarm(replace(slow, ends=3, replicas=3, epochs=100_000, outer=outer), 1)
        swarm.world.run(160.0, None)
        stages = {p.training.cell: p.work.stage for p in swarm.live(1)}
        assert len(stages) == 3
        met = any(not commit.tokens for commit in swarm.watch.commits)
        assert met == (outer.window_s == 20.0)
        apart.append(0.0)
        held = [stage.parameters() for stage in stages.values()]
        for name in held[0]:
            values = torch.stack([parameters[name] for parameters in held])
            apart[-1] += float((values.amax(0) - values.amin(0)).sum())
    together, alone = apart
    assert together < 0.75 * alone
