"""Donors of one version: asked again and again, so that they keep it."""

import asyncio
from typing import Any

import grpc
import pytest

from node.checkpoint import donors as module
from node.checkpoint.donors import ENOUGH, Donors
from node.core.journey import Version
from protos import state_pb2, state_pb2_grpc
from tests.checkpoint.test_run_file import Lab, lab

__all__ = ["lab"]


class Keeps(state_pb2_grpc.StateServicer):
    """A peer that answers each question by the next of these codes."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self.codes = list(codes)

    async def Describe(self, request: state_pb2.DescribeRequest, context: Any) -> Any:
        code = self.codes.pop(0)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, "scripted")
        return state_pb2.StateManifest()


OK = grpc.StatusCode.OK
GONE = grpc.StatusCode.NOT_FOUND
BUSY = grpc.StatusCode.UNAVAILABLE


async def test_a_donor_that_does_not_answer_once_is_asked_again(lab: Lab) -> None:
    steady = await lab.peer("steady", Keeps(OK, OK, OK))
    busy = await lab.peer("busy", Keeps(OK, BUSY, OK))
    gone = await lab.peer("gone", Keeps(OK, GONE))
    donors = Donors(lab.me, 1, Version(3), "w")
    assert {*await donors.find([steady, busy, gone])} == {steady, busy, gone}
    await donors.renew()
    assert donors.found == [steady]
    await donors.renew()
    assert {*donors.found} == {steady, busy}


class Waits(state_pb2_grpc.StateServicer):
    """A peer that answers when ``until`` is set."""

    def __init__(self, until: asyncio.Event) -> None:
        self.until = until

    async def Describe(self, request: state_pb2.DescribeRequest, context: Any) -> Any:
        await self.until.wait()
        return state_pb2.StateManifest()


async def test_for_late_donors_others_are_asked_meanwhile(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donors that are asked first say nothing until another one is asked."""
    monkeypatch.setattr(module, "LATE_S", 0.01)
    asked = asyncio.Event()
    peers = [await lab.peer(f"peer{i}", Waits(asked)) for i in range(ENOUGH + 1)]
    donors = Donors(lab.me, 1, Version(3), "w")
    ring: list[str] = []
    true = donors._ask

    async def ask(peer: Any) -> str:
        ring.append(peer)
        if len(ring) > ENOUGH:
            asked.set()
        return await true(peer)

    monkeypatch.setattr(donors, "_ask", ask)
    found = await donors.find(peers)
    assert len(ring) == ENOUGH + 1
    assert len(found) >= ENOUGH
    assert set(found) <= set(peers)


async def test_a_donor_that_says_nothing_is_not_waited_for_where_there_are_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.01)
    steady = await lab.peer("steady", Keeps(OK))
    silent = await lab.peer("silent", Waits(asyncio.Event()))
    donors = Donors(lab.me, 1, Version(3), "w")
    assert await donors.find([steady, silent]) == [steady]
    assert donors.reasons == {silent: "did not answer in time"}
