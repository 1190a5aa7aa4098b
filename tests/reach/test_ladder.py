"""Times at which a better way to a peer is tried: at once after a change, ever more rarely while it
fails."""

import pytest

from node.core.version import BYPASS_SINCE
from node.reach.ladder import (
    AGAIN_S,
    LONGEST_S,
    BypassWay,
    Climb,
    ClimbAttempt,
    Outside,
    Rung,
    bypass_of,
)


def relayed(**changes: object) -> Climb:
    climb = Climb(**changes)  # type: ignore[arg-type]
    climb.reached(Rung.RELAYED, 0.0)
    return climb


def tried(climb: Climb, until: float, step: float = 0.5) -> list[tuple[float, ClimbAttempt]]:
    """Every attempt up to a time; all of them fail."""
    found = []
    now = 0.0
    while now <= until:
        while (attempt := climb.due(now)) is not None:
            found.append((now, attempt))
            climb.failed(attempt, now)
        now += step
    return found


def test_nothing_is_tried_for_a_peer_that_is_not_reached() -> None:
    assert Climb(dialable=True, connected=Rung.TUNNEL).due(0.0) is None


def test_a_tunnel_is_taken_as_soon_as_there_is_a_connection() -> None:
    climb = relayed()
    climb.connected = Rung.PUNCHED
    assert climb.due(0.0) is ClimbAttempt.TUNNEL
    climb.reached(Rung.PUNCHED, 1.0)
    assert climb.due(1.0) is None
    climb.connected = Rung.TUNNEL
    assert climb.due(1.0) is ClimbAttempt.TUNNEL, "a better connection than the punched one"


def test_a_relayed_peer_is_punched_at_once_and_dialled_later() -> None:
    climb = relayed(dialable=True)
    assert climb.due(0.0) is ClimbAttempt.PUNCH
    climb.failed(ClimbAttempt.PUNCH, 0.0)
    assert climb.due(0.0) is None
    assert {a for _, a in tried(climb, 2 * AGAIN_S)} == {
        ClimbAttempt.PUNCH,
        ClimbAttempt.DIAL,
        ClimbAttempt.CONNECT,
    }


def test_attempts_that_fail_become_rare_and_never_stop() -> None:
    at = [now for now, attempt in tried(relayed(), 3000.0) if attempt is ClimbAttempt.PUNCH]
    pauses = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (AGAIN_S, LONGEST_S)
    assert len(at) < 20


def test_news_are_worth_a_try_at_once() -> None:
    climb = relayed(dialable=True)
    tried(climb, 60.0)
    assert climb.due(60.0) is None
    climb.news(60.0)
    assert climb.due(60.0) is not None


@pytest.mark.parametrize("rung", [Rung.MAPPED, Rung.DIRECT])
def test_at_the_top_there_is_nothing_to_try(rung: Rung) -> None:
    climb = Climb(dialable=True, connected=Rung.TUNNEL)
    climb.reached(rung, 0.0)
    assert tried(climb, 1000.0) == []


def test_punching_can_be_disabled_and_is_for_relayed_peers_only() -> None:
    assert ClimbAttempt.PUNCH not in {a for _, a in tried(relayed(punch=False), 100.0)}
    climb = Climb()
    climb.reached(Rung.REVERSED, 0.0)
    assert ClimbAttempt.PUNCH not in {a for _, a in tried(climb, 100.0)}


def test_a_peer_that_was_lost_begins_anew() -> None:
    climb = relayed()
    tried(climb, 100.0)
    climb.reached(Rung.NONE, 100.0)
    climb.reached(Rung.RELAYED, 101.0)
    assert climb.due(101.0) is ClimbAttempt.PUNCH


def test_each_kind_of_connection_has_its_way_past_libp2p() -> None:
    seen = Outside(seen_by=True)
    ways = {rung: bypass_of(rung, BYPASS_SINCE, seen) for rung in Rung}
    assert ways == {
        Rung.NONE: None,
        Rung.RELAYED: BypassWay.RELAY,
        Rung.PUNCHED: BypassWay.PUNCH,
        Rung.REVERSED: BypassWay.CALL_BACK,
        Rung.TUNNEL: BypassWay.CALL_BACK,
        Rung.MAPPED: None,
        Rung.DIRECT: None,
    }
    assert not any(bypass_of(rung, BYPASS_SINCE - 1, seen) for rung in Rung)


@pytest.mark.parametrize(
    ("rung", "outside", "way"),
    [
        (Rung.TUNNEL, Outside(closed=True), None),
        (Rung.REVERSED, Outside(closed=True), BypassWay.CALL_BACK),
        (Rung.REVERSED, Outside(listens=False), None),
        (Rung.RELAYED, Outside(listens=False, closed=True), BypassWay.RELAY),
        (Rung.PUNCHED, Outside(seen_by=False), None),
        (Rung.PUNCHED, Outside(seen_by=True, keeps_ports=False), None),
        (Rung.PUNCHED, Outside(seen_by=True, punch=False), None),
    ],
)
def test_a_way_past_libp2p_needs_what_it_is_made_of(
    rung: Rung, outside: Outside, way: BypassWay | None
) -> None:
    assert bypass_of(rung, BYPASS_SINCE, outside) is way


def test_a_way_past_libp2p_that_failed_is_tried_anew_on_another_rung() -> None:
    climb = relayed(carried=True)
    assert climb.due(0.0) is ClimbAttempt.BYPASS
    for _ in range(9):
        climb.failed(ClimbAttempt.BYPASS, 0.0)
    climb.failed(ClimbAttempt.PUNCH, 0.0)
    assert climb.due(1.0) is None
    climb.reached(Rung.PUNCHED, 2.0)
    climb.connected = Rung.PUNCHED
    assert climb.due(2.0) is ClimbAttempt.BYPASS
    climb.failed(ClimbAttempt.BYPASS, 2.0)
    assert climb.due(2.0 + AGAIN_S) is ClimbAttempt.BYPASS
    climb.carried = False
    assert climb.due(2.0 + AGAIN_S) is None
