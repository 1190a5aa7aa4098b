"""Every manifest under configs/ is read, is what its name says, and comes back from the file it is
written to."""

from pathlib import Path

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.manifest import Manifest, amended, read_manifest

CONFIGS = Path(__file__).parents[2] / "configs"
WANTED = {
    "data-parallel": (0, ("butterfly", "parameters", 0, "none")),
    "gossip": (1, ("gossip", "parameters", 20, "none")),
    "moshpit": (1, ("moshpit", "parameters", 20, "none")),
    "parameter-server": (1, ("parameter-server", "parameters", 20, "none")),
    "parameter-server-stale": (1, ("parameter-server", "deltas", 20, "sgd")),
    "hogwild": (1, ("hogwild", "deltas", 10, "sgd")),
    "diloco": (1, ("butterfly", "deltas", 20, "nesterov")),
    "diloco-quorum": (1, ("butterfly", "deltas", 20, "nesterov")),
    "diloco-streaming": (1, ("butterfly", "deltas", 10, "nesterov")),
    "diloco-top-k": (1, ("butterfly", "deltas", 20, "sgd")),
    "cells-moshpit-diloco": (2, ("moshpit", "state", 20, "nesterov")),
    "cells": (2, ("gossip", "parameters", 30, "none")),
    "full": (1, ("moshpit", "state", 60, "nesterov")),
}


def test_each_file_has_its_line_here() -> None:
    assert {p.stem for p in CONFIGS.glob("*.toml")} == WANTED.keys()


@pytest.mark.parametrize("name", WANTED)
def test_each_config_matches_its_name(name: str) -> None:
    m = read_manifest(CONFIGS / f"{name}.toml")
    o = m.outer
    assert (m.averaging.peers, (o.strategy, o.carries, o.window_s, o.optimizer)) == WANTED[name]
    assert Manifest.parse(m.to_toml()).run_id == m.run_id


def test_the_full_manifest_skips_a_third_and_steps_with_muon() -> None:
    m = read_manifest(CONFIGS / "full.toml")
    assert m.scheduler.paths == "planned"
    assert m.scheduler.hops(m.pipeline.stages) == m.pipeline.stages * 2 // 3
    assert m.optimizer.name == "muon"


def test_a_number_of_peers_is_read_from_text_too() -> None:
    base = Manifest(outer=OuterSettings("gossip", window_s=3.0))
    assert amended(base, {"averaging.cell": "4"}).averaging.peers == 4
