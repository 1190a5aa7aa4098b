"""One record of a file of receipts: everything that shows what an epoch counted and by whose work.
Pure. Enters: values of an epoch, or the bytes of a record from anybody. Leaves: bytes, or values
within bounds. Never: a signature's check."""

import zlib
from dataclasses import dataclass
from functools import cached_property

from node.consensus.votes import Certificate
from node.coordinator import notes
from node.coordinator.credit.statement import Signed
from node.core.errors import WireError
from node.core.journey import Plan, Version
from node.core.numbers import whole
from node.epoch.plan_context import makes
from node.wire import bounds
from node.wire.limits import PLAN
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
        voters = self.plan.electorate.voters
        certificate = self.certificate
        if certificate is not None and certificate.voters != voters:
            certificate = None  # it proves nothing about this plan
        note = notes.certificate_note(certificate)
        if note is not None:
            del note.voters[:]  # the plan has them
        raw = pb.EpochReceipts(
            run=self.run,
            plan=zlib.compress(self.plan.canonical(), 6),
            dropped=self.dropped,
            tokens=self.tokens,
            certificate=note,
            receipts=[s.note() for s in self.signed],
        ).SerializeToString()
        bounds.check(pb.EpochReceipts, raw)
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> "EpochRecord":
        """The inverse of :meth:`encoded`. Raises WireError for bytes that are no record, before
        anything large is made of them."""
        note = bounds.parse(pb.EpochReceipts, raw, "a record of receipts")
        if len(note.run) != RUN_DIGITS or not set(note.run) <= set("0123456789abcdef"):
            raise WireError("a record of receipts of no run")
        plan = Plan.parse(_inflated(note.plan))
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


def _inflated(packed: bytes) -> bytes:
    """The bytes of a plan. Raises WireError for what is not compressed, or too large."""
    inflating = zlib.decompressobj()
    try:
        raw = inflating.decompress(packed, PLAN + 1)
    except zlib.error as e:
        raise WireError("a plan that does not decompress") from e
    if len(raw) > PLAN or not inflating.eof:
        raise WireError(f"a plan of more than {PLAN} bytes, or one that breaks off")
    return raw
