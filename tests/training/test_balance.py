"""Changes of stage, and the patience between them."""

import itertools
from collections.abc import Collection, Iterable

import pytest

from node.core.ids import ENDS, PeerId
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.leader.balance import COMING_S, REST_S, Balance
from node.epoch.leader.roster import Roster
from node.scheduler.costs import LinkCost, Measured
from node.scheduler.settings import SchedulerSettings

BASE = Version(3, "a" * 32)


def hear(roster: Roster, peer: str, stage: int, speed: float = 1.0, at: Version = BASE) -> None:
    roster.hear(ev.Heartbeat(PeerId(peer), stage, at, "d", ev.Capacity(speed)), 0.0)


def swarm(*stages: Iterable[str]) -> tuple[Roster, Balance]:
    """A swarm of peers with these names, mostly one letter, at stage 1, stage 2 and so on; the
    leader looks every 10 s, and a download takes 1 s."""
    roster = Roster(len(stages))
    balance = Balance(len(stages), 10.0, 1.0)
    for stage, peers in enumerate(stages, start=1):
        for peer in peers:
            hear(roster, peer, stage)
    roster.versions.agree(BASE)
    assert balance.look(roster, BASE, 0.0) == []
    return roster, balance


def test_a_peer_that_is_on_its_way_counts_where_it_goes() -> None:
    roster, balance = swarm("abcdef", "z")
    first = balance.look(roster, BASE, 10.0)
    assert [(m.source, m.target) for m in first] == [(1, 2), (1, 2)], "two at once, as many as pay"
    for m in first:
        roster.gone(m.peer)  # they have left their stage and are not in the other one yet
    assert balance.look(roster, BASE, 20.0) == [], "4 and 3 then: nothing to gain"
    for m in first:
        hear(roster, m.peer, 2)
    assert balance.look(roster, BASE, 30.0) == []


def test_one_that_never_comes_back_is_forgotten() -> None:
    roster, balance = swarm("abcdef", "z")
    first = balance.look(roster, BASE, 10.0)
    for m in first:
        roster.gone(m.peer)
    assert balance.look(roster, BASE, 10.0 + COMING_S - 1.0) == []
    moves = balance.look(roster, BASE, 20.0 + COMING_S)
    assert [(m.source, m.target) for m in moves] == [(1, 2)], "4 and 1"


def test_a_peer_that_is_still_coming_counts_where_it_goes() -> None:
    roster, balance = swarm("abcdef", "z")
    first = balance.look(roster, BASE, 10.0)
    for m in first:
        roster.gone(m.peer)
    still = {m.peer: 2 for m in first}
    assert balance.look(roster, BASE, 20.0 + COMING_S, coming=still) == []
    back = {m.peer: 1 for m in first} | {PeerId("x"): None}
    assert len(balance.look(roster, BASE, 30.0 + COMING_S, coming=back)) == 1, "4 and 1"


def test_looks_have_their_interval_between_them() -> None:
    roster = Roster(2)
    balance = Balance(2, 10.0, 1.0)
    for peer, stage in (*((p, 1) for p in "abcdef"), ("z", 2)):
        hear(roster, peer, stage)
    roster.versions.agree(BASE)
    assert balance.look(roster, BASE, 100.0) == []
    assert balance.look(roster, BASE, 109.9) == []
    assert len(balance.look(roster, BASE, 110.0)) == 2
    assert balance.look(roster, BASE, 119.9) == []
    assert len(balance.look(roster, BASE, 120.0)) > 0, "they have not moved, and others can"
    assert balance.look(roster, None, 130.0) == [], "no version is agreed on"


def test_one_in_eight_peers_moves_at_once_and_always_two() -> None:
    for many, moves in ((9, 2), (31, 4)):
        roster, balance = swarm([f"p{n:02}" for n in range(many)], "z")
        assert len(balance.look(roster, BASE, 10.0)) == moves


def test_a_peer_on_its_way_does_not_serve_its_new_stage_yet() -> None:
    roster = Roster(2)
    balance = Balance(2, 10.0, 1.0)
    for peer, stage, speed in (("a", 1, 2.0), ("b", 1, 2.0), ("c", 1, 2.0), ("z", 2, 1.0)):
        hear(roster, peer, stage, speed)
    roster.versions.agree(BASE)
    balance.look(roster, BASE, 0.0)
    (move,) = balance.look(roster, BASE, 10.0)
    for gone in (move.peer, "c"):
        roster.gone(PeerId(gone))
    (left,) = {"a", "b"} - {move.peer}
    hear(roster, left, 1, 0.5)
    assert balance.look(roster, BASE, 20.0) == [], "z alone serves stage 2"


def test_an_unmeasured_newcomer_does_not_move() -> None:
    roster, balance = swarm("bcdef", "z")
    hear(roster, "a", 1, speed=0.0)
    assert "a" not in [m.peer for m in balance.look(roster, BASE, 10.0)]


def test_a_peer_that_refused_counts_nowhere_once_it_is_gone() -> None:
    roster, balance = swarm("abc", "z")
    (asked,) = balance.look(roster, BASE, 10.0)
    balance.refused(asked.peer, 11.0)
    roster.gone(asked.peer)
    assert balance.look(roster, BASE, 20.0) == [], "2 and 1"
    hear(roster, "x", 1)
    assert len(balance.look(roster, BASE, 30.0)) == 1, "3 and 1"


def test_a_newcomer_counts_but_neither_moves_nor_delays_others() -> None:
    roster, balance = swarm("abcdef", "z", "uvwxy")
    hear(roster, "new", 3, speed=0.0)
    moves = balance.look(roster, BASE, 10.0)
    assert {m.target for m in moves} == {2}
    assert "new" not in [m.peer for m in moves]


def test_a_peer_that_stays_behind_counts_for_a_while() -> None:
    roster, balance = swarm("abcd", "yz")
    hear(roster, "z", 2, at=Version(1, "b" * 32))
    hear(roster, "x", 2, at=Version(1, "b" * 32))
    for at in range(10, 110, 10):
        assert balance.look(roster, BASE, float(at)) == [], (
            "4 and 3: nothing to gain while they may still come"
        )
    assert [(m.source, m.target) for m in balance.look(roster, BASE, 110.0)] == [(1, 2)], "4 and 1"


def test_a_peer_that_refused_a_move_is_not_asked_again_soon() -> None:
    roster, balance = swarm("abc", "z")
    asked = balance.look(roster, BASE, 10.0)[0].peer
    balance.refused(asked, 11.0)
    (again,) = balance.look(roster, BASE, 20.0)
    assert again.peer != asked


def test_members_help_the_ends_too_and_the_leader_stays() -> None:
    roster, balance = swarm("abcd", "wxyz")
    roster.peers.leader = PeerId("a")
    hear(roster, "e", ENDS)
    moves = balance.look(roster, BASE, 10.0)
    assert [m.target for m in moves] == [ENDS, ENDS]
    assert "a" not in [m.peer for m in moves]


def test_the_ends_keep_two_peers() -> None:
    roster, balance = swarm("a", "z")
    for peer in "efg":
        hear(roster, peer, ENDS)
    moves = balance.look(roster, BASE, 10.0, 100.0)
    assert [m.source for m in moves] == [], "2, 2 and 1 would be no faster than 3, 1 and 1"
    hear(roster, "h", ENDS)
    moves = balance.look(roster, BASE, 20.0, 100.0)
    assert [(m.source, m.target) for m in moves] == [(ENDS, 1), (ENDS, 2)]


def test_a_peer_that_refuses_the_ends_may_go_to_another_stage() -> None:
    roster, balance = swarm("abc", "xyz")
    hear(roster, "e", ENDS)
    (first,) = balance.look(roster, BASE, 10.0)
    assert first.target == ENDS
    balance.refused(first.peer, 10.0)
    (second,) = balance.look(roster, BASE, 20.0)
    assert second.target == ENDS
    assert second.peer != first.peer, "it is not asked for the ends again"
    balance.refused(second.peer, 20.0)
    hear(roster, "f", ENDS)
    for peer in "yz":
        roster.gone(PeerId(peer))
    moves = balance.look(roster, BASE, 30.0)
    assert [(m.peer, m.target) for m in moves] == [(first.peer, 2)]


def test_a_newcomer_that_is_dealt_now_counts_at_its_new_stage() -> None:
    roster, balance = swarm("abc", "z")
    hear(roster, "e", ENDS, speed=9.0)
    hear(roster, "f", ENDS, speed=9.0)
    hear(roster, "new", 1)
    members = [PeerId(p) for p in "abcefz"]
    assert [(m.peer, m.target) for m in balance.deal(roster, members, 10.0)] == [("new", 2)]
    assert balance.look(roster, BASE, 10.0) == [], "3 and 2"


def test_an_epoch_that_is_missed_is_part_of_the_price() -> None:
    def asked(epoch_s: float) -> int:
        roster, balance = swarm([f"p{n:02}" for n in range(11)], [f"q{n:02}" for n in range(10)])
        hear(roster, "p00", 1, speed=1.4)
        return len(balance.look(roster, BASE, 10.0, epoch_s))

    assert asked(0.0) == 1
    assert asked(1000.0) == 0


def test_where_peers_come_and_go_a_small_gain_does_not_pay() -> None:
    def asked(churn: int) -> int:
        roster = Roster(2)
        balance = Balance(2, 10.0, 30.0)
        for stage, count in ((1, 12), (2, 10)):
            for i in range(count):
                hear(roster, f"p{stage}{i:02}", stage)
        roster.versions.agree(BASE)
        balance.look(roster, BASE, 0.0)
        for k in range(churn):
            hear(roster, f"q{k}", 1 + k % 2)
        balance.look(roster, BASE, 10.0)
        for k in range(churn):
            roster.gone(PeerId(f"q{k}"))
        return len(balance.look(roster, BASE, 20.0))

    assert asked(0) > 0
    assert asked(40) == 0


def test_a_stage_that_all_paths_visit_keeps_more_speed_than_the_others() -> None:
    """Every path leaves out one of four stages, never the first."""
    asked = []
    for scheduler in (SchedulerSettings(skip=0.25, keep_first=1), SchedulerSettings()):
        roster = Roster(4)
        balance = Balance(4, 10.0, 1.0, scheduler)
        for stage, (peers, speed) in enumerate(
            (("abcdef", 1.0), ("ghij", 1.0), ("klmn", 1.08), ("opqr", 1.08)), start=1
        ):
            for peer in peers:
                hear(roster, peer, stage, speed)
        roster.versions.agree(BASE)
        balance.look(roster, BASE, 0.0)
        moves = balance.look(roster, BASE, 10.0)
        asked.append([(m.source, m.target) for m in moves])
    assert asked == [[], [(1, 2)]], "6 for all of the visits, 4 for two thirds of them"


# ---------------------------------------------------------------- newcomers, as an epoch closes


def dealt(balance: Balance, roster: Roster, members: str, now: float = 10.0) -> list:
    moves = balance.deal(roster, [PeerId(p) for p in members], now)
    return [(m.peer, m.source, m.target) for m in moves]


def with_ends(ends: str, *stages: str) -> tuple[Roster, Balance]:
    roster, balance = swarm(*stages)
    for peer in ends:
        hear(roster, peer, ENDS)
    return roster, balance


def test_a_newcomer_waits_where_it_is_needed_most_when_an_epoch_closes() -> None:
    roster, balance = with_ends("xyz", "abcn", "d")
    assert dealt(balance, roster, "xyzabcd") == [("n", 1, 2)]
    assert dealt(balance, roster, "xyzabcd") == [], "it was asked"


def test_a_newcomer_goes_to_the_ends_and_comes_from_there() -> None:
    roster, balance = with_ends("x", "abcn", "defg")
    assert dealt(balance, roster, "xabcdefg") == [("n", 1, ENDS)]
    roster, balance = with_ends("xyzn", "a", "def")
    assert dealt(balance, roster, "xyzadef") == [("n", ENDS, 1)]


def test_as_many_newcomers_move_as_it_takes() -> None:
    roster, balance = with_ends("xyzu", "abcdnop", "e")
    assert sorted(dealt(balance, roster, "xyzuabcde")) == [("n", 1, 2), ("o", 1, 2), ("p", 1, 2)]


def test_who_works_in_the_epoch_or_leaves_does_not_move() -> None:
    roster, balance = with_ends("xyz", "abcn", "d")
    assert dealt(balance, roster, "xyzabcdn") == []
    left = ev.Heartbeat(PeerId("n"), 1, BASE, "d", ev.Capacity(1.0), leaving=True)
    roster.hear(left, 0.0)
    assert dealt(balance, roster, "xyzabcd") == []


def test_a_newcomer_on_its_way_counts_where_it_goes_and_one_that_refused_where_it_is() -> None:
    roster, balance = with_ends("xyz", "abcno", "d")
    assert dealt(balance, roster, "xyzabcd") == [("n", 1, 2), ("o", 1, 2)]
    roster.gone(PeerId("n"))
    balance.refused(PeerId("o"), 11.0)
    hear(roster, "p", 1)
    assert dealt(balance, roster, "xyzabcd", 12.0) == [("p", 1, 2)], "2 and 3 before, 3 and 3 then"
    assert dealt(balance, roster, "xyzabcd", 13.0) == []


def test_the_speed_of_an_unmeasured_newcomer_is_reckoned_from_a_plain_product() -> None:
    roster, balance = with_ends("xyz", "abc", "d")
    for peer, product_s in (("a", 1.0), ("n", 4.0), ("o", 1.0)):
        costs = Measured(product_s=product_s)
        speed = 1.0 if peer == "a" else 0.0
        roster.hear(ev.Heartbeat(PeerId(peer), 1, BASE, "d", ev.Capacity(speed, costs=costs)), 0.0)
    moves = balance.deal(roster, [PeerId(p) for p in "xyzabcd"], 10.0)
    assert moves[0].peer == "o", "the faster one helps more"


def test_a_stage_whose_workers_are_all_new_counts_in_the_unit_of_the_others() -> None:
    roster = Roster(2)
    balance = Balance(2, 10.0, 1.0)
    for peer, stage, speed in (
        *(("x", ENDS, 0.05), ("y", ENDS, 0.05), ("z", ENDS, 0.05)),
        *(("a", 1, 0.05), ("b", 1, 0.05), ("c", 1, 0.05), ("n", 1, 0.0), ("d", 2, 0.0)),
    ):
        hear(roster, peer, stage, speed)
    assert dealt(balance, roster, "xyzabcd") == [("n", 1, 2)], "d is no faster than the others"


def test_the_claim_of_a_newcomer_is_bounded_by_those_who_were_measured() -> None:
    roster, balance = with_ends("vwxyz", "abcfo", "dn")
    hear(roster, "n", 2, speed=1e9)
    assert dealt(balance, roster, "vwxyzabcfd") == [("o", 1, 2)], "a word does no work"


def test_the_leader_keeps_a_peer_beside_it_at_the_ends() -> None:
    roster, balance = with_ends("xn", "abc", "d")
    hear(roster, "d", 2, speed=0.2)
    assert dealt(balance, roster, "xabcd") == []
    hear(roster, "o", ENDS)
    assert [target for _, _, target in dealt(balance, roster, "xabcd")] == [2]


def test_one_that_has_gone_on_its_way_is_forgotten_soon() -> None:
    roster, balance = with_ends("xyz", "abn", "d")
    assert dealt(balance, roster, "xyzabd") == [("n", 1, 2)]
    roster.gone(PeerId("n"))
    hear(roster, "p", 1)
    assert dealt(balance, roster, "xyzabd", 10.0 + COMING_S - 1.0) == []
    assert dealt(balance, roster, "xyzabd", 10.0 + COMING_S) == [("p", 1, 2)]


def test_a_newcomer_that_is_still_coming_counts_where_it_goes() -> None:
    roster, balance = with_ends("xyz", "abn", "d")
    assert dealt(balance, roster, "xyzabd") == [("n", 1, 2)]
    roster.gone(PeerId("n"))
    hear(roster, "p", 1)
    members = [PeerId(p) for p in "xyzabd"]
    coming = {PeerId("n"): 2}
    assert balance.deal(roster, members, 10.0 + COMING_S, coming=coming) == []
    assert len(balance.deal(roster, members, 10.0 + COMING_S)) == 1


def test_only_peers_that_the_next_plan_counts_on_are_dealt_and_counted() -> None:
    roster, balance = with_ends("xyz", "abn", "du")
    slept = ev.Capacity(1.0, running=ev.Running("a plan that is over"))
    roster.hear(ev.Heartbeat(PeerId("n"), 1, BASE, "d", slept), 0.0)
    roster.peers.put_on_probation({PeerId("u")})
    assert dealt(balance, roster, "xyzabd") == [], "n has to hear of another plan first"
    hear(roster, "n", 1)
    assert dealt(balance, roster, "xyzabd") == [("n", 1, 2)], "u does no work"


def test_the_gain_does_not_depend_on_the_order_of_a_set() -> None:
    """Two on their way, whose speeds in another order have another sum."""
    gains = set[float]()
    for names in itertools.permutations("pqr"):
        roster, balance = with_ends("wxyz", "abcdefg" + "".join(names), "h")
        speeds = dict(zip(names, (0.1, 0.7, 0.3), strict=True))
        for peer, speed in speeds.items():
            hear(roster, peer, 1, speed)
        moves = balance.deal(roster, [PeerId(p) for p in "wxyzabcdefgh"], 10.0)
        assert len(moves) == 3
        for move in moves:
            roster.gone(move.peer)
        hear(roster, "n", 1)
        (move,) = balance.deal(roster, [PeerId(p) for p in "wxyzabcdefgh"], 11.0)
        gains.add(move.gain)
    assert len(gains) == 1, "asked in one order, whatever their names"


def test_a_swarm_that_never_looks_deals_nobody_out() -> None:
    roster = Roster(2)
    for peer, stage in (("x", ENDS), ("a", 1), ("b", 1), ("n", 1), ("d", 2)):
        hear(roster, peer, stage)
    assert dealt(Balance(2, 0.0, 1.0), roster, "xabd") == []


YOUNG = Version(0)
LEADER = PeerId("leader")
PATIENCE_S = 10.0


class Waiting:
    """A swarm that waits: peers with one letter each at stage 1, stage 2 and so on, and a
    leader."""

    def __init__(
        self, *stages: str, at: Version = YOUNG, ends: str = "", every_s: float = 0.0
    ) -> None:
        self.roster = Roster(len(stages))
        self.balance = Balance(len(stages), every_s, 1.0)
        hear(self.roster, LEADER, ENDS, 0.0, at)
        for stage, peers in enumerate((ends, *stages)):
            for peer in peers:
                hear(self.roster, peer, stage, 0.0, at)

    def asks(self, now: float, *lacking: int, **coming: int | None) -> tuple[str, int] | None:
        about = {PeerId(p): stage for p, stage in coming.items()}
        m = self.balance.mend(self.roster, LEADER, lacking, about, PATIENCE_S, now)
        return (m.peer, m.target) if m else None

    def first(self, *lacking: int, **coming: int | None) -> float:
        """Time in s at which the first peer is asked."""
        return next(t for t in range(200) if self.asks(float(t), *lacking, **coming))


def test_an_empty_stage_gets_a_peer_of_the_largest_stage() -> None:
    w = Waiting("ab", "cde", "")
    assert w.asks(0.0, 3) is None
    assert w.asks(PATIENCE_S - 0.1, 3) is None
    peer, stage = w.asks(PATIENCE_S, 3)
    assert (peer, stage) in {(p, 3) for p in "cde"}
    assert w.asks(PATIENCE_S + 0.25, 3) is None, "it is on its way"
    w.roster.gone(PeerId(peer))
    assert w.asks(PATIENCE_S + COMING_S - 1, 3) is None
    assert w.asks(PATIENCE_S + COMING_S, 3)[1] == 3, "somebody else"


def test_patience_begins_when_somebody_could_be_spared() -> None:
    w = Waiting("a", "")
    assert w.asks(0.0, 2) is None
    assert w.asks(500.0, 2) is None, "the last of its stage stays"
    hear(w.roster, "b", 1, 0.0, YOUNG)
    assert w.asks(501.0, 2) is None
    assert w.asks(501.0 + PATIENCE_S, 2) is not None


def test_every_lacking_stage_gets_one_peer_before_a_second() -> None:
    w = Waiting("abcdef", "", "")
    assert w.asks(0.0, 2, 3) is None
    for at in (PATIENCE_S, 20.0):
        asked = [w.asks(at + 0.25 * i, 2, 3) for i in range(4)]
        assert [one and one[1] for one in asked] == [2, 3, None, None]
        for peer, stage in filter(None, asked):
            hear(w.roster, peer, stage, 0.0, YOUNG)
    # Should every stage want three, the present peers can help only up to two each.
    assert all(w.asks(40.0 + t, 1, 2, 3) is None for t in range(60))


def test_a_stage_takes_no_peer_from_one_that_has_just_one_more() -> None:
    w = Waiting("abc", "de")
    assert all(w.asks(float(t), 2) is None for t in range(200))
    w = Waiting("abc", "d")
    assert [w.asks(float(t), 2) for t in range(12)].count(None) == 11


@pytest.mark.parametrize(("every_s", "rest_s"), [(0.0, REST_S), (20.0, 200.0)])
def test_a_peer_that_refuses_is_not_asked_again_at_once_and_the_next_is(
    every_s: float, rest_s: float
) -> None:
    w = Waiting("abc", "", every_s=every_s)
    w.asks(0.0, 2)
    refused = []
    for i in range(3):
        refused.append(w.asks(PATIENCE_S + 0.25 * i, 2)[0])
        w.balance.refused(PeerId(refused[-1]), PATIENCE_S + 0.25 * i)
    assert sorted(refused) == ["a", "b", "c"]
    # When the first could be asked again, patience begins anew.
    again = next(t for t in range(11, 300) if w.asks(float(t), 2))
    assert again == PATIENCE_S + rest_s + PATIENCE_S


@pytest.mark.parametrize(
    ("first", "second", "coming", "at"),
    [
        ("abc", "", {}, PATIENCE_S),
        ("abc", "", {"x": 2}, COMING_S),
        ("abc", "", {"x": None}, COMING_S),  # a peer that still chooses may choose this stage
        ("abc", "", {"x": 1}, PATIENCE_S),
        ("abcd", "x", {"x": 2}, PATIENCE_S),  # it is here
    ],
)
def test_a_peer_that_is_coming_is_waited_for_but_not_for_ever(
    first: str, second: str, coming: dict[str, int | None], at: float
) -> None:
    assert Waiting(first, second).first(2, **coming) == at


def test_a_peer_with_unproven_ways_is_waited_for() -> None:
    w = Waiting("abc", "x")
    w.roster = Roster(2, LEADER, prove=True)
    here = {LEADER: 0, "a": 1, "b": 1, "c": 1, "x": 2}
    for peer, stage in here.items():
        ways = tuple((PeerId(p), LinkCost(0.0, 0.0)) for p in here if "x" not in (p, peer))
        costs = Measured(ways=ways)
        note = ev.Heartbeat(PeerId(peer), stage, YOUNG, "d", ev.Capacity(costs=costs))
        w.roster.hear(note, 0.0)
    assert {s: len(peers) for s, peers in w.roster.participants.by_stage().items()} == {
        0: 1,
        1: 3,
        2: 0,
    }
    assert w.first(2) == COMING_S


def test_a_stage_that_was_helped_in_between_is_waited_for_anew() -> None:
    w = Waiting("abc", "")
    assert w.asks(0.0, 2) is None
    assert w.asks(5.0) is None, "no stage lacks peers"
    assert w.asks(PATIENCE_S, 2) is None
    assert w.asks(2 * PATIENCE_S, 2) is not None


def test_the_slowest_peer_of_a_stage_is_asked_first() -> None:
    w = Waiting("", "", at=BASE)
    for peer, speed in (("a", 4.0), ("b", 1.0), ("c", 2.0)):
        hear(w.roster, peer, 1, speed)
    w.roster.versions.agree(BASE)
    w.asks(0.0, 2)
    assert w.asks(PATIENCE_S, 2) == ("b", 2), "its stage loses least"


def test_ends_peers_other_than_the_leader_fill_empty_stages() -> None:
    w = Waiting("a", "", ends="xy")
    assert w.asks(0.0, 2) is None
    assert w.asks(PATIENCE_S, 2)[0] in "xy"
    w = Waiting("abcd", "e")
    assert all(w.asks(float(t), ENDS) is None for t in range(100))


def test_the_only_one_that_holds_what_was_agreed_on_stays() -> None:
    def asked(refuse: Collection[str]) -> list[str]:
        w = Waiting("a", "", at=BASE)
        w.roster.versions.agree(BASE)
        hear(w.roster, "new", 1, 0.0, YOUNG)
        said = []
        for t in range(300):
            if one := w.asks(float(t), 2):
                said.append(one[0])
                if one[0] in refuse:
                    w.balance.refused(PeerId(one[0]), float(t))
        return said

    assert set(asked([])) == set(asked(["new"])) == {"new"}


def test_without_an_agreed_version_the_newest_peers_are_kept() -> None:
    w = Waiting("a", "", at=BASE)
    hear(w.roster, "new", 1, 0.0, YOUNG)
    w.asks(0.0, 2)
    assert w.asks(PATIENCE_S, 2) == ("new", 2)
