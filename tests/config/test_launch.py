"""Arguments with which a solo swarm starts the daemons of its other stages."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from node.app import node
from node.app.launch import LOG, as_flags, for_child
from node.availability.settings import AvailabilitySettings
from node.config import NodeConfig


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
