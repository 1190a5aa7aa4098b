"""Speeds, anchors and ways of peers, as the leader has heard of them."""

import dataclasses

import pytest

from node.core.ids import PeerId
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.leader.roster import Roster
from node.epoch.pace import MOST_LACKING
from node.epoch.peers.speeds import CEILING, FORGIVE_AFTER, GRID
from node.scheduler.costs import LinkCost, Measured
from tests.training.test_roster import A, B, C, D, proving, ready, roster, says


def anchored(peer: PeerId, stage: int, anchor: str, leaving: bool = False) -> ev.Heartbeat:
    return ev.Heartbeat(
        peer, stage, Version(0), "d", outer=ev.OuterReport(anchor=anchor), leaving=leaving
    )


ENDS = anchored(PeerId("E"), 0, "e")


def test_the_anchor_of_a_cell_is_that_of_most_replicas_of_each_stage() -> None:
    alone = [ENDS, anchored(A, 1, "x"), anchored(B, 2, "y")]
    one = roster(*alone).anchor()
    assert len(one) == 64
    most = roster(*alone, anchored(C, 1, "z"), anchored(D, 1, "x"))
    assert most.anchor() == one, "C is outvoted"
    tie = roster(ENDS, anchored(B, 2, "y"), anchored(C, 1, "z"), anchored(A, 1, "x"))
    assert tie.anchor() == one, "the smallest of equally many"
    assert roster(*alone, anchored(C, 1, "")).anchor() == one, "a peer without one has no say"
    assert roster(*alone, anchored(C, 1, "a", leaving=True)).anchor() == one
    assert roster(ENDS, anchored(A, 1, "x"), anchored(B, 2, "other")).anchor() != one


def test_a_cell_with_a_stage_without_an_anchor_has_none() -> None:
    assert roster(ENDS, anchored(A, 1, "x")).anchor() == ""
    assert roster(ENDS, anchored(A, 1, "x"), anchored(B, 2, "")).anchor() == ""


def test_a_claim_beyond_its_bound_is_doubted_by_its_factor() -> None:
    r = roster(says(A, 64.0), says(B, 4.0), says(C, 1.0, 0, A=10.0, B=10.0))
    assert r.speeds.doubts() == {A: pytest.approx(64.0 / 8.0)}
    assert r.speeds.of(A) == 8.0
    assert r.speeds.of(B) == 4.0


def test_a_speed_is_the_same_until_it_has_changed_by_a_step() -> None:
    step = 2 ** (1 / GRID)
    assert roster(says(A, 4.0 * step**0.4)).speeds.of(A) == pytest.approx(4.0)
    r = roster(says(A, 4.0))
    assert r.speeds.of(A) == 4.0
    high = 4.0 * step
    claims = (
        (4.0 * step**0.9, 4.0),
        (4.0 * step**1.1, high),
        (4.0 * step**0.1, high),
        (4.0 / step**0.1, 4.0),
        (0.0, 0.0),
        (4.0 * step**0.4, 4.0),
    )
    for claim, speed in claims:
        r.hear(says(A, claim), 1.0)
        assert r.speeds.of(A) == pytest.approx(speed)


def test_measurements_of_no_speed_and_of_oneself_are_passed_over() -> None:
    r = roster(says(A, 64.0, A=10.0), says(B, 4.0), says(C, 1.0, 0, A=0.0, B=10.0))
    assert r.speeds.of(A) == 64.0


def test_a_newcomer_is_told_a_bounded_number_of_peers_to_reach() -> None:
    crowd = [f"p{n:03}" for n in range(MOST_LACKING + 20)]
    r = proving(*(ready(p, []) for p in crowd))
    taking = r.participants.by_stage()[1]
    assert len(taking) == 1
    (owner,) = taking
    wanted = r.participants.lacking(owner)
    assert len(wanted) == MOST_LACKING
    assert owner not in wanted
    (other, *_) = [PeerId(p) for p in crowd if p != owner]
    assert r.participants.lacking(other)[0] == owner
    assert other not in r.participants.lacking(other)
    assert r.participants.lacking(PeerId("stranger")) == []
    assert Roster(2).participants.lacking(A) == []


def test_a_peer_outside_the_stages_lacks_no_ways() -> None:
    r = proving(ready("a", []))
    r.hear(ev.Heartbeat(B, 7, Version(0), "d"), 0.0)
    assert r.participants.lacking(B) == []


def timed(peer: PeerId, speed: float, product_s: float) -> ev.Heartbeat:
    """A replica of stage 1 with a measured speed, 0 for none, and the time of a plain product."""
    return dataclasses.replace(
        says(peer, speed), capacity=ev.Capacity(speed, costs=Measured(product_s=product_s))
    )


def stepped(note: ev.Heartbeat, tera_s: float) -> ev.Heartbeat:
    """The heartbeat of a peer that has timed steps of the optimizer too."""
    costs = dataclasses.replace(note.capacity.costs, tera_s=tera_s)
    return dataclasses.replace(note, capacity=dataclasses.replace(note.capacity, costs=costs))


def test_the_speed_of_a_newcomer_is_reckoned_from_a_plain_product() -> None:
    r = roster(timed(A, 4.0, 1.0), timed(B, 2.0, 2.0), timed(C, 0.0, 1.6), timed(D, 0.0, 0.0))
    assert r.speeds.of(C) == pytest.approx(4.0 / 1.6, rel=0.05)
    assert r.speeds.of(D) == 0.0, "nothing is known of it"
    assert r.speeds.believed(C) == 0.0, "it is planned with, and nobody moves for it"


def test_a_newcomer_is_compared_by_products_alone_and_not_by_steps_of_the_optimizer() -> None:
    veterans = (stepped(timed(A, 4.0, 1.0), 20.0), stepped(timed(B, 4.0, 1.0), 0.01))
    r = roster(*veterans, timed(C, 0.0, 1.6), stepped(timed(D, 0.0, 0.0), 1.0))
    assert r.speeds.of(C) == pytest.approx(4.0 / 1.6, rel=0.05)
    assert r.speeds.of(D) == 0.0, "its product is unknown"
    r = roster(stepped(timed(A, 4.0, 0.0), 20.0), timed(C, 0.0, 1.6))
    assert r.speeds.of(C) == 4.0, "nothing to compare with"


def test_the_product_of_a_newcomer_is_believed_within_bounds() -> None:
    r = roster(timed(A, 4.0, 1.0), timed(B, 4.0, 1.0), timed(C, 0.0, 1e-6), timed(D, 0.0, 1e6))
    assert r.speeds.of(C) == pytest.approx(4.0 * CEILING)
    assert r.speeds.of(D) == pytest.approx(4.0 / CEILING)


def test_before_anything_was_measured_speeds_are_in_the_ratio_of_products() -> None:
    r = roster(timed(A, 0.0, 1.0), timed(B, 0.0, 1.5))
    assert r.speeds.of(A) / r.speeds.of(B) == pytest.approx(1.5, rel=0.06)


def lined(peer: PeerId, speed: float, stage: int, *tensors_s: float) -> ev.Heartbeat:
    """A peer with a measured speed, and with connections of a tenth of a second there and back that
    carry a tensor in these seconds."""
    ways = tuple((PeerId(f"to {s}"), LinkCost(s, 0.1)) for s in tensors_s)
    capacity = ev.Capacity(speed, costs=Measured(ways=(*ways, (D, LinkCost(0.0, 0.1)))))
    return dataclasses.replace(says(peer, speed, stage), capacity=capacity)


@pytest.mark.parametrize(
    ("stage", "tensors_s", "coarsest", "speed"),
    [
        (0, (8.1, 20.0), 1.0, 1 / 16),
        (0, (8.1,), 0.25, 1 / 4),
        (0, (0.2,), 1.0, 2.0),
        (0, (8.1, 0.05), 1.0, 2.0),
        (0, (), 1.0, 2.0),
        (1, (8.1,), 1.0, 2.0),
    ],
    ids=["narrow", "coarser", "wide", "one wide way", "not measured", "block stage"],
)
def test_an_ends_peer_starts_what_its_line_carries(
    stage: int, tensors_s: tuple[float, ...], coarsest: float, speed: float
) -> None:
    r = Roster(2, coarsest=coarsest)
    r.hear(lined(A, 2.0, stage, *tensors_s), 0.0)
    assert r.speeds.of(A) == pytest.approx(speed, rel=0.03)


def test_a_line_without_work_for_long_is_tried_again() -> None:
    r = roster(lined(A, 2.0, 0, 8.1), says(B, 2.0, 0))
    for _ in range(FORGIVE_AFTER):
        assert r.speeds.of(A) == pytest.approx(1 / 16)
        r.speeds.worked({A, B}, {B})
    assert r.speeds.of(A) == pytest.approx(CEILING / 16)
