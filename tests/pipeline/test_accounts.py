"""Memory that several holders share."""

from hypothesis import given
from hypothesis import strategies as st

from node.pipeline.accounts import SharedBudget


def test_one_request_always_fits_into_an_empty_account() -> None:
    account = SharedBudget[str](10)
    assert account.room("a", 1000)
    account.charge("a", 1000)
    assert not account.room("b", 1)
    account.charge("a", -1000)
    assert (account.used, account.held("a")) == (0, 0)


def test_a_single_holder_has_everything() -> None:
    account = SharedBudget[str](10)
    account.divide({"a": 3})
    account.charge("a", 9)
    assert account.room("a", 1)
    assert not account.room("a", 2)


def test_a_stranger_gets_one_request_and_what_nobody_needs() -> None:
    account = SharedBudget[str](10)
    account.divide({"a": 1})
    account.charge("a", 8)
    assert account.room("stranger", 1)
    account.charge("stranger", 1)
    assert not account.room("stranger", 1)
    assert account.room(None, 1), "work for nobody in particular has all of it"


requests = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20)), max_size=60)


@given(requests, st.integers(20, 100))
def test_greedy_holders_leave_the_others_their_parts(asked: list[tuple[str, int]], n: int) -> None:
    """Whatever the others ask for, a holder that has nothing yet gets a request that fits, and its
    part while the remaining half lasts."""
    account = SharedBudget[str](n)
    account.divide(dict.fromkeys("abcd", 1.0))
    for holder, amount in asked:
        if account.room(holder, amount):
            before = account.used
            account.charge(holder, amount)
            assert account.used <= n or before == 0
            beyond = account.held(holder) > max(n / 4, amount)
            assert not beyond or account.used <= n / 2
    assert account.used == sum(account.held(holder) for holder in "abcd")
