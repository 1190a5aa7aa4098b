"""Makespan at or near the least, floors that hold, one owner for every unit, the same answer
everywhere."""

import itertools
import math
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.errors import OutOfResources, UsageFault
from node.core.ids import PeerId
from node.partition.balance import balance, longest_first
from node.partition.bounds import lower_bound
from node.partition.exact import KINDS, _branched, _packed, settle
from node.partition.matrices import Matrix, Unit, muon_flops, units_of
from node.partition.plan import assign_units, make_plan, quantised
from node.partition.search import OwnershipProblem, SearchState
from testbed.reference.buckets import fill_buckets
from testbed.reference.layouts import Wire, choose_layout, permuted_shards
from testbed.reference.qwen3 import MODELS, fused_form, split_form
from testbed.reference.sharing import break_even, who_computes

few = st.lists(st.integers(1, 60), min_size=1, max_size=8)
pace = st.lists(st.sampled_from([0.5, 1.0, 1.0, 1.5, 2.0, 3.7]), min_size=1, max_size=4)


def units(costs, sizes=None):
    return [
        Unit(f"w{i:04}", 1, c, c, s)
        for i, (c, s) in enumerate(zip(costs, sizes or costs, strict=True))
    ]


def least(costs, speeds):
    """Every plan tried."""
    best = math.inf
    for owner in itertools.product(range(len(speeds)), repeat=len(costs)):
        loads = [0] * len(speeds)
        for c, p in zip(costs, owner, strict=True):
            loads[p] += c
        best = min(best, max(load / s for load, s in zip(loads, speeds, strict=True)))
    return best


@settings(max_examples=60, deadline=None)
@given(few.filter(lambda c: len(c) <= 7), pace)
def test_few_units_are_placed_optimally(costs, speeds):
    costs.sort(reverse=True)
    owner, floor = balance(OwnershipProblem(costs, speeds))
    best = least(costs, speeds)
    assert SearchState(OwnershipProblem(costs, speeds), owner).makespan() == pytest.approx(
        best, rel=1e-9
    )
    assert max(floor, lower_bound(costs, speeds)) <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(few.filter(lambda c: len(c) <= 7), pace)
def test_both_exact_searches_find_the_optimum(costs, speeds):
    costs.sort(reverse=True)
    problem = OwnershipProblem(costs, speeds)
    best = least(costs, speeds)
    worst = SearchState(problem, [0] * len(costs))
    for search in (settle, _branched):
        found, proof = search(worst, 0.0)
        assert found.makespan() == pytest.approx(
            best, rel=2e-4 if search is settle and len(set(costs)) > KINDS else 1e-9
        )
        if search is settle:
            assert proof <= best * (1 + 1e-9)
        else:
            assert proof


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([3, 5, 7, 11]), min_size=4, max_size=8),
    st.sampled_from([[1.0, 1.0, 1.0], [1.0, 1.5], [0.5, 1.0, 2.0]]),
)
def test_packing_knows_whether_there_is_a_plan(costs, speeds):
    costs.sort(reverse=True)
    problem = OwnershipProblem(costs, speeds)
    best = least(costs, speeds)
    owner, _ = _packed(problem, best, 300)
    assert owner is not None
    assert SearchState(problem, owner).makespan() == pytest.approx(best)
    assert _packed(problem, best * (1 - 1e-6), 300) == (None, True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=12),
)
def test_a_plan_is_no_better_than_its_floor(costs, speeds):
    plan = make_plan(units(costs), speeds, "muon")
    assert set(plan.owner) == {u.name for u in units(costs)}
    assert set(plan.owner.values()) <= set(range(len(speeds)))
    assert sum(plan.loads) == sum(costs)
    assert 1 <= plan.floor_over_ideal <= plan.over_ideal
    assert plan.floor >= max(costs) / max(speeds) * (1 - 1e-12)
    longest = SearchState(
        OwnershipProblem(sorted(costs, reverse=True), speeds),
        longest_first(OwnershipProblem(sorted(costs, reverse=True), speeds)),
    )
    assert plan.makespan <= longest.makespan() * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "form", "ranks", "expected"),
    [
        ("32B", split_form, 256, 1.0583),
        ("32B", split_form, 200, 1.1425),
        ("32B", fused_form, 256, 2.0388),
        ("1.7B", split_form, 32, 1.0063),
    ],
)
def test_transformers_reach_their_floor(name, form, ranks, expected):
    plan = make_plan(units_of(form(MODELS[name]), "muon"), [1.0] * ranks, "muon")
    assert plan.over_ideal == pytest.approx(expected, abs=1e-4)
    assert plan.over_ideal == pytest.approx(plan.floor_over_ideal, rel=1e-6)


def test_splitting_lowers_the_floor():
    fused = fused_form(MODELS["32B"])
    parts = fused_form(MODELS["32B"], "parts")
    whole, split = (
        make_plan(units_of(m, "muon"), [1.0] * 256, "muon", tensor=8) for m in (fused, parts)
    )
    assert split.over_ideal <= 1.07
    assert split.makespan < whole.makespan / 1.8


def test_giant_thousands_and_more_ranks_than_units():
    giant = make_plan(units([10**6, *[1] * 50]), [1.0, 2.0, 4.0], "muon")
    assert giant.owner["w0000"] == 2
    assert giant.makespan == pytest.approx(10**6 / 4)
    dice = random.Random(1)
    many = make_plan(
        units([dice.randint(1, 10**7) for _ in range(3000)]),
        [dice.uniform(0.5, 4) for _ in range(40)],
        "muon",
    )
    assert many.over_ideal < 1.0005
    idle = make_plan(units([5, 5, 4]), [1.0] * 10, "muon")
    assert sorted(idle.owner.values()) == [0, 1, 2]
    assert idle.over_ideal == idle.floor_over_ideal


BY_COST = [100, 50, 50, 50]
BY_BYTES = [80, 10, 10, 10]


def test_memory_is_a_key_of_its_own():
    # By cost alone the first rank would take the first unit and little else; its memory holds only
    # the small units.
    items = units(BY_COST, BY_BYTES)
    plan = make_plan(items, [4.0, 1.0], "muon", room=[30, 200])
    assert plan.owner["w0000"] == 1
    assert sum(u.bytes for u in items if plan.owner[u.name] == 0) <= 30


@pytest.mark.parametrize(
    ("items", "room", "why"),
    [
        (units(BY_COST, BY_BYTES), [30, 40], "w0000"),
        (units([10, 5], [80, 20]), [0, 90], "room"),
    ],
)
def test_state_that_fits_nowhere_is_refused(items, room, why):
    with pytest.raises(OutOfResources, match=why):
        make_plan(items, [4.0, 1.0], "muon", room=room)


@pytest.mark.parametrize(
    ("items", "speeds", "more"),
    [
        *((units([1]), speeds, {}) for speeds in ([], [0.0], [-1.0], [math.nan], [math.inf])),
        ([], [1.0], {}),
        (units([1]) * 2, [1.0], {}),
        (units([1]), [1.0] * 6, {"tensor": 4}),
        (units([1]), [1.0] * 2, {"room": [1]}),
    ],
)
def test_input_that_cannot_be_planned_is_refused(items, speeds, more):
    with pytest.raises(UsageFault):
        make_plan(items, speeds, "muon", **more)


def test_an_unknown_speed_counts_as_the_mean():
    items = units([3] * 6)
    known = assign_units(items, [(PeerId("a"), 1.0), (PeerId("b"), 3.0), (PeerId("c"), 2.0)])
    assert (
        assign_units(items, [(PeerId("a"), 1.0), (PeerId("b"), 3.0), (PeerId("c"), 0.0)]) == known
    )


def test_every_process_makes_the_same_plan():
    program = (
        "import random\n"
        "from node.partition.plan import make_plan\n"
        "from node.partition.matrices import units_of\n"
        "from testbed.reference.qwen3 import MODELS, fused_form\n"
        "d = random.Random(3)\n"
        "s = [d.lognormvariate(0, .7) for _ in range(9)]\n"
        "u = units_of(fused_form(MODELS['0.6B']), 'soap')\n"
        "p = make_plan(u, s, 'soap')\n"
        "q = make_plan(u, s[:-1], 'soap', p.owner)\n"
        "print(p.hash, q.hash, repr(p.makespan), repr(q.makespan), repr(p.floor))\n"
        "from node.optim.ownership import assign, ownership_hash\n"
        "from node.optim.parts import ParameterPart\n"
        "costs = [float(1 + i * 7 % 13) for i in range(50)]\n"
        "ps = [ParameterPart(f'w{i}', (i + 1, 1), c, i, True) for i, c in enumerate(costs)]\n"
        "owners = assign(ps, [(f'p{i}', i / 3) for i in range(7)])\n"
        "print(ownership_hash(ps, owners, 'muon'))\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert [len(words.split()) for words in said] == [6]


def test_tensor_groups_hold_near_equal_bytes():
    items = units_of(split_form(MODELS["0.6B"]), "muon")
    flat = make_plan(items, [1.0] * 16, "muon")
    joint = make_plan(items, [1.0] * 16, "muon", tensor=4)
    assert joint.makespan == flat.makespan
    held = [sum(u.bytes for u in items if joint.owner[u.name] // 4 == g) for g in range(4)]
    assert max(held) <= 1.03 * sum(held) / 4


@pytest.mark.parametrize(
    ("speed", "rounded"), [(1.0, 1.0), (1.124, 1.0), (1.126, 1.125), (3.99, 3.75), (0.0, 0.0)]
)
def test_speeds_are_rounded_down_in_steps(speed, rounded):
    assert quantised(speed) == rounded
    assert all(quantised(quantised(x)) == quantised(x) > x * 0.88 for x in (0.017, 5.3, 1e9))
    with pytest.raises(UsageFault):
        quantised(-1.0)


def test_a_matrix_is_computed_by_all_where_its_update_travels_longer():
    small, large = units_of([Matrix("small", 256, 1024), Matrix("large", 5120, 25600)], "muon")
    gigabit = 1e9 / 8
    assert [break_even(u, 150e9) / gigabit for u in (small, large)] == pytest.approx(
        [0.42, 0.02], abs=0.006
    )
    assert break_even(small, 600e12) / gigabit == pytest.approx(1667, abs=1)
    peers = [150e9] * 4
    between = 0.2 * gigabit
    assert {c.name: c.shared for c in who_computes([small, large], peers, [between] * 4)} == {
        "small": False,
        "large": True,
    }
    assert all(
        c.shared for c in who_computes([small, large], peers, [1.0] * 4, exchange="to-owner")
    )
    assert not who_computes([large], [1e9], [1e9])[0].shared
    for at, wanted in ((1.01, True), (0.99, False)):
        assert who_computes([small], peers, [break_even(small, 150e9) * at] * 4)[0].shared is wanted
    with pytest.raises(UsageFault):
        who_computes([small], [1.0], [])


def test_layouts_are_chosen_by_time():
    shards = fused_form(MODELS["0.6B"], tensor=1)
    items = units_of(fused_form(MODELS["0.6B"]), "muon")
    buckets = fill_buckets([(m.name, m.rows * m.cols) for m in shards], 8, 100_000_000)
    direct = choose_layout(items, buckets, 8, Wire(1e12, 1e9, message_s=0.0))
    assert direct[0].kind == "parts"
    assert [x.seconds for x in direct] == sorted(x.seconds for x in direct)
    dear = choose_layout(items, buckets, 8, Wire(1e15, 1e12, message_s=1.0))
    assert dear[0].kind == "permuted"
    assert {x.kind for x in dear} == {"contiguous", "permuted", "parts"}
    for layout in (*direct, *dear):
        assert set(layout.owner) == {u.name for u in items}
        assert (layout.padding > 0) == (layout.kind == "permuted")
    owner, sizes = permuted_shards(items, buckets, 8, 0.3)
    for b, size in zip(buckets, sizes, strict=True):
        for rank in range(8):
            assert sum(end - start for name, start, end in b.spans if owner[name] == rank) <= size
    with pytest.raises(UsageFault):
        choose_layout([*items, *units([1])], buckets, 8, Wire(1e12, 1e9))


def test_true_cost_is_of_the_whole_matrix():
    assert units_of([Matrix("w", 6, 4, (("a", 2), ("b", 4)))], "muon")[1].cost == muon_flops(4, 4)


def test_ample_memory_does_not_change_the_plan():
    items = units_of(fused_form(MODELS["0.6B"], "parts"), "soap")
    free = make_plan(items, [1.0] * 12, "soap")
    held = [sum(u.bytes for u in items if free.owner[u.name] == r) for r in range(12)]
    assert make_plan(items, [1.0] * 12, "soap", room=held).owner == free.owner
    tight = make_plan(items, [1.0] * 12, "soap", room=[max(held) - 1] * 12)
    assert max(sum(u.bytes for u in items if tight.owner[u.name] == r) for r in range(12)) < max(
        held
    )


@pytest.mark.parametrize("speeds", [(5e-324, 1.0), (1e17, 1e-300), (5e-324, 5e-324)])
def test_hardly_any_speed_is_still_one(speeds):
    items = units([5, 4, 3])
    peers = [(PeerId(str(i)), s) for i, s in enumerate(speeds)]
    owners = assign_units(items, peers)
    assert owners.keys() == {u.name for u in items}
    assert assign_units(items, peers, owners) == owners


def test_less_work_gives_a_plan_too():
    items = units_of(fused_form(MODELS["1.7B"], "parts"), "muon")
    quick, long = (
        make_plan(items, [1.0 + r / 7 for r in range(24)], "muon", work=w)
        for w in (2_000, 1_500_000)
    )
    assert long.makespan <= quick.makespan <= 1.05 * long.makespan
