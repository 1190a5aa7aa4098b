"""The ledger of samples: its findings in stories of plans. No daemon runs."""

from testbed.daemons.books import COMMITTED, PLANNED, Books
from testbed.daemons.ledger import Ledger, ledger
from testbed.daemons.told import Told

SEQ = 10


def story(*epochs: tuple[list, int]) -> Books:
    """Books with a plan for each pair (positions, count) and a commit of `count` samples; the last
    plan has no commit."""
    told = []
    for i, (positions, counted) in enumerate(epochs):
        about = {"epoch": i, "lineage": f"v{i}", "term": i, "hash": f"h{i}", "positions": positions}
        told.append(Told("a", 2.0 * i, "debug", "training", PLANNED, "", about))
        if i < len(epochs) - 1:
            made = {"epoch": i + 1, "lineage": f"v{i + 1}", "term": i, "tokens": counted * SEQ}
            told.append(Told("a", 2.0 * i + 1, "info", "training", COMMITTED, "", made))
    return Books(told)


def test_a_run_without_losses_has_neither_gaps_nor_doubles():
    assert ledger(story(([0, []], 4), ([4, []], 4), ([8, []], 0)), SEQ) == Ledger(8, 0, 0)


def test_samples_that_were_handed_back_are_counted_once_later():
    books = story(([0, []], 2), ([4, [1, 2]], 4), ([6, []], 0))
    assert ledger(books, SEQ) == Ledger(6, 0, 0)


def test_a_commit_of_fewer_samples_than_were_taken_is_a_gap():
    assert ledger(story(([0, []], 3), ([4, []], 0)), SEQ) == Ledger(4, 0, 1)


def test_a_commit_of_more_samples_than_were_taken_is_a_double():
    assert ledger(story(([0, []], 5), ([4, []], 0)), SEQ).doubles == 1


def test_what_was_counted_and_is_handed_back_is_a_double():
    assert ledger(story(([0, []], 4), ([4, []], 4), ([8, [2]], 3), ([10, []], 0)), SEQ).doubles > 0


def test_positions_that_no_plan_took_are_a_gap():
    books = story(([0, []], 4), ([4, []], 4), ([8, []], 0))
    for e in books.events:
        if e.get("epoch") == 0 and e.kind == PLANNED:
            e.fields["positions"] = [2, []]
            books.attempts[0].commit.fields["tokens"] = 2 * SEQ
    assert ledger(books, SEQ) == Ledger(6, 0, 2)
