"""One record of a file of receipts: everything that proves the tokens that an epoch counted, and
the work of each peer in it. Pure. Enters: values of an epoch, or the bytes of a record from
anybody. Leaves: bytes, or values within bounds. Never: a signature's check."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from node.consensus.votes import Certificate
from node.coordinator import notes
from node.coordinator.credit.statement import Signed
from node.core.errors import WireError
from node.core.journey import Plan, Version
from node.core.numbers import whole
from node.epoch.plan_context import makes
from node.wire import bounds
from node.wire.limits import PEERS, PLAN, SIZES
from protos import training_pb2 as pb

RUN_DIGITS = 64


@dataclass(frozen=True)
class EpochRecord:
    """An epoch in a file of receipts. ``tokens``: counted in it; ``dropped``: micro-batches of the
    plan that do not count; ``certificate``: of the version that it made, None if the writer has
    none; ``signed``: statements of work that the writer knows."""

    run: str
    plan: Plan
    dropped: tuple[int, ...]
    tokens: int
    certificate: Certificate | None
    signed: tuple[Signed, ...]

    @cached_property
    def made(self) -> Version:
        """The version that the epoch made."""
        return makes(self.plan, self.dropped)

    def encoded(self) -> bytes:
        """The bytes of the record. Raises WireError if it is larger than anybody reads. Blocks for
        the time of a compression."""
        raw = self._head + _statements(self.signed)
        bounds.check(pb.EpochReceipts, raw)
        return raw

    def fitting(self) -> "EpochRecord":
        """This record with the shortest statements, up to the size that readers take. Blocks as
        :meth:`encoded`."""
        room = SIZES["v1.EpochReceipts"] - len(self._head)
        if len(self.signed) <= PEERS and len(_statements(self.signed)) <= room:
            return self
        kept = set[Signed]()
        for signed in sorted(self.signed, key=lambda s: (len(s.said), s.peer))[:PEERS]:
            room -= len(_statements((signed,)))
            if room < 0:
                break
            kept.add(signed)
        return replace(self, signed=tuple(s for s in self.signed if s in kept))

    @cached_property
    def _head(self) -> bytes:
        """The bytes of the record without its statements."""
        voters = self.plan.electorate.voters
        certificate = self.certificate
        if certificate is not None and certificate.voters != voters:
            certificate = None  # it proves nothing about this plan
        note = notes.certificate_note(certificate)
        if note is not None:
            del note.voters[:]  # the plan has them
        return pb.EpochReceipts(
            run=self.run,
            plan=zlib.compress(self.plan.canonical(), 6),
            dropped=self.dropped,
            tokens=self.tokens,
            certificate=note,
        ).SerializeToString()

    def load(self) -> "EpochRecord":
        """This record, as a :class:`Stored` one gives it."""
        return self

    @classmethod
    def parse(cls, raw: bytes, inflates: Callable[[int], None] = lambda n: None) -> "EpochRecord":
        """The inverse of :meth:`encoded`. Raises WireError for bytes that are no record, before
        anything large is made of them. ``inflates``: told the bytes of the plan before it is
        parsed."""
        note = bounds.parse(pb.EpochReceipts, raw, "a record of receipts")
        if len(note.run) != RUN_DIGITS or not set(note.run) <= set("0123456789abcdef"):
            raise WireError("a record of receipts of no run")
        inflated = _inflated(note.plan)
        inflates(len(inflated))
        plan = Plan.parse(inflated)
        certificate = None
        if note.HasField("certificate"):
            note.certificate.voters[:] = plan.electorate.voters
            certificate = notes.parse_certificate(note.certificate)
        try:
            tokens = whole(note.tokens)
        except ValueError as e:
            raise WireError(f"a record of receipts: {e}") from e
        return cls(
            note.run,
            plan,
            tuple(note.dropped),
            tokens,
            certificate,
            tuple(Signed.of(r) for r in note.receipts),
        )


class Stored:
    """A record as bytes, because a parsed plan takes many times their memory. ``record``: the
    parsed record, which is handed out once."""

    def __init__(self, raw: bytes, record: EpochRecord) -> None:
        self._raw = raw
        self._record: EpochRecord | None = record

    def load(self) -> EpochRecord:
        """The record."""
        record = self._record
        self._record = None
        if record is None:
            record = EpochRecord.parse(self._raw)
        return record


def _statements(signed: Iterable[Signed]) -> bytes:
    """The bytes of statements in a record; fields of a message follow each other."""
    return pb.EpochReceipts(receipts=[s.note() for s in signed]).SerializeToString()


def _inflated(packed: bytes) -> bytes:
    """Decompress a plan. Raises WireError for other bytes, and for a plan of more than
    :data:`PLAN` bytes."""
    inflating = zlib.decompressobj()
    try:
        raw = inflating.decompress(packed, PLAN + 1)
    except zlib.error as e:
        raise WireError("a plan that does not decompress") from e
    if len(raw) > PLAN or not inflating.eof:
        raise WireError(f"a plan of more than {PLAN} bytes, or one that breaks off")
    return raw
