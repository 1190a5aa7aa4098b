"""The demo's own code path, except for the start of its daemons, with the topology of
docker-compose.yml: a rendezvous, ends, three block stages with two replicas."""

import contextlib
import dataclasses
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml

from node.app.demo import play
from node.app.demo.daemons import DemoOptions
from node.app.demo.play import run
from node.coordinator.recording.player import Player
from node.manifest import Manifest
from testbed.daemons.forks import ForkedChild, Forks
from testbed.daemons.told import read_told

pytestmark = pytest.mark.swarm


def tiny() -> Manifest:
    base = Manifest.default_demo()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            base.model, layers=3, d_model=32, heads=2, kv_heads=1, d_ff=64, seq_len=32
        ),
        pipeline=dataclasses.replace(base.pipeline, micro_batch=4),
        training=dataclasses.replace(
            base.training, target_batch=16, eval_every=2, eval_batches=2, reference=True
        ),
        optimizer=dataclasses.replace(base.optimizer, warmup=2),
    )


SECONDS = 8.0
"""Length of the demo in s, shorter than a fresh daemon takes to load and join after the kill: the
demo waits for it."""


@pytest.mark.timeout(400)
def test_the_compose_topology_trains_and_survives_a_kill(
    tmp_path, capsys, pytestconfig, forks: Forks, monkeypatch
):
    make = partial(ForkedChild, forks=forks)
    monkeypatch.setattr(play, "child_maker", lambda: contextlib.nullcontext(make))
    monkeypatch.setattr(play, "SAMPLE_TOKENS", 64)
    monkeypatch.setenv("TUTTI_RECORD", str(tmp_path / "machines.rec"))
    services = yaml.safe_load((pytestconfig.rootpath / "docker-compose.yml").read_text())[
        "services"
    ]
    # A service of a profile starts only where it is asked for.
    usual = [name for name, service in services.items() if "profiles" not in service]
    replicas = tuple(
        sum(name.startswith(f"stage-{stage}-") for name in usual) for stage in (1, 2, 3)
    )
    assert {"rendezvous", "ends"} <= set(services)

    nodes = (1, *replicas)
    code = run(
        DemoOptions(
            nodes,
            kill=True,
            json=True,
            epochs=100_000,
            seconds=SECONDS,
            home=tmp_path,
            manifest=tiny(),
            rendezvous=True,
        )
    )
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, said["nodes"], said["failures"]) == (0, 8, 0)
    assert said["digests_equal"] is True
    assert said["killed"] == "stage-2-0"
    assert said["replaced_in_s"] > 0
    each = 16 * 32
    assert said["epochs"] * each - said["tokens"] in (0, each), "the next plan tells the last ones"
    assert 0 < said["loss_val"] < said["loss_first"], said
    assert said["sample"].strip()
    (log,) = tmp_path.glob("ends*/log/events.jsonl")
    measured = [t for t in read_told("ends", log) if t.kind == "evaluated"]
    assert [int(t.get("epoch")) for t in measured[:2]] == [0, 2], "before the first step too"
    assert float(measured[0].get("loss_val")) > said["loss_val"]
    replayed(sorted(tmp_path.glob("machines.rec*")))


def replayed(paths: list[Path]) -> None:
    """The recordings of eight daemons, of which one was killed and one replaced it, replay."""
    assert len(paths) == 8, "the rendezvous has no such machines"
    ends = []
    events: Counter[str] = Counter()
    for path in paths:
        with path.open("rb") as lines:
            played = Player().play(lines)
        assert played.difference is None, (path, played.difference)
        ends.append(bool(played.end))
        events += played.events
    assert ends.count(False) == 1, "the killed one ends without an end"
    assert events["leader"] > 20
    assert events["member"] > 20
