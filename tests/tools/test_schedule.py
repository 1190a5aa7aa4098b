"""``tutti schedule``: the document, the picture, and every way to ask for the impossible."""

import io
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from cli import main
from node.scheduler.planning.problem import parse
from node.scheduler.planning.replay import replay
from node.tools import schedule
from node.tools.gantt import COLOURS
from testbed.planning.path_problems import DATA, load

B = str(DATA / "skippipe_B.json")


def ask(capsys, *words):
    return main(["schedule", *words]), *capsys.readouterr()


def planned(capsys, *words) -> dict:
    """The document that the command prints with --json; fails unless the exit code is 0."""
    code, out, err = ask(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_json_can_be_replayed(capsys):
    said = planned(capsys, B, "--moves", "800")
    routes = [(row["origin"], *row["hops"]) for row in said["paths"]]
    assert replay(load("B"), routes).makespan == pytest.approx(said["makespan_s"], abs=1e-6)
    assert said["lower_bound_s"] <= said["makespan_s"] < 18.0
    assert said["planning_s"] >= 0
    assert said["deadlock_free"] is True


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (-1e-12, "no other paths can be faster"),
        (0.0, "no other paths can be faster"),
        (0.25, "other paths save at most 25.0% of the makespan"),
    ],
)
def test_what_other_paths_could_save_is_no_negative_number(share: float, says: str):
    assert schedule._saving(share) == says


def test_people_get_a_table_and_a_picture(capsys, tmp_path):
    svg = tmp_path / "plan.svg"
    code, out, _ = ask(capsys, B, "--moves", "200", "--gantt", str(svg), "--slots-ends", "6")
    assert code == 0
    (bound,) = (line for line in out.splitlines() if line.startswith("lower bound"))
    assert re.search(r"other paths save at most [0-9.]+% of the makespan$", bound)
    assert "Australia" in out
    assert len([line for line in out.splitlines() if line.endswith("%")]) == 20
    drawn = ElementTree.parse(svg).getroot()
    titles = [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert (len(titles), sum("loss" in str(t) for t in titles)) == (30 * 9, 30)


def test_the_picture_may_be_a_png(capsys, tmp_path):
    from matplotlib.image import imread  # takes its time to load

    png = tmp_path / "plan.PNG"
    assert ask(capsys, B, "--moves", "50", "--gantt", str(png))[0] == 0
    pixels = (imread(png)[..., :3] * 255).round().astype(int)
    high, wide, _ = pixels.shape
    # Every peer's row is crossed; the forwards of the ends peers come first, and the last task ends
    # at the right.
    colours = {
        kind: [int(text[i : i + 2], 16) for i in (1, 3, 5)] for kind, text in COLOURS.items()
    }
    blue, orange = ((pixels == colours[kind]).all(axis=2) for kind in "fb")
    assert high > 20 * 15
    assert wide > 1000
    assert blue.any(axis=0).argmax() < orange.any(axis=0).argmax()
    runs = (blue | orange).any(axis=1).astype(int)
    assert (runs[1:] > runs[:-1]).sum() >= 20


def test_a_picture_of_another_kind_is_refused_before_planning(capsys, tmp_path):
    code, out, err = ask(capsys, str(tmp_path / "none.json"), "--gantt", str(tmp_path / "plan.bmp"))
    assert (code, out) == (2, "")
    assert "picture" in err


def test_the_problem_may_come_by_stdin(capsys, monkeypatch):
    text = (DATA / "skippipe_B.json").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert len(planned(capsys, "-", "--moves", "50")["paths"]) == 30


def test_unreadable_files_unwritable_charts_and_long_limits_are_refused(capsys, tmp_path):
    assert ask(capsys, str(tmp_path / "none.json"))[0] == 2
    assert ask(capsys, B, "--moves", "50", "--gantt", str(tmp_path / "no" / "plan.svg"))[0] == 1
    assert ask(capsys, B, "--assign", "--limit", "99999")[0] == 2


def test_a_swarm_of_one_of_each_is_planned():
    one = {
        "delays_s": [[0, 1], [1, 0]],
        "compute_s": [1, 1],
        "stages": [[0], [1]],
        "path_length": 2,
        "microbatches_per_end": 2,
    }
    assert parse(one).total == 2


def test_peers_are_put_where_they_are_better(capsys):
    said = planned(capsys, str(DATA / "skippipe_A.json"), "--assign", "--moves", "120")
    assert said["assignment"]["after_s"] < said["assignment"]["before_s"]
    given = json.loads((DATA / "skippipe_A.json").read_text())
    assert [len(peers) for peers in said["stages"]] == [len(peers) for peers in given["stages"]]
    again = parse(given | {"stages": said["stages"]})
    routes = [(row["origin"], *row["hops"]) for row in said["paths"]]
    assert replay(again, routes).makespan == pytest.approx(said["makespan_s"], abs=1e-6)
