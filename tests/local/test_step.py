"""Matrices stepped together by forked ranks over gloo are what one process makes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.local.groups import Sharded, micro_groups

ROOT = Path(__file__).parents[2]
SCENES = ("even", "serial", "one-group", "uneven", "few", "large")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The folder the ranks wrote into, and their exit codes."""
    folder = tmp_path_factory.mktemp("ranks")
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("forked.py")), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    return folder, json.loads(ran.stdout.splitlines()[-1])


def told(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{ranks}-{r}.json").read_text()) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_came_to_the_end(done, ranks):
    assert done[1][0 if ranks == 2 else 1] == [0] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scene", SCENES)
def test_the_updates_are_those_of_one_process_to_the_bit(done, ranks, scene):
    for told_by in told(done[0], ranks):
        assert (told_by[scene]["missing"], told_by[scene]["off"]) == ([], [])


@pytest.mark.parametrize("ranks", [2, 4])
def test_momentum_that_stays_with_the_shards_trains_the_same(done, ranks):
    assert max(told_by["training"] for told_by in told(done[0], ranks)) <= 1e-6


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_hold_what_three_groups_need_and_no_more(done, ranks):
    for told_by in told(done[0], ranks):
        for scene, slots in (("even", 3), ("serial", 1), ("one-group", 1)):
            seen = told_by[scene]
            assert seen["buffer"] == slots * (seen["hosted"] + seen["given"])
        # 64 x 64 alone is above the 10,000 bytes asked for
        assert told_by["even"]["hosted"] <= 16_384
        assert told_by["even"]["groups"] >= 4 - ranks // 4
        assert told_by["large"]["hosted"] == told_by["even"]["hosted"], (
            "one matrix, however little was allowed"
        )
        assert told_by["one-group"]["groups"] == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_keeps_an_unused_collective(done, ranks):
    assert [told_by["unwaited"] for told_by in told(done[0], ranks)] == [0] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_that_are_bad_at_one_rank_are_bad_at_all(done, ranks):
    assert [told_by["finite"] for told_by in told(done[0], ranks)] == [[True, False]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loss_in_pieces_is_that_of_one_device(done, ranks):
    first, *others = [told_by["pieces"] for told_by in told(done[0], ranks)]
    assert len(first) == 4, "rank 0 has the whole gradient of the head as well"
    assert max(first) <= 1e-6
    assert all(len(other) == 3 and max(other) <= 1e-6 for other in others)


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_that_are_cast_once_give_the_same_numbers(done, ranks):
    for told_by in told(done[0], ranks):
        assert len(told_by["copies"]) == 4 * (2 + 9) + 2
        assert all(told_by["copies"])


def test_a_rank_that_dies_is_a_typed_error_at_the_others(done):
    folder, codes = done
    assert codes[2] == [0, 9]
    said = json.loads((folder / "dying-0.json").read_text())
    assert said["lost"]
    assert "lost each other" in said["what"]
    assert "start the node again" in said["next"]


def test_hosts_are_balanced_by_the_cost_of_whole_matrices():
    matrices = [Sharded(f"w{i}", 64, 64, 0, (32, 32)) for i in range(6)] + [
        Sharded("flat", 8, 4096, 0, (4, 4))
    ]
    (group,) = micro_groups(matrices, 2, 1 << 30, 5)
    # The flat matrix has eight times the bytes of a square one and costs two thirds of it.
    assert [sum(m.name != "flat" for m in slot) for slot in group] == [3, 3]


def test_micro_groups_hold_each_part_once_below_the_limit():
    matrices = [Sharded(f"w{i:02}", 16 + i, 32, 0, (16 + i, 0, 0)) for i in range(20)]
    groups = micro_groups(matrices, 3, 8000, 5)
    assert sorted(m.name for g in groups for slot in g for m in slot) == [m.name for m in matrices]
    assert max(sum(4 * m.numel for m in slot) for g in groups for slot in g) <= 8000
    assert micro_groups((), 3, 8000, 5) == ()
