"""Times at which a cell gives to its partners, and at which it puts the mean in place."""

from dataclasses import replace

from node.core.ids import CellId, PeerId
from node.core.journey import Partner, Plan, Version, Window
from node.epoch import events as ev
from node.epoch.leader.roster import Roster
from node.epoch.leader.windows import TRIES, Windows

E, S1, S2 = (PeerId(p) for p in ("ends", "stage1", "stage2"))
BASE = Version(4, "aa" * 16)
NEXT = Version(5, "bb" * 16)
PARTNER = Partner(CellId("cd" * 8), PeerId("other"), {})
GROUP = ev.Grouped(Window(7, (PARTNER,)), until=100.0)


def roster(base: Version = BASE, **means: tuple[int, str]) -> Roster:
    made = Roster(2)
    for peer, stage in ((E, 0), (S1, 1), (S2, 2)):
        mean = means.get(peer, (0, ""))
        made.hear(ev.Heartbeat(peer, stage, base, f"d{stage}", outer=ev.OuterReport(mean)), 0.0)
    return made


HELD = {"ends": (7, "m0"), "stage1": (7, "m1"), "stage2": (7, "m2")}


def given() -> Windows:
    """The group is found, and the cell's parameters are on their way."""
    w = Windows()
    w.grouped(GROUP)
    w.next(roster(), BASE, 40.0)
    return w


def test_without_a_group_a_plan_says_nothing_of_windows() -> None:
    window = Windows().next(roster(), BASE, 0.0)
    assert (window.number, window.means) == (0, {})


def test_the_first_plan_after_the_group_gives_its_start() -> None:
    w = Windows()
    w.grouped(GROUP)
    first = w.next(roster(), BASE, 40.0)
    assert (first.number, first.partners, first.within_s) == (7, (PARTNER,), 60.0)
    again = w.next(roster(), BASE, 41.0)
    assert again.number == 7, "the epoch was given up: the same version is given"
    assert w.next(roster(NEXT), NEXT, 42.0).number == 0, "a later version is not what was given"


def test_means_are_put_in_place_once_every_stage_holds_one() -> None:
    w = given()
    some = roster(NEXT, ends=(7, "m0"), stage1=(7, "m1"))
    assert not w.next(some, NEXT, 42.0).means
    assert w.next(roster(NEXT, **HELD), NEXT, 43.0).means == {0: "m0", 1: "m1", 2: "m2"}
    assert w.number() == 7


def test_what_is_not_there_in_time_is_left_out() -> None:
    w = given()
    late = roster(NEXT, stage1=(7, "m1"), stage2=(6, "of another window"))
    assert w.next(late, NEXT, 100.0).means == {1: "m1"}


def test_a_window_in_which_nothing_came_costs_no_plan() -> None:
    w = given()
    assert not w.next(roster(NEXT), NEXT, 101.0).means
    assert not w.number()


def test_outer_rounds_that_fail_are_given_up() -> None:
    w = given()
    held = roster(NEXT, **HELD)
    assert [bool(w.next(held, NEXT, 41.0).means) for _ in range(TRIES + 1)] == [True] * TRIES + [
        False
    ]


def test_a_later_group_takes_the_place_of_an_earlier_one() -> None:
    w = Windows()
    w.grouped(GROUP)
    w.grouped(replace(GROUP, window=Window(6, (PARTNER,))))
    assert w.next(roster(), BASE, 40.0).number == 7
    w.grouped(replace(GROUP, window=Window(8, (PARTNER,))))
    assert w.next(roster(), BASE, 40.0).number == 8


def test_a_group_found_under_other_settings_is_forgotten() -> None:
    w = given()
    w.forget()
    assert not w.next(roster(NEXT, **HELD), NEXT, 43.0).means
    assert not w.number()
    w.grouped(replace(GROUP, window=Window(6, (PARTNER,))))
    assert w.next(roster(NEXT), NEXT, 44.0).number == 6, "whatever its number was"


T1 = PeerId("twin of stage1")
T2 = PeerId("third of stage1")


def with_twins(*digests: str) -> Roster:
    """A roster of which three replicas of stage 1 hold these means; all others hold theirs."""
    made = roster(NEXT, **HELD)
    for peer, digest in zip((S1, T1, T2), digests, strict=False):
        made.hear(ev.Heartbeat(peer, 1, NEXT, "d1", outer=ev.OuterReport((7, digest))), 0.0)
    return made


def test_a_stage_puts_in_place_the_mean_that_most_of_its_replicas_hold() -> None:
    w = given()
    split = with_twins("m1", "other", "other")
    assert w.next(split, NEXT, 43.0) == Window(), "one of them may still get the others' mean"
    assert w.next(split, NEXT, 100.0).means[1] == "other"
    assert given().next(with_twins("m9", "m1"), NEXT, 100.0).means[1] == "m1", "equally many"


def test_a_replica_without_the_mean_is_waited_for() -> None:
    w = given()
    lacks = roster(NEXT, **HELD)
    lacks.hear(ev.Heartbeat(T1, 1, NEXT, "d1"), 0.0)
    assert not w.next(lacks, NEXT, 43.0).means
    assert w.next(lacks, NEXT, 100.0).means == {0: "m0", 1: "m1", 2: "m2"}


def test_a_group_that_is_found_too_late_gives_nothing() -> None:
    w = Windows()
    w.grouped(GROUP)
    assert w.next(roster(), BASE, 100.0) == Window()
    assert not w.number()


def test_a_version_is_not_given_again_once_its_mean_was_put_in_place() -> None:
    w = given()
    assert w.next(roster(NEXT, **HELD), NEXT, 43.0).means
    again = w.next(roster(**HELD), BASE, 44.0)
    assert (again.number, set(again.means)) == (0, {0, 1, 2}), "the cell went back to it"


def test_a_group_that_is_told_twice_gives_once() -> None:
    w = given()
    w.grouped(replace(GROUP, until=200.0))
    assert w.next(roster(NEXT), NEXT, 50.0) == Window()


def test_a_later_group_has_all_its_tries() -> None:
    w = given()
    held = roster(NEXT, **HELD)
    for _ in range(TRIES):
        assert w.next(held, NEXT, 41.0).means
    w.grouped(replace(GROUP, window=Window(8, (PARTNER,))))
    assert w.next(held, NEXT, 42.0).number == 8
    later = roster(BASE, **{p: (8, m) for p, (_, m) in HELD.items()})
    assert w.next(later, BASE, 43.0).means


def test_only_the_round_of_its_window_ends_a_group() -> None:
    plan = Plan(4, 1, E, (), (), {}, outer=6)
    w = given()
    w.committed(plan)
    assert w.number() == 7
    w.committed(replace(plan, outer=7))
    assert w.number() == 0
    w.committed(plan)
