"""The audit of records: only certified epochs count, every statement once, and lies are named."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from node.coordinator.credit.account import NOBODY, CreditGround
from node.coordinator.credit.audit import RunAudit, audit
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Signed, Statement
from node.core.errors import Refused, WireError
from node.core.ids import PeerId
from node.core.journey import Version
from node.identity.keys import verify
from testbed.swarms.signing import RUN, SigningSwarm


def is_signed(peer: PeerId, data: bytes, signature: bytes, domain: str) -> bool:
    try:
        verify(peer, data, signature, domain)
    except (Refused, WireError):
        return False
    return True


def audited(records: Iterable[EpochRecord]) -> RunAudit:
    return audited_files(records)


def audited_files(*files: Iterable[EpochRecord]) -> RunAudit:
    found = audit(files, is_signed)[RUN]
    for account in found.accounts:
        assert account.sums() == dict.fromkeys(account.stages, account.tokens)
    return found


def grounds(run: RunAudit) -> set[tuple[CreditGround, str]]:
    return {(r.ground, r.peer) for r in run.refused}


def test_a_record_reads_as_it_was_written() -> None:
    record = SigningSwarm().epoch(dropped=(2,))
    assert EpochRecord.parse(record.encoded()) == record


def test_all_work_of_some_epochs_is_counted_once_from_several_files() -> None:
    swarm = SigningSwarm()
    records = [swarm.epoch() for _ in range(5)]
    thin = [replace(r, signed=r.signed[::2], certificate=None) for r in records]
    rest = [replace(r, signed=r.signed[1:]) for r in records]
    run = audited([*thin, *rest, *records])
    assert run.tokens == 5 * swarm.micro_batches * swarm.tokens
    assert sum(run.receipts().values()) == run.work == run.tokens * 3
    assert not run.refused
    assert not run.open


def test_one_certificate_proves_all_epochs_before_it_and_one_signature_all_statements() -> None:
    swarm = SigningSwarm(ends=2, stages=2, replicas=2)
    records = [swarm.epoch() for _ in range(6)]
    proven = [replace(r, certificate=None) for r in records[:-1]]
    run = audited([*proven, records[-1]])
    assert len(run.accounts) == 6
    assert not run.refused
    votes = len(swarm.peers) // 2  # with the first voter, half is a majority
    assert run.signatures == votes + len(swarm.peers)


def test_a_certificate_with_its_ballots_in_another_order_is_checked_once() -> None:
    swarm = SigningSwarm()
    record = swarm.epoch()
    few = swarm.certificate(record.plan, record.made, votes=len(swarm.peers) // 2 - 1)
    turned = replace(few, ballots=few.ballots[::-1])
    once = audited([replace(record, certificate=few)])
    twice = audited([replace(record, certificate=c) for c in (few, turned)])
    assert once.signatures > 0
    assert twice.signatures == once.signatures
    assert not twice.accounts
    alone = replace(few, ballots=few.ballots[:1])
    assert audited([replace(record, certificate=c) for c in (few, alone)]).signatures > (
        once.signatures
    )


def test_epochs_without_a_majority_do_not_count() -> None:
    swarm = SigningSwarm()
    records = [swarm.epoch() for _ in range(2)]
    last = records[-1]
    few = swarm.certificate(last.plan, last.made, votes=len(swarm.peers) // 2 - 1)
    run = audited([records[0], replace(last, certificate=few)])
    assert len(run.accounts) == 1
    assert run.open == {1: last.tokens}
    assert grounds(run) == {(CreditGround.UNCERTIFIED, last.plan.leader)}


def test_votes_of_others_than_the_voters_of_the_plan_prove_nothing() -> None:
    swarm = SigningSwarm()
    record = swarm.epoch()
    strangers = SigningSwarm()
    foreign = replace(record.plan, electorate=strangers.plan().electorate)
    certificate = strangers.certificate(foreign, record.made)
    run = audited([replace(record, certificate=certificate)])
    assert not run.accounts


def test_a_forged_statement_is_refused_whether_or_not_the_signers_own_is_there() -> None:
    swarm = SigningSwarm()
    records = [swarm.epoch() for _ in range(3)]
    middle = records[1]
    victim = middle.signed[0]
    forged = Signed(victim.peer, middle.signed[1].said, victim.signature)
    for signed in ((forged, *middle.signed[1:]), (forged, *middle.signed)):
        run = audited([records[0], replace(middle, signed=signed), records[2]])
        assert grounds(run) == {(CreditGround.FORGED, NOBODY)}, "anybody can have written it"
        alone = sum(run.unsigned().values())
        assert (alone == 0) == (victim in signed)


def test_a_statement_of_another_peer_or_epoch_or_run_is_no_receipt() -> None:
    swarm = SigningSwarm()
    records = [swarm.epoch() for _ in range(2)]
    thief = swarm.peers[0]
    stolen = replace(records[0].signed[-1], peer=thief)
    run = audited([replace(records[0], signed=(stolen,))])
    assert grounds(run) == {(CreditGround.FORGED, NOBODY)}
    old = records[0].signed[-1]
    run = audited([records[0], replace(records[1], signed=(old,))])
    assert (CreditGround.ELSEWHERE, NOBODY) in grounds(run), "anybody can have put it there"
    assert sum(run.receipts().values()) == records[0].tokens * 3
    both = replace(records[1], signed=(*records[0].signed, *records[1].signed))
    for files in ([[records[0], both]], [records, [both]]):
        run = audited_files(*files)
        assert grounds(run) == {(CreditGround.ELSEWHERE, NOBODY)}
        assert sum(run.receipts().values()) == run.work, "the signers' own statements count"
    other = audit([[replace(records[0], run="ef" * 32)]], is_signed)["ef" * 32]
    assert not other.accounts, "certificates of a run prove nothing in another one"


def test_two_statements_of_one_signer_for_one_epoch_count_for_nobody() -> None:
    swarm = SigningSwarm()
    record = swarm.epoch()
    signed = record.signed[0]
    said = Statement.parse(signed.said)
    other = swarm.sign(signed.peer, replace(said, sizes=(99,) * len(said.sizes)))
    run = audited([record, replace(record, signed=(other,))])
    assert grounds(run) == {(CreditGround.DOUBLE, signed.peer)}
    assert signed.peer in run.silent()


def test_a_record_with_other_tokens_than_the_next_plan_says_is_refused() -> None:
    swarm = SigningSwarm()
    records = [swarm.epoch() for _ in range(2)]
    more = replace(records[0], tokens=records[0].tokens + 160)
    run = audited([more, records[1]])
    assert grounds(run) == {(CreditGround.SUM, NOBODY)}, "a file's lie is not the leader's"
    assert run.tokens == sum(r.tokens for r in records)
    assert not run.unsigned()


def test_tokens_that_only_the_writer_of_a_record_claims_cost_no_peer_anything() -> None:
    swarm = SigningSwarm()
    record = swarm.epoch()
    run = audited([replace(record, tokens=record.tokens + 160)])
    assert grounds(run) == {(CreditGround.SUM, NOBODY)}
    assert run.tokens == record.tokens
    assert not run.unsigned()


def test_of_two_histories_the_one_with_more_epochs_counts() -> None:
    swarm = SigningSwarm()
    first = swarm.epoch()
    made = swarm.version
    counted = swarm.counted
    short = swarm.epoch(dropped=(0,))
    swarm.version = made
    swarm.counted = counted
    long = [swarm.epoch() for _ in range(2)]
    run = audited([first, short, *long])
    assert [a.epoch for a in run.accounts] == [0, 1, 2]
    assert run.tokens == sum(r.tokens for r in (first, *long))
    assert run.open == {1: short.tokens}
    assert (CreditGround.DOUBLE, short.plan.leader) in grounds(run)


def test_of_two_histories_in_several_files_the_one_in_the_first_file_counts() -> None:
    swarm = SigningSwarm()
    mine = [swarm.epoch() for _ in range(2)]
    strangers = SigningSwarm()
    made_up = [strangers.epoch() for _ in range(3)]
    run = audited_files(mine, made_up)
    assert [r.tokens for r in mine] == [a.tokens for a in run.accounts[:2]]
    assert run.receipts().keys() >= set(swarm.peers)
    assert {r.ground for r in run.refused} == {CreditGround.DOUBLE}
    assert run.rows == 2, "the third epoch of the strangers does not join the others"
    assert audited(mine).rows == 1


def test_a_made_up_epoch_that_starts_from_the_newest_real_one_says_nothing_about_it() -> None:
    swarm = SigningSwarm()
    mine = [swarm.epoch() for _ in range(3)]
    strangers = SigningSwarm()
    strangers.version = swarm.version
    strangers.counted = 10**12
    run = audited_files(mine, [strangers.epoch()])
    assert not run.refused, "nobody of the first file is named"
    alone = audited(mine)
    assert run.accounts[:3] == alone.accounts
    receipts = run.receipts()
    assert {peer: receipts[peer] for peer in swarm.peers} == alone.receipts()


def test_of_two_histories_in_the_first_file_no_later_file_chooses() -> None:
    swarm = SigningSwarm()
    given_up = swarm.epoch()
    swarm.version = Version(0)
    swarm.counted = 0
    strangers = SigningSwarm()
    for dropped in ((0,), (1,), (2,)):  # the histories sort differently
        real = swarm.epoch(dropped=dropped)
        swarm.version = Version(0)
        swarm.counted = 0
        strangers.version = given_up.made
        made_up = strangers.epoch()
        run = audited_files([replace(given_up, certificate=None), real], [made_up])
        assert [a.tokens for a in run.accounts][:1] == [real.tokens]
        assert run.open == {0: given_up.tokens}


def test_the_epochs_of_a_later_file_prove_those_before_them() -> None:
    swarm = SigningSwarm()
    first, second = [swarm.epoch() for _ in range(2)]
    run = audited_files([replace(first, certificate=None)], [second])
    assert [a.tokens for a in run.accounts] == [first.tokens, second.tokens]
    assert not run.refused


def test_a_record_under_another_plan_is_of_no_certified_version() -> None:
    swarm = SigningSwarm()
    record = swarm.epoch()
    fewer = replace(record.plan, paths=record.plan.paths[1:])
    run = audited([replace(record, plan=fewer)])
    assert not run.accounts
    assert {r.ground for r in run.refused} == {CreditGround.UNCERTIFIED}


BROKEN = {
    "nothing": b"",
    "no message": b"\xff" * 40,
    "a plan that does not decompress": None,
}


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_are_no_record_are_refused(name: str) -> None:
    raw = BROKEN[name]
    if raw is None:
        whole = SigningSwarm().epoch().encoded()
        raw = whole.replace(b"\x78\x9c", b"\x00\x00", 1)
    with pytest.raises(WireError):
        EpochRecord.parse(raw)
