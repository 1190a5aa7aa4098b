"""Positions in the data from which a stream's samples are read: sums over every byte and
position."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.errors import UsageFault
from node.data.streamed import pieces
from node.data.streamed.pieces import Pieces

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(lambda s: sum(s) > 3)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 64)
    monkeypatch.setattr(pieces, "HELD_OUT", 2)


def bytes_of(made: Pieces, numbers) -> Counter:
    """Number of times that each (shard, byte) is in these pieces."""
    return Counter(
        (part.shard, at)
        for number in numbers
        for part in made.parts(number)
        for at in range(part.start, part.stop)
    )


@settings(deadline=None, max_examples=200)
@given(SIZES, st.integers(1, 9), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 99))
def test_a_pass_has_every_byte_once_and_none_that_is_held_out(sizes, windows, holdout, seed):
    made = Pieces(sizes, windows, holdout, seed)
    held = bytes_of(made, range(-made.held, 0))
    for data_pass in range(3):
        numbers = range(data_pass * made.count, (data_pass + 1) * made.count)
        trained = bytes_of(made, numbers)
        assert set(trained.values()) == {1}
        assert not trained.keys() & held.keys()
        assert trained.keys() | held.keys() == {
            (shard, at) for shard, size in enumerate(sizes) for at in range(size)
        }
    assert set(held.values()) <= {1}
    assert bool(held) == bool(holdout)


@settings(deadline=None, max_examples=200)
@given(SIZES, st.integers(1, 9), st.integers(0, 99))
def test_a_pass_has_every_window_of_every_piece_once(sizes, windows, seed):
    made = Pieces(sizes, windows, 0.0, seed)
    columns = 3  # whole rounds of the lanes
    places = [made.place(p) for p in range(columns * made.lanes * windows)]
    assert sorted(places) == [
        (number, window) for number in range(columns * made.lanes) for window in range(windows)
    ]
    read = Counter(number for number, _ in places)
    assert set(read.values()) == {windows}
    # `following` is the piece that the same lane reads next.
    for position, (number, _) in enumerate(places[: 2 * made.lanes * windows]):
        later = made.place(position + made.lanes * windows)[0]
        assert later == made.following(number)


def test_classes_of_positions_read_other_pieces():
    made = Pieces([64 * 100], 4, 0.0, 1)
    for classes in (2, 8):
        read = [{made.place(p)[0] for p in range(start, 4000, classes)} for start in range(classes)]
        assert sum(map(len, read)) == len(set.union(*read))


def test_held_out_windows_go_round_and_stay_held_out():
    made = Pieces([64 * 40], 3, 0.05, 1)
    assert made.held == 2
    places = [made.held_out(i) for i in range(12)]
    assert (places[:6], {number for number, _ in places}) == (places[6:], {-1, -2})
    assert [made.after(number) for number in (-1, -2)] == [-2, -1]


def test_two_seeds_read_in_another_order():
    a, b = (Pieces([64] * 50, 4, 0.0, seed) for seed in (1, 2))
    assert [a.parts(n) for n in range(50)] != [b.parts(n) for n in range(50)]
    assert [a.parts(n) for n in range(50)] != [a.parts(n) for n in range(50, 100)]


def test_no_text_is_refused():
    with pytest.raises(UsageFault, match="nothing to train on"):
        Pieces([0, 0], 4, 0.0, 1)
