"""Changes of stage, and the patience between them."""

from __future__ import annotations

from node.core.ids import PeerId
from node.core.journey import Version
from node.training import events as ev
from node.training.balance import Balance
from node.training.roster import Roster

BASE = Version(3, "a" * 32)


def hear(roster: Roster, peer: str, stage: int, speed: float = 1.0, at: Version = BASE) -> None:
    roster.hear(ev.Heard(PeerId(peer), stage, at, "d", speed=speed), 0.0)


def swarm(*stages: str) -> tuple[Roster, Balance]:
    """Peers by their letters, of stage 1, stage 2 and so on; looks every 10 s, a download takes 1."""
    roster, balance = Roster(len(stages)), Balance(len(stages), 10.0, 1.0)
    for stage, peers in enumerate(stages, start=1):
        for peer in peers:
            hear(roster, peer, stage)
    roster.agree(BASE)
    assert balance.look(roster, BASE, 0.0) == []
    return roster, balance


def test_who_is_on_its_way_counts_where_it_goes() -> None:
    roster, balance = swarm("abcdef", "z")
    first = balance.look(roster, BASE, 10.0)
    assert [(m.source, m.target) for m in first] == [(1, 2), (1, 2)], "two at once, as many as pay"
    for m in first:
        del roster.candidates[m.peer]  # they have left their stage and are not in the other one yet
    assert balance.look(roster, BASE, 20.0) == [], "4 and 3 then: nothing to gain"
    for m in first:
        hear(roster, m.peer, 2)
    assert balance.look(roster, BASE, 30.0) == []


def test_one_that_never_comes_back_is_forgotten() -> None:
    roster, balance = swarm("abcdef", "z")
    first = balance.look(roster, BASE, 10.0)
    for m in first:
        del roster.candidates[m.peer]
    assert balance.look(roster, BASE, 100.0) == []
    second = balance.look(roster, BASE, 110.0)
    assert [(m.source, m.target) for m in second] == [(1, 2)], "4 and 1 now"


def test_a_newcomer_counts_but_is_not_judged_and_does_not_hold_others_up() -> None:
    roster, balance = swarm("abcdef", "z", "uvwxy")
    hear(roster, "new", 3, speed=0.0)
    moves = balance.look(roster, BASE, 10.0)
    assert {m.target for m in moves} == {2}
    assert "new" not in {m.peer for m in moves}


def test_who_stays_behind_counts_for_a_while() -> None:
    roster, balance = swarm("abcd", "yz")
    hear(roster, "z", 2, at=Version(1, "b" * 32))
    hear(roster, "x", 2, at=Version(1, "b" * 32))
    for at in range(10, 110, 10):
        assert balance.look(roster, BASE, float(at)) == [], "4 and 3: nothing to gain while they may still come"
    assert [(m.source, m.target) for m in balance.look(roster, BASE, 110.0)] == [(1, 2)], "4 and 1"


def test_who_said_no_is_not_asked_again_soon() -> None:
    roster, balance = swarm("abc", "z")
    asked = balance.look(roster, BASE, 10.0)[0].peer
    balance.refused(asked, 11.0)
    again = balance.look(roster, BASE, 20.0)
    assert [m.peer for m in again] != [asked]
    assert len(again) == 1


def test_where_peers_come_and_go_a_small_gain_does_not_pay() -> None:
    def asked(churn: int) -> int:
        roster, balance = Roster(2), Balance(2, 10.0, 30.0)
        for stage, count in ((1, 12), (2, 10)):
            for i in range(count):
                hear(roster, f"p{stage}{i:02}", stage)
        roster.agree(BASE)
        balance.look(roster, BASE, 0.0)
        for k in range(churn):
            hear(roster, f"q{k}", 1 + k % 2, speed=1.0)
        balance.look(roster, BASE, 10.0)
        for k in range(churn):
            del roster.candidates[PeerId(f"q{k}")]
        return len(balance.look(roster, BASE, 20.0))

    assert asked(0) > 0
    assert asked(40) == 0
