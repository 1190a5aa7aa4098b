"""Plans are parsed after their sender is known as the leader, large ones beside the event loop and
one at a time."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from node.consensus.admission import LARGE_PLAN, OTHER_LEADER, Admission, Ground, Refusal
from node.consensus.rules import ChangeStatus, Rules
from node.consensus.terms import Terms
from node.consensus.trust import Trust
from node.coordinator import notes
from node.coordinator.following import Following
from node.coordinator.plan_inbox import PlanInbox
from node.coordinator.service import Training
from node.core import journey
from node.core.clock import SystemClock
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import MOST_LISTS, Hop, Path, Plan, PlanMember
from node.epoch.bounds import Bounds
from node.pipeline.events import MicroBatchDone
from node.telemetry.events import Journal
from node.wire.limits import RESULTS
from protos import training_pb2 as pb

E = PeerId("ends")
S = PeerId("stage")
LARGE = bytes(LARGE_PLAN + 1)


def plan(paths: int = 3, owners: int = 1) -> Plan:
    return Plan(
        7,
        9,
        E,
        (PlanMember(E, 0), PlanMember(S, 1)),
        tuple(Path(i, E, (2 * i, 2 * i + 1), (Hop(1, S),)) for i in range(paths)),
        {f"layers.{i}.weight": S for i in range(owners)},
    )


BOUNDS = Bounds(120, 128, 2, micro_batches=3)


def inbox(bounds: Any = BOUNDS) -> Any:
    """An inbox of a peer that knows nobody."""
    trust = Trust("run", lambda *about: False)
    admission = Admission(Terms(), trust, ChangeStatus(Rules()), lambda peer: True)
    work: Any = SimpleNamespace(objection=lambda plan: "", read=lambda change: Rules())
    statements: Any = SimpleNamespace(is_plan_of=lambda *about: True)
    return PlanInbox(admission, statements, bounds, work, SystemClock(), Journal())


def anything(parse: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An inbox that reads plans with ``parse``, without a check."""
    monkeypatch.setattr(notes, "parse_plan", parse)
    return inbox(SimpleNamespace(paths=3, of_plan=lambda plan: ""))


def service(leader: Any) -> Any:
    """The part of the training service that reads results."""
    made: Any = object.__new__(Training)
    kit = SimpleNamespace(facts=SimpleNamespace(bounds=BOUNDS))
    made.__dict__ |= {"kit": kit, "leading": SimpleNamespace(leader=leader)}
    return made


async def test_a_plan_is_read_with_its_hash() -> None:
    made = plan()
    found, _ = await inbox()._read(E, pb.PlanNote(plan=made.canonical()), False)
    assert found == made
    assert found.__dict__["hash"] == made.hash


async def test_a_plan_with_more_paths_than_micro_batches_is_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.core.journey.Path", None)
    with pytest.raises(WireError, match="4 paths, at most 3"):
        await inbox()._read(E, pb.PlanNote(plan=plan(4).canonical()), False)


@pytest.mark.parametrize("raw", [bytes(3), LARGE], ids=["small", "large"])
async def test_a_large_plan_is_parsed_beside_the_event_loop(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int]()

    def parse(note: pb.PlanNote, most: int) -> Any:
        threads.append(threading.get_ident())
        return SimpleNamespace(hash="h")

    await anything(parse, monkeypatch)._read(E, pb.PlanNote(plan=raw), False)
    assert (threads == [threading.get_ident()]) is (raw is not LARGE)


async def test_one_large_plan_is_parsed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = threading.Semaphore(1)
    free = list[bool]()

    def parse(note: pb.PlanNote, most: int) -> Any:
        free.append(at_once.acquire(blocking=False))
        threading.Event().wait(0.01)  # long enough for a second thread to come
        at_once.release()
        return SimpleNamespace(hash="h")

    reader = anything(parse, monkeypatch)
    note = pb.PlanNote(plan=LARGE)
    await asyncio.gather(*(reader._read(E, note, False) for _ in range(3)))
    assert free == [True] * 3


async def test_a_large_plan_of_a_peer_that_is_not_the_leader_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = anything(None, monkeypatch)
    refused = await reader.receive(S, pb.PlanNote(plan=LARGE), False, None)
    assert refused == Refusal(Ground.ELSEWHERE, OTHER_LEADER)


async def test_results_are_read_by_a_leader_only_and_as_many_as_an_epoch_has() -> None:
    results = tuple(MicroBatchDone(i, True, 1.0, 8) for i in range(4))
    note = notes.finished_note(plan(), results)
    assert await service(None)._hear(S, note) == "this peer does not lead"
    with pytest.raises(WireError, match="4 results"):
        await service(SimpleNamespace())._hear(S, note)


async def test_many_results_travel_in_several_messages() -> None:
    told = list[int]()

    async def tell(to: Plan, note: pb.Note) -> bool:
        told.append(len(note.finished.results))
        return True

    made = plan()
    spawned = list[asyncio.Task[None]]()
    tasks = SimpleNamespace(
        spawn=lambda work, name: spawned.append(asyncio.get_running_loop().create_task(work))
    )
    member = SimpleNamespace(plan=made)
    driver: Any = object.__new__(Following)
    kit = SimpleNamespace(tasks=tasks)
    driver.__dict__ |= {"_port": SimpleNamespace(tell_leader=tell), "_kit": kit, "member": member}
    driver.__dict__["_reports"] = None
    reports = driver._reports_on(made)
    for i in range(2 * RESULTS + 1):
        reports.add(MicroBatchDone(i, True, 1.0, 8))
    await asyncio.gather(*spawned)
    assert told == [RESULTS, RESULTS, 1]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[" + b"[]," * MOST_LISTS + b"[]]", "lists"),
        (plan().canonical().replace(b'"digests":{}', b'"digests":{"1":[[]]}'), "text"),
        (plan().canonical().replace(b'"digests":{}', b'"digests":{"\xd9\xa3":"d"}'), "stage"),
        (plan().canonical().replace(b'"stood":{}', b'"stood":{"123456":[1,""]}'), "stage"),
        (plan().canonical().replace(b'"change":""', b'"change":["a"]'), "text"),
        (plan().canonical().replace(b"layers.0.weight", b"a" * 300), "text"),
        (plan().canonical().replace(b'"ends"', b'"e\\u0000"'), "printable"),
    ],
    ids=["lists", "digest", "digits", "long stage", "change", "part", "peer"],
)
def test_a_plan_with_more_than_a_plan_has_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        Plan.parse(raw)


def test_a_plan_with_more_owners_than_there_are_parts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(journey.ENTRIES, "owners", 2)
    assert Plan.parse(plan(owners=2).canonical())
    with pytest.raises(WireError, match="3 owners, at most 2"):
        Plan.parse(plan(owners=3).canonical())
