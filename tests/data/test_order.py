import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.samples import SampleClass
from node.data.order import SampleOrder, Sampler


@given(st.integers(1, 700), st.integers(0, 2**64), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_each_pass_is_a_permutation(count, seed, data_pass):
    order = SampleOrder(count, seed)
    start = data_pass * count
    assert sorted(order.sample(p) for p in range(start, start + count)) == list(range(count))


@given(st.integers(1, 2**62), st.integers(0, 2**62))
@settings(deadline=None)
def test_huge_texts_need_no_list(count, position):
    assert 0 <= SampleOrder(count, 1).sample(position) < count


def test_passes_and_seeds_differ_and_look_shuffled():
    order = SampleOrder(1000, 42)
    first, second = ([order.sample(p) for p in range(a, a + 1000)] for a in (0, 1000))
    assert first != second
    assert first != [SampleOrder(1000, 43).sample(p) for p in range(1000)]
    fixed = sum(i == w for i, w in enumerate(first))
    neighbours = sum(abs(a - b) == 1 for a, b in zip(first, first[1:], strict=False))
    rising = sum(a < b for a, b in zip(first, first[1:], strict=False))
    assert fixed < 10
    assert neighbours < 15
    assert 430 < rising < 570


def test_the_order_is_the_same_on_every_machine():
    order = SampleOrder(3500, 42)
    assert [order.sample(p) for p in (0, 1, 2, 3499, 3500, 10**12)] == ORDER


ORDER = [2931, 1242, 1100, 1375, 3428, 1959]


SHARE = (SampleClass(0, 2, 20), SampleClass(1, 1, 19))


@pytest.mark.parametrize(
    ("cursor", "back"),
    [
        *(((SampleClass(0, 0, 4, (2,)),), [*b]) for b in ((1, 1), (2,), (0, 2), (4,), (-1,))),
        *(((SampleClass(0, 0, 4, (2,)),), [*b]) for b in ((1.0,), (True,))),
        *((SHARE, [*b]) for b in ((2,), (20,), (12, 19), (3, 21), (-4,))),
    ],
)
def test_giving_back_twice_or_what_was_never_taken(cursor, back):
    sampler = Sampler(cursor)
    with pytest.raises(ValueError, match="given back"):
        sampler.give_back(back)
    assert sampler.cursor() == cursor


def test_a_share_of_two_classes_goes_forward_evenly():
    sampler = Sampler((SampleClass(0, 2, 4), SampleClass(1, 1, 15, (3, 9))))
    assert sampler.take(8) == (3, 9, 4, 8, 12, 15, 16, 17)
    sampler.give_back([12, 3])
    assert sampler.cursor() == (SampleClass(0, 2, 20, (12,)), SampleClass(1, 1, 19, (3,)))


def test_a_sampler_at_the_end_of_all_positions_has_no_cursor():
    sampler = Sampler((SampleClass(0, 0, 2**63 - 2),))
    sampler.take(1)
    assert sampler.cursor() == (SampleClass(0, 0, 2**63 - 1),)
    sampler.take(1)
    with pytest.raises(ValueError, match="below 2"):
        sampler.cursor()
