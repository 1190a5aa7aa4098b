"""Time between a peer's heartbeats."""

import asyncio
from typing import Any

import pytest

from node.coordinator import reporting
from node.coordinator.presence import View
from node.coordinator.reporting import LeaderContact
from node.core.ids import PeerId
from node.core.journey import Version
from node.dht.record import DirectoryEntry, PeerBody
from node.epoch.pace import CALM_AFTER_S, CALM_BEAT_S, COMPANY, HEARTBEAT_S
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


def test_a_peer_that_answers_calls_alone_is_told_less_and_less_often() -> None:
    contact = LeaderContact()
    busy = PeerId("busy")
    pauses = [contact.reached(busy, float(second)) for second in range(2000)]
    assert pauses[0] == 0.0, "it may be back"
    assert pauses == sorted(pauses)
    assert pauses[10] == pauses[-1] == CALM_BEAT_S
    assert contact.reached(PeerId("other"), 2000.0) == 0.0
    contact.accepted(PeerId("other"), Version(3))
    assert contact.reached(busy, 2001.0) == 0.0, "somebody leads"
    assert contact.reached(busy, 2002.0) > 0
    assert contact.reached(busy, 2003.0 + CALM_AFTER_S) == 0.0, "long ago"


async def test_a_leader_without_room_is_not_told_again_at_once(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = await rig.trained("a", 1)
    t = taking_part(a)
    busy = PeerId("busy")
    called = asyncio.Event()

    async def answers(peer: PeerId, timeout: float) -> float:
        called.set()
        return 0.01

    monkeypatch.setattr(t.kit.transport, "ping", answers)
    monkeypatch.setattr(reporting, "TICK_S", 3600.0)
    monkeypatch.setattr(reporting, "CALM_BEAT_S", 3600.0)
    election = t.candidacy.election
    election.shun(busy, t.kit.clock.now())
    await t.reporting._look_for(busy)
    assert not election.is_silent(busy, t.kit.clock.now()), "the first call brings it back"
    election.shun(busy, t.kit.clock.now())
    called.clear()
    second = asyncio.create_task(t.reporting._look_for(busy))
    await called.wait()
    await asyncio.sleep(0)
    assert election.is_silent(busy, t.kit.clock.now())
    second.cancel()
    await asyncio.wait([second])
    await t.close()
