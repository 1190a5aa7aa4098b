"""Notes to the training service that are as large as a message may be."""

import asyncio
from collections.abc import Callable
from functools import cache

from benchmarks.attacks.band import Attacker, Band
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.training.protocol.votes import signing_domain
from node.transport.port import printable
from protos import training_pb2 as pb

TELL = "/tutti.v1.Training/Tell"
LARGE = 4 << 20
"""Bytes of a note."""


async def large(band: Band) -> None:
    """Every kind of note with a field that never ends, one note after the other."""
    await band.each(lambda one: _tell(band, one))


async def _tell(band: Band, one: Attacker) -> None:
    own = await asyncio.to_thread(plan, one)
    number = band.all.index(one)
    async for victim in band.rounds(one):
        number += 1
        make = KINDS[number % len(KINDS)]
        note = own if make is plan else await asyncio.to_thread(_shared, make, band.all[0])
        answer = await band.call(one, victim, TELL, note)
        if answer is not None:
            reply = pb.NoteReply.FromString(answer)
            band.heard["" if reply.accepted else f"reply: {printable(reply.reason, 120)}"] += 1


@cache
def _shared(make: Callable[[Attacker], bytes], one: Attacker) -> bytes:
    return make(one)


def finished(one: Attacker) -> bytes:
    """Results of more micro-batches than an epoch has."""
    result = pb.MicroBatchResult(index=7, counted=True, loss_sum=1.0, tokens=128)
    each = len(pb.FinishedNote(results=[result]).SerializeToString())
    said = pb.FinishedNote(plan_hash="a" * 64, results=[result] * (LARGE // each))
    return pb.Note(epoch=1, term=1, finished=said).SerializeToString()


def plan(one: Attacker) -> bytes:
    """A plan of its own with thousands of paths, signed."""
    stages = range(1, one.manifest.pipeline.stages + 1)
    hops = tuple(Hop(stage, PeerId(one.victims[0])) for stage in stages)
    members = (PlanMember(one.me, ENDS), PlanMember(one.victims[0], 1))

    def of(count: int) -> bytes:
        paths = tuple(Path(i, one.me, (i,), hops) for i in range(count))
        return Plan(1, 1, one.me, members, paths, {}, lineage="f" * 32).canonical()

    few = len(of(1000))
    said = of(1000 * (LARGE - 8192) // (few + few // 4))
    domain = signing_domain("plan", one.manifest.run_id)
    note = pb.PlanNote(plan=said, signature=one.identity.sign(said, domain))
    return pb.Note(epoch=1, term=1, plan=note).SerializeToString()


def round_(one: Attacker) -> bytes:
    """A round with thousands of dead, owners and dropped micro-batches."""
    said = pb.RoundNote(plan_hash="a" * 64, attempt=1, deadline_s=10.0)
    each = len(one.me) + 2
    said.dead.extend([one.me] * (LARGE // each // 5))
    said.dropped.extend(range(LARGE // 12))
    for number in range(LARGE // each // 4):
        said.owners[f"part {number}"] = one.me
    return pb.Note(epoch=1, term=1, round=said).SerializeToString()


def ready(one: Attacker) -> bytes:
    """A heartbeat that has measured thousands of neighbours."""
    said = pb.ReadyNote(stage=1, at=pb.VersionNote(epoch=1, lineage="f" * 32), speed=1.0)
    for number in range(LARGE // 80):
        said.seen[f"{one.me}{number}"] = 1.0
    return pb.Note(epoch=1, term=1, ready=said).SerializeToString()


def dead(one: Attacker) -> bytes:
    """Thousands of peers that are said to be dead."""
    said = pb.DeadNote(plan_hash="a" * 64, dead=[one.me] * (LARGE // (len(one.me) + 3)))
    return pb.Note(epoch=1, term=1, dead=said).SerializeToString()


def incomplete(one: Attacker) -> bytes:
    """Thousands of parts that are said to be there."""
    said = pb.IncompleteNote(plan_hash="a" * 64, holds=["part"] * (LARGE // 6 - 100))
    return pb.Note(epoch=1, term=1, incomplete=said).SerializeToString()


KINDS: tuple[Callable[[Attacker], bytes], ...] = (finished, plan, round_, ready, dead, incomplete)
