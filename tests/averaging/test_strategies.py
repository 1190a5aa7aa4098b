"""Groups that each strategy forms: the theorems the strategies are known by, held to numbers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.strategies.strategy import (
    Barrierless,
    Butterfly,
    Groups,
    Moshpit,
    Pairs,
    ParameterServer,
    RandomGroups,
    advance,
    dice,
    first_keys,
    fit,
    meet_by_key,
    order,
    pack,
)
from node.sim.averaging import grouped
from testbed.reference.mixing import mixing

ALL = {
    "butterfly": Butterfly(),
    "all-reduce": Butterfly(whole=True),
    "random groups": RandomGroups(4),
    "moshpit": Moshpit((4, 4)),
    "pairs": Pairs(),
    "server": ParameterServer(2),
}


def values_of(count: int, width: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width))


def everybody(count: int) -> np.ndarray:
    return np.ones(count, bool)


# ------------------------------------------------------------ pure functions


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
@pytest.mark.parametrize("count", [4, 7, 16])
def test_a_meeting_is_a_function_of_members_round_and_seed(strategy, count: int) -> None:
    again = [mixing(strategy.meet(count, 3, seed), everybody(count)) for seed in (5, 5)]
    assert (again[0] == again[1]).all()


@pytest.mark.parametrize("strategy", ALL.values(), ids=ALL)
@given(st.integers(2, 16), st.integers(0, 40), st.data())
@settings(max_examples=15, deadline=None)
def test_nobody_meets_twice_and_the_absent_keep_their_values(
    strategy, count: int, number: int, data
) -> None:
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    meeting = strategy.meet(count, number, 1)
    values = values_of(count)
    matrix = mixing(meeting, alive)
    assert (matrix >= 0).all()
    assert np.allclose(matrix.sum(1), 1)
    assert (matrix[~alive] == np.eye(count)[~alive]).all()
    assert (matrix[:, ~alive] == np.eye(count)[:, ~alive]).all()
    if not meeting.owners or alive[list(meeting.owners)].all():
        assert np.allclose(matrix @ values, grouped(meeting, values, alive))
    assert np.allclose(matrix.sum(0), 1)  # the mean of all is preserved


def test_the_dice_are_the_same_on_every_machine() -> None:
    """Words of Philox and a stable sort. numpy guarantees the words; these numbers are a record."""
    assert dice(1, "a", 2).random_raw(2).tolist() == [9057045604928955888, 9014286728687812316]
    assert order(6, 1, "x").tolist() == [1, 0, 2, 3, 4, 5]
    assert sorted(order(1000, 7).tolist()) == list(range(1000))


# ------------------------------------------------------------ Moshpit


@pytest.mark.parametrize(("length", "axes"), [(4, 2), (4, 3), (8, 3), (32, 2), (2, 6)])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_full_grid_averages_exactly_in_as_many_rounds_as_axes(
    length: int, axes: int, begin: int
) -> None:
    count = length**axes
    values = values_of(count)
    strategy = Moshpit((length,) * axes)
    mean = values.mean()
    for number in range(begin, begin + axes):
        assert values.var() > 1e-6
        values = grouped(strategy.meet(count, number, 3), values, everybody(count))
    assert np.abs(values - mean).max() < 1e-14
    assert values.var() < 1e-29


@pytest.mark.parametrize(("length", "axes"), [(4, 2), (4, 3), (8, 3), (32, 2)])
def test_keys_average_exactly_too(length: int, axes: int) -> None:
    """The paper's rule, with no view: only the last indices decide who meets."""
    count = length**axes
    values = values_of(count)
    keys = first_keys(count, (length,) * axes, 1)
    for number in range(axes):
        groups = meet_by_key(keys, length)
        values = grouped(groups, values, everybody(count))
        keys = advance(keys, groups, everybody(count), length, number, 1)
    assert values.var() < 1e-29


def test_members_that_met_meet_again_only_after_all_indices() -> None:
    keys = first_keys(64, (4, 4, 4), 2)
    for number in range(6):
        before = meet_by_key(keys, 4).labels
        keys = advance(keys, Groups(before), everybody(64), 4, number, 2)
        again = meet_by_key(keys, 4).labels
        same = (before[:, None] == before) & (again[:, None] == again)
        assert same.sum() == 64


def test_a_failed_member_keeps_its_key_and_groups_stay_bounded() -> None:
    keys = first_keys(60, (8, 8), 0)
    failed = np.zeros(60, bool)
    failed[:20] = True
    for number in range(10):
        groups = meet_by_key(keys, 8)
        assert np.bincount(groups.labels).max() <= 8
        moved = advance(keys, groups, ~failed, 8, number, 0)
        assert (moved[failed] == keys[failed]).all()
        keys = moved


@pytest.mark.parametrize(
    ("count", "longest", "shape"),
    [
        (512, (32, 32), (16, 32)),
        (900, (32, 32), (30, 30)),
        (1024, (32, 32), (32, 32)),
        (12, (4, 4), (3, 4)),
        (64, (4, 4, 4), (4, 4, 4)),
    ],
)
def test_a_grid_is_packed_full_where_it_can_be(
    count: int, longest: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert pack(count, longest) == shape


@given(st.integers(2, 3000), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_a_grid_holds_everybody_and_no_axis_is_too_long(count: int, most: int) -> None:
    shape = fit(count, most)
    assert math.prod(shape) >= count
    assert max(shape) <= most


# ------------------------------------------------------------ contraction


SIZES = ((12, 4), (16, 4), (64, 8), (60, 13))


def contraction(strategy, count: int, rounds: int = 16, width: int = 2000) -> float:
    """Ratio of mean variances before and after a round, from independent normal values."""
    before = after = 0.0
    for number in range(rounds):
        values = values_of(count, width, number)
        before += values.var(0).mean()
        after += (mixing(strategy.meet(count, number, 11), everybody(count)) @ values).var(0).mean()
    return after / before


@pytest.mark.parametrize(
    ("strategy", "count", "expected"),
    [
        # r groups of n members by (r - 1) / (n - 1), one pair by 1 - 1 / (n - 1)
        *((RandomGroups(size), n, (n // size - 1) / (n - 1)) for n, size in SIZES),
        *((Pairs(single=True), n, 1 - 1 / (n - 1)) for n in (4, 16, 64)),
    ],
)
def test_random_meetings_contract_as_published(strategy, count: int, expected: float) -> None:
    assert contraction(strategy, count) == pytest.approx(expected, rel=0.01)


def test_pairs_are_drawn_evenly() -> None:
    met = np.zeros((6, 6))
    for number in range(1500):
        labels = Pairs(single=True).meet(6, number, 0).labels
        met += labels[:, None] == labels
    assert met[np.triu_indices(6, 1)] / 1500 == pytest.approx(np.full(15, 1 / 15), abs=0.03)


# ------------------------------------------------------------ servers


@pytest.mark.parametrize("shards", [1, 4])
def test_a_parameter_server_equals_a_butterfly_with_one_owner(shards: int) -> None:
    values = values_of(9, 12)
    meeting = ParameterServer(shards).meet(9, 0, 0)
    assert len(meeting.owners) == shards
    butterfly = grouped(Butterfly().meet(9, 0, 0), values, everybody(9))
    assert (grouped(meeting, values, everybody(9)) == butterfly).all()


def test_only_a_lost_servers_shares_are_not_averaged() -> None:
    values = values_of(9, 12)
    meeting = ParameterServer(4).meet(9, 0, 0)
    alive = everybody(9)
    alive[meeting.owners[2]] = False
    new = grouped(meeting, values, alive)
    untouched = [c for c in range(12) if (new[:, c] == values[:, c]).all()]
    assert untouched == [2, 6, 10]


def test_an_all_reduce_with_somebody_missing_is_void() -> None:
    values = values_of(5)
    alive = everybody(5)
    alive[1] = False
    assert (grouped(Butterfly(whole=True).meet(5, 0, 0), values, alive) == values).all()
    assert grouped(Butterfly().meet(5, 0, 0), values, alive)[alive].std() < 1e-15


def test_pushes_meet_at_owners_within_a_bound_or_without() -> None:
    assert Barrierless(3).meet(5, 0, 0).bound == 3
    assert not Barrierless(locked=False).meet(5, 0, 0).locked
