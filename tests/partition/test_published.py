"""The published planner, reproduced: its ratios, its sweep, its groups, and the counts of
operations behind our own cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.errors import UsageFault
from node.partition.matrices import (
    Matrix,
    Rates,
    Unit,
    equal_splits,
    flops,
    muon_flops,
    soap_flops,
    state_bytes,
    units_of,
)
from node.partition.plan import bounded_groups, make_plan
from testbed.reference.buckets import (
    Bucket,
    alpha_balanced,
    alpha_cuts,
    balance_ratio,
    fill_buckets,
    owners_of_cuts,
    shard_flops,
    start_index,
)
from testbed.reference.groups import group_time, published_groups
from testbed.reference.qwen3 import MODELS, fused_form, split_form

SHARDS = fused_form(MODELS["32B"], tensor=8)
NUMEL = {m.name: m.rows * m.cols for m in SHARDS}
BUCKETS = fill_buckets(list(NUMEL.items()), 32, 400_000_000)
MI = 1 << 20

numels = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def named(values):
    return [(f"p{i:02}", v) for i, v in enumerate(values)]


def ratios(cost, alpha=1.0):
    owner, _ = alpha_balanced(BUCKETS, 32, alpha, cost)
    return balance_ratio(start_index(BUCKETS, 32), cost, 32), balance_ratio(owner, cost, 32)


WHOLE = fused_form(MODELS["32B"])


@pytest.mark.parametrize(
    ("matrices", "cost", "expected"),
    [
        (SHARDS, lambda m: shard_flops(m.rows, m.cols), (3.238, 1.434)),  # as published
        (SHARDS, lambda m: m.rows * m.cols, (2.462, 1.113)),
        (SHARDS, lambda m: muon_flops(m.rows, m.cols), (3.322, 1.472)),
        (WHOLE, lambda m: muon_flops(m.rows, m.cols), (2.345, 1.160)),
        (WHOLE, lambda m: soap_flops(m.rows, m.cols), (2.321, 1.460)),
    ],
)
def test_the_balance_of_a_partition_by_each_cost(matrices, cost, expected):
    assert ratios({m.name: cost(m) for m in matrices}) == pytest.approx(expected, abs=0.002)


def test_balance_over_alpha_is_as_published():
    sweep = [ratios(NUMEL, a)[1] for a in (0, 0.25, 0.5, 0.75, 0.9, 0.95, 1)]
    assert sweep == pytest.approx([2.462, 2.419, 2.419, 2.151, 1.344, 1.344, 1.113], abs=0.002)


@given(numels, st.integers(1, 9), st.integers(1, 20_000), st.sampled_from([0.0, 0.3, 1.0]))
def test_cuts_are_legal_and_owners_unique(values, ranks, size, alpha):
    params = named(values)
    buckets = fill_buckets(params, ranks, size)
    assert [name for b in buckets for name, _, _ in b.spans] == [
        name for name, _ in reversed(params)
    ]
    cuts = alpha_cuts(buckets, ranks, alpha)
    for b, cut in zip(buckets, cuts, strict=True):
        assert b.total % ranks == 0
        assert all(start % 64 == 0 for _, start, _ in b.spans)
        assert (cut[0], cut[-1]) == (0, b.total)
        assert list(cut) == sorted(cut)
        assert set(cut) <= {0, b.total} | {end for _, _, end in b.spans}
    owner = owners_of_cuts(buckets, cuts)
    assert set(owner) == {name for name, _ in params}
    cost = dict(params)
    kept, _ = alpha_balanced(buckets, ranks, alpha, cost)
    assert balance_ratio(kept, cost, ranks) <= balance_ratio(
        start_index(buckets, ranks), cost, ranks
    )
    assert balance_ratio(kept, cost, ranks) >= max(values) * ranks / sum(values) - 1e-12
    assert alpha_cuts(buckets, ranks, alpha) == cuts


def test_equal_parameters_in_one_bucket_are_dealt_evenly():
    buckets = fill_buckets(named([128] * 12), 4, 10**9)
    owner = owners_of_cuts(buckets, alpha_cuts(buckets, 4, 1.0))
    assert balance_ratio(owner, {f"p{i:02}": 1 for i in range(12)}, 4) == 1


def test_a_cut_inside_a_parameter_and_a_bad_alpha_are_refused():
    with pytest.raises(UsageFault):
        owners_of_cuts([Bucket((("w", 0, 100),), 128)], [(0, 50, 128)])
    with pytest.raises(UsageFault):
        alpha_cuts(BUCKETS, 32, 1.5)


def test_numbers_of_micro_groups_are_as_published():
    units = [Unit(m.name, m.rows, m.cols, m.rows * m.cols, 0) for m in SHARDS]
    assert [len(published_groups(units, 8, c * MI)) for c in (32, 64, 128, 256, 400, 512)] == [
        15,
        8,
        4,
        2,
        2,
        1,
    ]
    assert [len(published_groups(units, 8, 0, mode)) for mode in ("no", "single")] == [32, 32]
    ideal = sum(u.cost for u in units) / 8
    assert group_time(published_groups(units, 8, 32 * MI)) == ideal
    assert group_time(published_groups(units, 8, 0, "single")) == ideal
    assert group_time(published_groups(units, 8, 0, "no")) > 2 * ideal
    with pytest.raises(UsageFault):
        published_groups(units, 8, 16 * MI)


@pytest.mark.parametrize("mode", ["no", "single", "slot", "global"])
@settings(max_examples=30)
@given(numels, st.integers(1, 6), st.integers(5000, 20_000))
def test_groups_keep_every_unit_within_the_bound(mode, values, slots, most):
    units = [Unit(name, 1, v, v, 4 * v) for name, v in named(values)]
    groups = published_groups(units, slots, most, mode)
    assert sorted(u.name for g in groups for slot in g for u in slot) == sorted(
        u.name for u in units
    )
    assert all(len(g) == slots for g in groups)
    if mode == "global":
        assert all(sum(u.cost for u in slot) <= most for g in groups for slot in g)


@settings(max_examples=30)
@given(numels, st.integers(1, 6), st.integers(5000, 20_000))
def test_our_groups_are_bounded_in_bytes_whatever_units_cost(values, ranks, most):
    units = [Unit(name, 1, v, v**2, 4 * v) for name, v in named(values)]
    owner = make_plan(units, [1.0] * ranks, "muon").owner
    groups = bounded_groups(units, owner, ranks, 4 * most)
    assert sorted(u.name for g in groups for slot in g for u in slot) == sorted(owner)
    for g in groups:
        for rank, slot in enumerate(g):
            assert all(owner[u.name] == rank for u in slot)
            assert sum(4 * u.numel for u in slot) <= 4 * most


def test_our_groups_cost_little_beside_the_makespan():
    units = units_of(split_form(MODELS["32B"]), "muon")
    plan = make_plan(units, [1.0] * 8, "muon")
    groups = bounded_groups(units, plan.owner, 8, 1 << 30)
    assert 1 < len(groups) < 30
    assert group_time(groups) <= 1.02 * plan.makespan
    with pytest.raises(UsageFault):
        bounded_groups(units, plan.owner, 8, 1 << 20)


FORMS = {
    "fused": fused_form,
    "split": split_form,
    "heads": lambda model: split_form(model, per_head=True),
}


@pytest.mark.parametrize(
    ("form", "method", "pflop"),
    [
        ("fused", "muon", (0.0102, 0.2102, 3.5391)),
        ("split", "muon", (0.0111, 0.2112, 3.5714)),
        ("heads", "muon", (0.0081, 0.1827, 3.2042)),
        ("split", "soap", (0.0148, 0.3897, 1.7313)),
    ],
)
def test_operations_of_a_whole_model_in_pflop(form, method, pflop):
    found = [
        sum(u.cost for u in units_of(FORMS[form](MODELS[name]), method)) / 1e15
        for name in ("0.6B", "4B", "32B")
    ]
    assert found == pytest.approx(pflop, abs=6e-5)


@pytest.mark.parametrize(
    ("model", "matrices", "fused", "billions"),
    [(MODELS["0.6B"], 196, 112, 0.440), (MODELS["32B"], 448, 256, 31.206)],
    ids=["0.6B", "32B"],
)
def test_parameters_of_the_models_add_up_as_published(model, matrices, fused, billions):
    assert (len(split_form(model)), len(fused_form(model))) == (matrices, fused)
    for form in (
        split_form(model),
        fused_form(model),
        fused_form(model, "parts"),
        fused_form(model, "heads"),
    ):
        assert sum(rows * cols for m in form for _, rows, cols in m.shapes) / 1e9 == pytest.approx(
            billions, abs=5e-4
        )


def test_measured_rates_make_slow_shapes_dearer():
    rates = Rates([(64, 64, 10.0), (1024, 4096, 100.0)])
    small, large = (units_of([Matrix("w", n, n)], "muon", rates)[0].cost for n in (64, 2048))
    assert (small, large) == (10 * muon_flops(64, 64), muon_flops(2048, 2048))
    with pytest.raises(UsageFault):
        Rates([(64, 64, 0.0)])


def test_every_method_has_cost_and_bytes():
    for method in ("muon", "shampoo", "soap", "adamw"):
        assert flops(method, 64, 256) == flops(method, 256, 64) > 0
        assert state_bytes(method, 64, 256) >= 4 * 64 * 256
    # A side above the longest that is preconditioned costs neither operations nor bytes.
    assert state_bytes("soap", 20_000, 64) == 4 * (2 * 20_000 * 64 + 2 * 64 * 64)
    assert soap_flops(20_000, 64) == 8 * 64 * 64 * 20_000 + 22 * 64**3 // 30


def test_a_split_covers_the_matrix_with_distinct_names():
    assert Matrix("w", 8, 4, equal_splits("w", 8, 2)).shapes == (("w[0]", 4, 4), ("w[1]", 4, 4))
    for bad in ((("a", 3),), (("a", 4), ("a", 4))):
        with pytest.raises(UsageFault):
            Matrix("w", 8, 4, bad)
    with pytest.raises(UsageFault):
        equal_splits("w", 7, 2)
