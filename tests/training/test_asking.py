"""Requests that go on at the same time: the places for them, and the wait for the first to end."""

import asyncio

import pytest

from node.core.tasks import Tasks
from node.outer.asking import Places, first_of


async def held(places: Places, log: list[str], name: str, ends: asyncio.Event) -> None:
    async with places.one():
        log.append(name)
        await ends.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_place_is_given_to_the_next_one_when_a_request_ends() -> None:
    places = Places(2, 1e6)
    tasks = Tasks("test")
    log: list[str] = []
    ends = {name: asyncio.Event() for name in "abcd"}
    for name, event in ends.items():
        tasks.spawn(held(places, log, name, event), name)
    await turns()
    assert log == ["a", "b"]
    ends["b"].set()
    await turns()
    assert log == ["a", "b", "c"]
    await tasks.close()
    async with asyncio.timeout(9.0), places.one(), places.one():
        pass


async def test_a_slow_request_gives_its_place_up_once_and_goes_on() -> None:
    places = Places(1, 0.01)
    tasks = Tasks("test")
    log: list[str] = []
    never = asyncio.Event()
    for name in "ab":
        tasks.spawn(held(places, log, name, never), name)
    await turns()
    async with asyncio.timeout(9.0), places.one():
        assert (log, len(tasks)) == (["a", "b"], 2), "the slow ones go on"
    await tasks.close()
    assert places._free._value == 1, "a place that was given up is not given up again at the end"


async def test_the_wait_ends_with_the_first_that_ends_or_in_time() -> None:
    now = asyncio.get_running_loop().time
    tasks = Tasks("test")
    never = tasks.spawn(asyncio.Event().wait(), "never")  # type: ignore[arg-type]
    quick = tasks.spawn(asyncio.sleep(0), "quick")
    assert await first_of({never, quick}, now() + 9.0) == {never}  # type: ignore[arg-type]
    assert await first_of({never}, now() + 0.01) == {never}  # type: ignore[arg-type]
    until = now() + 0.01
    assert await first_of(set(), until) == set()
    assert now() >= until - 0.001
    await tasks.close()


async def test_an_error_of_a_request_is_raised_where_it_is_awaited() -> None:
    async def fails() -> None:
        raise ValueError("a fault of this program")

    tasks = Tasks("test")
    failing = tasks.spawn(fails(), "fails")
    with pytest.raises(ValueError, match="a fault of this program"):
        await first_of({failing}, asyncio.get_running_loop().time() + 9.0)
