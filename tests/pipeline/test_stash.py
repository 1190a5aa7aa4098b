from hypothesis import given
from hypothesis import strategies as st

from node.pipeline.stash import Stash


def test_one_entry_always_fits_and_the_next_waits():
    stash: Stash[str, int] = Stash(10)
    ticket = stash.reserve(100)
    assert not stash.room(1)
    stash.put("a", 1, 100, 5.0, ticket)
    assert stash.used == 100
    assert not stash.room(1)
    assert stash.pop("a") == 1
    assert stash.room(1000)


def test_the_expired_are_named_oldest_first():
    stash: Stash[str, int] = Stash(100)
    for name, expires in (("late", 9.0), ("b", 2.0), ("a", 1.0)):
        stash.put(name, 0, 1, expires)
    assert stash.expired(2.0) == ["a", "b"]


operations = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "put", "cancel", "recharge", "pop"]),
        st.integers(0, 3),
        st.integers(0, 60),
    ),
    max_size=40,
)


@given(operations)
def test_what_is_used_is_what_is_inside(steps):
    stash: Stash[int, int] = Stash(100)
    tickets: list[tuple[int, int]] = []
    inside: dict[int, int] = {}
    for what, key, n in steps:
        if what == "reserve" and stash.room(n):
            tickets.append((stash.reserve(n), n))
            assert stash.used <= max(100, n)
        elif what == "put" and tickets:
            stash.put(key, key, n, 0.0, tickets.pop()[0])
            inside[key] = n
        elif what == "cancel" and tickets:
            ticket, _ = tickets.pop(0)
            stash.cancel(ticket)
            stash.cancel(ticket)
        elif what == "recharge":
            stash.recharge(key, n)
            inside.update({key: n} if key in inside else {})
        elif what == "pop":
            assert (stash.pop(key) is None) == (inside.pop(key, None) is None)
        assert stash.used == sum(inside.values()) + sum(n for _, n in tickets)
        assert {key for key in range(4) if stash.get(key) is not None} == inside.keys()
