"""Tokens and live peers of a story with deaths."""

import pytest

from benchmarks.proof.goodput import live_peers, stretch
from testbed.daemons.books import COMMITTED, PLANNED
from testbed.daemons.told import Told


def planned(at: float, epoch: int, members: int, listeners: int = 0, **more: object) -> Told:
    fields = {"epoch": epoch, "members": members, "listeners": listeners, **more}
    return Told("ends-0", at, "debug", "epoch", PLANNED, "", fields)


def committed(at: float, epoch: int, tokens: int, lineage: str, term: int = 0) -> Told:
    fields = {"epoch": epoch, "tokens": tokens, "lineage": lineage, "term": term}
    return Told("ends-0", at, "info", "epoch", COMMITTED, "", fields)


STORY = (
    planned(0.0, 0, 12),
    committed(10.0, 1, 100, "x"),
    planned(10.0, 1, 12, lineage="x"),
    committed(20.0, 2, 100, "y"),
    planned(20.0, 2, 12, 1, lineage="y"),
    committed(36.0, 3, 80, "z"),
)


def test_a_dead_peer_is_live_until_its_death_and_a_newcomer_from_its_plan():
    assert live_peers(STORY, [], 10.0, 20.0) == 12.0
    assert live_peers(STORY, [15.0], 10.0, 20.0) == 11.5
    assert live_peers(STORY, [15.0], 20.0, 36.0) == 11.0
    joined = [*STORY, planned(36.0, 3, 12, lineage="z")]
    assert live_peers(joined, [15.0], 20.0, 40.0) == pytest.approx((16 * 11 + 4 * 12) / 20)


def test_only_epochs_that_hold_between_the_commits_count():
    again = (
        planned(21.0, 2, 11, lineage="y", term=1),
        committed(24.0, 3, 1000, "given up", term=1),
    )
    held = stretch(sorted([*STORY, *again], key=lambda e: e.at), [], 10.0, 36.0)
    assert (held.tokens, held.seconds) == (180, 26.0)
    assert held.gaps == (10.0, 16.0)
