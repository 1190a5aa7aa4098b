"""`tutti ledger`: totals of receipts for each peer, verified without a daemon. Enters: files of
receipts. Leaves: text or a document, a file that others can verify. Never: a key; the rules of an
account (:mod:`node.coordinator.credit.account`)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.config import write_atomically
from node.control.words import clean
from node.coordinator.credit.account import CreditGround, RefusedCredit
from node.coordinator.credit.audit import RunAudit, audit
from node.coordinator.credit.book import RECEIPTS, Damage, FileBook, framed, read, records
from node.coordinator.credit.record import EpochRecord, Stored
from node.core.errors import ExitCode, LocalFault, UsageFault, WireError, writing
from node.core.ids import PeerId, named
from node.core.names import LONGEST
from node.core.numbers import human, several
from node.identity import keys

HONEST = frozenset({CreditGround.UNCERTIFIED})
"""Grounds that need no liar: the newest epoch of a file is often not certified yet."""
MOST_RECORDS = 250_000
"""Most records that are read, of all files together: 30 days of epochs of 10 s."""
MOST_INFLATED = 2 << 30
"""Most bytes of plans that are read, of all files together. A plan is compressed, by up to a
thousand times."""
MOST_SHOWN = 20
"""Refusals and gaps in the text; the document has all."""


@dataclass(frozen=True)
class Damaged:
    """A damaged place in a file. ``why``: "" for bytes that are no whole record, else the fault of
    the record."""

    file: Path
    at: int
    nbytes: int
    why: str = ""


@dataclass
class Ledger:
    """The content of files of receipts."""

    runs: dict[str, RunAudit] = field(default_factory=dict)
    damaged: list[Damaged] = field(default_factory=list)
    names: Mapping[str, Mapping[PeerId, str]] = field(default_factory=dict)
    """Names that peers have announced, by run."""

    @property
    def code(self) -> ExitCode:
        """REFUSED if something was refused that no honest peer writes, DEGRADED if records are
        damaged."""
        grounds = {r.ground for run in self.runs.values() for r in run.refused}
        if grounds - HONEST:
            return ExitCode.REFUSED
        if self.damaged:
            return ExitCode.DEGRADED
        return ExitCode.OK


def files_of(home: Path) -> list[Path]:
    """The files of receipts in the directory of a node, of all its runs. Raises UsageFault if there
    is none."""
    found = list[Path]()
    for swarm in sorted((home / "swarms").glob("*")):
        found += FileBook(swarm / RECEIPTS).files
    if not found:
        raise UsageFault(
            f"there are no receipts in {home}",
            "they come with the first epochs; or name files:  tutti ledger FILE",
        )
    return found


def load(
    files: Iterable[Path], names_of: Callable[[str], Mapping[PeerId, str]] = lambda run: {}
) -> Ledger:
    """Read and verify files. ``names_of(run)``: names that peers of a run have announced. Raises
    UsageFault for a file that cannot be read. Records beyond :data:`MOST_RECORDS`, or with plans
    beyond :data:`MOST_INFLATED`, are not read, and counted as damaged."""
    ledger = Ledger()
    reading = _Reading(ledger)
    ledger.runs = audit((reading.stored(file) for file in files), is_signed)
    ledger.names = {run.run: names_of(run.run) for run in ledger.runs.values()}
    return ledger


class _Reading:
    """Files while they are read. ``left``: records and bytes of plans that are still read."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._records = MOST_RECORDS
        self._inflated = MOST_INFLATED

    def stored(self, file: Path) -> Iterator[Stored]:
        """The good records of a file; damage and records that are not read are noted."""
        damaged = self._ledger.damaged
        at = 0
        beyond = 0
        first = 0
        for piece in records(read(file)):
            if isinstance(piece, Damage):
                damaged.append(Damaged(file, piece.at, piece.nbytes))
                at = piece.at + piece.nbytes
                continue
            if self._records <= 0 or self._inflated <= 0:
                first = first or at
                beyond += len(framed(piece))
            else:
                self._records -= 1
                try:
                    record = EpochRecord.parse(piece, self._inflates)
                except WireError as e:
                    damaged.append(Damaged(file, at, len(piece), str(e)))
                else:
                    yield Stored(piece, record)
                    del record  # one plan at a time is in memory
            at += len(framed(piece))
        if beyond:
            why = "not read, because the records before are too many or too large: name fewer files"
            damaged.append(Damaged(file, first, beyond, why))

    def _inflates(self, nbytes: int) -> None:
        self._inflated -= nbytes


def is_signed(peer: PeerId, data: bytes, signature: bytes, domain: str) -> bool:
    """Return True if ``peer`` has signed the data in this domain."""
    try:
        keys.verify(peer, data, signature, domain)
    except (WireError, LocalFault):
        return False
    return True


def export(home: Path, file: Path) -> tuple[int, int]:
    """Write the whole records of a node's files to one file. Returns the number of records, and of
    bytes. Raises UsageFault if there are none, OutOfResources or LocalFault if it cannot be
    written."""
    raw = list[bytes]()
    for source in files_of(home):
        raw += [framed(piece) for piece in records(read(source)) if isinstance(piece, bytes)]
    content = b"".join(raw)
    with writing(file, "name a file in a directory that you may write"):
        write_atomically(file, content, 0o644)
    return len(raw), len(content)


# ------------------------------------------------------------- for programs


def document(ledger: Ledger) -> dict[str, Any]:
    """The ledger as JSON."""
    return {
        "runs": [_run_document(run, ledger.names[run.run]) for run in ledger.runs.values()],
        "damaged": [
            {"file": str(d.file), "at": d.at, "bytes": d.nbytes, "why": d.why}
            for d in ledger.damaged
        ],
        "verified": ledger.code is ExitCode.OK,
    }


def _run_document(run: RunAudit, names: Mapping[PeerId, str]) -> dict[str, Any]:
    receipts = run.receipts()
    silent = run.silent()
    peers = sorted({*receipts, *silent}, key=lambda p: (-receipts[p], p))
    return {
        "run": run.run,
        "epochs": len(run.accounts),
        "first_epoch": run.accounts[0].epoch if run.accounts else None,
        "last_epoch": run.accounts[-1].epoch if run.accounts else None,
        "rows": run.rows,
        "tokens": run.tokens,
        "work": run.work,
        "peers": [
            {
                "peer": peer,
                "name": _name(names, peer),
                "receipts": receipts[peer],
                "share": round(_share(receipts[peer], run.work), 6),
                "not_confirmed": silent[peer],
            }
            for peer in peers
        ],
        "unsigned": sum(run.unsigned().values()),
        "unsigned_of": [
            {"workers": list(workers), "tokens": tokens}
            for workers, tokens in run.unsigned().most_common()
        ],
        "left_out": run.left_out(),
        "uncertified": {"epochs": len(run.open), "tokens": sum(run.open.values())},
        "refused": [
            {"ground": r.ground.value, "peer": r.peer, "epoch": r.epoch, "text": r.text}
            for r in run.refused
        ],
        "signatures": run.signatures,
    }


def _share(tokens: int, work: int) -> float:
    if not work:
        return 0.0
    return tokens / work


def _name(names: Mapping[PeerId, str], peer: PeerId) -> str:
    """The name that a peer has announced, or the name of its key, which it has without one."""
    return clean(names.get(peer, ""), LONGEST) or keys.name_of(peer)


# ------------------------------------------------------------- for people


def picture(ledger: Ledger) -> list[str]:
    """The ledger as lines of text."""
    lines = list[str]()
    for run in ledger.runs.values():
        lines += _run_lines(run, ledger.names[run.run])
    for d in ledger.damaged:
        why = d.why or "no whole record"
        lines.append(f"damaged   {d.file}, {d.nbytes} bytes from {d.at}: {clean(why)}")
    return lines or ["no receipts"]


def _run_lines(run: RunAudit, names: Mapping[PeerId, str]) -> list[str]:
    first = f"run {run.run[:12]}: no certified epoch"
    if run.accounts:
        first = (
            f"run {run.run[:12]}: epochs {run.accounts[0].epoch} to {run.accounts[-1].epoch}, "
            f"{run.tokens:,} tokens committed at every stage"
        )
    receipts = run.receipts()
    lines = [first]
    if receipts:
        lines.append(f"  {'peer':32} {'receipts':>15}   share")
    for peer, tokens in sorted(receipts.items(), key=lambda row: (-row[1], row[0])):
        share = _share(tokens, run.work)
        lines.append(f"  {named(peer, _name(names, peer)):32} {tokens:15,}   {share:.1%}")
    lines.append(f"  {'all receipts':32} {sum(receipts.values()):15,}")
    unsigned = run.unsigned()
    lines.append(f"  {'unsigned, by these files':32} {sum(unsigned.values()):15,}")
    lines.append(f"  {'left out':32} {run.left_out():15,}")
    lines.append(f"  {'committed, all stages':32} {run.work:15,}")
    for peer, tokens in run.silent().most_common(MOST_SHOWN):
        neighbour = named(peer, _name(names, peer))
        lines.append(f"  {neighbour}: no statement here about {tokens:,} tokens beside its own")
    if run.silent():
        lines.append(
            "  a member's file has only the statements that name it; the leader's file has all"
        )
    if run.rows > 1:
        lines.append(
            f"  epochs are missing in between: {run.rows} pieces, each proven by its own voters"
        )
    if run.open:
        tokens = sum(run.open.values())
        lines.append(
            f"  not certified, so not counted: {several(len(run.open), 'epoch')}, {tokens:,} tokens"
        )
    liars = [r for r in run.refused if r.ground not in HONEST]
    lines += _refusals(liars, names)
    return lines


def _refusals(refused: Sequence[RefusedCredit], names: Mapping[PeerId, str]) -> list[str]:
    if not refused:
        return []
    kinds = Counter(r.ground.value for r in refused)
    lines = [f"  refused: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}"]
    for r in refused[:MOST_SHOWN]:
        about = "nobody named"
        if r.peer:
            about = named(r.peer, _name(names, r.peer))
        lines.append(f"    {r.ground.value}, epoch {r.epoch}, {about}: {r.text}")
    if len(refused) > MOST_SHOWN:
        lines.append(f"    and {len(refused) - MOST_SHOWN} more (--json has all)")
    return lines


def exported(file: Path, count: int, nbytes: int) -> str:
    """The sentence after an export."""
    return (
        f"{several(count, 'record')}, {human(nbytes)}, in {file}; verify with  tutti ledger {file}"
    )
