"""The window of an origin: fewer micro-batches under way where they would wait for memory."""

import asyncio

import pytest

from node.pipeline import events as ev
from node.pipeline.events import Direction, Key
from node.pipeline.origin import LaunchWindow


def test_a_window_is_whole_while_everything_is_let_in():
    window = LaunchWindow(12)
    for index in range(100):
        window.ended(index)
    assert window.width == 12


def test_each_micro_batch_that_is_turned_away_takes_one_place_once():
    window = LaunchWindow(12)
    for _ in range(5):
        window.turned_away(3)
        window.turned_away(4)
    assert window.width == 10


def test_a_window_never_closes():
    window = LaunchWindow(2)
    for index in range(9):
        window.turned_away(index)
    assert window.width == 1
    assert LaunchWindow(0).width == 1


def test_a_window_grows_by_one_when_as_many_as_it_has_were_let_in():
    window = LaunchWindow(12)
    for index in range(6):
        window.turned_away(index)
        window.ended(index)
    assert window.width == 6
    for index in range(100, 107):
        window.ended(index)
    assert window.width == 7


@pytest.mark.parametrize("limit", [1, 2])
async def test_no_more_are_under_way_than_the_window_allows(make_swarm, limit):
    swarm = make_swarm()
    await swarm.fill(replicas=2)
    origin = swarm.pipelines["s0a"].origin
    origin.window = LaunchWindow(limit)
    plan = swarm.adopt(swarm.plan(9))
    most = 0

    async def watched() -> None:
        nonlocal most
        while True:
            most = max(most, len(origin._results))
            await asyncio.sleep(0)

    watch = asyncio.ensure_future(watched())
    await swarm.run(plan, counted=True)
    watch.cancel()
    assert most == limit
    assert [r.counted for r in swarm.results] == [True] * 9


async def test_only_peers_without_room_make_a_window_smaller(make_swarm):
    swarm = make_swarm()
    await swarm.fill(replicas=2)
    pipeline = swarm.pipelines["s0a"]
    whole = pipeline.origin.window.width
    for index, full in enumerate((False, True)):
        key = Key(swarm.adopt(swarm.plan(2)).epoch, index, 0)
        pipeline._carry_out(ev.Later(key, Direction.FORWARD, 0.01, full))
        assert pipeline.origin.window.width == whole - full
