"""Receipts of simulated swarms: with unsigned and left-out tokens they sum to the committed tokens,
whoever dies, joins or lies."""

from dataclasses import replace

import pytest

from node.coordinator.credit.account import CreditGround
from node.core.ids import PeerId
from node.sim.faults import Schedule, lay
from node.sim.setup import Setup
from testbed.swarms.receipts import SwarmBooks
from tests.sim.outcomes import finished

CHURN = Setup(epochs=50)
SHORT = replace(CHURN, epochs=8)


def test_after_50_epochs_under_churn_every_committed_token_is_accounted_for() -> None:
    books = SwarmBooks()
    outcome = finished(CHURN, lay(("churn",), CHURN, 1), books.factory())
    assert len(outcome.struck) >= 5
    run = books.audit()
    assert [a.epoch for a in run.accounts] == list(range(CHURN.epochs))
    for account in run.accounts:
        assert account.sums() == dict.fromkeys(account.stages, account.tokens)
    assert run.tokens == books.committed()
    receipts = sum(run.receipts().values())
    unsigned = sum(run.unsigned().values())
    assert receipts + unsigned + run.left_out() == run.work == 3 * run.tokens
    assert receipts > 0.9 * run.work
    assert {r.ground for r in run.refused} <= {CreditGround.UNCERTIFIED}


def test_without_faults_every_token_has_a_receipt() -> None:
    books = SwarmBooks()
    finished(SHORT, Schedule(1, ()), books.factory())
    run = books.audit()
    assert sum(run.receipts().values()) == run.work == 3 * 8 * SHORT.micro_batches * SHORT.tokens
    assert not run.refused
    assert not run.open


@pytest.mark.parametrize("old", ["e00-000", "s01-000"])
def test_an_older_peer_is_named_and_breaks_nothing(old: str) -> None:
    """With an older leader nobody signs; an older member leaves its neighbours unsigned."""
    books = SwarmBooks(is_old=lambda peer: peer == old)
    outcome = finished(replace(SHORT, ends=1), Schedule(1, ()), books.factory())
    assert "fault" not in outcome.counts
    if old.startswith("e"):
        assert all(not record.signed[1:] for record in books.records())
        return
    run = books.audit()
    assert run.silent().keys() == {PeerId(old)}
    assert sum(run.receipts().values()) + sum(run.unsigned().values()) == run.work
    assert run.receipts()[PeerId(old)] > 0
