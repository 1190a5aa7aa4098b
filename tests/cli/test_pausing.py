"""``pause`` and ``resume``, the rules of ``start``, and a paused peer on the screens."""

import pytest

from node.commands.line import launching
from node.config import LEAST_DATA, NodeConfig
from node.control.text import paused_lines, peers_table, present, status_lines
from node.core.errors import UsageFault
from protos.ask_pb2 import PeerLine
from testbed.fakes.canned_window import some_peers, training_snapshot
from tests.cli.conftest import refused


def test_a_pause_asks_the_daemon_and_prints_what_it_says(tutti, daemon):
    said = tutti("pause", "1h30m", "--reason", "a film", "--now").good()
    assert said.startswith("paused by its operator, until 23:10: 312 MiB")
    assert daemon.paused == (5400.0, "a film", True)
    assert tutti("resume").good().startswith("goes on")
    assert daemon.paused is None
    tutti("pause").good()
    assert daemon.paused == (None, "", False)


def test_a_resume_without_a_pause_and_a_wrong_duration_are_refused(tutti, daemon):
    refused(tutti("resume"), 5, "not paused")
    refused(tutti("pause", "2"), 2, "2h")
    assert daemon.paused is None


def test_no_daemon_no_pause(tutti):
    refused(tutti("pause", "2h"), 3, "no daemon")


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (("--idle-only",), (10.0, "", 0.0)),
        (("--idle-only", "5", "--max-load", "40"), (5.0, "", 40.0)),
        (("--idle-only", "--hours", "22-07"), (10.0, "22-07", 0.0)),
        (("--hours=22-07,12-13",), (0.0, "22-07,12-13", 0.0)),
    ],
)
def test_the_rules_of_a_start(tutti, monkeypatch, words, rules):
    begun = []
    monkeypatch.setattr("node.app.joining.choose", lambda ours, what: (None, None))
    monkeypatch.setattr(
        launching, "run_daemon", lambda ours, *of: begun.append(ours.availability) or 0
    )
    tutti("start", *words).good()
    [ours] = begun
    assert (ours.idle_only, ours.hours, ours.max_load) == rules


def test_idle_only_takes_no_file_for_a_number(tutti):
    refused(tutti("start", "--idle-only", "swarm.toml"), 2, "--idle-only")


def test_the_rules_are_settings_of_the_peer(tmp_path):
    env = {"TUTTI_HOME": str(tmp_path), "TUTTI_HOURS": "22-07"}
    ours = NodeConfig.load({"idle_only": 5.0, "max_load": 40.0}, env).availability
    assert (ours.idle_only, ours.hours, ours.max_load) == (5.0, "22-07", 40.0)
    with pytest.raises(UsageFault, match="availability.hours"):
        NodeConfig.load({"hours": "at night"}, env)
    with pytest.raises(UsageFault, match="availability.max_load"):
        NodeConfig.load({"max_load": 101.0}, env)


def test_one_cap_bounds_data_and_checkpoints(tmp_path):
    def load(**flags) -> tuple[int, int]:
        ours = NodeConfig.load(flags, {"TUTTI_HOME": str(tmp_path)})
        return ours.node.data_disk, ours.checkpoint.max_disk

    assert load() == (8 << 30, 0)
    assert load(max_disk="4GiB") == (2 << 30, 2 << 30)
    assert load(max_disk="100GiB") == (8 << 30, 92 << 30)
    assert load(max_disk="4GiB", data_disk=1 << 30) == (1 << 30, 3 << 30)
    assert load(max_disk="4GiB", **{"checkpoint.max_disk": 1 << 30}) == (2 << 30, 1 << 30)
    with pytest.raises(UsageFault, match=r"max_disk = 200MB  \(--max-disk\)") as fault:
        load(max_disk="200MB")
    assert f"{2 * LEAST_DATA:,}" in fault.value.next_step
    with pytest.raises(UsageFault, match="max_disk = 4GiB"):
        load(max_disk="4GiB", data_disk=5 << 30)


@pytest.mark.parametrize("rule", [{"idle_only": 10.0}, {"hours": "22-07"}, {"max_load": 50.0}])
def test_pauses_by_rules_need_checkpoints(tmp_path, rule):
    flags = {f"availability.{name}": value for name, value in rule.items()}
    ours = NodeConfig.load(flags, {"TUTTI_HOME": str(tmp_path)})
    assert ours.checkpoint.writes
    none = {"checkpoint.every": 0, "checkpoint.within_s": 0.0}
    with pytest.raises(UsageFault, match="needs checkpoints"):
        NodeConfig.load(flags | none, {"TUTTI_HOME": str(tmp_path)})
    assert not NodeConfig.load(none, {"TUTTI_HOME": str(tmp_path)}).checkpoint.writes


def test_a_paused_peer_is_shown_with_its_reason():
    answer = some_peers()
    answer.peers.append(
        PeerLine(peer="12D3KooWxxxxPAUSED", name="lazy-cat", state="paused", role="rendezvous")
    )
    assert "lazy-cat" not in [p.name for p in present(answer.peers)]
    answer.peers[-1].paused = "outside its hours"
    assert "lazy-cat" in [p.name for p in present(answer.peers)]
    [line] = paused_lines(answer)
    assert line.startswith("Paused outside its hours: ")
    assert "lazy-cat" in line
    assert peers_table(answer)


def test_the_status_of_a_paused_daemon():
    why = "by its operator, until 23:10"
    snapshot = training_snapshot(
        state="paused",
        reason=f"paused {why}",
        cause="paused",
        paused=why,
        given_back="312 MiB of main memory given back after 0.4 s",
        placed=True,
        layers="",
    )
    lines = [line.plain for line in status_lines(snapshot)]
    assert "PAUSED" in lines[0]
    assert any("now" in line and why in line for line in lines)
    assert any("stage 2 later; 312 MiB" in line for line in lines)
