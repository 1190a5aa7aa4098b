"""The weight that a claim of tokens gets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.reducers.quarantine import weights
from node.averaging.reducers.reducer import Gathered, Reducer, means
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId
from node.wire.coding.codecs import Coded
from testbed.reference.reducers import means_of

A, B, C = map(PeerId, "abc")
PLAN = {A: 100, B: 60, C: 40}


@pytest.mark.parametrize(
    ("claims", "allowed", "total", "weigh"),
    [
        (PLAN, PLAN, 200, PLAN),  # what the plan assigned
        ({A: 90, B: 60}, PLAN, 200, {A: 90, B: 60}),
        # the peer that did a dead replica's work may claim its tokens
        ({A: 140, B: 60}, PLAN, 200, {A: 140, B: 60}),
        ({A: 200}, PLAN, 200, {A: 200}),
        ({A: 120, B: 40, C: 40}, PLAN, 200, {A: 120, B: 40, C: 40}),
        # more than anybody left over does not count
        ({A: 10**9, B: 60, C: 40}, PLAN, 200, PLAN),
        ({A: 10**9, B: 30, C: 40}, PLAN, 200, {A: 130, B: 30, C: 40}),
        ({A: 10**9, B: 60, C: 40}, PLAN, 150, PLAN),  # dropped tokens leave no room
        ({**PLAN, PeerId("x"): 50}, PLAN, 200, {**PLAN, PeerId("x"): 0}),
        # without a plan or a total claims stand
        ({A: 10**9, B: 1, C: 0}, {}, 200, {A: 10**9, B: 1, C: 0}),
        ({A: 10**9, B: 1, C: 0}, PLAN, 0, {A: 10**9, B: 1, C: 0}),
    ],
)
def test_a_claim_weighs_what_the_plan_explains(claims, allowed, total, weigh):
    assert weights(claims, allowed, total) == weigh


CLAIMS = st.dictionaries(
    st.sampled_from([A, B, C]),
    st.sampled_from([-1, 0, 1, 39, 60, 101, 200, 10**9, 2**64]),
    min_size=1,
)


@settings(deadline=None)
@given(
    CLAIMS, st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 100)), st.integers(0, 300)
)
def test_a_weight_is_within_the_claim_and_within_what_is_left(claims, allowed, total):
    got = weights(claims, allowed, total)
    assert got == weights(dict(reversed(claims.items())), allowed, total)
    assert all(0 <= got[p] <= max(0, claims[p]) for p in claims)
    if allowed and total:
        assert all(got[p] <= allowed.get(p, 0) + total for p in claims)
        assert any(got.values()) == any(c > 0 for c in claims.values()), (
            "somebody always weighs something"
        )


def gathered(claims, allowed, total):
    generator = torch.Generator().manual_seed(1)
    sums = {
        p: [Coded.of(torch.randn(40, generator=generator) * max(1, min(t, 100)))]
        for p, t in claims.items()
    }
    return Gathered(0, ("x",), claims, sums, allowed, total)


def reduced(g, **settings):
    return Reducer(AveragingSettings(**settings)).reduce(g)


def test_honest_cells_get_the_bits_of_the_plain_weighted_mean():
    g = gathered(PLAN, PLAN, 200)
    assert torch.equal(means_of(reduced(g))[0], means(g.gradients, sorted(PLAN), 200)[0].whole())
    assert torch.equal(means_of(reduced(g))[0], means_of(reduced(gathered(PLAN, {}, 0)))[0])


def test_a_capped_claim_scales_its_sum_down():
    g = gathered({A: 400, B: 60, C: 40}, PLAN, 200)
    got = reduced(g, quarantine=0.0)
    a, b, c = (g.gradients[p][0].whole() for p in (A, B, C))
    torch.testing.assert_close(means_of(got)[0], (a * (100 / 400) + b + c) / 200)
    assert got.tokens == 200


@pytest.mark.parametrize("claim", [-1, 0])
def test_a_claim_of_nothing_leaves_its_gradient_out(claim):
    g = gathered({A: 100, B: claim, C: 40}, {}, 0)
    got = reduced(g)
    assert got.contributors == (A, C)
    a, c = (g.gradients[p][0].whole() for p in (A, C))
    assert torch.equal(means_of(got)[0], (a + c) / 140)
    with pytest.raises(ValueError, match="weight"):
        reduced(gathered({A: claim}, {}, 0))
