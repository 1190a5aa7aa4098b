"""Every manifest under configs/ is read, is what its name says, and comes back from the file it is
written to."""

from pathlib import Path

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.core.errors import UsageFault
from node.manifest import Manifest, amended, read_manifest

CONFIGS = Path(__file__).parents[2] / "configs"
WANTED = {
    "data-parallel": (0, ("butterfly", "parameters", 0, "none")),
    "gossip": (1, ("gossip", "parameters", 20, "none")),
    "moshpit": (1, ("moshpit", "parameters", 20, "none")),
    "ring": (1, ("ring", "parameters", 20, "none")),
    "push-sum": (1, ("push-sum", "parameters", 20, "none")),
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


@pytest.mark.parametrize(
    ("averaging", "outer", "says"),
    [
        ("cell = 2", "", "never average"),
        ("cell = 0", "", "averaging.cell"),
        ('cell = "some"', "", "averaging.cell"),
        ("", "window_s = 20.0", "one cell"),
        ("cell = 2", 'strategy = "gossip"', "outer.window_s is 0"),
        (
            "cell = 2",
            'window_s = 20.0\nstrategy = "ring"\ncarries = "deltas"\noptimizer = "sgd"',
            "different anchors",
        ),
        ("cell = 2", 'window_s = 20.0\nstrategy = "ring"\nfanout = 2', "outer.fanout"),
        ("cell = 2", 'window_s = 20.0\nstrategy = "moshpit"', "grid"),
        ("cell = 2", 'window_s = 20.0\nstrategy = "ringo"', "outer.strategy"),
        ("cell = 2", 'window_s = 20.0\ncarries = "gradients"', "outer.carries"),
        ("cell = 2", 'window_s = 20.0\ncodec = "int2"', "outer.codec"),
        ("cell = 2", "window_s = -1.0", "outer.window_s"),
        ("cell = 2", "window_s = inf", "outer.window_s"),
        ("cell = 2", "window_s = 20.0\nmomentum = 1.0", "outer.momentum"),
        ("cell = 2", "window_s = 20.0\nmixing = 1.5", "outer.mixing"),
        ("cell = 2", "window_s = 20.0\nquorum = -1", "outer.quorum"),
        *(
            ("cell = 2", f"window_s = 20.0\n{name} = 0", f"outer.{name}")
            for name in ("fanout", "shards", "fragments")
        ),
        (
            "cell = 2",
            'window_s = 20.0\nstrategy = "moshpit"\ngrid = ["2"]',
            "list of whole numbers",
        ),
        (
            "cell = 2",
            'window_s = 20.0\ncarries = "deltas"\noptimizer = "sgd"\nmomentum = 0.0\nstrategy = '
            '"hogwild"\ncodec = "int8"\nfeedback = true',
            "too late",
        ),
        (
            "cell = 2",
            'window_s = 20.0\ncarries = "parameters"\nstrategy = "hogwild"',
            "do not add up",
        ),
        ("cell = 2", "window_s = 20.0\nfragments = 3", "fragments of deltas"),
        ("cell = 2", "window_s = 20.0\nquorum = 2", "quorum"),
        (
            "cell = 2",
            'window_s = 20.0\ncarries = "deltas"\noptimizer = "sgd"\ncodec = "top-k"',
            "outer.feedback",
        ),
        ("cell = 2", 'window_s = 20.0\ncarries = "gradients"', "parameters, deltas"),
        ("cell = 2", 'window_s = 20.0\ncodec = "int8"', "rounds"),
        (
            "cell = 2",
            'window_s = 20.0\nstrategy = "push-sum"\ncarries = "state"\noptimizer = "sgd"',
            "do not carry push-sum of state",
        ),
        ("cell = 2", "every = 4", "outer.window_s"),
        ("cell = 2", "overlap = 1", "outer.window_s"),
        ("cell = 2", 'reducer = "median"', "outer.reducer is not a setting any more"),
        ("cell = 2", "grace_s = 2.0", "a quorum waits"),
    ],
)
def test_averaging_a_live_swarm_does_not_support_is_refused(
    averaging: str, outer: str, says: str
) -> None:
    with pytest.raises(UsageFault) as refusal:
        Manifest.parse(f"[averaging]\n{averaging}\n[outer]\n{outer}\n".encode())
    assert refusal.value.next_step
    assert says in f"{refusal.value}; {refusal.value.next_step}"


def test_a_number_of_peers_is_read_from_text_too() -> None:
    base = Manifest(outer=OuterSettings("gossip", window_s=3.0))
    assert amended(base, {"averaging.cell": "4"}).averaging.peers == 4
