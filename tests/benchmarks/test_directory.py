"""The judgement of readings in the benchmark of the directory."""

import math
from typing import Any

import pytest

from benchmarks.proof.directory import IN_TIME_S, good_share, judge, percentile

FULL, MEASURED = 100.0, 110.0
POSTED = [
    ("here", 0, 50.0, math.inf),
    ("late", 0, 125.0, math.inf),
    ("left", 0, 50.0, 119.0),
    ("other", 1, 50.0, math.inf),
]


def told(*reads: Any, posted: Any = POSTED) -> dict[str, Any]:
    return {
        "posted": posted,
        "reads": reads,
        "failed": [],
        "cpu_s": 30.0,
        "bytes_each": 1000.0,
        "late_s": 0.1,
        "lives": 3,
        "links": 30,
    }


@pytest.mark.parametrize(
    ("ended", "found", "good"),
    [
        (120.1, ["here"], True),
        (120.1, ["here", "left", "late"], True),
        (120.1, ["late", "left", "other"], False),
        (120.0 + IN_TIME_S + 0.1, ["here"], False),
    ],
)
def test_a_reading_is_good_that_shows_all_who_were_there_and_in_time(ended, found, good):
    ran = judge([told((120.0, ended, 0, found, False))], FULL, MEASURED, 60.0)
    assert good_share(ran.of(first=False)) == good


def test_posts_of_all_processes_count():
    reading = (120.0, 120.1, 0, ["here"], False)
    ran = judge([told(reading), told(posted=[("more", 0, 60.0, math.inf)])], FULL, MEASURED, 60.0)
    (read,) = ran.of(first=False)
    assert (read.missing, read.of) == (1, 2)
    assert (ran.nodes, ran.cores, ran.left) == (6, 1.0, 1)


def test_readings_before_the_measurement_count_only_of_newcomers_under_churn():
    early = [(at, at + 0.1, 0, ["here"], first) for at in (99.0, 105.0) for first in (True, False)]
    ran = judge([told(*early)], FULL, MEASURED, 60.0)
    assert [len(ran.of(first=first)) for first in (True, False)] == [1, 0]


def test_no_readings_are_not_good():
    ran = judge([told()], FULL, MEASURED, 60.0)
    assert good_share(ran.of(first=False)) == 0.0
    assert percentile(ran.of(first=False), 0.99) == math.inf
