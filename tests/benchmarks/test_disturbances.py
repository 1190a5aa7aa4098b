"""Rows about a disturbance hold only where it happened."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import churn
from benchmarks.proof.everything import Lived, _tell
from benchmarks.real import generated
from benchmarks.report import Report
from benchmarks.shared.churn import Churn
from node.core.errors import TimedOut
from testbed.daemons.books import Books
from testbed.daemons.fleet import Peer
from testbed.swarms.arena import Arena

AUDIT = {
    "verified": True,
    "damaged": [],
    "runs": [{"refused": [], "unsigned": 0, "tokens": 1, "epochs": 1}],
}
PEACE = Lived(loss=3.0, before=4.0, seconds=10, cells={"": 4}, waits=[0.1])
WAR = replace(
    PEACE, audit=AUDIT, killed=["stage-1-0"], damaged="stage-2-0", arrived=2, cells={"": 4}
)


@pytest.mark.parametrize(
    ("missing", "holds"),
    [({}, True), ({"killed": []}, False), ({"damaged": ""}, False), ({"arrived": 0}, False)],
)
def test_everything_at_once_needs_deaths_arrivals_and_a_damaged_disk(
    missing: dict[str, Any], holds: bool
) -> None:
    report = Report()
    _tell(report, "adapters", PEACE, replace(WAR, **missing))
    assert all(row.holds for row in report.rows) is holds


@pytest.mark.parametrize(("deaths", "holds"), [(0, False), (4, False), (5, True), (10, True)])
def test_churn_needs_half_of_the_deaths_that_were_due(deaths: int, holds: bool) -> None:
    dying = Churn(cast("Arena", None))
    dying.kills = [(float(n), f"stage-1-{n}") for n in range(deaths)]
    rough = churn.Ran(1.0, 1.0, Books([]), dying, digests_equal=True)
    report = Report()
    churn.tell(report, 50, 5, rough, rough)
    (row,) = [row for row in report.rows if row.name == "2 deaths"]
    assert row.holds is holds


def test_a_text_that_breaks_off_is_told_by_its_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = threading.Event()

    class Refusing:
        """The control window of a daemon that answers no question for text."""

        def generate(self, request: object) -> None:
            asked.set()
            raise TimedOut("no answer", "ask again")

    monkeypatch.setattr(generated, "ControlClient", lambda _: contextlib.nullcontext(Refusing()))
    reading = generated.Reading(cast("Peer", SimpleNamespace(home=tmp_path)), "the whale")
    with pytest.raises(TimedOut, match="no answer"), reading:
        assert asked.wait(60)
