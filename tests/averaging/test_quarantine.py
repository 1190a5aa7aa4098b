"""Contributions that are outliers, and others that only look like it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.reducers.quarantine import FEWEST_KNOWN, WINDOW, NormHistory, Size, quarantined
from node.core.ids import PeerId

A, B, C, D = map(PeerId, "abcd")
P = "p.weight"
Q = "q.weight"


def size(per_token, tokens=100):
    return Size(tokens, (per_token * tokens,))


def trail(norm=1.0, epochs=FEWEST_KNOWN, tokens=100):
    made = NormHistory()
    for epoch in range(epochs):
        made.note(epoch, (P,), size(norm, tokens))
    return made


MANY = size(1, tokens=400)
QUIET = Size(1, (1.0, 100.0))


@pytest.mark.parametrize(
    ("sizes", "out"),
    [
        ((size(1), size(1.5), size(14.9)), ""),
        ((size(1), size(1), size(1e6)), "c"),
        ((size(1), size(1), size(1e-9)), ""),
        ((size(1), size(1), size(1e6), size(1e6)), "cd"),
        ((size(0), size(0), size(1)), ""),  # against nothing, anything is large
        # who did little may be noisier
        ((MANY, MANY, size(20, tokens=4)), ""),
        ((MANY, MANY, size(20, tokens=400)), "c"),
        ((MANY, MANY, size(101, tokens=4)), "c"),
        ((MANY, MANY, Size(4, (20.0 * 400,))), "c"),  # the same sum, said to stand for less
        # all parts of the owner count together
        ((QUIET, QUIET, Size(1, (50.0, 100.0))), ""),
    ],
)
def test_of_three_or_more_those_far_above_the_others_go(sizes, out):
    assert set(quarantined(dict(zip((A, B, C, D), sizes, strict=False)), 10.0)) == set(out)


def test_the_bound_is_said_and_zero_switches_it_off():
    sizes = {A: size(1), B: size(1.5), C: size(20)}
    assert quarantined(sizes, 10.0) == {C: "norm per token 20, 10 times the others' median is 15"}
    assert quarantined(sizes, 0.0) == {}
    assert Size(2, (3.0, 4.0)).per_token == 2.5


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"),
        st.tuples(st.floats(0, 1e12), st.integers(1, 10**6)),
        min_size=1,
    ),
    st.floats(2, 100),
    st.booleans(),
)
def test_somebody_is_always_left(said, factor, known):
    sizes = {PeerId(p): size(norm, tokens) for p, (norm, tokens) in said.items()}
    made = trail() if known else NormHistory()
    out = quarantined(sizes, factor, FEWEST_KNOWN, (P,), made)
    assert len(out) < len(sizes)
    assert out == quarantined(dict(reversed(sizes.items())), factor, FEWEST_KNOWN, (P,), made)
    # of two, a louder peer that did little may be within its usual norm where the other is not
    if len(sizes) != 2:
        assert min(sizes, key=lambda p: sizes[p].per_token) not in out


@pytest.mark.parametrize(
    ("made", "norms", "out"),
    [
        (trail(), (1, 11), "b"),
        (trail(), (1, 9), ""),
        (trail(), (11, 1), "a"),
        (NormHistory(), (1, 11), ""),
        (None, (1, 11), ""),
        (trail(epochs=FEWEST_KNOWN - 1), (1, 11), ""),
        (trail(), (1e9,), ""),  # one alone is never left out
        # when everybody is above it the trail is out of date
        (trail(), (50, 40), ""),
        (trail(), (50, 5000), "b"),
        (trail(), (5000, 50), "a"),
    ],
)
def test_two_are_measured_by_what_was_usual(made, norms, out):
    sizes = {p: size(norm) for p, norm in zip((A, B), norms, strict=False)}
    assert set(quarantined(sizes, 10.0, FEWEST_KNOWN, (P,), made)) == set(out)


@pytest.mark.parametrize(
    ("epoch", "tokens", "expected"),
    [
        (20, 100, 1.0),
        (20, 25, 2.0),  # a quarter of the tokens is twice as noisy
        (20, 400, 1.0),
        (FEWEST_KNOWN, 100, 1.0),
        (FEWEST_KNOWN - 1, 100, 0.0),  # an epoch begun anew is not measured by itself
        (WINDOW + 11, 100, 1.0),
        (WINDOW + 13, 100, 0.0),
    ],
)
def test_the_trail_forgets_the_old(epoch, tokens, expected):
    assert trail(epochs=20).expected(epoch, (P,), tokens) == expected


def test_the_trail_knows_parts_apart():
    made = trail(epochs=20)
    assert made.expected(20, (P, Q), 100) == 0.0
    for epoch in range(20):
        made.note(epoch, (Q,), size(2.0))
    assert math.isclose(made.expected(20, (P, Q), 100), math.sqrt(5))
    made.void(FEWEST_KNOWN - 1)
    assert made.expected(20, (P,), 100) == 0.0


def test_the_trail_does_not_grow():
    assert len(trail(epochs=5 * WINDOW)._seen[P]) == WINDOW


def test_one_odd_epoch_does_not_change_what_is_usual():
    made = trail(epochs=20)
    made.note(20, (P,), size(1e6))
    assert made.expected(21, (P,), 100) == 1.0
