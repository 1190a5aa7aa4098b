"""Receipts of work: whether they sum to the committed tokens under churn, whether lies are refused,
and what signing, passing on and verifying them costs.

    python -m benchmarks.ledger [--epochs 100] [--json -]

Sums are of a simulated swarm whose peers die and are replaced. Lies are told about epochs of a
swarm that signs with real keys. Costs are of 100 peers: 20 at the ends and 20 of each of 4 block
stages, 200 micro-batches an epoch, one peer replaced in every epoch; processor time of one process.
"""

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.report import Report, command_line
from node.coordinator.credit.account import CreditGround, settle
from node.coordinator.credit.audit import audit
from node.coordinator.credit.keeper import Credit
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Signed, Statement, statement_of, work_domain
from node.core.clock import SystemClock
from node.core.ids import PeerId
from node.core.tasks import Tasks
from node.sim.faults import lay
from node.sim.run import run
from node.sim.setup import Setup
from node.telemetry.events import Journal
from node.tools.ledger import is_signed
from protos import training_pb2 as pb
from testbed.swarms.receipts import SwarmBooks
from testbed.swarms.signing import RUN, SigningSwarm, neighbours_of

ITEM = "3"
EPOCHS = 100
VERIFIED_S = 1.0
"""Target for the processor time in which the receipts of 100 peers are verified."""
HELD_S = 0.05
"""Target for the longest time for which an epoch's receipts hold the event loop of a leader."""
LIES = 100
SCENARIOS = ("churn", "random")


def rows(report: Report, root: object = None, quick: bool = False, *, epochs: int = EPOCHS) -> None:
    """Measure and add the rows. ``root`` is not used; ``quick`` takes a tenth of the epochs."""
    if quick:
        epochs = max(5, epochs // 10)
    for scenario in SCENARIOS:
        _sums(report, scenario, epochs)
    _lies(report)
    _costs(report, epochs)


# ----------------------------------------------------------------- sums


def _sums(report: Report, scenario: str, epochs: int) -> None:
    setup = Setup(epochs=epochs, micro_batches=6)
    books = SwarmBooks()
    outcome = run(setup, lay((scenario,), setup, 1), books.factory())
    found = books.audit()
    receipts = sum(found.receipts().values())
    unsigned = sum(found.unsigned().values())
    # Tokens count once at each stage; the members of the swarm count them once.
    difference = receipts + unsigned + found.left_out() - found.work
    difference = abs(difference) + abs(found.tokens - books.committed())
    name = f"{ITEM} {scenario}"
    said = f"{len(found.accounts)} epochs, {len(outcome.struck)} faults, seed 1"
    report.add(
        f"{name}: receipts, unsigned and left-out tokens less committed ones",
        difference,
        "tokens",
        said,
        "0",
        difference == 0 and len(found.accounts) >= epochs - 1,
    )
    share = round(100 * receipts / max(1, found.work), 2)
    named = f"{100 * unsigned / max(1, found.work):.2f} % unsigned, of {len(found.silent())} peers"
    report.add(f"{name}: committed work with a receipt", share, "%", named)
    false = sum(r.ground is not CreditGround.UNCERTIFIED for r in found.refused)
    report.add(f"{name}: receipts of honest peers refused", false, "receipts", "", "0", not false)


# ----------------------------------------------------------------- lies


Lie = Callable[[SigningSwarm, EpochRecord, random.Random], EpochRecord]


def _forged(swarm: SigningSwarm, record: EpochRecord, dice: random.Random) -> EpochRecord:
    """A statement with a bit of its signature changed."""
    victim = dice.choice(record.signed)
    signature = bytearray(victim.signature)
    signature[dice.randrange(64)] ^= 1 << dice.randrange(8)
    forged = replace(victim, signature=bytes(signature))
    return replace(record, signed=tuple(forged if s is victim else s for s in record.signed))


def _double(swarm: SigningSwarm, record: EpochRecord, dice: random.Random) -> EpochRecord:
    """A second statement of one signer for the same epoch, with more tokens."""
    signed = dice.choice(record.signed)
    said = Statement.parse(signed.said)
    other = swarm.sign(signed.peer, replace(said, sizes=tuple(n + 1 for n in said.sizes)))
    return replace(record, signed=(*record.signed, other))


def _stolen(swarm: SigningSwarm, record: EpochRecord, dice: random.Random) -> EpochRecord:
    """A statement by which its signer puts itself beside peers that its micro-batches never met."""
    signed = dice.choice(record.signed)
    said = Statement.parse(signed.said)
    same = [i for i, m in enumerate(record.plan.members) if m.stage == _stage(record, signed.peer)]
    place = dice.choice(same)
    lie = swarm.sign(signed.peer, replace(said, takers=(place,) * len(said.takers)))
    return replace(record, signed=tuple(lie if s is signed else s for s in record.signed))


def _stage(record: EpochRecord, peer: PeerId) -> int:
    return next(m.stage for m in record.plan.members if m.peer == peer)


def _renamed(swarm: SigningSwarm, record: EpochRecord, dice: random.Random) -> EpochRecord:
    """A statement of another peer, shown as the thief's own."""
    victim, thief = dice.sample(record.signed, 2)
    stolen = replace(victim, peer=thief.peer)
    return replace(record, signed=tuple(stolen if s is thief else s for s in record.signed))


TOLD: dict[str, tuple[Lie, CreditGround]] = {
    "forged": (_forged, CreditGround.FORGED),
    "double": (_double, CreditGround.DOUBLE),
    "stolen, of others' neighbours": (_stolen, CreditGround.STOLEN),
    "stolen, under another name": (_renamed, CreditGround.FORGED),
}


def _lies(report: Report) -> None:
    for name, (lie, ground) in TOLD.items():
        swarm = SigningSwarm(ends=2, stages=3, replicas=2)
        dice = random.Random(1)
        refused = 0
        for _ in range(LIES):
            record = swarm.epoch()
            (found,) = audit([[lie(swarm, record, dice)]], is_signed).values()
            whole = sum(found.receipts().values()) == found.work
            refused += not whole and {r.ground for r in found.refused} == {ground}
        report.add(
            f"{ITEM} receipts {name}: refused as {ground.value}",
            refused,
            f"of {LIES}",
            "",
            f"{LIES}",
            refused == LIES,
        )


# ----------------------------------------------------------------- costs


@dataclass
class Costs:
    """Costs of one epoch. Seconds are of the processor, by what they are spent on; bytes of one
    peer."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Measure the block."""
        began = time.process_time()
        yield
        self.seconds.setdefault(what, []).append(time.process_time() - began)


def _costs(report: Report, epochs: int) -> None:
    swarm = SigningSwarm(ends=20, stages=4, replicas=20, micro_batches=200, tokens=1024)
    costs = Costs()
    records = list[bytes]()
    # The simulated swarms before are no part of these costs.
    gc.collect()
    gc.freeze()
    for _ in range(epochs):
        swarm.replace_some(1)
        records.append(_epoch_costs(swarm, costs))
    began = time.process_time()
    parsed = [EpochRecord.parse(raw) for raw in records]
    (found,) = audit([parsed], is_signed).values()
    took = round(time.process_time() - began, 3)
    whole = sum(found.receipts().values()) == found.work and len(found.accounts) == epochs
    said = (
        f"{len(found.receipts())} peers in turn, {epochs} epochs, {sum(map(len, records)) >> 10} "
        f"KiB, {found.signatures} signatures"
    )
    report.add(
        f"{ITEM} receipts of 100 peers verified",
        took,
        "s",
        said,
        f"<= {VERIFIED_S:g}",
        whole and took <= VERIFIED_S,
    )
    for name, sizes in (
        ("sent by a peer", costs.sent),
        ("received by a peer", costs.received),
        ("written by a peer", costs.written),
    ):
        report.add(
            f"{ITEM} bytes an epoch, {name}", round(median(sizes)), "B", f"most {max(sizes)}"
        )
    for what, seconds in costs.seconds.items():
        took = round(1000 * median(seconds), 3)
        report.add(f"{ITEM} an epoch, {what}", took, "ms", f"most {1000 * max(seconds):.3f}")
    held = max(max(costs.seconds[what]) for what in ON_THE_LOOP)
    report.add(
        f"{ITEM} an epoch, longest hold of a leader's event loop",
        round(1000 * held, 3),
        "ms",
        "at most, of the parts on the loop",
        f"<= {1000 * HELD_S:g}",
        held <= HELD_S,
    )


ON_THE_LOOP = (
    "a member signs",
    "the leader parses a statement",
    "the leader adds statements to 100 plans",
)


def _epoch_costs(swarm: SigningSwarm, costs: Costs) -> bytes:
    """Make an epoch and measure its parts. Returns the record of the leader."""
    plan = swarm.plan()
    record = swarm.epoch()
    member = swarm.stages[1][0]
    neighbours = neighbours_of(plan, (), swarm.tokens)
    with costs.of("a member signs"):
        said = statement_of(plan, record.made, record.tokens, b"\0" * 32, neighbours[member])
        if said is not None:
            swarm.sign(member, said)
    leader = _leader(swarm, plan.leader)
    for signed in record.signed:
        note = pb.CommittedNote(work=signed.said, work_signature=signed.signature)
        with costs.of("the leader parses a statement"):
            leader.collect(signed.peer, plan, note)
    note = pb.Note(plan=pb.PlanNote(plan=swarm.plan().canonical()))
    with costs.of("the leader adds statements to 100 plans"):
        to = leader.addressed(note, plan)
        addressed = {peer: to(peer) for peer in swarm.peers}
    told = {s.peer: s for s in record.signed}
    received = [Signed.of(r) for r in addressed[member].receipts.receipts]
    costs.sent.append(len(told[member].said) + 64)
    costs.received.append(addressed[member].receipts.ByteSize())
    own = replace(record, signed=(*received, told[member]))
    with costs.of("a member writes, beside the loop"):
        costs.written.append(len(_settled(own)))
    with costs.of("the leader settles and writes, beside the loop"):
        raw = _settled(record)
    return raw


def _settled(record: EpochRecord) -> bytes:
    """The record's bytes, after a check of its signatures and its account."""
    statements = {
        s.peer: Statement.parse(s.said)
        for s in record.signed
        if is_signed(s.peer, s.said, s.signature, work_domain(RUN))
    }
    settle(record.plan, record.made, record.dropped, record.tokens, statements)
    return record.encoded()


def _leader(swarm: SigningSwarm, me: PeerId) -> Credit:
    kit: Any = SimpleNamespace(
        me=me,
        facts=SimpleNamespace(run_id=RUN),
        journal=Journal(),
        clock=SystemClock(),
        tasks=Tasks("benchmark"),
    )
    worked: Any = SimpleNamespace(worked=lambda: [])
    return Credit(kit, swarm.keys[me], worked, None)


def main() -> int:
    """Measure, print, and exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of each swarm")
    asked = parser.parse_args()
    report = Report()
    rows(report, epochs=asked.epochs)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
