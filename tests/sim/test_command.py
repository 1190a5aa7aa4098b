"""`tutti simulate`: its output, pictures, saved schedules and replays."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

import cli
from node.core.errors import ExitCode, UsageFault
from node.manifest import Manifest
from node.sim import command
from node.sim.command import setup_of
from node.sim.faults import KINDS, Fault, Schedule
from node.sim.invariants import InvariantViolation
from node.sim.names import SCENARIOS
from node.sim.run import run
from node.sim.setup import Setup
from node.sim.show import MARKS, svg, timeline


@pytest.fixture
def outcome():
    return run(Setup(), Schedule(1, (Fault(5.0, "kill", 1), Fault(7.0, "pause", 2, seconds=3.0))))


def test_help_lists_the_scenarios() -> None:
    text = " ".join(
        CliRunner().invoke(cli.app, ["simulate", "--help"], env={"COLUMNS": "200"}).stdout.split()
    )
    # A line may end at the hyphen of a name.
    assert all(name in text.replace("- ", "-") for name in SCENARIOS)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "line.svg"
    saved = tmp_path / "faults.json"
    words = "simulate --small --scenario kill --scenario pause --seed 3 --json".split()
    assert cli.main([*words, "--svg", str(picture), "--save", str(saved)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["epochs"] == first["epochs_wanted"] == 12
    assert (first["violation"], first["scenario"]) == (None, "kill, pause")
    assert ET.parse(picture).getroot().tag.endswith("svg")
    drawn = tmp_path / "line.png"
    assert (
        cli.main(["simulate", "--small", "--replay", str(saved), "--json", "--png", str(drawn)])
        == 0
    )
    assert drawn.read_bytes().startswith(b"\x89PNG")
    again = json.loads(capsys.readouterr().out)
    assert {k: v for k, v in again.items() if k not in ("wall_s", "scenario")} == {
        k: v for k, v in first.items() if k not in ("wall_s", "scenario")
    }


def test_people_get_a_time_line_without_colour_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main(["simulate", "--small", "--scenario", "churn", "--seed", "1"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 50
    assert "12 of 12 committed" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--scenario", "nonsense"],
        ["--peers", "3", "--stages", "8"],
        ["--replay", "/nowhere"],
        ["/nowhere/swarm.toml"],
    ],
)
def test_an_impossible_simulation_is_refused_with_the_reason(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *words]) == ExitCode.USAGE
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"seed": 1}',
        '{"seed": 1, "faults": [{"at": 1, "kind": "no"}]}',
        '{"seed": 1, "faults": [{"at": -1, "kind": "kill"}]}',
        '{"seed": 1, "faults": [{"at": 1, "kind": "kill", "who": "s01-000"}]}',
        '{"seed": 1, "faults": [{"at": 1, "kind": "kill", "stage": 1.5}]}',
        '{"seed": 1, "faults": [{"at": 1, "kind": "kill", "size": "much"}]}',
        '{"seed": 1e999, "faults": []}',
        "[" * 100_000,
        b"\xff",
    ],
)
def test_a_file_that_is_no_schedule(text: str | bytes) -> None:
    with pytest.raises(UsageFault):
        Schedule.from_json(text)


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        pytest.param(b"\x89PNG\xff", "no schedule", id="another file"),
        pytest.param(
            Schedule(1, (Fault(5.0, "join", stage=99),)).to_json().encode(),
            "stage 99 of",
            id="a stage that is not there",
        ),
    ],
)
def test_a_replay_of_what_this_swarm_cannot_play_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: bytes, why: str
) -> None:
    file = tmp_path / "saved"
    file.write_bytes(saved)
    assert cli.main(["simulate", "--small", "--replay", str(file)]) == ExitCode.USAGE
    assert why in capsys.readouterr().err


def test_a_broken_invariant_is_shown_with_its_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(setup: Setup, schedule: Schedule, make: object = None) -> object:
        found = run(setup, schedule)
        found.violation = InvariantViolation(
            "I1", 3.25, "two truths", schedule.seed, ["what came before"]
        )
        return found

    monkeypatch.setattr(command, "run", breaks)
    assert cli.main(["simulate", "--small", "--scenario", "kill"]) == ExitCode.DEGRADED
    said = capsys.readouterr().err
    assert "I1 at 3.250 s: two truths" in said
    assert "what came before" in said
    assert '"kind": "kill"' in said
    assert "--replay" in said


def test_the_time_line_fits_and_marks_every_kind_of_fault(outcome) -> None:
    for width in (30, 80, 200):
        lines = timeline(outcome, width)
        assert max(map(len, lines)) <= width
        marks = next(line for line in lines if line.startswith("faults"))
        assert {"x", "p"} <= set(marks.removeprefix("faults"))
    assert "\x1b[" in "".join(timeline(outcome, 80, colour=True))
    assert set(MARKS) == set(KINDS)
    top = timeline(outcome, 80)[0]
    bottom = timeline(outcome, 80)[5]
    assert top.count("█") < bottom.count("█"), "epochs go up"


def test_the_picture_has_a_line_for_every_fault(outcome) -> None:
    root = ET.fromstring(svg(outcome, "a <title>"))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [t.split()[2] for t in titles] == ["kill", "pause"]


def test_a_simulated_swarm_has_the_manifests_parts_and_peers() -> None:
    m = Manifest.default_demo()
    setup = setup_of(peers=25, epochs=7, stages=5)
    assert (setup.peers, (setup.stages, setup.epochs, setup.ends)) == (25, (5, 7, 2))
    assert setup.micro_batches == m.training.target_batch // m.pipeline.micro_batch
    assert (
        sum(part.bytes for parts in setup.parts.values() for part in parts)
        > 4 * m.parameter_count() * 0.9
    )
