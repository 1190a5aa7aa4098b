"""Turns of pairs at a relay: the total stays under its rate, and all pairs that want to send get
equal shares."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.reach.shares import BURST_S, CREDIT_S, DEBT_S, PAIRS_KEPT, Shares

PIECE = 1000


def play(rate: float, wants: dict[str, int], seconds: float, step: float = 0.01) -> dict[str, int]:
    """Bytes granted to each pair; `wants`: pieces that a pair has waiting at a time."""
    shares = Shares(rate)
    now = 0.0
    owner = {shares.ask(pair, PIECE): pair for pair, count in wants.items() for _ in range(count)}
    got = dict.fromkeys(wants, 0)
    while now < seconds:
        while granted := shares.grant(now):
            for number in granted:
                pair = owner.pop(number)
                got[pair] += PIECE
                owner[shares.ask(pair, PIECE)] = pair
        now += step
    return got


@settings(deadline=None)
@given(st.integers(1, 16), st.floats(5e4, 5e6))
def test_the_total_keeps_to_the_rate_and_pairs_share_it_equally(pairs: int, rate: float) -> None:
    got = play(rate, {f"p{i}": 1 + 3 * (i % 2) for i in range(pairs)}, 2.0)
    assert sum(got.values()) <= rate * (2.0 + BURST_S) + PIECE
    assert max(got.values()) - min(got.values()) <= 4 * PIECE


def test_a_peer_that_comes_back_gets_little_credit_for_its_absence() -> None:
    shares = Shares(1e6)
    rate = 1e6
    shares.grant(0.0)
    shares.ask("late", PIECE)
    for now in range(10_000):
        shares.ask("busy", PIECE)
        shares.grant(now / 1000)
    late = {shares.ask("late", PIECE) for _ in range(2000)}
    busy = {shares.ask("busy", PIECE) for _ in range(2000)}
    granted: list[int] = []
    for now in range(10_000, 12_000):
        granted += shares.grant(now / 1000)
    ahead = (len(late & set(granted)) - len(busy & set(granted))) * PIECE
    assert 0 <= ahead <= rate * CREDIT_S + 2 * PIECE, "of ten seconds a quarter of one"


def test_a_request_larger_than_the_bucket_delays_the_next() -> None:
    shares = Shares(1000.0)
    large = shares.ask("a", 5000)
    assert shares.grant(1.0) == [large]
    small = shares.ask("a", 1)
    assert shares.grant(1.1) == []
    wait = shares.wait()
    assert wait is not None
    assert shares.grant(1.1 + wait + 0.01) == [small]


def test_what_is_dropped_or_gone_is_not_granted() -> None:
    shares = Shares(1000.0)
    first = shares.ask("a", 10)
    second = shares.ask("a", 10)
    other = shares.ask("b", 10)
    shares.drop(first)
    shares.gone("b")
    assert shares.grant(1.0) == [second]
    assert other not in shares.grant(2.0)
    assert shares.wait() is None


def test_a_tenfold_weight_gets_a_far_larger_share() -> None:
    shares = Shares(1e6)
    got = {"own": 0, "others": 0}
    owner = dict[int, str]()
    weights = {"own": 1.0, "others": 0.1}
    for pair, weight in weights.items():
        owner |= {shares.ask(pair, PIECE, weight): pair for _ in range(20)}
    for tick in range(2000):
        for number in shares.grant(tick / 1000):
            pair = owner.pop(number)
            got[pair] += PIECE
            owner[shares.ask(pair, PIECE, weights[pair])] = pair
    # A grant gives one piece to each waiting pair, so pieces granted together are not yet unequal.
    assert got["others"] * 3 < got["own"]
    assert sum(got.values()) >= 1.9e6


def test_what_is_spent_without_asking_is_waited_for() -> None:
    shares = Shares(1000.0)
    shares.spend(2100, 0.0)
    number = shares.ask("a", 10)
    assert shares.grant(0.0) == []
    assert shares.wait() == pytest.approx(2.0)
    assert shares.grant(1.9) == []
    assert shares.grant(2.1) == [number]


def test_a_late_clock_reading_loses_no_granted_bytes() -> None:
    shares = Shares(1000.0)
    sent = 0
    for second in range(1, 61):
        for _ in range(20):
            shares.ask("a", 100)
        while granted := shares.grant(second * 0.7):
            sent += 100 * len(granted)
    assert 0.95 * 60 * 700 <= sent <= 1.05 * 60 * 700


def test_idle_pairs_are_forgotten_and_waiting_ones_are_not() -> None:
    shares = Shares(1000.0)
    shares.spend(1000, 0.0)
    kept = shares.ask("waits", 10)
    for i in range(3 * PAIRS_KEPT):
        shares.drop(shares.ask(f"idle{i}", 10))
    assert len(shares._pairs) <= PAIRS_KEPT + 1
    assert shares.grant(10.0) == [kept]


def test_what_went_without_asking_makes_others_wait_for_a_moment_only() -> None:
    shares = Shares(1000.0)
    shares.spend(1_000_000, 0.0)
    number = shares.ask("a", 100)
    assert shares.grant(DEBT_S - 0.1) == []
    assert shares.grant(DEBT_S + 0.1) == [number]
