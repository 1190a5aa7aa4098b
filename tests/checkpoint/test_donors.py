"""Donors of one version: asked again and again, so that they keep it."""

from typing import Any

import grpc

from node.checkpoint.donors import Donors
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


OK, GONE, BUSY = (
    grpc.StatusCode.OK,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
)


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
