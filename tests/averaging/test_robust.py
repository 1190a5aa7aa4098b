"""The reducers beside their slow twins, and what each of them promises whatever it is given."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.reducers import robust
from node.averaging.reducers.reducer import Gathered, Reducer
from node.averaging.reducers.robust import merge_exchange, selection
from node.averaging.settings import AveragingSettings
from node.core.ids import PeerId
from node.wire.coding.codecs import Coded
from testbed.reference.reducers import TWINS, flat, length, means_of

torch.set_num_threads(1)

SHAPES = ((3, 5), (robust.CHUNK + 17,), (1,))
NAMES = ("a", "b", "c")
ROBUST = ("clipped-mean", "median", "trimmed-mean", "centered-clip")
ALL = ("mean", *ROBUST)


def contribution(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def gathered(contributions, claims=None, epoch=0):
    peers = [PeerId(f"p{i:02}") for i in range(len(contributions))]
    claims = claims or [4] * len(peers)
    sums = {
        p: [Coded.of(t * c) for t in g]
        for p, g, c in zip(peers, contributions, claims, strict=True)
    }
    return Gathered(epoch, NAMES, dict(zip(peers, claims, strict=True)), sums)


def made_by(name, g, **changes):
    return Reducer(AveragingSettings(reducer=name, quarantine=0.0, **changes)).reduce(g)


def rows(g):
    return torch.stack(
        [flat([t.whole() for t in g.gradients[p]], g.claims[p]) for p in sorted(g.claims)]
    )


# Networks


@pytest.mark.parametrize("count", range(1, 11))
def test_the_merge_exchange_network_sorts_every_zero_one_row(count):
    for bits in itertools.product((0, 1), repeat=count):
        row = list(bits)
        for low, high in merge_exchange(count):
            assert low < high
            row[low], row[high] = min(row[low], row[high]), max(row[low], row[high])
        assert row == sorted(bits)


def test_merge_networks_have_as_many_exchanges_as_batcher_says():
    assert [len(merge_exchange(n)) for n in (1, 2, 4, 8, 16, 64)] == [0, 1, 5, 19, 63, 543]


@settings(deadline=None)
@given(st.integers(1, 64), st.data())
def test_a_selection_leaves_the_wanted_ranks_in_their_place(count, data):
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count - 1))
    row = data.draw(st.permutations(range(count)))
    lost = None
    for low, high, keep in selection(count, first, last):
        small, large = sorted(
            (row[low], row[high]), key=lambda v: (v is lost, v if v is not lost else 0)
        )
        row[low], row[high] = small if keep & 1 else lost, large if keep & 2 else lost
    assert sorted(row[first : last + 1]) == list(range(first, last + 1))


def test_a_selection_is_cheaper_than_a_sort():
    assert len(selection(16, 7, 8)) < len(merge_exchange(16))
    assert any(c.keep != 3 for c in selection(16, 7, 8))


# Twins


@pytest.mark.parametrize("count", [3, 4, 5, 8, 13])
@pytest.mark.parametrize("name", ALL)
def test_the_fast_one_gives_what_the_slow_one_gives(name, count):
    claims = [3 + 2 * i for i in range(count)]
    loud = [contribution(i, scale=20.0 if i == 1 else 1.0) for i in range(count)]
    g = gathered(loud, claims)
    before = rows(g)
    torch.testing.assert_close(
        flat(means_of(made_by(name, g)), 1), TWINS[name](before, claims), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(rows(g), before), "the inputs are left as they are"


def test_centered_clip_starts_where_the_epoch_before_ended():
    settings = AveragingSettings(reducer="centered-clip", quarantine=0.0, clip_iterations=1)
    reducer = Reducer(settings)
    twin = TWINS["centered-clip"]
    loud = [contribution(i, scale=20.0 if i == 9 else 1.0) for i in range(9, 14)]
    second = gathered(loud, epoch=8)
    before = reducer.reduce(gathered([contribution(i) for i in range(5)], epoch=7))
    reducer.remember(before)
    means_of(before)[0].fill_(1e9)  # the optimizer may overwrite the mean
    center = twin(rows(gathered([contribution(i) for i in range(5)])), [4] * 5, iterations=1)
    alone = twin(rows(second), [4] * 5, iterations=1)
    got = flat(means_of(reducer.reduce(second)), 1)
    torch.testing.assert_close(
        got, twin(rows(second), [4] * 5, iterations=1, center=center), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(got, alone, rtol=1e-3, atol=1e-3)
    skipped = flat(means_of(reducer.reduce(gathered(loud, epoch=9))), 1)
    torch.testing.assert_close(skipped, alone, rtol=1e-4, atol=1e-5)
    reducer.void(7)
    torch.testing.assert_close(
        flat(means_of(reducer.reduce(second)), 1), alone, rtol=1e-4, atol=1e-5
    )


# Promises


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL), st.integers(3, 9), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_bit(name, count, random):
    g = gathered([contribution(i) for i in range(count)], [2 + i for i in range(count)])
    peers = list(g.claims)
    random.shuffle(peers)
    shuffled = Gathered(
        0, NAMES, {p: g.claims[p] for p in peers}, {p: g.gradients[p] for p in reversed(peers)}
    )
    a = made_by(name, g)
    b = made_by(name, shuffled)
    assert all(torch.equal(x, y) for x, y in zip(means_of(a), means_of(b), strict=True))
    assert a.contributors == b.contributors == tuple(sorted(peers))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL), st.integers(3, 9), st.integers(-30, 30))
def test_all_things_scale_together(name, count, power):
    given_ = [contribution(i) for i in range(count)]
    plain = flat(means_of(made_by(name, gathered(given_))), 1)
    scaled = flat(
        means_of(made_by(name, gathered([[t * 2.0**power for t in g] for g in given_]))), 1
    )
    torch.testing.assert_close(scaled, plain * 2.0**power, rtol=1e-4, atol=1e-6 * 2.0**power)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_equal_inputs_come_out_as_they_are(name, count):
    g = gathered([contribution(5)] * count, [1 + 3 * i for i in range(count)])
    torch.testing.assert_close(
        flat(means_of(made_by(name, g)), 1), flat(contribution(5), 1), rtol=1e-5, atol=1e-6
    )


HUGE = st.floats(-1e15, 1e15)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["median", "trimmed-mean"]), st.integers(3, 9), st.data())
def test_a_minority_cannot_leave_the_range_of_the_others(name, count, data):
    liars = (count - 1) // 2 if name == "median" else robust.trimmed(count, 0.25)
    lies = [[torch.full(s, data.draw(HUGE)) for s in SHAPES] for _ in range(liars)]
    honest = [contribution(i) for i in range(count - liars)]
    got = flat(means_of(made_by(name, gathered(lies + honest))), 1)
    truth = torch.stack([flat(g, 1) for g in honest])
    slack = 1e-5 * truth.abs().max()
    assert bool(((got >= truth.min(0).values - slack) & (got <= truth.max(0).values + slack)).all())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["clipped-mean", "centered-clip"]),
    st.integers(3, 9),
    st.floats(-1e12, 1e12),
    st.sampled_from([1, 2, 5]),
)
def test_a_minority_moves_a_clipped_mean_at_most_by_the_radius(name, count, lie, iterations):
    liars = (count - 1) // 2
    honest = [contribution(i) for i in range(count - liars)]
    lies = [[t * lie for t in contribution(99)] for _ in range(liars)]
    got = length(
        flat(means_of(made_by(name, gathered(lies + honest), clip_iterations=iterations)), 1)
    )
    # The median of the distances is an honest one; each iteration moves by at most the radius, and
    # so does all of it.
    reach = sum(3.0**i for i in range(iterations if name == "centered-clip" else 1))
    assert got <= 2.0 * reach * max(length(flat(g, 1)) for g in honest) * 1.001


def test_one_liar_of_nine_moves_a_centered_clip_hardly_at_all():
    honest = [[t + 1 for t in contribution(i, 0.1)] for i in range(8)]
    truth = torch.stack([flat(g, 1) for g in honest]).mean(0)
    got = flat(
        means_of(made_by("centered-clip", gathered([*honest, [t * -1e6 for t in honest[0]]]))), 1
    )
    assert length(got - truth) < 0.5 * length(truth)
    assert length(
        flat(means_of(made_by("mean", gathered([*honest, [t * -1e6 for t in honest[0]]]))), 1)
        - truth
    ) > 1e4 * length(truth)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_are_averaged_with_a_report(name, count):
    g = gathered([contribution(i, 1 + 5 * i) for i in range(count)], [3 + i for i in range(count)])
    got = made_by(name, g)
    expected = made_by("mean", g)
    assert (got.fell_back, expected.fell_back) == (True, False)
    assert all(torch.equal(a, b) for a, b in zip(means_of(got), means_of(expected), strict=True))
    assert not made_by(name, gathered([contribution(i) for i in range(3)])).fell_back


def test_the_trimmed_share_is_rounded_down_but_never_to_none():
    assert [robust.trimmed(n, 0.25) for n in range(3, 10)] == [1, 1, 1, 1, 1, 2, 2]
    assert [robust.trimmed(n, 0.49) for n in (3, 10)] == [1, 4]


def test_nothing_overflows_below_the_largest_norm_there_may_be():
    for name in ROBUST:
        g = gathered([contribution(i, 1e16) for i in range(5)])
        assert all(bool(torch.isfinite(t).all()) for t in means_of(made_by(name, g)))
        assert math.isfinite(
            length(
                flat(
                    means_of(made_by(name, gathered([contribution(i, 1e-20) for i in range(5)]))), 1
                )
            )
        )
    zero = gathered([[torch.zeros(s) for s in SHAPES]] * 4)
    assert all(not flat(means_of(made_by(name, zero)), 1).any() for name in ALL)
