"""Notes to the training service: as large as any message may be, and as large as their own limits
let them."""

import asyncio
from collections.abc import Callable
from functools import cache, partial

from benchmarks.strangers.band import Attacker, Band
from node.consensus.votes import signing_domain
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.transport.limits import LARGEST, NOTES
from node.transport.port import printable
from protos import training_pb2 as pb

TELL = "/tutti.v1.Training/Tell"
HASH = "a" * 64
SPARE = 8192
"""Bytes of a limit that are left free, for the fields around the long ones."""
Make = Callable[[Attacker, int], bytes]
"""A note of at most so many bytes."""


async def large(band: Band) -> None:
    """Every kind of note with a field that never ends, up to the largest message."""
    await band.each(partial(_tell, band, dict.fromkeys(KINDS, LARGEST)))


async def within(band: Band) -> None:
    """Every kind of note as large as notes of its kind may be."""
    sizes = {name: limit.size for name, limit in NOTES.values()}
    await band.each(partial(_tell, band, {name: sizes[name] for name in KINDS}))


async def _tell(band: Band, sizes: dict[str, int], one: Attacker) -> None:
    own = await asyncio.to_thread(plan, one, sizes["plan"] - SPARE)
    names = list(sizes)
    number = band.all.index(one)
    async for victim in band.rounds(one):
        number += 1
        name = names[number % len(names)]
        made = own
        if name != "plan":
            made = await asyncio.to_thread(_shared, name, band.all[0], sizes[name] - SPARE)
        answer = await band.call(one, victim, TELL, made)
        if answer is not None:
            reply = pb.NoteReply.FromString(answer)
            band.heard["" if reply.accepted else f"reply: {printable(reply.reason, 120)}"] += 1


@cache
def _shared(name: str, one: Attacker, size: int) -> bytes:
    """A note that is the same for all attackers."""
    return KINDS[name](one, size)


def finished(one: Attacker, size: int) -> bytes:
    """Results of more micro-batches than an epoch has."""
    result = pb.MicroBatchResult(index=7, counted=True, loss_sum=1.0, tokens=128)
    each = len(pb.FinishedNote(results=[result]).SerializeToString())
    said = pb.FinishedNote(plan_hash=HASH, results=[result] * (size // each))
    return pb.Note(epoch=1, term=1, finished=said).SerializeToString()


def plan(one: Attacker, size: int) -> bytes:
    """A plan of its own with thousands of paths, signed."""
    stages = range(1, one.manifest.pipeline.stages + 1)
    hops = tuple(Hop(stage, PeerId(one.victims[0])) for stage in stages)
    members = (PlanMember(one.me, ENDS), PlanMember(one.victims[0], 1))

    def of(count: int) -> bytes:
        paths = tuple(Path(i, one.me, (i,), hops) for i in range(count))
        return Plan(1, 1, one.me, members, paths, {}, lineage="f" * 32).canonical()

    few = len(of(1000))
    said = of(1000 * size // (few + few // 4))
    domain = signing_domain("plan", one.manifest.run_id)
    note = pb.PlanNote(plan=said, signature=one.identity.sign(said, domain))
    return pb.Note(epoch=1, term=1, plan=note).SerializeToString()


def round_(one: Attacker, size: int) -> bytes:
    """A round with thousands of dead, owners and dropped micro-batches."""
    said = pb.RoundNote(plan_hash=HASH, attempt=1, deadline_s=10.0)
    each = len(one.me) + 2
    said.dead.extend([one.me] * (size // each // 5))
    said.dropped.extend(range(size // 12))
    for number in range(size // each // 4):
        said.owners[f"part {number}"] = one.me
    return pb.Note(epoch=1, term=1, round=said).SerializeToString()


def ready(one: Attacker, size: int) -> bytes:
    """A heartbeat that has measured thousands of neighbours."""
    said = pb.ReadyNote(stage=1, at=pb.VersionNote(epoch=1, lineage="f" * 32), speed=1.0)
    for number in range(size // 80):
        said.seen[f"{one.me}{number}"] = 1.0
    return pb.Note(epoch=1, term=1, ready=said).SerializeToString()


def dead(one: Attacker, size: int) -> bytes:
    """Thousands of peers that are said to be dead."""
    said = pb.DeadNote(plan_hash=HASH, dead=[one.me] * (size // (len(one.me) + 3)))
    return pb.Note(epoch=1, term=1, dead=said).SerializeToString()


def incomplete(one: Attacker, size: int) -> bytes:
    """Thousands of parts that are said to be there."""
    said = pb.IncompleteNote(plan_hash=HASH, holds=["part"] * (size // 6))
    return pb.Note(epoch=1, term=1, incomplete=said).SerializeToString()


KINDS: dict[str, Make] = {
    "finished": finished,
    "plan": plan,
    "round": round_,
    "ready": ready,
    "dead": dead,
    "incomplete": incomplete,
}
