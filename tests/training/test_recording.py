"""Recordings of machines: written by simulated daemons, played, cut, changed, and full."""

import dataclasses
import errno
import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cli
from node.consensus.rules import Rules
from node.consensus.voters import Quorum
from node.coordinator.recording import file as recording_file
from node.coordinator.recording.chain import Chain, RecordingDamaged, documents, text_of
from node.coordinator.recording.file import RecordingFile
from node.coordinator.recording.player import KINDS, Played, Player
from node.coordinator.recording.recorder import Recorder
from node.coordinator.recording.setup import FORMAT, LeaderStart, MemberStart, RunNumbers
from node.coordinator.recording.setup import RecordingSetup as RecordedSetup
from node.coordinator.recording.show import differing, lines
from node.coordinator.recording.values import ValueReader, ValueWriter
from node.core.errors import ExitCode, LocalFault, WireError
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Partner, Version, Window
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.epoch.leader.leader import Leader
from node.epoch.member import Member
from node.epoch.plan_context import PlanContext
from node.scheduler.costs import LinkCost, Measured
from node.sim.faults import Schedule
from node.sim.run import run
from node.sim.setup import Setup
from testbed.swarms.tapes import Tapes

A = PeerId("a")
B = PeerId("b")
V = Version(3, "ab" * 16)
FLIPS = 200


@pytest.fixture(scope="module")
def tape() -> list[bytes]:
    """The lines of the simulated daemon that led a quiet run of three epochs."""
    tapes = Tapes()
    run(Setup(epochs=3), Schedule(1, ()), tapes.factory())
    return max((tape for _, tape in tapes.tapes), key=lambda t: sum(b"SendPlan" in x for x in t))


def changed(tape: list[bytes], change: Callable[[int, Any], Any]) -> list[bytes]:
    """The recording with hashes of its new documents; `change` gets each document and its number,
    and returns another one, or None to leave it out."""
    chain = Chain()
    new = [change(number, one) for number, one in enumerate(documents(tape))]
    return [chain.line(document) for document in new if document is not None]


def played(tape: list[bytes]) -> Played:
    return Player().play(tape)


# ------------------------------------------------------------ replay


@pytest.mark.parametrize("order", ["1", "2"])
def test_a_recording_replays_in_another_process(
    tape: list[bytes], tmp_path: Path, order: str
) -> None:
    """Each process iterates over sets in an order of its own."""
    path = tmp_path / "machines.rec"
    path.write_bytes(b"".join(tape))
    done = subprocess.run(
        [
            sys.executable,
            str(Path(cli.__file__).parent / "tutti.py"),
            "replay",
            str(path),
            "--json",
        ],
        env={**os.environ, "PYTHONHASHSEED": order},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["difference"], said["damage"]) == (None, "")
    assert said["machines"] == {"leader": 1, "member": 1}
    assert said["events"]["leader"] > 50
    assert said["records"] == len(tape)


def test_other_recorded_actions_are_named_by_event(tape: list[bytes], tmp_path: Path) -> None:
    rows = list(documents(tape))
    plans = [i for i, row in enumerate(rows) if "SendPlan" in str(row.get("actions"))]
    second = plans[1]

    def later(number: int, row: Any) -> Any:
        if number == second:
            row["actions"] = [a for a in row["actions"] if a[0] != "SendPlan"]
        return row

    path = tmp_path / "machines.rec"
    path.write_bytes(b"".join(changed(tape, later)))
    player = Player()
    found = player.play(path.read_bytes().splitlines(keepends=True)).difference
    assert found is not None
    leaders = [row for row in rows[: second + 1] if row.get("to") == "leader"]
    assert (found.record, found.machine, found.number) == (second, "leader", len(leaders))
    assert found.found[found.at][0] == "SendPlan"
    said = "\n".join(lines(player, damaged=False))
    assert f"at its event {len(leaders)}, {leaders[-1]['event'][0]}" in said
    assert 'found     ["SendPlan"' in said
    assert cli.main(["replay", str(path)]) == ExitCode.DEGRADED


def test_the_fields_of_two_plans_are_compared(tape: list[bytes]) -> None:
    """A leader that was recorded with another limit on epochs made plans with other deadlines."""

    def shorter(number: int, row: Any) -> Any:
        if number == 0:
            row["setup"]["waits"]["epoch_s"] += 1.0
        return row

    player = Player()
    player.play(changed(tape, shorter))
    said = lines(player, damaged=False)
    assert "  SendPlan.plan.deadline_s" in said


def test_what_a_machine_raised_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> list[Any]:
        raise RuntimeError("broken")

    written: list[bytes] = []
    chain = Chain()
    recorder = Recorder(written.append)
    true = Member._placed
    monkeypatch.setattr(Member, "_placed", breaks)
    member = recorder.member(A, V)
    with pytest.raises(RuntimeError, match="broken"):
        member.handle(ev.VersionPlaced(V, (), 0), 1.0)
    setup = next(documents(_any_tape()))
    rows = [setup, *documents(written)]
    again = [chain.line(row) for row in rows]
    assert played(again).difference is None
    monkeypatch.setattr(Member, "_placed", true)
    found = played(again).difference
    assert found is not None
    assert (found.expected, found.found) == ([["raised", {"kind": "RuntimeError"}]], [])


def _any_tape() -> list[bytes]:
    tapes = Tapes()
    run(Setup(epochs=1), Schedule(1, ()), tapes.factory())
    return tapes.tapes[0][1]


# ------------------------------------------------------------ damage


def test_a_changed_bit_is_found_and_its_record_named(tape: list[bytes]) -> None:
    whole = b"".join(tape)
    ends = [sum(map(len, tape[: i + 1])) for i in range(len(tape))]
    dice = random.Random(1)
    for _ in range(FLIPS):
        at = dice.randrange(len(whole))
        raw = bytearray(whole)
        raw[at] ^= 1 << dice.randrange(8)
        with pytest.raises(RecordingDamaged) as found:
            for _ in documents(bytes(raw).splitlines(keepends=True)):
                pass
        record = next(i for i, end in enumerate(ends) if at < end)
        assert found.value.record == record, at


def test_a_changed_bit_ends_the_replay_with_an_error(
    tape: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machines.rec"
    line = bytearray(tape[40])
    line[60] ^= 2
    path.write_bytes(b"".join([*tape[:40], bytes(line), *tape[41:]]))
    assert cli.main(["replay", str(path)]) == ExitCode.REFUSED
    said = capsys.readouterr()
    assert "record 40 of the recording was changed" in said.err
    assert "the same actions" in said.out, "the records before it were played"


@pytest.mark.parametrize("without", [0, 1, 17])
def test_a_record_that_is_left_out_is_found(tape: list[bytes], without: int) -> None:
    with pytest.raises(RecordingDamaged, match=f"record {without} .* was changed"):
        played([*tape[:without], *tape[without + 1 :]])


def test_a_cut_recording_is_named_or_says_that_it_has_no_end(tape: list[bytes]) -> None:
    with pytest.raises(RecordingDamaged, match="record 30 of the recording is cut"):
        played([*tape[:30], tape[30][:-5]])
    cut = played(tape[:30])
    assert (cut.records, cut.end) == (30, "")


def test_an_empty_file_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(b"")
    assert cli.main(["replay", str(path)]) == ExitCode.REFUSED
    assert cli.main(["replay", str(tmp_path / "none")]) == ExitCode.USAGE


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


STRANGE: list[Any] = [
    {"to": "leader", "now": 1.0, "event": ["System", {}], "actions": []},
    {"to": "leader", "now": 1.0, "event": ["Adopted", {}], "actions": []},
    {"to": "leader", "now": 1.0, "event": ["Heartbeat", {"peer": 5}], "actions": []},
    {"to": "leader", "now": 1.0, "event": ["Heartbeat", {"sum": 5}], "actions": []},
    {"to": "leader", "now": 1.0, "event": ["ClockTick", {"known": "f" * 32}], "actions": []},
    {"to": "leader", "now": 1.0, "event": ["Searched", {"job": "f" * 32}], "actions": []},
    {"to": "leader", "now": 1.0, "event": ["ClockTick", {}]},
    {"to": "leader", "now": 1.0, "event": ["ClockTick", {}], "actions": [7]},
    {"to": "leader", "now": "soon", "event": ["ClockTick", {}], "actions": []},
    {"to": "member", "now": 1.0, "event": ["PlanArrived", {"plan": "f" * 64}], "actions": []},
    {"to": "pipeline", "now": 1.0, "event": ["ClockTick", {}], "actions": []},
    {"to": "leader", "now": 10**400, "event": ["ClockTick", {}], "actions": []},
    {
        "to": "leader",
        "now": 1.0,
        "event": ["ClockTick", {}],
        "actions": [["A", {"a": nested(500)}]],
    },
    {"start": "pipeline", "with": {}},
    {"start": "member", "with": {}},
    {"recording": 1, "setup": {}},
    [1, 2, 3],
    None,
]


@pytest.mark.parametrize("row", STRANGE, ids=range(len(STRANGE)))
def test_a_record_that_no_recorder_writes_is_named(tape: list[bytes], row: Any) -> None:
    rows = list(documents(tape))
    begins = next(i for i, one in enumerate(rows) if one.get("to") == "leader")
    chain = Chain()
    strange = [chain.line(one) for one in [*rows[: begins + 1], row, *rows[begins + 1 :]]]
    with pytest.raises(RecordingDamaged) as found:
        played(strange)
    assert found.value.record == begins + 1


def test_another_format_is_refused_with_the_version_that_wrote_it(tape: list[bytes]) -> None:
    def newer(number: int, row: Any) -> Any:
        if number:
            return row
        return {"recording": FORMAT + 1, "setup": {**row["setup"], "version": "9.9.9"}}

    with pytest.raises(RecordingDamaged, match=f"format {FORMAT + 1}") as found:
        played(changed(tape, newer))
    assert "9.9.9" in found.value.next_step


# ------------------------------------------------------------ the recording end


OUTSIDE = [
    ev.Heartbeat(
        A,
        1,
        V,
        "digest",
        ev.Capacity(
            seen=((B, 0.1),),
            costs=Measured(0.25, ways=((B, LinkCost(1e-3, 2e-3)),)),
        ),
        outer=ev.OuterReport((3, "mean")),
        membership=ev.Membership(may_lead=False),
    ),
    ev.Grouped(
        Window(3, (Partner(CellId("ab" * 8), A, {1: (Host(B, ("/ip4/1.2.3.4",)),)}),), 2.5), 9.0
    ),
    ev.Recalled(V, None, (1, 2), Version(2)),
    ev.Changed(Rules(2, revision=1, change="signed", revoked=frozenset({"x"}))),
    ev.QuorumChanged(Quorum()),
    ev.QuorumChanged(Quorum((A, B), V, 12.5)),
    ev.Equivocated(frozenset({B})),
    ev.ContextsKept(((V, PlanContext((SampleClass(0, 0, 8),), {"p": A}, 64)),)),
    ev.Resigning(True),
    ev.Unreachable(A),
    ev.ClockTick({A: 1, B: None}, frozenset(PeerId(f"p{i}") for i in range(100)), 0.5),
    ev.RoundArrived(A, 1, 2, "h", 0, (B,), {"p": A}, (), (3,), 6.0),
    ev.VersionPlaced(V, (Version(1),), 64, 7),
]


@pytest.mark.parametrize("event", OUTSIDE, ids=lambda e: type(e).__name__)
def test_an_event_is_read_as_it_was_written(event: Any) -> None:
    shared: dict[str, Any] = {}
    writer = ValueWriter(lambda name, document: shared.setdefault(name, document()))
    text = text_of(writer.event(event))
    assert (
        ValueReader(shared, {}).event(json.loads(text), KINDS["leader"] | KINDS["member"]) == event
    )


def test_groups_of_fields_stand_beside_the_others() -> None:
    """A recording of an older tutti has no groups, and is read all the same."""
    beat = ev.Heartbeat(
        A, 1, V, "digest", ev.Capacity(2.0, room=9), outer=ev.OuterReport(anchor="x")
    )
    name, fields = ValueWriter(lambda *_: None).event(beat)
    assert fields.keys() == {"peer", "stage", "at", "digest", "speed", "room", "anchor"}
    assert ValueReader({}, {}).event([name, fields], KINDS["leader"]) == beat
    with pytest.raises(WireError, match="no field capacity"):
        ValueReader({}, {}).event([name, {**fields, "capacity": {}}], KINDS["leader"])


def test_a_large_set_is_written_once() -> None:
    shared: list[str] = []
    writer = ValueWriter(lambda name, document: shared.append(name))
    known = frozenset(PeerId(f"p{i}") for i in range(100))
    ticks = [writer.event(ev.ClockTick(known=known)) for _ in range(3)]
    assert ticks == [["ClockTick", {"known": shared[0]}]] * 3
    assert set(shared) == {ticks[0][1]["known"]}


def test_a_full_recording_ends_and_its_machines_go_on() -> None:
    written: list[bytes] = []
    full: list[str] = []
    recorder = Recorder(written.append, 2_000, full.append)
    member = recorder.member(A, V)
    for term in range(100):
        member.handle(ev.VersionPlaced(V, (), 0, term), float(term))
    assert member.term == 99
    assert len(full) == 1
    assert sum(map(len, written[:-1])) < 2_200
    assert list(documents(written))[-1] == {"end": full[0], "early": True}
    recorder.close("stopped")
    assert list(documents(written))[-1] == {"end": full[0], "early": True}


def test_a_value_that_cannot_be_written_ends_the_recording_and_no_machine() -> None:
    written: list[bytes] = []
    ended: list[str] = []
    member = Recorder(written.append, on_end=ended.append).member(A, V)
    strange: Any = object()
    member.handle(ev.VersionPlaced(V, (strange,), 5, 1), 1.0)
    member.handle(ev.VersionPlaced(V, (), 7, 1), 2.0)
    assert member.tokens == 7, "the machine goes on"
    assert len(ended) == 1
    *_, last = documents(written)
    assert last == {"end": ended[0], "early": True}


def test_what_a_hostile_recording_says_moves_no_cursor(tape: list[bytes]) -> None:
    def spoken(number: int, one: Any) -> Any:
        if number == 0:
            return {**one, "setup": {**one["setup"], "run_id": "\x1b[2J", "version": "\x1b]0;x"}}
        return {"end": "\x1b[1A", "early": True} if number == 1 else None

    player = Player()
    player.play(changed(tape, spoken))
    assert all(line.isprintable() for line in lines(player, damaged=False))


def test_documents_that_name_each_other_are_compared_to_an_end() -> None:
    names = {"a": '"b"', "b": '"a"'}
    assert list(differing("a", "b", names.get)) == [("", "a", "b")]


@pytest.mark.parametrize("most", [{"stages": 10**9}, {"target_batch": 10**12}])
def test_a_run_that_no_manifest_may_have_is_refused(tape: list[bytes], most: Any) -> None:
    def larger(number: int, one: Any) -> Any:
        return one if number else {**one, "setup": {**one["setup"], **most}}

    with pytest.raises(RecordingDamaged, match="than a run may have") as found:
        played(changed(tape, larger))
    assert found.value.record == 0


def test_a_file_that_exists_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "machines.rec"
    path.write_text("mine", encoding="utf-8")
    for number in (2, 3):
        kept = RecordingFile(path, lambda why: None)
        kept.recorder.member(A, V).handle(ev.VersionPlaced(V, (), 0), 1.0)
        kept.close("stopped")
        assert kept.path == tmp_path / f"machines.rec.{number}"
        with kept.path.open("rb") as file:
            assert [*documents(file)][-1] == {"end": "stopped"}
    assert path.read_text(encoding="utf-8") == "mine"
    with pytest.raises(LocalFault, match="cannot write"):
        RecordingFile(tmp_path / "nowhere" / "machines.rec", lambda why: None)


def test_a_full_disk_ends_a_recording_after_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 900

    def write(fd: int, data: Any) -> int:
        nonlocal room
        taken = min(room, len(data))
        if not taken:
            raise OSError(errno.ENOSPC, "no space left")
        room -= taken
        return true(fd, bytes(data[:taken]))

    true = os.write
    monkeypatch.setattr(recording_file.os, "write", write)
    ended: list[str] = []
    kept = RecordingFile(tmp_path / "machines.rec", ended.append)
    member = kept.recorder.member(A, V)
    for term in range(50):
        member.handle(ev.VersionPlaced(V, (), 0, term), float(term))
    kept.close("stopped")
    monkeypatch.undo()
    assert member.term == 49
    assert len(ended) == 1
    assert "no space left" in ended[0]
    with kept.path.open("rb") as file:
        assert len(list(documents(file))) > 2, "all lines are whole"


def test_a_recording_has_every_fact_and_every_argument_of_its_machines() -> None:
    facts = {f.name for f in dataclasses.fields(RunFacts)} - {"make", "may_lead", "invite_of"}
    recorded = {f.name for f in dataclasses.fields(RecordedSetup)}
    recorded |= {f.name for f in dataclasses.fields(RunNumbers)}
    assert facts <= recorded
    for start, machine, beside in (
        (LeaderStart, Leader, {"self", "facts"}),
        (MemberStart, Member, {"self"}),
    ):
        arguments = set(inspect.signature(machine.__init__).parameters) - beside
        # The micro-batches of a past plan that did not count stand beside it in the record.
        recorded = {f.name for f in dataclasses.fields(start)} - {"dropped", "dead"}
        assert recorded == arguments
