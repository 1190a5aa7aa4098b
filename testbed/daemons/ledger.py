"""Ledger of counted samples, one by one, from the leaders' reports of their plans and commits."""

from dataclasses import dataclass

from node.core.samples import Cursor, parse_cursor
from testbed.daemons.books import PLANNED, Books


@dataclass(frozen=True)
class Ledger:
    """``counted``: samples in the history that holds. ``doubles``: how many of them had been
    counted before. ``gaps``: positions that were taken, and neither counted nor handed back."""

    counted: int
    doubles: int
    gaps: int


def ledger(books: Books, sequence: int) -> Ledger:
    """Ledger over the epochs of the history that holds, for a run of one cell.

    `sequence`: tokens of a sample. If an epoch's commit has other tokens than its samples, the
    difference is added to `gaps` or to `doubles`.
    """
    held = sorted(books.history().values(), key=lambda a: a.epoch)
    after = {
        (int(e.get("epoch", 0)), str(e.get("lineage", ""))): parse_cursor(e.get("positions"))
        for e in books.events
        if e.kind == PLANNED
    }
    seen = set[int]()
    counted = 0
    doubles = 0
    gaps = 0
    last: Cursor | None = None
    for attempt in held:
        made = attempt.makes
        if made is None or attempt.commit is None or made not in after:
            continue  # the newest: its returned samples are in the next plan
        before = parse_cursor(attempt.plan.get("positions"))
        last = after[made]
        taken = set(range(before[0].next, last[0].next)) | set(before[0].returned)
        epoch = taken - set(last[0].returned)
        difference = len(epoch) - int(attempt.commit.get("tokens", 0)) // sequence
        gaps = gaps + max(0, difference)
        doubles = doubles + max(0, -difference)
        doubles += len(epoch & seen) + len(set(last[0].returned) - taken)
        seen |= epoch
        counted += len(epoch)
    if last is not None:
        gaps += len(set(range(last[0].next)) - seen - set(last[0].returned))
    return Ledger(counted, doubles, gaps)
