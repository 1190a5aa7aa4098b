from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.pipeline.events import Key
from node.pipeline.hops.stash import Stash
from node.pipeline.visit_buffers import VisitBuffers


def work(deadline: float = 0.0) -> VisitBuffers:
    return VisitBuffers(deadline, (1, 1, 1))


def test_one_entry_always_fits_and_the_next_waits():
    stash = Stash(10)
    key = Key(1, 0, 1)
    stash.charge(100)
    assert not stash.room(1)
    stash.charge(-100)
    stash.put(key, work(), 100)
    assert stash.used == 100
    assert not stash.room(1)
    assert stash.pop(key) is not None
    assert stash.room(1000)


def test_the_expired_are_named_oldest_first():
    stash = Stash(100)
    for index, deadline in ((0, 9.0), (1, 2.0), (2, 1.0)):
        stash.put(Key(1, index, 1), work(deadline), 1)
    assert stash.expired(2.0) == [Key(1, 2, 1), Key(1, 1, 1)]


def test_an_origin_beyond_its_part_leaves_half_to_the_others():
    stash = Stash(100)
    greedy = PeerId("greedy")
    other = PeerId("other")
    stash.divide({greedy: 1, other: 3})
    for index in range(6):
        if stash.room(10, greedy):
            stash.put(Key(1, index, 1), VisitBuffers(0.0, (1, 1, 1), greedy), 10)
    assert stash.used == 50
    assert all(stash.room(n, other) for n in (10, 50))
    assert not stash.room(51, other)
    stash.charge(50, other)
    assert not stash.room(1, other)
    stash.pop(Key(1, 0, 1))
    assert not stash.room(10, greedy), "room that others may need"
    assert stash.room(10, other)


operations = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "put", "leave", "recharge", "pop"]),
        st.integers(0, 3),
        st.integers(0, 60),
    ),
    max_size=40,
)


@given(operations)
def test_what_is_used_is_what_is_inside(steps):
    stash = Stash(100)
    arriving: list[int] = []
    inside: dict[Key, int] = {}
    for what, index, n in steps:
        key = Key(1, index, 1)
        if what == "arrive" and stash.room(n):
            arriving.append(n)
            stash.charge(n)
            assert stash.used <= max(100, n)
        elif what == "put" and arriving:
            stash.charge(-arriving.pop())
            stash.put(key, work(), n)
            inside[key] = n
        elif what == "leave" and arriving:
            stash.charge(-arriving.pop(0))
        elif what == "recharge":
            stash.recharge(key, n)
            inside.update({key: n} if key in inside else {})
        elif what == "pop":
            assert (stash.pop(key) is None) == (inside.pop(key, None) is None)
        assert stash.used == sum(inside.values()) + sum(arriving)
        assert {k for i in range(4) if stash.get(k := Key(1, i, 1)) is not None} == inside.keys()
