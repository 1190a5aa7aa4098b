"""One change of stage at a time."""

from __future__ import annotations

from node.core.ids import PeerId
from node.core.journey import Version
from node.training import events as ev
from node.training.balance import Balance
from node.training.roster import Roster

BASE = Version(3, "a" * 32)


def hear(roster: Roster, peer: str, stage: int) -> None:
    roster.hear(ev.Heard(PeerId(peer), stage, BASE, "d", speed=1.0), 0.0)


def test_nobody_else_is_asked_while_one_is_on_its_way() -> None:
    roster, balance = Roster(2), Balance(2, 10.0, 1.0)
    for peer in "abcdef":
        hear(roster, peer, 1)
    hear(roster, "z", 2)
    assert balance.look(roster, BASE, 0.0) is None
    first = balance.look(roster, BASE, 10.0)
    assert first is not None
    assert (first.source, first.target) == (1, 2)
    del roster.candidates[first.peer]  # it has left its stage and is not in the other one yet
    assert balance.look(roster, BASE, 20.0) is None
    hear(roster, first.peer, 2)
    second = balance.look(roster, BASE, 30.0)
    assert second is not None
    assert second.peer != first.peer


def test_one_that_never_comes_back_does_not_stop_it_for_ever() -> None:
    roster, balance = Roster(2), Balance(2, 10.0, 1.0)
    for peer in "abcdef":
        hear(roster, peer, 1)
    hear(roster, "z", 2)
    balance.look(roster, BASE, 0.0)
    first = balance.look(roster, BASE, 10.0)
    assert first is not None
    del roster.candidates[first.peer]
    assert balance.look(roster, BASE, 100.0) is None
    assert balance.look(roster, BASE, 110.0) is not None
