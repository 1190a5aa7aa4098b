"""Time between a peer's heartbeats."""

from typing import Any

import pytest

from node.coordinator.presence import View
from node.core.ids import PeerId
from node.dht.record import DirectoryEntry, PeerBody
from node.epoch.pace import COMPANY, HEARTBEAT_S
from node.pipeline.timing import Timing
from tests.training.test_damaged import taking_part


async def test_only_peers_that_answer_make_heartbeats_rarer(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = await rig.trained("a", 1)
    t = taking_part(a)
    body = PeerBody(stage=1, role="stage", state="training", epoch=0, name="stranger", version="0")
    made_up = {
        PeerId(f"stranger-{n}"): DirectoryEntry(PeerId(f"stranger-{n}"), body, 1, 1e9)
        for n in range(10 * COMPANY)
    }
    monkeypatch.setattr(t.candidacy, "view", lambda: View(made_up))
    timing = Timing()
    monkeypatch.setattr(a.work.engines.pipeline, "timing", timing, raising=False)
    assert t.reporting.beat_s() == HEARTBEAT_S
    for n in range(2 * COMPANY):
        timing.probed(PeerId(f"peer-{n}"), 0.01, t.kit.clock.now())
    assert t.reporting.beat_s() == 2 * HEARTBEAT_S
    await t.close()
