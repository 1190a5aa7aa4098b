"""Which contributions are outliers, and which only look like it."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.reducers.quarantine import FEWEST_KNOWN, WINDOW, NormHistory, Size, quarantined
from node.core.ids import PeerId

A, B, C, D = map(PeerId, "abcd")
P, Q = "p.weight", "q.weight"


def size(per_token, tokens=100):
    return Size(tokens, (per_token * tokens,))


def trail(norm=1.0, epochs=FEWEST_KNOWN, tokens=100):
    made = NormHistory()
    for epoch in range(epochs):
        made.note(epoch, (P,), size(norm, tokens))
    return made


def against(made, sizes, epoch=FEWEST_KNOWN, factor=10.0):
    return set(quarantined(sizes, factor, epoch, (P,), made))


def test_of_three_the_one_far_above_the_others_goes():
    sizes = {A: size(1), B: size(1.5), C: size(20)}
    out = quarantined(sizes, 10.0)
    assert set(out) == {C}
    assert "20" in out[C]
    assert "15" in out[C], "the bound is said"
    assert quarantined(sizes | {C: size(14.9)}, 10.0) == {}
    assert quarantined(sizes, 0.0) == {}


def test_liars_that_are_few_accuse_nobody():
    assert set(quarantined({A: size(1), B: size(1), C: size(1e6)}, 10.0)) == {C}
    assert quarantined({A: size(1), B: size(1), C: size(1e-9)}, 10.0) == {}
    assert set(quarantined({A: size(1), B: size(1), C: size(1e6), D: size(1e6)}, 10.0)) == {C, D}
    assert quarantined({A: size(0), B: size(0), C: size(1)}, 10.0) == {}, (
        "against nothing, anything is large"
    )


def test_who_did_little_may_be_noisier():
    few, many = size(20, tokens=4), size(1, tokens=400)
    assert quarantined({A: many, B: many, C: few}, 10.0) == {}
    assert set(quarantined({A: many, B: many, C: size(20, tokens=400)}, 10.0)) == {C}
    assert set(quarantined({A: many, B: many, C: size(101, tokens=4)}, 10.0)) == {C}
    loud = Size(4, (20.0 * 400,))  # the same sum, said to stand for less
    assert set(quarantined({A: many, B: many, C: loud}, 10.0)) == {C}


def test_all_parts_of_the_owner_count_together():
    assert Size(2, (3.0, 4.0)).per_token == 2.5
    quiet = Size(1, (1.0, 100.0))
    assert quarantined({A: quiet, B: quiet, C: Size(1, (50.0, 100.0))}, 10.0) == {}


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
    # of two, a louder one that did little may be within what is usual where the other is not
    if len(sizes) != 2:
        assert min(sizes, key=lambda p: sizes[p].per_token) not in out


def test_two_are_measured_by_what_was_usual():
    sizes = {A: size(1), B: size(11)}
    assert against(trail(), sizes) == {B}
    assert against(trail(), {A: size(1), B: size(9)}) == set()
    assert against(trail(), {A: size(11), B: size(1)}) == {A}
    assert against(NormHistory(), sizes) == against(None, sizes) == set()
    assert against(trail(epochs=FEWEST_KNOWN - 1), sizes) == set()


def test_one_alone_is_never_left_out():
    assert against(trail(), {A: size(1e9)}) == set()


def test_when_everybody_is_above_it_the_trail_is_out_of_date():
    assert against(trail(), {A: size(50), B: size(40)}) == set()
    assert against(trail(), {A: size(50), B: size(5000)}) == {B}
    assert against(trail(), {A: size(5000), B: size(50)}) == {A}


def test_the_trail_knows_parts_apart_and_forgets_the_old():
    made = trail(epochs=20)
    assert made.expected(20, (P,), 100) == 1.0
    assert made.expected(20, (P,), 25) == 2.0, "a quarter of the tokens is twice as noisy"
    assert made.expected(20, (P,), 400) == 1.0
    assert made.expected(20, (P, Q), 100) == 0.0
    for epoch in range(20):
        made.note(epoch, (Q,), size(2.0))
    assert math.isclose(made.expected(20, (P, Q), 100), math.sqrt(5))
    assert made.expected(FEWEST_KNOWN, (P,), 100) == 1.0
    assert made.expected(FEWEST_KNOWN - 1, (P,), 100) == 0.0, (
        "an epoch begun anew is not measured by itself"
    )
    assert made.expected(WINDOW + 11, (P,), 100) == 1.0
    assert made.expected(WINDOW + 13, (P,), 100) == 0.0
    made.void(FEWEST_KNOWN - 1)
    assert made.expected(20, (P,), 100) == 0.0


def test_the_trail_does_not_grow():
    made = trail(epochs=5 * WINDOW)
    assert len(made._seen[P]) == WINDOW
    for epoch in range(5 * WINDOW, 7 * WINDOW):
        made.note(epoch, (Q,), size(1))
    assert set(made._seen) == {Q}


def test_one_odd_epoch_does_not_change_what_is_usual():
    made = trail(epochs=20)
    made.note(20, (P,), size(1e6))
    assert made.expected(21, (P,), 100) == 1.0
