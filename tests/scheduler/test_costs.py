"""A leader's estimates from the peers' measurements: delays from tensors and round trips, and no
number that spoils a plan."""

import pytest

from node.core.ids import PeerId
from node.scheduler.costs import (
    BEYOND,
    LinkCost,
    Measured,
    believe,
    capped,
)

E, A, B, C = (PeerId(p) for p in "eabc")


def test_the_bytes_of_a_tensor_take_what_the_fastest_connection_takes_beyond_a_trip() -> None:
    ways = ((A, LinkCost(1.1, 0.2)), (B, LinkCost(0.5, 0.1)), (C, LinkCost(0.0, 0.01)))
    assert Measured(ways=ways).body_s == pytest.approx(0.4)
    assert Measured(ways=ways[2:]).body_s == 0.0, "it has carried no tensor"
    assert Measured(ways=((A, LinkCost(0.1, 0.2)),)).body_s == 0.0


def test_a_delay_is_the_tensor_less_half_the_way_back() -> None:
    said = {
        E: Measured(ways=((A, LinkCost(1.1, 0.2)), (B, LinkCost(0.0, 0.4)))),
        A: Measured(0.1, 0.2, ways=((E, LinkCost(0.9, 0.0)),)),
        B: Measured(),
        C: Measured(),
    }
    costs = believe(said, {E})
    assert costs.delay(E, A) == pytest.approx(1.0)
    assert costs.delay(A, E) == pytest.approx(0.8)  # E's round trip serves both directions
    assert costs.body_s == pytest.approx(0.8)
    # no tensor went there: half the trip, and a usual body
    assert costs.delay(E, B) == pytest.approx(0.2 + 0.8)
    assert costs.delay(B, E) == costs.delay(E, B)
    # nobody measured it: the median of the known delays
    assert costs.delay(A, C) == pytest.approx(1.0)
    assert costs.compute == {A: pytest.approx(0.3)}
    assert costs.backward == pytest.approx(2.0)


HONEST = {
    PeerId(f"p{i}"): Measured(0.1, 0.2, ways=((PeerId(f"p{(i + 1) % 5}"), LinkCost(0.5, 0.1)),))
    for i in range(5)
}


@pytest.mark.parametrize(
    "odd",
    [
        Measured(1e-6, 1e-6, ways=((PeerId("p0"), LinkCost(1e-6, 1e-6)),)),
        Measured(1e4, 1e4, ways=((PeerId("p0"), LinkCost(1e4, 1e4)),)),
        Measured(0.1, 0.2, ways=((PeerId("p0"), LinkCost(0.5, 0.1)),), up=1e-9, down=1e-9),
    ],
    ids=["fast beyond belief", "slow beyond belief", "a tiny cap"],
)
def test_one_absurd_claim_counts_as_the_most_that_is_believed(odd: Measured) -> None:
    costs = believe({**HONEST, A: odd}, set(), tensor=1 << 20)
    assert 0.3 / BEYOND <= costs.compute[A] <= 0.3 * BEYOND * 1.001
    assert 0 < costs.delay(A, PeerId("p0")) <= 0.5 * BEYOND * 1.001
    assert costs.delay(PeerId("p0"), PeerId("p1")) == costs.delay_s == pytest.approx(0.45)


def test_a_peer_that_its_neighbours_find_slower_is_reckoned_slower() -> None:
    costs = believe(dict.fromkeys((A, B), Measured(0.1, 0.2)), set(), {B: 3.0})
    assert costs.compute[B] == pytest.approx(3 * costs.compute[A])


def test_a_way_to_a_stranger_or_to_oneself_is_none() -> None:
    costs = believe({A: Measured(ways=((A, LinkCost(1.0, 1.0)), (B, LinkCost(1.0, 1.0))))}, set())
    assert costs.ways == {}
    assert costs.delay(A, B) == 0.0


def test_bandwidth_caps_bound_compute_and_transfer_times() -> None:
    said = {
        E: Measured(ways=((A, LinkCost(0.15, 0.1)), (B, LinkCost(0.15, 0.1)))),
        A: Measured(0.1, 0.2, ways=((B, LinkCost(0.15, 0.1)),), up=1000.0, down=500.0),
        B: Measured(0.1, 0.2, ways=((A, LinkCost(0.15, 0.1)),), up=1e9),
    }
    costs = believe(said, {E}, tensor=200)
    assert costs.compute[A] == pytest.approx(2 * 200 / 500), (
        "two tensors each way for a micro-batch"
    )
    assert costs.compute[B] == pytest.approx(0.3)
    assert costs.delay(E, A) == pytest.approx(0.05 + 200 / 500), "A receives no faster"
    assert costs.delay(A, B) == pytest.approx(0.05 + 200 / 1000), "and sends no faster"
    assert costs.delay(E, B) == pytest.approx(0.1)
    assert costs.lines == {A: 500.0, B: 1e9}


@pytest.mark.parametrize(
    ("speed", "line", "planned"),
    [
        (10.0, 0.0, 10.0),
        (10.0, 400.0, 2.0),
        (1.0, 400.0, 1.0),
        # A cap tells nothing of an unknown speed.
        (0.0, 400.0, 0.0),
    ],
)
def test_a_peer_is_as_fast_as_its_cap_allows(speed: float, line: float, planned: float) -> None:
    assert capped(speed, line, 100) == planned
