"""Which samples were counted, one by one, from what leaders told of their plans and commits."""

from dataclasses import dataclass

from benchmarks.lab.books import PLANNED, Books
from node.core.samples import Cursor, parse_cursor


@dataclass(frozen=True)
class Ledger:
    """``counted``: samples in the history that holds. ``doubles``: how many of them had been
    counted before. ``gaps``: positions that were taken, and neither counted nor handed back."""

    counted: int
    doubles: int
    gaps: int


def ledger(books: Books, sequence: int) -> Ledger:
    """Over the epochs of the history that holds, for a run of one cell. ``sequence``: tokens of a
    sample. An epoch whose commit says other tokens than its samples have adds the difference to
    ``gaps``, or to ``doubles``."""
    held = sorted(books.history().values(), key=lambda a: a.epoch)
    after = {
        (int(e.get("epoch", 0)), str(e.get("lineage", ""))): parse_cursor(e.get("positions"))
        for e in books.events
        if e.kind == PLANNED
    }
    seen, counted, doubles, gaps = set[int](), 0, 0, 0
    last: Cursor | None = None
    for attempt in held:
        made = attempt.makes
        if made is None or attempt.commit is None or made not in after:
            continue  # the newest: what it handed back is in the next plan
        before, last = parse_cursor(attempt.plan.get("positions")), after[made]
        taken = set(range(before[0].next, last[0].next)) | set(before[0].returned)
        epoch = taken - set(last[0].returned)
        difference = len(epoch) - int(attempt.commit.get("tokens", 0)) // sequence
        gaps, doubles = gaps + max(0, difference), doubles + max(0, -difference)
        doubles += len(epoch & seen) + len(set(last[0].returned) - taken)
        seen |= epoch
        counted += len(epoch)
    if last is not None:
        gaps += len(set(range(last[0].next)) - seen - set(last[0].returned))
    return Ledger(counted, doubles, gaps)
