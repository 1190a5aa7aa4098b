"""The demo's reactions to daemons that come and go; none is started."""

from collections.abc import Callable
from pathlib import Path

import pytest

from node.app import demo
from node.app.demo import DemoOptions, DemoOutcome, DemoSwarm
from node.core.errors import LocalFault
from protos.control_pb2 import Snapshot

Watched = Callable[..., DemoSwarm]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Watch a swarm with an ends peer that shows one of these snapshots at each poll."""
    for name in ("start", "kill"):
        monkeypatch.setattr(demo.Child, name, lambda child: None)
    monkeypatch.setattr(demo.Child, "running", True)
    monkeypatch.setattr(demo, "POLL_S", 0.0)
    monkeypatch.setattr(demo, "REPLACE_AFTER_S", -1.0)

    def watch(options: DemoOptions, *said: Snapshot) -> DemoSwarm:
        swarm = DemoSwarm(tmp_path, options)
        left = list(said)
        monkeypatch.setattr(swarm, "poll", lambda: [left.pop(0)])
        demo._watch(swarm, options, DemoOutcome(1), lambda snapshots, note: None)
        return swarm

    return watch


def ends(state: str, epoch: int) -> Snapshot:
    return Snapshot(role="ends", state=state, epoch=epoch)


@pytest.mark.parametrize("replicas", [2, 12])
def test_the_replacement_gets_a_home_of_its_own(watched: Watched, replicas: int) -> None:
    options = DemoOptions((1, replicas), kill=True)
    swarm = watched(options, ends("training", 100), ends("finished", 120))
    homes = [child.home for child in swarm.children]
    assert len(homes) == len(set(homes)) == 1 + replicas + 1


def test_the_demo_says_so_when_its_ends_have_died(watched: Watched, monkeypatch) -> None:
    monkeypatch.setattr(demo.Child, "running", False)
    with pytest.raises(LocalFault, match="at the ends has ended"):
        watched(DemoOptions((1, 1), seconds=1e-9), ends("lost", 3), ends("lost", 3))
