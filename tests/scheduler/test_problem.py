"""A path problem from a document: every field is checked, and the error for an impossible one names
the next step."""

import math

import pytest

from node.core.errors import UsageFault
from node.scheduler.planning.dealing import deal, legal, orders
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.problem import parse


def small(**changes):
    """Two ends peers, three block stages of two, paths of two of them."""
    size = 8
    return {
        "name": "small",
        "delays_s": [
            [0.0 if a == b else 0.1 + 0.01 * ((a * 7 + b * 3) % 10) for b in range(size)]
            for a in range(size)
        ],
        "compute_s": [0.2 + 0.01 * n for n in range(size)],
        "stages": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "path_length": 3,
        "slots_ends": 2,
        "slots_stage": 2,
        "microbatches_per_end": 3,
        "backward_ratio": 1.5,
        "loss_ratio": 0.25,
        "gap_s": 0.05,
        "max_swaps": 1,
        "max_swap_distance": 1,
        "max_jump": 3,
        "equal_visits": True,
    } | changes


def row(value):
    rows = small()["delays_s"]
    rows[2][3] = value
    return rows


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"delays_s": row(math.nan)}, "row 2"),
        ({"delays_s": row(-1.0)}, "row 2"),
        ({"delays_s": row(math.inf)}, "row 2"),
        ({"delays_s": row("far")}, "row 2"),
        ({"delays_s": row(1e300)}, "row 2"),
        ({"delays_s": row(None)}, "row 2"),
        ({"delays_s": small()["delays_s"][:-1]}, "7 rows"),
        ({"delays_s": [r[:-1] for r in small()["delays_s"]]}, "7 figures"),
        ({"compute_s": [0.1] * 7 + [-0.1]}, "compute_s"),
        ({"compute_s": [0.1] * 7}, "8 rows"),
        ({"compute_s": []}, "0 peers"),
        ({"stages": [[0, 1], [2, 3], [4, 5], []]}, "stage 3"),
        ({"stages": [[0, 1], [2, 3], [4, 2]]}, "peer 2"),
        ({"stages": [[0, 1], [2, 8]]}, "8"),
        ({"stages": "all"}, "stages"),
        ({"path_length": 5}, "path_length"),
        ({"path_length": 0}, "path_length"),
        ({"path_length": 2.5}, "path_length"),
        ({"slots_ends": 0}, "slots_ends"),
        ({"slots_stage": [1, 2]}, "slots_stage"),
        ({"microbatches_per_end": 0}, "micro-batches"),
        ({"microbatches_per_end": [1]}, "1 figures"),
        ({"microbatches_per_end": 1 << 20}, "micro-batches"),
        ({"gap_s": -0.1}, "gap_s"),
        ({"loss_ratio": True}, "loss_ratio"),
        ({"equal_visits": 1}, "equal_visits"),
        ({"owed": {"5": [1]}}, "no ends peer"),
        ({"owed": {"0": [4]}}, "owed"),
        ({"owed": [1]}, "owed"),
        ({"max_jump": 0}, "max_jump"),
        ({"reference": {"paper": 10**400}}, "reference paper"),
        ({"reference": {"paper": math.nan}}, "reference paper"),
    ],
)
def test_what_is_wrong_is_named(changes, word):
    with pytest.raises(UsageFault) as fault:
        parse(small(**changes))
    assert word in fault.value.what
    assert fault.value.next_step


@pytest.mark.parametrize("document", [None, [], 3, {}, {"delays_s": []}])
def test_a_document_that_is_no_problem_is_refused(document):
    with pytest.raises(UsageFault):
        parse(document)


def test_indivisible_visits_name_the_next_divisible_number():
    with pytest.raises(UsageFault, match="equal visits") as fault:
        deal(parse(small(microbatches_per_end=2)))
    assert "6 micro-batches" in fault.value.next_step
    assert len(deal(parse(small(microbatches_per_end=2, equal_visits=False)))) == 4


def test_an_unreachable_stage_names_the_nearest_max_jump():
    with pytest.raises(UsageFault, match="max_jump 1") as fault:
        deal(parse(small(max_jump=1, max_swaps=0)))
    assert "max_jump 2" in fault.value.next_step
    assert len(deal(parse(small(max_jump=2, max_swaps=0)))) == 6


def test_owing_more_than_paths_have_is_refused():
    with pytest.raises(UsageFault, match="owed"):
        make_plan(parse(small(microbatches_per_end=[1, 5], owed={"0": [1, 2, 3]})), moves=100)


@pytest.mark.parametrize("blocks", [3, 5, 9])
@pytest.mark.parametrize("jump", [2, 3, 9])
def test_dealt_sets_are_legal_and_equal(blocks, jump):
    for hops in range(1, blocks + 1):
        size = blocks + 1
        problem = parse(
            small(
                stages=[[n] for n in range(size)],
                compute_s=[1.0] * size,
                delays_s=[[1.0] * size] * size,
                path_length=hops + 1,
                microbatches_per_end=2 * blocks,
                max_jump=jump,
            )
        )
        try:
            sets = deal(problem)
        except UsageFault:
            # Only jumps can stand in the way, and only when some stage is too far.
            assert jump < blocks - hops + 1
            continue
        assert all(len(set(z)) == hops and legal(problem, z) for z in sets)
        assert {sum(s in z for z in sets) for s in range(1, blocks + 1)} == {2 * hops}


def test_orders_are_those_that_keep_the_rules():
    problem = parse(small(path_length=4))
    assert orders(problem, (1, 2, 3)) == [(1, 2, 3), (1, 3, 2), (2, 1, 3)]
    assert orders(parse(small(path_length=4, max_swaps=0)), (1, 2, 3)) == [(1, 2, 3)]
    twice = parse(small(path_length=4, max_swaps=2, max_swap_distance=2))
    assert (3, 1, 2) not in orders(twice, (1, 2, 3))
    assert (2, 3, 1) in orders(twice, (1, 2, 3))
