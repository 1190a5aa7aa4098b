"""Peers that a peer has worked with, and their weight when strangers claim to lead."""

import pytest

from node.consensus.election import RIPE_S, SHUN_S, TOLD_S, Colleagues, Election, Sighting
from node.core.ids import PeerId

ME, LEADER, OTHER, STAGE = (PeerId(p) for p in ("me", "leader", "other-ends", "stage"))
GROUND = PeerId("0-ground")
SYBILS = [PeerId(f"sybil-{i:02d}") for i in range(50)]
LATE = 1000.0


def worked(*peers: PeerId) -> Colleagues:
    found = Colleagues(ME)
    found.meet(peers, 0.0)
    found.meet(peers, RIPE_S)
    return found


def election(
    colleagues: Colleagues,
    follows: dict[PeerId, PeerId],
    *leads: PeerId,
    others: tuple[PeerId, ...] = (),
    following: PeerId = LEADER,
) -> Election:
    e = Election(ME, 0.0)
    ends = {**{p: Sighting(1) for p in others}, **{p: Sighting(1, leads=True) for p in leads}}
    e.see(ends, follows, following, known=colleagues.all)
    return e


def test_a_peer_that_works_along_for_long_enough_is_a_colleague() -> None:
    known = Colleagues(ME)
    known.meet([ME, LEADER], 0.0)
    assert LEADER not in known.all
    known.meet([ME, LEADER], RIPE_S)
    assert known.all == {LEADER}
    known.meet([ME, LEADER, STAGE], RIPE_S + 1.0)
    known.meet([ME, LEADER], 1.5 * RIPE_S)
    known.meet([ME, LEADER, STAGE], 2 * RIPE_S + 2.0)
    assert known.all == {LEADER}, "the other was not there all the time"
    known.recall([STAGE])
    assert known.all == {LEADER, STAGE}


def test_a_peer_that_was_met_first_stays_a_colleague_when_parted() -> None:
    known = Colleagues(ME)
    known.meet([ME, LEADER, OTHER], 0.0)
    known.meet([ME, LEADER], 1.0)
    assert not known.all
    known.meet([ME, LEADER], RIPE_S)
    assert known.all == {LEADER, OTHER}
    known.meet([ME, LEADER, STAGE], RIPE_S + 1.0)
    assert STAGE not in known.all


def test_old_colleagues_are_forgotten_and_present_ones_kept() -> None:
    known = Colleagues(ME, ripe_s=0.0, most=3)
    for n in range(100):
        known.meet([LEADER, PeerId(f"passing-{n}")], float(n))
    assert known.all == {LEADER, "passing-98", "passing-99"}
    known.meet([LEADER, OTHER, STAGE, *SYBILS[:2]], 200.0)
    assert known.all == {LEADER, OTHER, STAGE, *SYBILS[:2]}
    known.recall([PeerId("long-ago")])
    assert "long-ago" not in known.all


FOLLOWS = {LEADER: LEADER, STAGE: LEADER, OTHER: LEADER, GROUND: GROUND}
CROWD = dict.fromkeys(SYBILS, GROUND)


@pytest.mark.parametrize(
    ("known", "follows"),
    [
        ((LEADER, STAGE, OTHER), FOLLOWS),
        ((LEADER, STAGE, OTHER), FOLLOWS | CROWD),
        ((LEADER, STAGE, OTHER, GROUND), FOLLOWS | CROWD),
    ],
    ids=["alone", "with-a-crowd", "with-a-record"],
)
@pytest.mark.parametrize("able", [True, False])
def test_a_ground_key_that_claims_to_lead_does_not_lead(
    known: tuple[PeerId, ...], follows: dict[PeerId, PeerId], able: bool
) -> None:
    e = election(worked(*known), follows, LEADER, GROUND)
    assert e.leader(LATE, able=able, leads=False) == LEADER


def test_nobody_who_leads_gives_way_to_a_stranger() -> None:
    e = election(worked(STAGE), CROWD, GROUND, following=ME)
    assert e.leader(LATE, able=True, leads=True) == ME


def test_a_colleague_succeeds_the_leader_before_a_stranger() -> None:
    e = election(worked(LEADER, STAGE, OTHER), CROWD, LEADER, GROUND, others=(OTHER,))
    e.shun(LEADER, LATE)
    assert e.leader(LATE, able=False, leads=False) == OTHER
    assert e.leader(LATE, able=True, leads=False) == ME
    e.see({LEADER: Sighting(1, True), GROUND: Sighting(1, True)}, {})
    assert e.leader(LATE + 2 * SHUN_S, able=False, leads=False) == GROUND, (
        "where nobody else is left"
    )


def test_after_a_partition_the_side_with_more_followers_goes_on() -> None:
    a, b, *others = names = [PeerId(f"p{i}") for i in range(9)]
    of_a = [a, *others[:2]]
    # The last one came to b's side while the network was parted.
    follows = dict.fromkeys(names, b) | dict.fromkeys(of_a, a)
    for me in names[:8]:
        known = Colleagues(me)
        known.recall(names[:8] if me in of_a else names)
        e = Election(me, 0.0)
        e.see(
            {p: Sighting(1, True) for p in (a, b) if p != me},
            {p: who for p, who in follows.items() if p != me},
            follows[me],
            known=known.all,
        )
        assert e.leader(LATE, able=me in (a, b), leads=me in (a, b)) == b


def test_a_plan_is_accepted_only_from_a_leader_we_reported_to() -> None:
    e = Election(ME, 0.0)
    assert not e.heeds(LEADER, 0.0)
    e.tells(LEADER, 5.0)
    assert e.heeds(LEADER, 5.0 + TOLD_S / 2)
    assert not e.heeds(GROUND, 5.0)
    assert not e.heeds(LEADER, 5.0 + TOLD_S)


def test_colleagues_from_before_a_restart_are_bounded_too() -> None:
    known = Colleagues(ME, most=2)
    known.recall([ME, STAGE, OTHER, LEADER])
    assert known.all == {OTHER, LEADER}, "the last ones were met last, and a peer is not its own"


def test_a_colleague_that_is_forgotten_does_not_return_with_the_next_one() -> None:
    known = Colleagues(ME, ripe_s=1.0, most=2)
    known.meet([LEADER, OTHER], 0.0)
    known.meet([LEADER], 1.0)
    assert known.all == {LEADER, OTHER}
    for now in (2.0, 3.0):
        known.meet([LEADER, STAGE], now)
    assert known.all == {LEADER, STAGE}
    for now in (4.0, 5.0):
        known.meet([GROUND], now)
    assert known.all == {STAGE, GROUND}


def test_a_peer_heeds_each_leader_that_it_reported_to_of_late() -> None:
    e = Election(ME, 0.0)
    e.tells(LEADER, LATE)
    e.tells(OTHER, LATE + 1.0)
    assert e.heeds(LEADER, LATE + 1.0)
    assert e.heeds(OTHER, LATE + 1.0)


def test_followers_are_those_of_the_newest_reading() -> None:
    ends = {p: Sighting(1, leads=True) for p in (LEADER, OTHER)}
    e = Election(ME, 0.0)
    e.see(ends, {STAGE: LEADER, GROUND: LEADER})
    assert e.leader(LATE, able=False, leads=False) == LEADER
    e.see(ends, {STAGE: OTHER, GROUND: OTHER})
    assert e.leader(LATE, able=False, leads=False) == OTHER
    e.see(ends)
    assert e.leader(LATE, able=False, leads=False) == LEADER, "nobody says whom it follows"


def test_a_peer_counts_itself_among_the_followers_of_its_leader() -> None:
    e = Election(ME, 0.0)
    e.see({p: Sighting(1, leads=True) for p in (LEADER, OTHER)}, {}, following=OTHER)
    assert e.leader(LATE, able=False, leads=False) == OTHER


def test_the_same_reading_is_not_counted_again() -> None:
    class Reading(dict[PeerId, PeerId]):
        counted = 0

        def items(self):  # type: ignore[no-untyped-def]
            self.counted += 1
            return super().items()

    follows = Reading({STAGE: LEADER})
    e = Election(ME, 0.0)
    for _ in range(3):
        e.see({LEADER: Sighting(1, leads=True)}, follows)
    assert follows.counted == 1
    assert e.leader(LATE, able=False, leads=False) == LEADER
