"""A reader of state that keeps every snapshot it can."""

import asyncio
from functools import partial

from benchmarks.strangers.band import ANSWER_S, Attacker, Band
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.transport.port import answers
from protos import state_pb2
from protos.state_pb2_grpc import StateStub

DESCRIBE_S = 0.5
TOUCH_BYTES = 16
KINDS = (state_pb2.PARAMETERS, state_pb2.OPTIMIZER, state_pb2.SPARE)


async def pins(band: Band) -> None:
    """Describe every new version and read a few bytes of all versions that were described."""
    await band.everywhere(partial(_read, band))


async def _read(band: Band, one: Attacker, victim: PeerId) -> None:
    held: dict[tuple[int, str], state_pb2.StateManifest] = {}
    stages = range(band.manifest.pipeline.stages + 1)
    while not band.over:
        for stage in stages:
            for kind in KINDS:
                asked = state_pb2.DescribeRequest(stage=stage, kind=kind, any_epoch=True)
                manifest = await _describe(band, one, victim, asked)
                if manifest is not None:
                    held[manifest.epoch, manifest.lineage + str(kind)] = manifest
        for key, manifest in list(held.items()):
            if not await _touch(band, one, victim, manifest):
                del held[key]
        await asyncio.sleep(DESCRIBE_S)


async def _describe(
    band: Band, one: Attacker, victim: PeerId, asked: state_pb2.DescribeRequest
) -> state_pb2.StateManifest | None:
    await one.pace(asked.ByteSize())
    band.calls += 1
    band.sent += asked.ByteSize()
    try:
        async with answers(victim, ANSWER_S):
            stub = StateStub(await one.transport.channel(victim))
            manifest = await stub.Describe(asked, timeout=ANSWER_S)
    except PeerFault as e:
        if not _elsewhere(e):
            band.refusal(e)
        return None
    band.heard[""] += 1
    return manifest


async def _touch(
    band: Band, one: Attacker, victim: PeerId, manifest: state_pb2.StateManifest
) -> bool:
    """Read a few bytes of a snapshot; False when it is gone."""
    asked = state_pb2.FetchRequest(
        stage=manifest.stage,
        kind=manifest.kind,
        epoch=manifest.epoch,
        lineage=manifest.lineage,
        name=manifest.tensors[0].head.name,
        length=min(TOUCH_BYTES, manifest.tensors[0].head.nbytes),
    )
    await one.pace(asked.ByteSize())
    band.calls += 1
    try:
        async with answers(victim, ANSWER_S):
            stub = StateStub(await one.transport.channel(victim))
            async for _ in stub.Fetch(asked, timeout=ANSWER_S):
                pass
    except PeerFault as e:
        if not _elsewhere(e):
            band.refusal(e)
        return False
    return True


def _elsewhere(error: PeerFault) -> bool:
    """True for an answer that refuses nobody: the state is not here, or not any more."""
    return "NOT_FOUND" in error.reason
