from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.core.journey import Hop
from node.scheduler.paths import assign_paths

A, B, P, Q, R = (PeerId(x) for x in "ABPQR")
SAMPLES = [(2 * i, 2 * i + 1) for i in range(8)]


def test_every_micro_batch_visits_each_stage_once_within_quotas() -> None:
    paths = assign_paths([(A, 6), (B, 2)], {1: [(P, 1.0), (Q, 3.0)], 2: [(R, 0.0)]}, SAMPLES)
    assert ([p.index for p in paths], [p.samples for p in paths]) == (list(range(8)), SAMPLES)
    assert Counter(p.origin for p in paths) == {A: 6, B: 2}
    assert all([h.stage for h in p.hops] == [1, 2] for p in paths)
    assert Counter(p.hops[0].peer for p in paths) == {Q: 6, P: 2}
    assert paths[0].hops[1] == Hop(2, R)


def test_origins_are_interleaved() -> None:
    paths = assign_paths([(A, 6), (B, 2)], {1: [(P, 1.0)]}, SAMPLES)
    assert "".join(p.origin for p in paths) == "AAABAAAB"


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_arguments_does_not_matter(rng) -> None:
    origins = [(A, 5), (B, 3)]
    stages = {1: [(P, 1.0), (Q, 3.0), (R, 0.0)], 2: [(Q, 2.0), (R, 2.0)]}
    expected = assign_paths(origins, stages, SAMPLES)
    shuffled = [(s, rng.sample(stages[s], len(stages[s]))) for s in rng.sample([1, 2], 2)]
    assert assign_paths(rng.sample(origins, 2), dict(shuffled), SAMPLES) == expected


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_any_quotas_are_met_exactly(counts: list[int]) -> None:
    origins = [(PeerId(f"o{i}"), n) for i, n in enumerate(counts)]
    paths = assign_paths(origins, {1: [(P, 1.0)]}, [(i,) for i in range(sum(counts))])
    assert Counter(p.origin for p in paths) == {p: n for p, n in origins if n}


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="add up"):
        assign_paths([(A, 7)], {1: [(P, 1.0)]}, SAMPLES)
    with pytest.raises(ValueError, match="stage 2 has no replica"):
        assign_paths([(A, 8)], {1: [(P, 1.0)], 2: []}, SAMPLES)
    with pytest.raises(ValueError, match="numbered"):
        assign_paths([(A, 8)], {0: [(P, 1.0)], 2: [(P, 1.0)]}, SAMPLES)
    with pytest.raises(ValueError, match="twice"):
        assign_paths([(A, 4), (A, 4)], {1: [(P, 1.0)]}, SAMPLES)
    assert assign_paths([(A, 0)], {1: [(P, 1.0)]}, []) == ()
