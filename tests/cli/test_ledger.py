"""``tutti ledger``: receipts of files are verified without a daemon, and damage is named."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.credit.book import RECEIPTS, FileBook, framed
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Signed
from node.core.journey import Plan
from node.identity.keys import name_of
from node.tools import ledger as ledger_tool
from testbed.swarms.signing import RUN, SigningSwarm
from tests.cli.conftest import refused


@pytest.fixture
def swarm() -> SigningSwarm:
    return SigningSwarm(ends=1, stages=2, replicas=1, micro_batches=4)


def book(ours) -> FileBook:
    return FileBook(ours.swarm_dir(RUN) / RECEIPTS)


def written(where: FileBook, *records: EpochRecord) -> Path:
    for record in records:
        where.append(record.encoded())
    return where.path


def test_the_own_receipts_are_summed_for_each_peer(tutti, ours, swarm):
    written(book(ours), *(swarm.epoch() for _ in range(3)))
    said = tutti("ledger").good()
    for peer in swarm.peers:
        assert f"{name_of(peer)} ({peer[-6:]})" in said
    assert said.count("33.3%") == 3
    told = json.loads(tutti("ledger", "--json").good())
    (run,) = told["runs"]
    assert told["verified"] is True
    assert run["run"] == RUN
    assert (run["epochs"], run["tokens"], run["work"]) == (3, 192, 576)
    assert [p["receipts"] for p in run["peers"]] == [192] * 3
    assert (run["unsigned"], run["left_out"], run["refused"]) == (0, 0, [])


def test_a_peer_has_the_name_that_it_has_announced(tutti, ours, swarm):
    written(book(ours), swarm.epoch())
    first, *others = swarm.peers
    ours.keep_names(RUN, {first: "gpu-under-my-desk"})
    said = tutti("ledger").good()
    assert f"gpu-under-my-desk ({first[-6:]})" in said
    assert name_of(first) not in said
    for peer in others:
        assert f"{name_of(peer)} ({peer[-6:]})" in said
    told = json.loads(tutti("ledger", "--json").good())
    assert "gpu-under-my-desk" in {p["name"] for p in told["runs"][0]["peers"]}
    for damaged in ("[1]", "{", ""):
        (ours.swarm_dir(RUN) / "names.json").write_text(damaged)
        assert name_of(first) in tutti("ledger").good()


def test_without_receipts_the_next_step_is_said(tutti):
    refused(tutti("ledger"), 2, "tutti ledger FILE")
    refused(tutti("ledger", "no-such-file"), 2, "no-such-file")
    refused(tutti("ledger", "export", "x"), 2, "receipts")


def test_an_export_is_verified_by_another_person(tutti, ours, swarm, tmp_path):
    written(book(ours), *(swarm.epoch() for _ in range(2)))
    out = tmp_path / "mine.receipts"
    tutti("ledger", "export", str(out)).good()
    told = json.loads(tutti("ledger", "--json", str(out)).good())
    assert told["runs"][0]["epochs"] == 2
    assert json.loads(tutti("ledger", "show", str(out), "--json").good()) == told


def test_a_damaged_record_is_named_and_the_others_count(tutti, ours, swarm):
    records = [swarm.epoch() for _ in range(3)]
    path = written(book(ours), *records)
    raw = bytearray(path.read_bytes())
    raw[40] ^= 1
    path.write_bytes(bytes(raw))
    shown = tutti("ledger", "--json")
    assert shown.returncode == 9
    told = json.loads(shown.stdout)
    assert told["runs"][0]["epochs"] == 2
    (damage,) = told["damaged"]
    assert (damage["file"], damage["at"]) == (str(path), 0)
    assert "damaged" in tutti("ledger").stdout


def test_a_forged_receipt_is_refused_with_its_ground(tutti, ours, swarm):
    record = swarm.epoch()
    victim = record.signed[0]
    forged = Signed(victim.peer, record.signed[1].said, victim.signature)
    written(book(ours), replace(record, signed=(forged, *record.signed[1:])))
    shown = tutti("ledger")
    assert shown.returncode == 5
    assert "1 forged" in shown.stdout
    assert "no statement here about" in shown.stdout
    told = json.loads(tutti("ledger", "--json").stdout)
    assert told["verified"] is False
    [found] = told["runs"][0]["refused"]
    assert (found["ground"], found["peer"]) == ("forged", ""), "anybody can have written it"
    assert victim.peer[-6:] in found["text"]


def test_a_newest_epoch_without_certificate_does_not_count_and_is_no_fault(tutti, ours, swarm):
    records = [swarm.epoch() for _ in range(2)]
    written(book(ours), records[0], replace(records[1], certificate=None))
    shown = tutti("ledger")
    assert shown.returncode == 0
    assert "not certified, so not counted: 1 epoch, 64 tokens" in shown.stdout


def test_records_that_are_no_records_are_damage(tutti, ours, swarm):
    where = book(ours)
    written(where, swarm.epoch())
    where.append(b"\xff" * 50)
    shown = tutti("ledger", "--json")
    assert shown.returncode == 9
    (damage,) = json.loads(shown.stdout)["damaged"]
    assert damage["why"] == "a number with too many bytes"


def test_records_that_inflate_without_end_are_not_read(tutti, ours, swarm, monkeypatch):
    records = [swarm.epoch() for _ in range(5)]
    path = written(book(ours), *records)
    plans = [len(r.plan.canonical()) for r in records]
    parsed: list[int] = []
    parse = Plan.parse.__func__

    def counting(cls, raw):
        parsed.append(len(raw))
        return parse(cls, raw)

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "parse", classmethod(counting))
        patch.setattr("node.tools.ledger.MOST_INFLATED", sum(plans[:3]))
        shown = tutti("ledger", "--json")
    assert shown.returncode == 9
    told = json.loads(shown.stdout)
    assert told["runs"][0]["epochs"] == 3
    (damage,) = told["damaged"]
    sizes = [len(framed(r.encoded())) for r in records]
    assert (damage["file"], damage["at"]) == (str(path), sum(sizes[:3]))
    assert damage["bytes"] == sum(sizes[3:])
    assert "not read" in damage["why"]
    assert max(parsed) <= max(plans)
    assert len(parsed) == 2 * 3, "once to be found, and once to be audited"
    monkeypatch.setattr("node.tools.ledger.MOST_RECORDS", 2)
    assert json.loads(tutti("ledger", "--json").stdout)["runs"][0]["epochs"] == 2


def test_one_plan_at_a_time_is_in_memory(ours, swarm):
    path = written(book(ours), *(swarm.epoch() for _ in range(20)))
    living: list[weakref.ref[Plan]] = []
    most = 0
    parse = Plan.parse.__func__

    def watching(cls, raw):
        nonlocal most
        plan = parse(cls, raw)
        living.append(weakref.ref(plan))
        most = max(most, sum(ref() is not None for ref in living))
        return plan

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plan, "parse", classmethod(watching))
        found = ledger_tool.load([path])
    assert found.runs[RUN].tokens == 20 * 64
    assert most <= 4
