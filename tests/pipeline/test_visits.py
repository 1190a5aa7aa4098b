"""One visit of a micro-batch at a peer: its answers to other peers and its actions, event by
event."""

from dataclasses import replace
from typing import Any

import pytest

from node.core.ids import PeerId, short
from node.core.journey import Hop, Plan, PlanMember
from node.pipeline import events as ev
from node.pipeline.events import Direction, Key, Say, Trouble
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import PAUSE_S, SUSPECT_S
from tests.pipeline.conftest import ORIGIN, make_plan

FORWARD = Direction.FORWARD
BACKWARD = Direction.BACKWARD
EPOCH = 3
START = Key(EPOCH, 0, 0)
HERE = Key(EPOCH, 0, 2)
LAST = Key(EPOCH, 0, 4)
S1A, S1B, S2A, S2B, S3A, S3B = (PeerId(f"s{n}{letter}") for n in (1, 2, 3) for letter in "ab")
STRANGER = PeerId("stranger")


class Scene:
    """A machine under a plan whose first micro-batch goes over s1b, s2a and s3b."""

    def __init__(
        self, peer: PeerId = S2A, plan: Plan | None = None, fewest: int = 99, **about: Any
    ) -> None:
        self.machine = PipelineMachine(peer, fewest, **about)
        self.plan = plan or make_plan(3, 2)
        self.tell(ev.AdoptPlan(self.plan))

    def tell(self, event: ev.Event, now: float = 0.0) -> list[ev.Action]:
        return self.machine.handle(event, now)

    def claim(self, position: int = 2, index: int = 0, **swapped: PeerId) -> ev.Claim:
        """The claim of a frame for this position. ``swapped``: peers other than the plan's, by
        stage, as ``s1=...``; an empty one is left out."""
        hops = [
            Hop(hop.stage, swapped.get(f"s{hop.stage}", hop.peer))
            for hop in self.plan.paths[index].journey
        ]
        return ev.Claim(EPOCH, self.plan.hash, index, tuple(hops), position)

    def come(
        self, way: Direction, sender: PeerId, claim: ev.Claim | None = None
    ) -> list[ev.Action]:
        """A whole tensor comes."""
        return self.tell(ev.TensorReceived(way, claim or self.claim(), sender))

    def answer(self, event: ev.Event) -> tuple[Say, str]:
        """The answer to a frame or a note, the first of the actions."""
        first = self.tell(event)[0]
        assert isinstance(first, ev.Answer)
        return first.say, first.reason

    def computed(self, way: Direction = FORWARD, key: Key = HERE) -> list[ev.Action]:
        return self.tell(ev.Computed(key, way))

    def turned(
        self, peer: PeerId, trouble: Trouble, way: Direction = FORWARD, now: float = 0.0
    ) -> list[ev.Action]:
        return self.tell(ev.Turned(HERE, way, peer, trouble), now)


def forwarded(**about: Any) -> Scene:
    """The activation is computed and on its way to s3b."""
    scene = Scene(**about)
    scene.come(FORWARD, scene.claim().journey[1].peer)
    scene.computed()
    return scene


def returned(**about: Any) -> Scene:
    """The gradient is computed and on its way to s1b."""
    scene = forwarded(**about)
    scene.come(BACKWARD, S3B)
    scene.computed(BACKWARD)
    return scene


def send(
    scene: Scene, way: Direction, position: int, *, patient: bool = False, **swapped: PeerId
) -> ev.Send:
    return ev.Send(HERE, way, scene.claim(**swapped).journey, position, patient)


def named(scene: Scene, caller: PeerId = ORIGIN, index: int = 0) -> ev.Counted:
    return ev.Counted(EPOCH, scene.plan.hash, index, caller)


def peers(actions: list[ev.Action]) -> list[PeerId]:
    return [action.peer for action in actions if isinstance(action, ev.Send)]


# ------------------------------------------------------------ plans

LATER = replace(make_plan(3, 2), epoch=EPOCH + 1)
OTHER = replace(make_plan(3, 2), term=9)


@pytest.mark.parametrize(
    ("before", "epoch", "under", "say"),
    [
        ([ev.AdoptPlan(None)], EPOCH, None, Say.AWAIT_PLAN),
        ([], EPOCH + 1, None, Say.AWAIT_PLAN),
        ([], EPOCH, OTHER, Say.AWAIT_PLAN),
        ([ev.AdoptPlan(OTHER)], EPOCH, None, Say.REFUSED),
        ([], EPOCH - 1, OTHER, Say.AWAIT_PLAN),
        ([ev.AdoptPlan(LATER)], EPOCH, None, Say.REFUSED),
        ([ev.AdoptPlan(LATER)], EPOCH, OTHER, Say.AWAIT_PLAN),
        ([ev.Close(EPOCH)], EPOCH, None, Say.REFUSED),
        ([ev.Close(EPOCH)], EPOCH, OTHER, Say.AWAIT_PLAN),
        ([ev.Close(EPOCH - 1)], EPOCH, None, Say.TAKE),
        ([ev.AdoptPlan(LATER), ev.AdoptPlan(OTHER)], EPOCH, OTHER, Say.TAKE),
    ],
    ids=[
        "no-plan",
        "epoch-ahead",
        "another-plan",
        "replaced",
        "begins-anew-earlier",
        "epoch-over",
        "epoch-begins-anew",
        "closed",
        "closed-and-begins-anew",
        "another-epoch-closed",
        "gone-back",
    ],
)
def test_work_waits_for_its_plan_and_is_refused_after_it(
    before: list[ev.Event], epoch: int, under: Plan | None, say: Say
) -> None:
    scene = Scene()
    for event in before:
        scene.tell(event)
    plan_hash = (under or scene.plan).hash
    claim = replace(scene.claim(), epoch=epoch, plan_hash=plan_hash)
    assert scene.answer(ev.Arrived(FORWARD, claim, S1B))[0] is say
    if say is not Say.TAKE:
        for note in (
            ev.Asked(epoch, plan_hash, 0, S3B, 3),
            ev.Lost(epoch, plan_hash, 0, S3B, "lost"),
            ev.Counted(epoch, plan_hash, 0, ORIGIN),
        ):
            assert scene.answer(note)[0] is Say.REFUSED


def test_a_new_plan_frees_everything_of_the_one_before() -> None:
    scene = Scene(ORIGIN)
    scene.tell(ev.Start(0))
    assert scene.tell(ev.AdoptPlan(scene.plan)) == [], "it is in force already"
    done = scene.tell(ev.AdoptPlan(LATER))
    assert done == [ev.Free(START), ev.Dropped(0, "the epoch is over")]
    assert scene.computed(key=START) == []


def test_only_an_origins_own_unfinished_micro_batches_are_dropped_with_a_plan() -> None:
    hop = forwarded()
    assert hop.tell(ev.AdoptPlan(LATER)) == [ev.Free(HERE)]
    origin = Scene(ORIGIN)
    origin.tell(ev.Start(0))
    origin.computed(key=START)
    origin.come(BACKWARD, S1B, origin.claim(0))
    origin.computed(BACKWARD, START)
    assert origin.tell(ev.AdoptPlan(LATER)) == [ev.Free(START)]


def test_peers_that_hold_a_stage_are_its_replicas() -> None:
    plan = make_plan(1, 2)
    listener = PlanMember(PeerId("s1c"), 1, 0.0, False)
    scene = Scene(plan=replace(plan, members=(listener, *reversed(plan.members))))
    assert scene.machine.replicas(1) == (S1A, S1B)
    assert scene.machine.replicas(7) == ()
    scene.tell(ev.AdoptPlan(None))
    assert scene.machine.replicas(1) == ()


# ------------------------------------------------------------ frames

BAD_FRAMES = {
    "no-such-micro-batch": ({"index": 9}, S1B, "no such micro-batch"),
    "shorter": ({"journey": 4}, S1B, "not the plan's"),
    "another-order": ({"journey": "swapped"}, S1B, "not the plan's"),
    "peer-of-another-stage": ({"s1": S3A}, S3A, "not the plan's"),
    "another-origin": ({"s0": S1A}, S1B, "not the plan's"),
    "leaves-out-too-much": ({"s1": PeerId("")}, ORIGIN, "leaves out too much"),
    "position-beyond": ({"position": 5}, S1B, "no such position"),
    "position-before": ({"position": -1}, S1B, "no such position"),
    "for-another": ({"s2": S2B}, S1B, "not for me"),
    "not-from-the-hop-before": ({}, S1A, "not from the hop before"),
    "from-the-hop-behind": ({}, S3B, "not from the hop before"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_that_is_not_of_the_plan_is_refused(name: str) -> None:
    about, sender, why = BAD_FRAMES[name]
    scene = Scene()
    swapped = {k: v for k, v in about.items() if k.startswith("s")}
    claim = scene.claim(about.get("position", 2), **swapped)
    if "index" in about:
        claim = replace(claim, index=about["index"])
    if about.get("journey") == 4:
        claim = replace(claim, journey=claim.journey[:4])
    if about.get("journey") == "swapped":
        first, one, two, *rest = claim.journey
        claim = replace(claim, journey=(first, two, one, *rest), position=1)
    for event in (ev.Arrived(FORWARD, claim, sender), ev.TensorReceived(FORWARD, claim, sender)):
        say, reason = scene.answer(event)
        assert say is Say.REFUSED
        assert why in reason


def test_a_full_stash_takes_only_what_it_has_room_for() -> None:
    scene = Scene()
    came = ev.Arrived(FORWARD, scene.claim(), S1B, room=False)
    assert scene.answer(came)[0] is Say.BUSY
    assert scene.answer(replace(came, room=True))[0] is Say.TAKE
    origin = Scene(ORIGIN)
    home = ev.Arrived(FORWARD, origin.claim(4), S3B, room=False)
    assert origin.answer(home) == (Say.REFUSED, "not under way here")
    origin.tell(ev.Start(0))
    assert origin.answer(home)[0] is Say.TAKE, "its room was set aside at the start"


def test_an_activation_is_computed_and_sent_on() -> None:
    scene = Scene()
    assert scene.come(FORWARD, S1B) == [ev.Answer(Say.TAKE), ev.Compute(HERE, FORWARD)]
    assert scene.answer(ev.Arrived(FORWARD, scene.claim(), S1B))[0] is Say.AGAIN
    assert scene.computed() == [send(scene, FORWARD, 3)]
    assert scene.computed() == []
    assert not scene.machine.told(HERE, FORWARD)
    assert scene.tell(ev.Passed(HERE, FORWARD, S3B)) == [ev.AcknowledgeVisit(HERE, FORWARD)]
    assert scene.machine.told(HERE, FORWARD)
    assert scene.tell(ev.Settled(HERE, FORWARD, S3B)) == []
    assert not scene.machine.told(HERE, BACKWARD)
    assert not scene.machine.told(LAST, FORWARD)


def test_a_gradient_is_computed_and_sent_back() -> None:
    scene = forwarded()
    assert scene.come(BACKWARD, S3B) == [ev.Answer(Say.TAKE), ev.Compute(HERE, BACKWARD)]
    assert scene.computed(BACKWARD) == [ev.FreeGraph(HERE), send(scene, BACKWARD, 1)]
    assert scene.answer(ev.Arrived(BACKWARD, scene.claim(), S3B))[0] is Say.AGAIN
    other = scene.claim(s3=S3A)
    assert scene.answer(ev.Arrived(BACKWARD, other, S3A))[0] is Say.SETTLED
    assert scene.tell(ev.Passed(HERE, BACKWARD, S1B)) == [ev.AcknowledgeVisit(HERE, BACKWARD)]
    assert scene.tell(ev.Settled(HERE, BACKWARD, S1B)) == [ev.FreeGradient(HERE)]


def test_a_gradient_that_overtakes_its_forward_is_computed_after_it() -> None:
    scene = Scene()
    scene.come(FORWARD, S1B)
    assert scene.come(BACKWARD, S3B) == [ev.Answer(Say.TAKE)]
    assert scene.computed() == [ev.AcknowledgeVisit(HERE, FORWARD), ev.Compute(HERE, BACKWARD)]


# ------------------------------------------------------------ troubles of the next hop


def test_each_replica_is_asked_then_all_again_after_a_pause() -> None:
    scene = forwarded()
    retry = ev.Retry(HERE, FORWARD)
    assert scene.turned(S3B, Trouble.BUSY) == [send(scene, FORWARD, 3, s3=S3A)]
    assert scene.turned(S3A, Trouble.BUSY) == [ev.Later(HERE, FORWARD, PAUSE_S[0], full=True)]
    assert scene.tell(retry) == [send(scene, FORWARD, 3, s3=S3A, patient=True)]
    assert scene.tell(retry) == [], "it is under way"
    assert scene.turned(S3A, Trouble.BUSY) == [send(scene, FORWARD, 3, patient=True)]
    assert scene.turned(S3B, Trouble.BUSY) == [ev.Later(HERE, FORWARD, 2 * PAUSE_S[0], full=True)]


def test_a_pause_is_never_longer_than_the_longest() -> None:
    scene = forwarded(plan=make_plan(1, 1))
    target = scene.claim().journey[3].peer
    pauses = []
    for _ in range(9):
        (later,) = scene.turned(target, Trouble.BUSY)
        assert isinstance(later, ev.Later)
        pauses.append(later.seconds)
        assert peers(scene.tell(ev.Retry(HERE, FORWARD))) == [target]
    assert pauses[:3] == [PAUSE_S[0], 2 * PAUSE_S[0], 4 * PAUSE_S[0]]
    assert pauses[-4:] == [PAUSE_S[1]] * 4


def test_a_peer_that_failed_twice_or_refused_is_not_asked_for_this_tensor() -> None:
    scene = forwarded()
    assert peers(scene.turned(S3B, Trouble.FAILED)) == [S3A]
    (later,) = scene.turned(S3A, Trouble.FAILED)
    assert isinstance(later, ev.Later)
    assert peers(scene.tell(ev.Retry(HERE, FORWARD))) == [S3A]
    assert peers(scene.turned(S3A, Trouble.FAILED)) == [S3B]
    assert scene.turned(S3B, Trouble.REFUSED) == [
        ev.Failed(HERE, FORWARD, "no live replica of stage 3")
    ]
    assert scene.tell(ev.Retry(HERE, FORWARD)) == [
        ev.Failed(HERE, FORWARD, "no live replica of stage 3")
    ]


def test_word_of_an_attempt_that_is_over_changes_nothing() -> None:
    scene = forwarded()
    assert scene.turned(S3A, Trouble.FAILED) == []
    assert scene.turned(S3B, Trouble.FAILED, BACKWARD) == []
    scene.tell(ev.Settled(HERE, FORWARD, S3B))
    assert scene.turned(S3B, Trouble.FAILED) == []


def test_a_broken_stream_is_no_trouble_once_the_gradient_is_here() -> None:
    scene = forwarded()
    scene.come(BACKWARD, S3B)
    assert scene.turned(S3B, Trouble.FAILED) == [ev.AcknowledgeVisit(HERE, FORWARD)]
    assert scene.turned(S3B, Trouble.FAILED) == []


def test_after_it_was_acknowledged_a_lost_activation_is_reported_to_the_origin() -> None:
    scene = forwarded()
    scene.tell(ev.Passed(HERE, FORWARD, S3B))
    assert peers(scene.turned(S3B, Trouble.REFUSED)) == [S3A]
    assert scene.turned(S3A, Trouble.REFUSED) == [
        ev.TellOrigin(HERE, ORIGIN, "no live replica of stage 3")
    ]


def test_a_sender_that_comes_again_has_a_given_up_result_sent_anew() -> None:
    scene = forwarded()
    scene.turned(S3B, Trouble.REFUSED)
    scene.turned(S3A, Trouble.REFUSED)
    newer = scene.claim(s3=S3B)
    again = scene.tell(ev.Arrived(FORWARD, newer, S1B))
    assert again[0] == ev.Answer(Say.AGAIN)
    assert peers(again) == [S3A], "the last one that was asked"
    back = returned()
    back.turned(S1B, Trouble.REFUSED, BACKWARD)
    assert back.turned(S1A, Trouble.REFUSED, BACKWARD) == [
        ev.Failed(HERE, BACKWARD, "no live replica of stage 1")
    ]
    assert peers(back.tell(ev.Arrived(BACKWARD, back.claim(), S3B))) == [S1A]


def test_a_gradient_goes_to_the_replacement_of_the_hop_that_it_was_sent_to() -> None:
    scene = returned()
    replacement = scene.claim(s1=S1A)
    came = ev.Arrived(FORWARD, replacement, S1A)
    assert scene.tell(came) == [
        ev.Answer(Say.AGAIN),
        send(scene, BACKWARD, 1, s1=S1A),
    ]
    assert scene.tell(came) == [ev.Answer(Say.AGAIN)], "it is on its way there"
    assert scene.turned(S1B, Trouble.FAILED, BACKWARD) == []
    scene.tell(ev.Settled(HERE, BACKWARD, S1A))
    assert scene.tell(ev.Arrived(FORWARD, scene.claim(), S1B)) == [ev.Answer(Say.AGAIN)]


def test_a_hop_that_refused_a_gradient_gets_it_when_it_asks_for_it() -> None:
    scene = returned()
    assert peers(scene.turned(S1B, Trouble.REFUSED, BACKWARD)) == [S1A]
    assert peers(scene.tell(ev.Arrived(FORWARD, scene.claim(), S1B))) == [S1B]


def test_a_suspect_is_asked_last_for_a_while_or_until_it_is_heard_of() -> None:
    def second(scene: Scene, now: float) -> list[PeerId]:
        """Peers asked for another micro-batch on the same path."""
        claim = scene.claim(index=2)
        scene.tell(ev.TensorReceived(FORWARD, claim, S1B), now)
        return peers(scene.tell(ev.Computed(claim.key, FORWARD), now))

    def failed() -> Scene:
        scene = forwarded()
        scene.turned(S3B, Trouble.FAILED, now=100.0)
        return scene

    assert second(forwarded(), 100.0) == [S3B]
    assert second(failed(), 100.0 + SUSPECT_S - 0.1) == [S3A]
    assert second(failed(), 100.0 + SUSPECT_S) == [S3B]
    busy = forwarded()
    busy.turned(S3B, Trouble.BUSY, now=100.0)
    assert second(busy, 100.0) == [S3B]
    for word in (ev.Passed(HERE, FORWARD, S3B), ev.Settled(HERE, FORWARD, S3B)):
        scene = failed()
        scene.tell(word, 101.0)
        assert second(scene, 102.0) == [S3B]
    scene = failed()
    scene.tell(ev.Arrived(BACKWARD, scene.claim(), S3B), 101.0)
    assert second(scene, 102.0) == [S3B], "a frame came from it"


def test_work_that_is_diverted_is_shared_among_the_other_replicas() -> None:
    plan = make_plan(6, 3)
    path = plan.paths[0]
    scene = Scene(path.hops[1].peer, replace(plan, paths=(path, path, replace(path, index=2))))
    diverted = []
    for index in (0, 2):
        claim = scene.claim(index=index)
        scene.come(FORWARD, path.hops[0].peer, claim)
        scene.computed(key=claim.key)
        busy = ev.Turned(claim.key, FORWARD, path.hops[2].peer, Trouble.BUSY)
        diverted += peers(scene.tell(busy))
    assert len({path.hops[2].peer, *diverted}) == 3


def test_nobody_of_a_found_dead_peer_is_asked() -> None:
    scene = forwarded()
    assert scene.tell(ev.PeerDied(S3A)) == [], "nothing is under way to it"
    assert scene.tell(ev.PeerDied(S3B)) == [ev.Failed(HERE, FORWARD, "no live replica of stage 3")]
    back = returned()
    assert back.tell(ev.PeerDied(S1B)) == [send(back, BACKWARD, 1, s1=S1A)]


OTHER_ORIGIN = PeerId("s0b")


def dying(peer: PeerId = S2A) -> Scene:
    """A machine under a plan whose last micro-batch has an origin of its own."""
    plan = make_plan(3, 2)
    paths = (*plan.paths[:2], replace(plan.paths[2], origin=OTHER_ORIGIN))
    members = (*plan.members, PlanMember(OTHER_ORIGIN, 0))
    return Scene(peer, replace(plan, paths=paths, members=members))


DEAD = "its origin is dead"


def test_work_for_a_dead_origin_is_freed_and_no_more_of_it_is_taken() -> None:
    scene = dying()
    scene.come(FORWARD, S1B)
    scene.computed()
    kept = scene.claim(index=2)
    scene.come(FORWARD, S1B, kept)
    assert scene.tell(ev.PeerDied(ORIGIN)) == [ev.Failed(HERE, FORWARD, DEAD), ev.Free(HERE)]
    assert list(scene.machine.visits) == [kept.key], "its own origin lives"
    for way, sender in ((FORWARD, S1B), (BACKWARD, S3B)):
        for event in (ev.Arrived, ev.TensorReceived):
            assert scene.answer(event(way, scene.claim(), sender)) == (Say.REFUSED, DEAD)
    assert scene.answer(ev.Arrived(BACKWARD, kept, S3B))[0] is Say.TAKE
    scene.plan = replace(scene.plan, term=scene.plan.term + 1)
    scene.tell(ev.AdoptPlan(scene.plan))
    assert scene.answer(ev.Arrived(FORWARD, scene.claim(), S1B))[0] is Say.TAKE, "it came back"


def test_the_last_hop_gives_a_result_for_a_dead_origin_up_at_once() -> None:
    scene = dying(S3B)
    claim = scene.claim(3)
    scene.come(FORWARD, S2A, claim)
    assert peers(scene.computed(key=claim.key)) == [ORIGIN]
    done = scene.tell(ev.PeerDied(ORIGIN))
    assert done == [ev.Failed(claim.key, FORWARD, DEAD), ev.Free(claim.key)]


def test_a_replacement_fetches_nothing_for_a_dead_origin() -> None:
    scene = dying(S2B)
    instead = scene.claim(s2=S2B)
    assert isinstance(scene.come(BACKWARD, S3B, instead)[1], ev.Fetch)
    assert scene.tell(ev.PeerDied(ORIGIN)) == [ev.Failed(HERE, BACKWARD, DEAD), ev.Free(HERE)]
    assert scene.tell(ev.Fetched(HERE, S1B)) == []


def test_a_share_that_a_dead_origin_may_have_named_waits_for_its_name() -> None:
    scene = returned()
    assert scene.tell(ev.PeerDied(ORIGIN)) == []
    scene.tell(ev.Passed(HERE, BACKWARD, S1B))
    assert scene.answer(ev.Arrived(BACKWARD, scene.claim(), S3B))[0] is Say.AGAIN
    assert scene.tell(named(scene)) == [ev.Answer(Say.TAKE), ev.Commit(HERE)]


def test_a_hop_that_is_left_out_is_recorded() -> None:
    scene = forwarded(fewest=2)
    scene.turned(S3B, Trouble.REFUSED)
    assert scene.turned(S3A, Trouble.REFUSED) == [
        ev.Skipped(HERE, 3),
        ev.Send(HERE, FORWARD, scene.claim(s3=PeerId("")).journey, 4, True),
    ]


# ------------------------------------------------------------ shares


def test_a_share_counts_once_when_it_is_named() -> None:
    scene = forwarded()
    assert scene.tell(named(scene)) == [ev.Answer(Say.TAKE)], "it is not made yet"
    assert scene.machine.unsure() == 0
    scene.come(BACKWARD, S3B)
    assert scene.computed(BACKWARD) == [
        ev.FreeGraph(HERE),
        ev.Commit(HERE),
        send(scene, BACKWARD, 1),
    ]
    assert scene.tell(named(scene)) == [ev.Answer(Say.TAKE)]
    assert scene.tell(ev.Settled(HERE, BACKWARD, S1B)) == [
        ev.AcknowledgeVisit(HERE, BACKWARD),
        ev.Free(HERE),
    ]


def test_a_gradient_that_another_replica_gave_first_counts_nowhere_here() -> None:
    scene = returned()
    assert scene.machine.unsure() == 1
    assert scene.machine.unsure(besides=[0]) == 0
    assert scene.tell(ev.Settled(HERE, BACKWARD, S1B)) == [
        ev.AcknowledgeVisit(HERE, BACKWARD),
        ev.Void(HERE),
        ev.Free(HERE),
    ]
    assert scene.machine.unsure() == 0


def test_a_gradient_that_may_have_been_taken_waits_for_its_name() -> None:
    scene = returned()
    assert peers(scene.turned(S1B, Trouble.FAILED, BACKWARD)) == [S1A]
    assert scene.tell(ev.Settled(HERE, BACKWARD, S1A)) == [
        ev.AcknowledgeVisit(HERE, BACKWARD),
        ev.FreeGradient(HERE),
    ]
    assert scene.tell(named(scene)) == [ev.Answer(Say.TAKE), ev.Commit(HERE), ev.Free(HERE)]


@pytest.mark.parametrize(("peer", "position"), [(S1B, 1), (S2A, 2), (S3B, 3)])
def test_a_share_of_every_block_stage_waits_for_its_name(peer: PeerId, position: int) -> None:
    scene = Scene(peer)
    claim = scene.claim(position)
    before, after = (claim.journey[at].peer for at in (position - 1, position + 1))
    scene.come(FORWARD, before, claim)
    scene.computed(key=claim.key)
    assert scene.machine.unsure() == 0
    scene.come(BACKWARD, after, claim)
    assert scene.machine.unsure() == 0, "the gradient is not made yet"
    scene.computed(BACKWARD, claim.key)
    assert scene.machine.unsure() == 1
    scene.tell(ev.Passed(claim.key, BACKWARD, before))
    assert scene.machine.unsure() == 1
    scene.tell(ev.Settled(claim.key, BACKWARD, before))
    assert scene.machine.unsure() == 1


def test_nobody_names_a_share_whose_gradient_went_nowhere() -> None:
    scene = returned()
    scene.turned(S1B, Trouble.REFUSED, BACKWARD)
    scene.turned(S1A, Trouble.REFUSED, BACKWARD)
    assert scene.machine.unsure() == 0


@pytest.mark.parametrize("caller", [S1B, STRANGER])
def test_only_the_origin_names_a_share(caller: PeerId) -> None:
    scene = returned()
    assert scene.answer(named(scene, caller))[0] is Say.REFUSED
    assert scene.answer(named(scene, index=9))[0] is Say.REFUSED
    assert scene.machine.unsure() == 1


def test_a_name_for_a_peer_without_the_visit_is_taken_note_of() -> None:
    scene = Scene()
    assert scene.tell(named(scene)) == [ev.Answer(Say.TAKE)]
    origin = Scene(ORIGIN)
    origin.tell(ev.Start(0))
    assert origin.tell(named(origin)) == [ev.Answer(Say.TAKE)]


def test_closing_throws_unnamed_shares_away() -> None:
    scene = returned()
    assert scene.tell(ev.Close(EPOCH + 1)) == []
    assert scene.tell(ev.Close(EPOCH)) == [ev.Void(HERE)]
    assert scene.tell(ev.Close(EPOCH)) == []
    assert scene.tell(ev.Settled(HERE, BACKWARD, S1B))[-1] == ev.Free(HERE)


@pytest.mark.parametrize(("peer", "position"), [(ORIGIN, 0), (S1B, 1), (S2A, 2), (S3B, 3)])
def test_a_gradient_needs_a_place_at_every_block_stage(peer: PeerId, position: int) -> None:
    scene = Scene(peer, places=1)
    first = []
    for index in (0, 2):
        claim = scene.claim(position, index)
        if peer == ORIGIN:
            scene.tell(ev.Start(index))
        else:
            scene.come(FORWARD, claim.journey[position - 1].peer, claim)
        scene.computed(key=claim.key)
        first.append(type(scene.come(BACKWARD, claim.journey[position + 1].peer, claim)[1]))
    assert first == [ev.Compute, ev.Compute if peer == ORIGIN else ev.Hold]


def test_a_gradient_that_waits_for_a_place_is_not_computed_after_the_close() -> None:
    scene = Scene(places=1)
    for index in (0, 2):
        claim = scene.claim(index=index)
        scene.come(FORWARD, S1B, claim)
        scene.computed(key=claim.key)
        scene.come(BACKWARD, S3B, claim)
    assert scene.tell(ev.Close(EPOCH)) == [ev.Void(HERE)]


def next_epoch(scene: Scene, epoch: int, *, closes: bool = True, origin: PeerId = ORIGIN) -> None:
    """Close the epoch before, and pass a gradient of this origin on in the next one."""
    if closes:
        scene.tell(ev.Close(epoch - 1))
    plan = make_plan(3, 2)
    paths = tuple(replace(path, origin=origin) for path in plan.paths)
    members = (*plan.members, PlanMember(PeerId("s0b"), 0))
    scene.plan = replace(plan, epoch=epoch, paths=paths, members=members)
    scene.tell(ev.AdoptPlan(scene.plan))
    claim = replace(scene.claim(), epoch=epoch)
    for way, sender in ((FORWARD, S1B), (BACKWARD, S3B)):
        scene.come(way, sender, claim)
        scene.computed(way, claim.key)


def test_an_origin_that_named_nothing_is_not_waited_for_until_it_names() -> None:
    scene = returned()
    next_epoch(scene, 4)
    assert (scene.machine.unsure(), scene.machine.unnamed()) == (0, {ORIGIN: 1})
    scene.tell(ev.Counted(4, scene.plan.hash, 0, ORIGIN))
    next_epoch(scene, 5)
    assert scene.machine.unsure() == 1
    next_epoch(scene, 6)
    assert scene.machine.unsure() == 0, "it has named nothing since"


def test_a_name_that_comes_too_late_is_a_sign_all_the_same() -> None:
    scene = returned()
    late = named(scene)
    lost = ev.Lost(EPOCH, scene.plan.hash, 0, ORIGIN, "nan")
    next_epoch(scene, 4)
    assert scene.answer(lost)[0] is Say.REFUSED
    assert scene.machine.unsure() == 0
    assert scene.answer(late)[0] is Say.REFUSED
    assert scene.machine.unsure() == 1


def test_an_origin_that_was_away_is_waited_for_again() -> None:
    scene = returned()
    next_epoch(scene, 4, origin=PeerId("s0b"))
    assert scene.machine.unsure() == 1
    next_epoch(scene, 5, closes=False)
    assert scene.machine.unsure() == 1
    scene = returned()
    scene.tell(ev.Close(EPOCH))
    scene.tell(ev.AdoptPlan(None))
    next_epoch(scene, 4)
    assert scene.machine.unsure() == 0, "without a plan nobody was away"


def test_an_unnamed_share_is_thrown_away_when_its_time_is_over() -> None:
    scene = returned()
    assert scene.tell(ev.Expired(HERE)) == [], "it is on its way"
    scene.tell(ev.Passed(HERE, BACKWARD, S1B))
    scene.tell(ev.Settled(HERE, BACKWARD, S1B))
    assert scene.tell(ev.Expired(HERE)) == [ev.Void(HERE), ev.Free(HERE)]
    assert scene.tell(ev.Expired(HERE)) == []


def test_an_activation_expires_unless_it_is_being_computed() -> None:
    scene = Scene()
    scene.come(FORWARD, S1B)
    assert scene.tell(ev.Expired(HERE)) == []
    scene.computed()
    assert scene.tell(ev.Expired(HERE)) == [ev.Failed(HERE, FORWARD, "too late"), ev.Free(HERE)]
    told = forwarded()
    told.tell(ev.Passed(HERE, FORWARD, S3B))
    assert told.tell(ev.Expired(HERE)) == [ev.Free(HERE)]


def test_what_the_device_cannot_compute_is_left_to_another_peer() -> None:
    scene = Scene()
    scene.come(FORWARD, S1B)
    assert scene.tell(ev.Broken(HERE, BACKWARD, "no")) == []
    assert scene.tell(ev.Broken(HERE, FORWARD, "no")) == [
        ev.Failed(HERE, FORWARD, "no"),
        ev.Free(HERE),
    ]
    back = forwarded()
    back.tell(ev.Passed(HERE, FORWARD, S3B))
    back.come(BACKWARD, S3B)
    assert back.tell(ev.Broken(HERE, BACKWARD, "nan", lost=True)) == [
        ev.Failed(HERE, BACKWARD, "nan"),
        ev.TellOrigin(HERE, ORIGIN, "nan"),
        ev.Free(HERE),
    ]


# ------------------------------------------------------------ a replacement of a dead hop


def test_a_replacement_fetches_its_input_and_computes_both_ways() -> None:
    scene = Scene()
    assert scene.come(BACKWARD, S3B) == [ev.Answer(Say.TAKE), ev.Fetch(HERE, (S1B, S1A))]
    assert scene.tell(ev.Fetched(HERE, S1A)) == [ev.Compute(HERE, FORWARD)]
    assert scene.tell(ev.Fetched(HERE, S1A)) == []
    assert scene.tell(ev.NotFetched(HERE, True)) == []
    assert scene.computed() == [ev.AcknowledgeVisit(HERE, FORWARD), ev.Compute(HERE, BACKWARD)]
    assert scene.computed(BACKWARD) == [
        ev.FreeGraph(HERE),
        send(scene, BACKWARD, 1, s1=S1A),
    ]


def test_an_input_that_cannot_be_had_is_told() -> None:
    scene = Scene()
    scene.come(BACKWARD, S3B)
    assert scene.tell(ev.NotFetched(HERE, False)) == [
        ev.Failed(HERE, BACKWARD, "the input cannot be had again"),
        ev.Free(HERE),
    ]
    assert scene.come(BACKWARD, S3B)[0] == ev.Answer(Say.TAKE), "it may be tried again"
    assert scene.tell(ev.NotFetched(HERE, True)) == [
        ev.AcknowledgeVisit(HERE, BACKWARD),
        ev.Free(HERE),
    ]
    assert scene.machine.told(HERE, BACKWARD)
    assert scene.machine.unsure() == 0
    assert scene.tell(named(scene)) == [ev.Answer(Say.TAKE)]


def asked(scene: Scene, caller: PeerId, position: int = 3, index: int = 0) -> Say:
    return scene.answer(ev.Asked(EPOCH, scene.plan.hash, index, caller, position))[0]


def test_an_output_is_given_to_a_replica_of_the_hop_behind() -> None:
    scene = Scene()
    assert asked(scene, S3A) is Say.REFUSED, "it is not here"
    scene.come(FORWARD, S1B)
    assert asked(scene, S3A) is Say.REFUSED, "it is not computed yet"
    scene.computed()
    assert asked(scene, S1A) is Say.REFUSED
    assert asked(scene, STRANGER) is Say.REFUSED
    assert asked(scene, S3A, index=9) is Say.REFUSED
    assert asked(scene, S3A) is Say.TAKE
    scene.come(BACKWARD, S3A, scene.claim(s3=S3A))
    assert asked(scene, S3B) is Say.SETTLED


def test_the_peer_that_took_an_output_is_the_next_hop_from_then_on() -> None:
    plan = make_plan(1, 3)
    one, two, three = plan.paths[0].hops
    scene = Scene(two.peer, plan)
    scene.come(FORWARD, one.peer)
    scene.computed()
    taker = max(set(scene.machine.replicas(3)) - {three.peer})
    assert asked(scene, taker) is Say.TAKE
    assert peers(scene.turned(three.peer, Trouble.FAILED)) == [taker]


def test_the_last_hops_output_is_for_its_origin_alone() -> None:
    scene = Scene(S3B)
    claim = scene.claim(3)
    scene.come(FORWARD, S2A, claim)
    scene.computed(key=claim.key)
    assert asked(scene, S3A, 4) is Say.REFUSED
    assert asked(scene, ORIGIN, 4) is Say.TAKE
    assert scene.answer(ev.Asked(EPOCH, scene.plan.hash, 0, ORIGIN, 5))[0] is Say.REFUSED


# ------------------------------------------------------------ the origin


def test_a_micro_batch_goes_out_and_comes_home() -> None:
    scene = Scene(ORIGIN)
    journey = scene.plan.paths[0].journey
    assert scene.tell(ev.Start(0)) == [ev.Compute(START, FORWARD)]
    assert scene.tell(ev.Start(0)) == []
    assert scene.computed(key=START) == [ev.Send(START, FORWARD, journey, 1)]
    home = scene.claim(4)
    assert scene.come(FORWARD, S3B, home) == [ev.Answer(Say.TAKE), ev.Compute(LAST, FORWARD)]
    assert scene.computed(key=LAST) == [
        ev.AcknowledgeVisit(LAST, FORWARD),
        ev.FreeGraph(LAST),
        ev.Send(LAST, BACKWARD, journey, 3),
    ]
    assert asked(scene, STRANGER, 5) is Say.REFUSED, "nothing is behind the last position"
    assert scene.tell(ev.Settled(LAST, BACKWARD, S3B)) == [ev.AcknowledgeVisit(LAST, BACKWARD)]
    back = scene.claim(0)
    assert scene.come(BACKWARD, S1B, back) == [ev.Answer(Say.TAKE), ev.Compute(START, BACKWARD)]
    assert scene.computed(BACKWARD, START) == [
        ev.Commit(START),
        ev.AcknowledgeVisit(START, BACKWARD),
        ev.TellCounted(0, (S1B, S2A, S3B)),
        ev.Finished(START),
        ev.Free(LAST),
        ev.Free(START),
    ]
    assert scene.tell(ev.Drop(0, "late")) == [], "it counts"
    assert scene.machine.unsure() == 0


@pytest.mark.parametrize("why", ["index", "origin", "closed", "no-plan", "no-hops"])
def test_only_an_own_micro_batch_of_the_plan_is_begun(why: str) -> None:
    plan = make_plan(3, 2)
    if why == "no-hops":
        plan = replace(plan, paths=(replace(plan.paths[0], hops=()),))
    scene = Scene(S2A if why == "origin" else ORIGIN, plan)
    if why == "closed":
        scene.tell(ev.Close(EPOCH))
    if why == "no-plan":
        scene.tell(ev.AdoptPlan(None))
    index = 9 if why == "index" else 0
    assert scene.tell(ev.Start(index)) == [
        ev.Dropped(index, "not a micro-batch of mine under this plan")
    ]


def test_a_dropped_micro_batch_is_dropped_once_with_both_its_visits() -> None:
    scene = Scene(ORIGIN)
    assert scene.tell(ev.Drop(0, "late")) == [], "it has not begun"
    scene.tell(ev.Start(0))
    scene.computed(key=START)
    scene.come(FORWARD, S3B, scene.claim(4))
    assert scene.tell(ev.Drop(0, "late")) == [
        ev.Dropped(0, "late"),
        ev.Failed(START, FORWARD, "late"),
        ev.Free(START),
        ev.Failed(LAST, FORWARD, "late"),
        ev.Free(LAST),
    ]
    assert scene.tell(ev.Drop(0, "late")) == []
    hop = forwarded()
    assert hop.tell(ev.Drop(0, "late")) == [], "it belongs to another origin"


@pytest.mark.parametrize("caller", [S1B, S2A, S3B])
def test_a_hop_of_its_path_reports_a_micro_batch_lost(caller: PeerId) -> None:
    scene = Scene(ORIGIN)
    scene.tell(ev.Start(0))
    lost = ev.Lost(EPOCH, scene.plan.hash, 0, caller, "nan")
    assert scene.answer(replace(lost, caller=STRANGER))[0] is Say.REFUSED
    assert scene.answer(replace(lost, index=9))[0] is Say.REFUSED
    assert scene.tell(lost)[:2] == [
        ev.Answer(Say.TAKE),
        ev.Dropped(0, f"{short(caller)} says: nan"),
    ]


def test_another_replica_reports_a_micro_batch_lost_only_in_the_place_of_a_hop() -> None:
    def begun() -> Scene:
        scene = Scene(ORIGIN)
        scene.tell(ev.Start(0))
        return scene

    lost = ev.Lost(EPOCH, begun().plan.hash, 0, S2B, "nan")
    assert begun().answer(lost)[0] is Say.REFUSED, "the path leads over s2a, which is well"
    scene = begun()
    scene.tell(ev.PeerDied(S2A))
    assert scene.answer(lost)[0] is Say.TAKE
    scene = begun()
    scene.machine.suspects.add(S2A, 0.0)
    assert scene.answer(replace(lost, caller=S3A))[0] is Say.REFUSED, "of another stage"
    assert scene.answer(lost)[0] is Say.TAKE
    scene = begun()
    scene.come(FORWARD, S3B, scene.claim(4, s2=S2B))
    assert scene.answer(lost)[0] is Say.TAKE, "it came home over s2b"
    scene = begun()
    scene.computed(key=START)
    (sent,) = scene.tell(ev.Turned(START, FORWARD, S1B, Trouble.BUSY))
    assert isinstance(sent, ev.Send)
    assert sent.peer == S1A
    assert scene.answer(replace(lost, caller=S1A))[0] is Say.TAKE


def test_an_origin_gives_up_what_nobody_takes_or_its_device_breaks() -> None:
    scene = Scene(ORIGIN, make_plan(1, 1))
    scene.tell(ev.Start(0))
    (sent,) = scene.computed(key=START)
    assert isinstance(sent, ev.Send)
    refused = ev.Turned(START, FORWARD, sent.peer, Trouble.REFUSED)
    assert scene.tell(refused)[0] == ev.Dropped(0, "no live replica of stage 1")
    broken = Scene(ORIGIN)
    broken.tell(ev.Start(0))
    assert broken.tell(ev.Broken(START, FORWARD, "no"))[0] == ev.Dropped(0, "no")


def test_nothing_of_an_origins_own_expires() -> None:
    scene = Scene(ORIGIN)
    scene.tell(ev.Start(0))
    scene.computed(key=START)
    assert scene.tell(ev.Expired(START)) == []
