"""Credit of one peer: what it signs, sends, passes on and writes."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.coordinator.credit.audit import audit
from node.coordinator.credit.keeper import Credit, CreditShares
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.sketches import parse_sketches
from node.coordinator.credit.statement import Signed, Statement, work_domain
from node.core.clock import SystemClock
from node.core.errors import WireError
from node.core.ids import ENDS, PeerId
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.pipeline.events import Neighbours, VisitSketches
from node.telemetry.events import Journal
from node.tools import ledger
from node.wire import bounds
from node.wire.limits import WORK
from node.wire.sketch import BYTES
from protos import training_pb2 as pb
from testbed.swarms.signing import RUN, SigningSwarm, neighbours_of


@dataclass
class Rig:
    """One peer of a swarm that signs: its credit, the records that it wrote, its faults."""

    swarm: SigningSwarm
    me: PeerId
    records: list[EpochRecord] = field(default_factory=list)
    faults: list[PeerId] = field(default_factory=list)
    broken: bool = False
    now: Sequence[Neighbours] = ()
    sketched: Sequence[VisitSketches] = ()

    def __post_init__(self) -> None:
        self.journal = Journal()
        self.tasks = Tasks("test", self._failed)
        kit: Any = SimpleNamespace(
            me=self.me,
            facts=SimpleNamespace(run_id=RUN),
            journal=self.journal,
            clock=SystemClock(),
            tasks=self.tasks,
            transport=SimpleNamespace(fault=lambda peer, why, weight: self.faults.append(peer)),
        )
        worked: Any = SimpleNamespace(worked=lambda: self.now, sketched=lambda: self.sketched)
        self.credit = Credit(kit, self.swarm.keys[self.me], worked, self)
        self.failures: list[BaseException] = []

    def _failed(self, name: str, error: BaseException) -> None:
        self.failures.append(error)

    def append(self, record: bytes) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.records.append(EpochRecord.parse(record))

    def commits(self, record: EpochRecord) -> pb.Note:
        """The peer's note to its leader after that epoch."""
        note = pb.Note(committed=pb.CommittedNote(plan_hash=record.plan.hash))
        worked = neighbours_of(record.plan, record.dropped, self.swarm.tokens)
        self.now = worked.get(self.me, ())
        leads = record.plan.leader == self.me
        self.credit.commits(
            record.plan, record.made, record.dropped, record.tokens, note, leads=leads
        )
        return note

    async def follows(self, plan: Plan, certificate: Any = None) -> None:
        self.credit.follows(plan, certificate)
        await self.settled()

    async def settled(self) -> None:
        while self.tasks:
            await next(iter(self.tasks._tasks))
        assert not self.failures

    def kinds(self) -> list[str]:
        return [e.kind for e in self.journal.recent()]


def swarm_of_one_way() -> SigningSwarm:
    return SigningSwarm(ends=1, stages=2, replicas=1, micro_batches=3)


def plan_note(plan: Plan, *signed: Signed) -> pb.PlanNote:
    note = pb.PlanNote(plan=plan.canonical())
    note.receipts.receipts.extend(s.note() for s in signed)
    note.receipts.SetInParent()
    return note


async def test_a_member_signs_its_work_for_a_leader_that_collects_it() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    plan = swarm.plan()
    rig.credit.heard(plan, plan_note(plan))
    await rig.follows(plan)
    record = swarm.epoch()
    note = rig.commits(record)
    said = Statement.parse(note.committed.work)
    own = next(Statement.parse(s.said) for s in record.signed if s.peer == rig.me)
    assert said == own
    assert rig.commits(record) == note, "the same epoch is signed once"


@pytest.mark.parametrize("collects", [True, False])
async def test_an_older_leader_gets_the_note_that_it_knows(collects: bool) -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    plan = swarm.plan()
    note = plan_note(plan)
    if not collects:
        note.ClearField("receipts")
    rig.credit.heard(plan, note)
    await rig.follows(plan)
    sent = rig.commits(swarm.epoch())
    assert bool(sent.committed.work) is collects
    assert collects or sent.ByteSize() < 100


async def test_receipts_are_written_when_the_next_plan_starts_from_the_version() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    record = swarm.epoch()
    rig.commits(record)
    others = [s for s in record.signed if s.peer != rig.me]
    following = swarm.plan()
    rig.credit.heard(following, plan_note(following, *others))
    await rig.follows(following, record.certificate)
    (written,) = rig.records
    assert (written.made, written.certificate) == (record.made, record.certificate)
    assert {s.peer for s in written.signed} == set(swarm.peers)
    assert rig.credit.shares == CreditShares(record.tokens, 3 * record.tokens, 0, 1)


async def test_outer_rounds_are_in_the_book_and_are_no_work() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    epochs = []
    for makes in (swarm.epoch, swarm.outer_round, swarm.epoch):
        epochs.append(makes())
        rig.commits(epochs[-1])
        await rig.follows(swarm.plan(), epochs[-1].certificate)
    run = audit([rig.records], ledger.is_signed)[RUN]
    assert [a.tokens for a in run.accounts] == [e.tokens for e in epochs]
    assert run.rows == 1, "no epoch is missing in between"
    assert not run.refused
    assert rig.credit.shares.epochs == 2


async def test_an_epoch_that_is_undone_leaves_no_receipt() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    again = swarm.plan()
    rig.commits(swarm.epoch())
    await rig.follows(again)
    await rig.follows(swarm.plan())
    assert rig.records == []


async def test_receipts_beside_another_plan_are_not_taken() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    record = swarm.epoch()
    rig.commits(record)
    rig.credit.heard(record.plan, plan_note(record.plan, *record.signed))
    await rig.follows(swarm.plan())
    assert [s.peer for s in rig.records[0].signed] == [rig.me]


async def test_a_forged_statement_beside_a_plan_is_refused_and_blames_nobody() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    record = swarm.epoch()
    rig.commits(record)
    forged = Signed(swarm.peers[2], record.signed[2].said, record.signed[1].signature)
    following = swarm.plan()
    rig.credit.heard(following, plan_note(following, forged, record.signed[0]))
    await rig.follows(following)
    [event] = [e for e in rig.journal.recent() if e.kind == "receipt-refused"]
    assert (event.fields["grounds"], event.fields["peers"]) == ({"forged": 1}, [])
    assert rig.faults == []
    assert swarm.peers[2] not in {s.peer for s in rig.records[0].signed}


@pytest.mark.parametrize("leads", [True, False])
async def test_of_several_statements_of_a_signer_the_one_about_the_epoch_is_kept(
    leads: bool,
) -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[0 if leads else 1])
    old = next(s for s in swarm.epoch().signed if s.peer == swarm.peers[2])
    record = swarm.epoch()
    rig.commits(record)
    others = [s for s in record.signed if s.peer != rig.me]
    following = swarm.plan()
    if leads:
        others = [s for s in others if s.peer != old.peer]
        collected(rig, record, old, *others)
    else:
        rig.credit.heard(following, plan_note(following, old, *others, old))
    await rig.follows(following)
    assert old not in rig.records[0].signed
    assert set(others) < set(rig.records[0].signed)
    (said,) = [e for e in rig.journal.recent() if e.kind == "receipt-refused"]
    assert said.fields["grounds"].keys() == {"elsewhere"}
    # Only a member sends its leader its own statement; elsewhere the leader may have put it there.
    assert said.fields["peers"] == ([old.peer] if leads else [])


async def test_a_record_has_one_statement_of_each_signer() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    record = swarm.epoch()
    rig.commits(record)
    others = [s for s in record.signed if s.peer != rig.me]
    again = [
        swarm.sign(s.peer, replace(Statement.parse(s.said), before=b"\1" * 32)) for s in others
    ]
    following = swarm.plan()
    rig.credit.heard(following, plan_note(following, *others, *again))
    await rig.follows(following)
    assert set(others) < set(rig.records[0].signed)
    assert len(rig.records[0].signed) == len(swarm.peers)


async def test_a_full_disk_costs_the_record_alone() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    rig.broken = True
    rig.commits(swarm.epoch())
    await rig.follows(swarm.plan())
    assert "receipts-not-written" in rig.kinds()
    rig.broken = False
    rig.commits(swarm.epoch())
    await rig.follows(swarm.plan())
    assert [r.plan.epoch for r in rig.records] == [1]


# ----------------------------------------------------------------- the leader


def collected(rig: Rig, record: EpochRecord, *signed: Signed) -> None:
    for s in signed:
        note = pb.CommittedNote(work=s.said, work_signature=s.signature)
        rig.credit.collect(s.peer, record.plan, note)


async def test_a_leader_passes_on_the_statements_that_name_a_member() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    leader, first, second, third = swarm.peers
    rig = Rig(swarm, leader)
    record = swarm.epoch()
    rig.commits(record)
    collected(rig, record, *(s for s in record.signed if s.peer != leader))
    note = pb.Note(plan=plan_note(swarm.plan()))
    addressed = rig.credit.addressed(note, record.plan)
    to = {peer: addressed(peer).whole() for peer in swarm.peers}
    told = {p: {r.peer for r in n.plan.receipts.receipts} for p, n in to.items()}
    assert told[first] == {leader, second}
    assert told[second] == {first, third}
    assert all(n.plan.HasField("receipts") for n in to.values())
    for made in to.values():
        made.plan.receipts.CopyFrom(note.plan.receipts)
        assert made == note, "the rest is the same for all"
    await rig.follows(swarm.plan(), record.certificate)
    assert len(rig.records[0].signed) == 4
    assert rig.credit.shares.unsigned == 0


async def test_statements_of_an_earlier_plan_are_not_passed_on() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    rig = Rig(swarm, swarm.peers[ENDS])
    record = swarm.epoch()
    collected(rig, record, *record.signed)
    note = pb.Note(plan=plan_note(swarm.plan()))
    later = swarm.epoch()
    addressed = rig.credit.addressed(note, later.plan)(swarm.peers[1]).whole()
    assert not addressed.plan.receipts.receipts
    assert addressed.plan.HasField("receipts")


def test_all_members_share_the_bytes_of_a_plan() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=30, micro_batches=90)
    rig = Rig(swarm, swarm.peers[ENDS])
    record = swarm.epoch()
    collected(rig, record, *record.signed)
    note = pb.Note(epoch=3, term=4, plan=pb.PlanNote(plan=bytes(1 << 20), signature=b"s" * 64))
    tracemalloc.start()
    to = rig.credit.addressed(note, record.plan)
    notes = [to(peer) for peer in swarm.peers]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 << 20
    assert sum(len(n.receipts.receipts) for n in notes) > len(notes)
    for shared in notes[::10]:
        sent = bounds.parse(pb.Note, shared.SerializeToString())
        assert (sent.epoch, sent.term, sent.plan.signature) == (3, 4, b"s" * 64)
        assert sent.plan.plan == note.plan.plan
        assert sent.plan.receipts == shared.receipts


async def test_a_leader_names_those_who_did_not_confirm() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    leader, first, second, third = swarm.peers
    rig = Rig(swarm, leader)
    record = swarm.epoch()
    rig.commits(record)
    collected(rig, record, *(s for s in record.signed if s.peer not in (leader, second)))
    await rig.follows(swarm.plan())
    (said,) = [e for e in rig.journal.recent() if e.kind == "work-unsigned"]
    assert said.fields["peers"] == [second]
    assert said.fields["tokens"] == 2 * record.tokens


async def test_a_member_with_a_wrong_signature_has_committed_a_fault() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    rig = Rig(swarm, swarm.peers[ENDS])
    record = swarm.epoch()
    rig.commits(record)
    liar = record.signed[1]
    collected(rig, record, Signed(liar.peer, liar.said, b"\1" * 64))
    await rig.follows(swarm.plan())
    assert rig.faults == [liar.peer]


def padded(swarm: SigningSwarm, signed: Signed, nbytes: int) -> Signed:
    """The statement with an unknown field of as many bytes, under its signer's signature."""
    padding = bytes([0xFA, 0x7F, *varint(nbytes)]) + bytes(nbytes)  # number 2047
    said = signed.said + padding
    return Signed(signed.peer, said, swarm.keys[signed.peer].sign(said, work_domain(RUN)))


def varint(n: int) -> bytes:
    raw = []
    while n > 127:
        raw.append(n & 127 | 128)
        n >>= 7
    return bytes([*raw, n])


async def test_statements_that_fill_a_record_cost_those_who_made_them_long() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=30, micro_batches=90)
    leader = swarm.peers[0]
    rig = Rig(swarm, leader)
    record = swarm.epoch()
    rig.commits(record)
    liars = {s.peer for s in record.signed[1:71]}
    others = [s for s in record.signed[1:] if s.peer not in liars]
    long = [padded(swarm, s, WORK - 4096) for s in record.signed if s.peer in liars]
    collected(rig, record, *long, *others)
    await rig.follows(swarm.plan(), record.certificate)
    (written,) = rig.records
    kept = {s.peer for s in written.signed}
    assert kept >= {leader, *(s.peer for s in others)}
    lost = liars - kept
    assert 0 < len(lost) < 20, "as many as fit"
    (said,) = [e for e in rig.journal.recent() if e.kind == "receipt-refused"]
    assert said.fields["grounds"] == {"room": len(lost)}
    assert set(said.fields["peers"]) <= lost
    (unsigned,) = [e for e in rig.journal.recent() if e.kind == "work-unsigned"]
    assert set(unsigned.fields["peers"]) <= lost


async def test_refusals_of_an_epoch_are_one_line() -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=3, micro_batches=60)
    rig = Rig(swarm, swarm.peers[ENDS])
    record = swarm.epoch()
    rig.commits(record)
    stranger = replace(Statement.parse(record.signed[1].said), tokens=1)
    lies = [swarm.sign(s.peer, stranger) for s in record.signed[1:]]
    collected(rig, record, *lies)
    await rig.follows(swarm.plan(), record.certificate)
    (said,) = [e for e in rig.journal.recent() if e.kind == "receipt-refused"]
    assert said.fields["grounds"] == {"sum": len(lies)}
    assert len(said.fields["peers"]) == min(len(lies), 8)
    assert said.fields["epoch"] == 0


@pytest.mark.parametrize("work", [b"\xff" * 30, bytes(WORK + 1)], ids=["no message", "too large"])
def test_work_that_is_no_statement_is_refused(work: bytes) -> None:
    swarm = SigningSwarm(ends=1, stages=3, replicas=1)
    rig = Rig(swarm, swarm.peers[ENDS])
    with pytest.raises(WireError):
        rig.credit.collect(swarm.peers[1], swarm.plan(), pb.CommittedNote(work=work))


def test_a_peer_without_work_says_nothing() -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    note = pb.Note(committed=pb.CommittedNote())
    plan = swarm.plan()
    rig.credit.commits(plan, Version(1), (), 0, note, leads=False)
    assert not note.committed.work


@pytest.mark.parametrize("inspects", [True, False])
async def test_a_member_sends_sketches_to_a_leader_that_inspects(inspects: bool) -> None:
    swarm = swarm_of_one_way()
    rig = Rig(swarm, swarm.peers[1])
    plan = swarm.plan()
    note = plan_note(plan)
    note.inspects = inspects
    rig.credit.heard(plan, note)
    await rig.follows(plan)
    record = swarm.epoch()
    members = record.plan.members
    rig.sketched = [
        VisitSketches(path.index, members[0].peer, members[-1].peer, bytes(4 * BYTES))
        for path in record.plan.paths
    ]
    sent = rig.commits(record).committed
    assert sent.HasField("sketches") == inspects
    if inspects:
        assert parse_sketches(record.plan, sent.sketches) == tuple(rig.sketched)
