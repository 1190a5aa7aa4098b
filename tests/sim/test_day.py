"""A day of volunteers: the trace, the lines of homes, and an account that adds up."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from node.core.ids import PeerId
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.origin import LaunchWindow
from node.sim.setup import LinkProfile, WorkTimes, toy_parts
from node.sim.world.loop import ProcessLoop, VirtualTime
from testbed.volunteers.day import LEAVE_S, DaySwarm, day_setup
from testbed.volunteers.losses import Loss, MeteredDevice
from testbed.volunteers.people import Going, Home, HomeLinks, Stay, Volunteer, volunteers

SECONDS = 40.0
SMALL = replace(
    day_setup(),
    micro_batches=6,
    parts=toy_parts(2, 3),
    min_replicas=1,
    work=WorkTimes(ends_s=0.1, forward_s=0.2, step_s=0.02),
)
NEAR = Home(0, 20e6, 100e6, 1.0)
SLOW = Home(1, 10e6, 50e6, 1.5)


def always(number: int, home: Home = NEAR, *stays: Stay) -> Volunteer:
    """A volunteer that is there for the whole day, or as ``stays`` say."""
    all_day = (Stay(0.0, 1e6, Going.CUT),)
    return Volunteer(PeerId(f"v-{number:05}"), home, stays or all_day)


def first_epoch_s(seed: int, stash: int = 1024) -> float:
    """Seconds of the micro-batches of the first epoch of twelve volunteers that stay. ``stash``:
    micro-batches that fit into a peer's memory."""
    people = [
        replace(one, stays=always(0).stays)
        for one in volunteers(12, 3600.0, seed, unequal=day_setup().work.unequal)
    ]
    swarm = DaySwarm(people, replace(day_setup(), micro_batches=96, stash=stash), seed)
    took = list[float]()
    swarm.committed = lambda facts: took.append(facts["run_s"])
    while not took and swarm.world.now < 400.0:
        swarm.world.run(swarm.world.now + 20.0)
    return took[0]


# ------------------------------------------------------------ the trace


def test_a_seed_draws_the_same_volunteers_again():
    assert volunteers(40, 3600.0, 3) == volunteers(40, 3600.0, 3)
    assert volunteers(40, 3600.0, 3) != volunteers(40, 3600.0, 4)


def test_stays_of_a_volunteer_follow_each_other():
    for v in volunteers(200, 3600.0, 1):
        assert all(s.begin < s.end for s in v.stays)
        assert all(a.end <= b.begin for a, b in pairwise(v.stays))
        assert all(s.begin < 3600.0 for s in v.stays)


def test_volunteers_are_there_for_as_long_as_the_published_fits_say():
    # Means of the fits: 10.4 h there, 31.8 h away; owners with hours are there for less.
    there = [v.seconds(3600.0) / 3600.0 for v in volunteers(2000, 3600.0, 5)]
    assert 0.2 < sum(there) / len(there) < 0.45


# ------------------------------------------------------------ lines of homes


@pytest.fixture
def lines() -> HomeLinks:
    homes = {PeerId("a"): NEAR, PeerId("b"): SLOW, PeerId("c"): SLOW}
    return HomeLinks(random.Random(0), LinkProfile(0.0, 0.0), homes)


def test_all_transfers_of_a_home_share_its_upload(lines: HomeLinks):
    alone = lines.travel(PeerId("a"), PeerId("b"), 1_000_000, 0.0)
    after = lines.travel(PeerId("a"), PeerId("c"), 1_000_000, 0.0)
    assert after == pytest.approx(alone + 8e6 / NEAR.up)


def test_a_small_message_does_not_queue_behind_tensors(lines: HomeLinks):
    quick = lines.travel(PeerId("a"), PeerId("b"), 200, 0.0)
    lines.travel(PeerId("a"), PeerId("b"), 10_000_000, 0.0)
    assert lines.travel(PeerId("a"), PeerId("b"), 200, 0.0) == quick


def test_a_home_sends_slower_than_it_receives(lines: HomeLinks):
    up = lines.travel(PeerId("b"), PeerId("a"), 1_000_000, 0.0)
    down = lines.travel(PeerId("a"), PeerId("b"), 1_000_000, 0.0)
    assert up > down


# ------------------------------------------------------------ the account


def test_a_device_that_stands_still_does_no_work():
    world = VirtualTime(0)
    loop = ProcessLoop(world)
    device = MeteredDevice(loop, 2.0, lambda: "plan")
    world.push(0.0, device.enqueue, 0, lambda: device.spend(3.0), loop=loop)
    world.run(2.0)
    device.stand_still()
    world.run(10.0)
    assert device.done_s() == 2.0
    device.go_on()
    world.run(13.0)
    assert device.done_s() == 5.0
    assert device.worked == {"plan": 3.0}
    device.ends()
    assert device.worked == {"plan": 2.5}


def test_work_and_losses_make_the_ideal():
    """Machines of every kind of going; the ideal is what the trace says, and nothing is counted
    twice or left out."""
    people = [always(n, NEAR if n % 2 else SLOW) for n in range(9)]
    people += [
        always(9, SLOW, Stay(0.0, 15.0, Going.SLEEP), Stay(22.0, 1e6, Going.CUT)),
        always(10, NEAR, Stay(0.0, 18.5, Going.CUT), Stay(20.0, 31.0, Going.CUT)),
        always(11, SLOW, Stay(3.0, 25.0, Going.PAUSE), Stay(39.0, 1e6, Going.CUT)),
    ]
    swarm = DaySwarm(people, SMALL, 1)
    swarm.world.run(SECONDS)
    account = swarm.account
    account.read_all(swarm.leaders(), SECONDS)
    losses = account.losses(swarm.under_way())
    assert account.tokens_committed == SMALL.tokens * sum(account.counted.values()) > 0
    assert account.useful + sum(losses.values()) == pytest.approx(account.ideal, rel=1e-9)
    assert all(seconds >= -1e-9 * account.ideal for seconds in losses.values())
    busy = sum(account.all_work().values())
    assert busy + sum(account.idle.values()) == pytest.approx(account.ideal, rel=1e-9)
    said = sum(v.seconds(SECONDS) / v.home.slowness for v in people)
    # Machines boot within a third of a second, and one takes a moment to leave in order.
    assert said - 0.3 * len(people) <= account.ideal <= said + LEAVE_S + 5.0
    assert losses[Loss.CHOOSING] + losses[Loss.FETCHING] + losses[Loss.QUEUE] > 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_an_epoch_has_a_shorter_tail_by_slack_than_by_arrival(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    by_slack = first_epoch_s(seed)
    monkeypatch.setattr(PlannedWork, "turn", lambda *_: 0.0)
    assert by_slack < 0.98 * first_epoch_s(seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_epoch_takes_less_time_where_nothing_is_launched_that_waits_for_memory(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    by_room = first_epoch_s(seed, stash=6)
    monkeypatch.setattr(LaunchWindow, "turned_away", lambda *_: None)
    assert by_room < 0.95 * first_epoch_s(seed, stash=6)
