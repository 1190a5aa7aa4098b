"""Credit of one peer while it trains: it signs the peer's work, adds sketches of its tensors,
collects statements for the leader, and writes receipts. Enters: commits, plans, statements of
others. Leaves: fields of messages, records for the book, journal events. Never: a decision of the
epoch; an account's rules (:mod:`node.coordinator.credit.account`)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from node.consensus.votes import Certificate
from node.coordinator.credit.account import (
    NOBODY,
    CreditGround,
    EpochAccount,
    RefusedCredit,
    names,
    settle,
)
from node.coordinator.credit.book import Book
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.shared_note import PlanBytes, SharedNote
from node.coordinator.credit.sketches import sketches_note
from node.coordinator.credit.statement import (
    Signed,
    Statement,
    statement_of,
    work_domain,
)
from node.coordinator.kit import Kit
from node.core.errors import WireError
from node.core.ids import PeerId, short
from node.core.journey import Plan, Version
from node.identity.keys import Signer, is_signed
from node.pipeline.events import Neighbours, VisitSketches
from node.wire.limits import SIZES, WORK
from protos import training_pb2 as pb

ADDRESSED = 32 << 10
"""Bytes of statements that a leader adds to a plan for one member."""
SAY_EVERY_S = 60.0
"""Seconds between two events about work without a receipt."""
MOST_SAID = 8
"""Peers that an event names."""


Collected = tuple[Signed, frozenset[int]]
"""A statement of a member, and the places of the members that it names."""


class Worked(Protocol):
    """The pipeline of this peer."""

    def worked(self) -> Sequence[Neighbours]:
        """Neighbours of each micro-batch that counts here in the epoch under way."""
        ...

    def sketched(self) -> Sequence[VisitSketches]:
        """Sketches of these micro-batches."""
        ...


@dataclass(frozen=True)
class Pending:
    """An epoch that this peer has committed, until the next plan shows that it counts. ``leads``:
    this peer led it when it ended."""

    plan: Plan
    made: Version
    dropped: tuple[int, ...]
    tokens: int
    own: Signed | None
    leads: bool


@dataclass(frozen=True)
class ReceiptRequests:
    """A leader's requests to the members of a plan. ``plan``: its hash. ``receipts``: receipts that
    the leader gives for statements of work, None if it collects no statements. ``sketches``: True
    if it collects sketches of tensors."""

    plan: str = ""
    receipts: pb.ReceiptsNote | None = None
    sketches: bool = False


@dataclass(frozen=True)
class CreditShares:
    """Work since this peer started, in tokens summed over stages: ``own`` with receipts for this
    peer, ``work`` by all peers, ``unsigned`` by this peer without a receipt. ``epochs``: number of
    epochs, without outer rounds."""

    own: int = 0
    work: int = 0
    unsigned: int = 0
    epochs: int = 0


class Credit:
    """Statements and receipts of one peer. ``book``: the place of its receipts, None keeps none."""

    def __init__(self, kit: Kit, identity: Signer, pipeline: Worked, book: Book | None) -> None:
        self._kit = kit
        self._identity = identity
        self._pipeline = pipeline
        self.book = book
        self.shares = CreditShares()
        self._last = b""
        """Hash of the statement that this peer signed last."""
        self._pending: Pending | None = None
        self._heard = ReceiptRequests()
        """Requests in the newest plan that a leader sent."""
        self._asked = ReceiptRequests()
        """Requests in the plan in force."""
        self._collected: tuple[str, dict[PeerId, Collected]] = "", {}
        """Hash of a plan that this peer leads, and the statements of its members."""
        self._order = asyncio.Lock()
        self._said_at = float("-inf")

    # ----------------------------------------------------------- the member

    def commits(
        self,
        plan: Plan,
        made: Version,
        dropped: tuple[int, ...],
        tokens: int,
        note: pb.Note,
        *,
        leads: bool,
        sample: str = "",
    ) -> None:
        """This peer has committed the version ``made``: sign its work and put the statement into
        the note to its leader, if that collects statements. ``tokens``: counted in the epoch;
        ``leads``: this peer leads it; ``sample``: seed of the micro-batches of which sketches are
        reported."""
        pending = self._pending
        if pending is None or pending.made != made:
            own = self._sign(plan, made, tokens)
            self._pending = pending = Pending(plan, made, dropped, tokens, own, leads)
        asked = self._asked.plan == plan.hash
        if leads or (asked and self._asked.sketches):
            found = sketches_note(plan, sample, self._pipeline.sketched())
            if found.indices:
                note.committed.sketches.CopyFrom(found)
        own = pending.own
        if own is None:
            return
        if leads:
            self._keep(plan.hash, own)
        elif asked and self._asked.receipts is not None:
            note.committed.work = own.said
            note.committed.work_signature = own.signature

    def _sign(self, plan: Plan, made: Version, tokens: int) -> Signed | None:
        statement = statement_of(plan, made, tokens, self._last, self._pipeline.worked())
        if statement is None:
            return None
        said = statement.said()
        if len(said) > WORK:
            text = f"a statement of {len(said)} bytes is not sent, {WORK} are read"
            self._kit.journal.emit("training", "work-not-signed", text, "warning", epoch=plan.epoch)
            return None
        signature = self._identity.sign(said, work_domain(self._kit.facts.run_id))
        signed = Signed(self._kit.me, said, signature)
        self._last = signed.hash
        return signed

    def heard(self, plan: Plan, note: pb.PlanNote) -> None:
        """A leader has sent a plan that may be followed."""
        receipts = None
        if note.HasField("receipts"):
            receipts = note.receipts
        self._heard = ReceiptRequests(plan.hash, receipts, note.inspects)

    def follows(self, plan: Plan, certificate: Certificate | None) -> None:
        """A plan is in force. If it starts from the version that this peer has committed, the
        receipts of that epoch count, and are written. ``certificate``: the newest that this peer
        believes."""
        self._asked = ReceiptRequests()
        if self._heard.plan == plan.hash:
            self._asked = self._heard
        receipts = self._asked.receipts
        pending = self._pending
        self._pending = None
        if pending is None or pending.made != plan.base:
            return
        if certificate is not None and certificate.version != plan.base:
            certificate = None
        leads = pending.leads
        signed = list[Signed]()
        if leads:
            signed = [s for s, _ in self._of(pending.plan.hash).values()]
        elif receipts is not None:
            signed = self._received(pending.plan, receipts)
        if pending.own is not None and pending.own not in signed:
            signed.append(pending.own)
        done = self._settle(pending, signed, certificate, leads)
        self._kit.tasks.spawn(done, "receipts")

    def _received(self, plan: Plan, note: pb.ReceiptsNote) -> list[Signed]:
        """The statements about the epoch of ``plan`` that came with the next one."""
        try:
            return [Signed.of(r) for r in note.receipts]
        except WireError as e:
            malformed = RefusedCredit(CreditGround.MALFORMED, plan.leader, plan.epoch, str(e))
            self._say_refused(plan.epoch, [malformed])
            return []

    async def _settle(
        self,
        pending: Pending,
        signed: Sequence[Signed],
        certificate: Certificate | None,
        leads: bool,
    ) -> None:
        """Check signatures, make the account and write the record, beside the event loop and in
        order."""
        kit = self._kit
        async with self._order:
            account, why = await asyncio.to_thread(
                self._settled, pending, signed, certificate, leads
            )
        self._say_refused(account.epoch, account.refused)
        for refused in account.refused:
            if refused.ground is CreditGround.FORGED and refused.peer:
                kit.transport.fault(refused.peer, f"a statement of work: {refused.text}", 1.0)
        if why:
            kit.journal.emit(
                "training", "receipts-not-written", why, "warning", epoch=account.epoch
            )
        own = account.of(kit.me)
        work = account.tokens * len(account.stages)
        unsigned = sum(n for gap, n in account.unsigned.items() if kit.me in gap.workers)
        kit.journal.emit(
            "training",
            "receipts",
            f"receipts for {own} tokens of this peer's work, none for {unsigned}",
            "debug",
            epoch=account.epoch,
            tokens=account.tokens,
            own=own,
            unsigned=unsigned,
        )
        s = self.shares
        # An outer round is an epoch of the history, and nobody works in it.
        trained = s.epochs + bool(account.stages)
        self.shares = CreditShares(s.own + own, s.work + work, s.unsigned + unsigned, trained)
        if leads and account.unsigned:
            self._say_unsigned(account)

    def _settled(
        self,
        pending: Pending,
        signed: Sequence[Signed],
        certificate: Certificate | None,
        leads: bool,
    ) -> tuple[EpochAccount, str]:
        """The account of an epoch, and the reason why its record was not written. Blocks."""
        facts = self._kit.facts
        domain = work_domain(facts.run_id)
        p = pending
        refused = list[tuple[CreditGround, PeerId, str]]()
        good: dict[Signed, Statement] = {}
        signers = set[PeerId]()
        for each in signed:
            # A member sends its leader its statement itself. Others get it from a leader, who
            # checks it later: anybody on the way may have made it, or put it there.
            sender = each.peer if leads else NOBODY
            if not is_signed(self._identity, each.peer, each.said, each.signature, domain):
                text = f"a statement in the name of {short(each.peer)} is not signed by it"
                refused.append((CreditGround.FORGED, sender, text))
                continue
            try:
                statement = Statement.parse(each.said)
            except WireError as e:
                refused.append((CreditGround.MALFORMED, each.peer, str(e)))
                continue
            if not statement.is_of(p.plan, p.made):
                text = f"a statement of {short(each.peer)} is of another version"
                refused.append((CreditGround.ELSEWHERE, sender, text))
            elif each.peer not in signers:
                signers.add(each.peer)
                good[each] = statement
        whole = EpochRecord(facts.run_id, p.plan, p.dropped, p.tokens, certificate, tuple(good))
        record = whole.fitting()
        # A statement without room in the record confirms nothing in the account either.
        statements = {each.peer: good[each] for each in record.signed}
        account = settle(p.plan, p.made, p.dropped, p.tokens, statements)
        for about in refused:
            account.refuse(*about)
        for each in good.keys() - set(record.signed):
            text = f"its statement of {len(each.said)} bytes has no room in the record"
            account.refuse(CreditGround.ROOM, each.peer, text)
        # Also without a statement: the chain of plans proves the tokens of earlier epochs.
        return account, self._written(record)

    def _written(self, record: EpochRecord) -> str:
        """Write a record; the reason why that failed, or "". Training goes on without it."""
        if self.book is None:
            return ""
        try:
            self.book.append(record.encoded())
        except (OSError, WireError) as e:
            return f"{e}"
        return ""

    # ----------------------------------------------------------- the leader

    def collect(self, peer: PeerId, plan: Plan, note: pb.CommittedNote) -> None:
        """A member of the plan that this peer leads has committed. Raises WireError for a statement
        that does not parse; its signature is checked later, beside the event loop."""
        if note.work:
            self._keep(
                plan.hash,
                Signed.of(pb.WorkReceipt(peer=peer, work=note.work, signature=note.work_signature)),
            )

    def _keep(self, plan_hash: str, signed: Signed) -> None:
        statement = Statement.parse(signed.said)
        if self._collected[0] != plan_hash:
            self._collected = plan_hash, {}
        named = frozenset((*statement.takers, *statement.givers))
        self._collected[1][signed.peer] = signed, named

    def _of(self, plan_hash: str) -> Mapping[PeerId, Collected]:
        known, statements = self._collected
        if known != plan_hash:
            return {}
        return statements

    def addressed(self, note: pb.Note, before: Plan | None) -> Callable[[PeerId], SharedNote]:
        """A plan's note as it is sent to each other member: with the statements about the epoch of
        ``before`` that name the member, where there is room. All share the bytes of the plan."""
        shared = PlanBytes(note)
        places: dict[PeerId, int] = {}
        statements: Mapping[PeerId, Collected] = {}
        if before is not None:
            places = {m.peer: i for i, m in enumerate(before.members)}
            statements = self._of(before.hash)
        most = min(ADDRESSED, SIZES["v1.Note"] - note.ByteSize() - 64)

        def to(peer: PeerId) -> SharedNote:
            receipts = pb.ReceiptsNote()
            room = most
            for signed in _naming(places.get(peer, -1), statements.values()):
                receipt = signed.note()
                room -= receipt.ByteSize() + 8
                if room < 0:
                    break
                receipts.receipts.append(receipt)
            return SharedNote(shared, receipts)

        return to

    # ----------------------------------------------------------- for people

    def _say_refused(self, epoch: int, refused: Sequence[RefusedCredit]) -> None:
        """Log the refusals of an epoch in one line: a peer can cause one for each micro-batch."""
        if not refused:
            return
        first = refused[0]
        text = f"{first.ground.value}: {first.text}"
        if first.peer:
            text = f"{first.ground.value}: {short(first.peer)}: {first.text}"
        if len(refused) > 1:
            text += f"; and {len(refused) - 1} more"
        peers = Counter(r.peer for r in refused if r.peer)
        self._kit.journal.emit(
            "training",
            "receipt-refused",
            text,
            "warning",
            epoch=epoch,
            count=len(refused),
            grounds=dict(Counter(r.ground.value for r in refused)),
            peers=[peer for peer, _ in peers.most_common(MOST_SAID)],
        )

    def _say_unsigned(self, account: EpochAccount) -> None:
        now = self._kit.clock.now()
        if now - self._said_at < SAY_EVERY_S:
            return
        self._said_at = now
        silent = account.silent()
        unsigned = sum(account.unsigned.values())
        self._kit.journal.emit(
            "training",
            "work-unsigned",
            f"{unsigned} of {account.tokens * len(account.stages)} tokens have no receipt: "
            f"{names(silent)} did not confirm them",
            epoch=account.epoch,
            tokens=unsigned,
            peers=silent[:MOST_SAID],
        )


def _naming(place: int, statements: Iterable[Collected]) -> Iterable[Signed]:
    """The statements that name the member at this place, the shortest first."""
    found = [signed for signed, named in statements if place in named]
    return sorted(found, key=lambda s: (len(s.said), s.peer))
