"""Arguments with which a solo swarm starts the daemons of its other stages."""

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from node.app import launch, node
from node.app.launch import LOG, as_flags, for_child
from node.availability.settings import AvailabilitySettings
from node.config import NodeConfig
from node.core.errors import LocalFault, OutOfResources, Refused


def test_a_child_has_its_parents_settings_and_ports_of_its_own(tmp_path: Path) -> None:
    near = "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooWAQqU9GpkTfSsZGdQnrbCkLh31Gp3okDXAQqU9GpkTfSs"
    image = {"TUTTI_LISTEN": "0.0.0.0", "TUTTI_P2P_PORT": "31337", "TUTTI_GRPC_PORT": "31338"}
    image |= {"TUTTI_ANNOUNCE": "a.example:31338", "TUTTI_NAME": "anna", "TUTTI_JOIN": near}
    image |= {"TUTTI_IDLE_ONLY": "10", "TUTTI_HOURS": "22-07", "TUTTI_TENSORBOARD": "/curves"}
    flags = {"max_up": "20Mbit", "reach.lan": "false", "checkpoint.every": 3, "data": "text"}
    parent = NodeConfig.load({"home": tmp_path, **flags}, image)
    words = as_flags(for_child(parent, "anna-2", 2, near))
    given = dict(word.split("=", 1) for word in words if word != "--set")
    child = NodeConfig.load({"home": tmp_path / "child", **given}, image)
    alone = replace(parent.transport, p2p_port=0, grpc_port=0, announce=())
    assert (child.transport, child.checkpoint) == (alone, parent.checkpoint)
    assert (child.reach, child.node.metrics_port) == (parent.reach, -1)
    assert (child.node.name, child.stage, child.node.join) == ("anna-2", 2, (near,))
    assert (child.node.data, child.node.log_format) == ("", "text")
    rules = parent.availability
    assert (rules.idle_only, rules.hours, parent.node.tensorboard) == (10, "22-07", "/curves")
    assert child.availability == AvailabilitySettings(), "a parent that pauses stops its children"
    assert child.node.tensorboard == ""


def test_a_daemon_bounds_the_file_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(node, "JsonlSink", Mock())
    monkeypatch.setattr(node, "StreamSink", sink)
    with pytest.raises(InterruptedError):
        node.Node(NodeConfig.load({"home": tmp_path}, {}), None, None)
    assert sink.call_args.kwargs["output"] == tmp_path / LOG


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "/tmp",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "no space to write"),
    ],
)
def test_a_start_without_room_for_temporary_files_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, says: str
) -> None:
    monkeypatch.setattr(node, "JsonlSink", Mock())
    monkeypatch.setattr(node, "StreamSink", Mock())
    monkeypatch.setattr(node, "Transport", Mock(side_effect=error))
    with pytest.raises(OutOfResources, match=says) as fault:
        node.Node(NodeConfig.load({"home": tmp_path}, {}), None, None)
    assert "free some space" in fault.value.next_step


def test_a_home_that_cannot_be_written_is_refused_before_a_daemon_begins(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file in the way")
    with pytest.raises(Refused, match=LOG) as fault:
        launch.in_background(["start"], home / LOG, lambda _: False)
    assert "--home" in fault.value.next_step
    with pytest.raises(Refused, match="cannot write"):
        NodeConfig.load({"home": home}, {}).prepare_control_socket()


@pytest.mark.parametrize(
    ("said", "free", "says"),
    [
        ("", 0, "the disk of .* is full"),
        ("", 1 << 30, "ended with code 7"),
        ("tutti: no way", 0, "no way"),
    ],
)
def test_a_daemon_that_could_not_write_its_last_words_had_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, free: int, says: str
) -> None:
    (tmp_path / LOG).write_text(said)
    disk = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(launch, "shutil", disk)
    with pytest.raises(LocalFault, match=says):
        raise launch.last_words(tmp_path / LOG, 7)
