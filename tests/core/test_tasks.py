"""Tasks end with their owner, and the task that ends them can be ended too."""

import asyncio

import pytest

from node.core.tasks import Tasks


async def takes_a_moment_to_end(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60.0)
    finally:
        await asyncio.sleep(0.01)
        ended.append("child")


async def test_an_owner_that_closes_waits_for_its_tasks_and_goes_on() -> None:
    tasks = Tasks("owner")
    ended = list[str]()
    for n in range(3):
        tasks.spawn(takes_a_moment_to_end(ended), f"child {n}")
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == ["child"] * 3
    await tasks.close()


async def test_an_owner_that_is_cancelled_while_it_closes_tasks_ends() -> None:
    tasks = Tasks("owner")
    ended = list[str]()

    async def begins_anew() -> None:
        await tasks.close()
        ended.append("closer")

    child = tasks.spawn(takes_a_moment_to_end(ended), "child")
    await asyncio.sleep(0)
    closer = asyncio.create_task(begins_anew())
    await asyncio.sleep(0)
    closer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closer
    await asyncio.wait([child])
    assert ended == ["child"]
