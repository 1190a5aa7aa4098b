"""A member's exchanges with one owner end together, however one of them ends."""

import asyncio

import pytest

from node.averaging.exchange.member import Exchanges
from node.core.errors import PeerFault
from node.core.ids import PeerId

OWNER = PeerId("owner")


class Scripted(Exchanges):
    """Exchanges whose `one` answers "first" at once, fails for "fault", and otherwise waits for
    ever. `ended` lists the exchanges that were cancelled."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.waits = asyncio.Event()

    async def one(self, wanted, names, timeout):
        if wanted == "fault":
            raise PeerFault(OWNER, "says no")
        if wanted != "first":
            try:
                self.waits.set()
                await asyncio.Event().wait()
            finally:
                self.ended.append(wanted)
        await self.waits.wait()
        return {wanted: None}, 0


def asked(*groups):
    return [(group, ()) for group in groups]


async def test_a_failure_to_keep_an_answer_ends_concurrent_exchanges():
    exchanges = Scripted()

    def took(parts, nbytes):
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        await exchanges.all(asked("first", "second"), 300.0, took)
    assert exchanges.ended == ["second"]


async def test_a_cancelled_round_leaves_no_exchange_behind():
    exchanges = Scripted()
    running = asyncio.ensure_future(
        exchanges.all(asked("second", "third", "fourth"), 300.0, lambda parts, nbytes: None)
    )
    await exchanges.waits.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {"second"} <= set(exchanges.ended)
    assert len(asyncio.all_tasks()) == 1


async def test_a_fault_lets_those_under_way_end_and_begins_no_other():
    exchanges = Scripted()
    exchanges.waits.set()
    answers = []
    with pytest.raises(PeerFault, match="says no"):
        await exchanges.all(
            asked("fault", "first", "first", "third"), 300.0, lambda parts, _: answers.extend(parts)
        )
    assert answers == ["first", "first"]
    assert not exchanges.ended
