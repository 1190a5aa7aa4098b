"""The stage a daemon takes: its operator's, its leader's, or one that it chooses."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.app import peer
from node.app.daemon import Daemon
from node.app.peer import CHOOSE_AGAIN_S, Peer
from node.config import MOVED, NodeConfig
from node.core.errors import UsageFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Version
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.scheduler.choosing import LOOK_S, SETTLE_S, STABLE_S, WITHOUT_ENDS_S, Placed
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock

STAGES = 2
MANIFEST = amended(Manifest.default_demo(), {"pipeline.stages": STAGES})


class FakePresence:
    """Shows always the same; every look at it takes half a second."""

    def __init__(self, daemon: "FakeDaemon", others: dict[str, Placed]) -> None:
        self._d = daemon
        self.company = asyncio.Event()
        self.pace = SimpleNamespace(hasty=False, times=1.0)
        self.me = PeerId("me")
        self.others = {PeerId(p): placed for p, placed in others.items()}
        self.view = self
        self.posted: list[tuple[int | None, bool]] = []
        self.company.set()
        self.until = math.inf
        self.over = asyncio.Event()
        self.come_at = math.inf
        self.hosts = frozenset[PeerId]()

    @property
    def hosting(self) -> frozenset[PeerId]:
        """``hosts`` from ``come_at`` on; every look takes half a second."""
        self._d.clock.advance(0.5)
        return self.hosts if self._d.clock.now() >= self.come_at else frozenset()

    def placed(self, stages: int) -> dict[PeerId, Placed]:
        assert stages == STAGES
        self._d.clock.advance(0.5)
        if self._d.clock.now() >= self.until:
            self.over.set()
        return self.others

    def announce(self, body: Any) -> None:
        self.changed()

    def changed(self) -> None:
        self.posted.append((self._d.place, self._d.settled))


class FakeDaemon(Peer):
    """A daemon that builds nothing, and is asked to move."""

    def __init__(self, home: Path, environ: dict[str, str] | None = None, **flags: Any) -> None:
        self.config = NodeConfig.load({"home": str(home), **flags}, environ or {})
        super().__init__(self.config.open_to, VirtualClock(), Journal(), MANIFEST, lambda *_: None)
        self.asks = list[int]()
        self.why = ""

    def body(self) -> Any:
        return SimpleNamespace(reach="unknown")

    def stop(self, why: str) -> None:
        raise AssertionError(f"nobody stops it here: {why}")

    def asked(self, stage: int, *, alone: bool = False) -> str:
        assert alone, "no leader asks here"
        self.asks.append(stage)
        return self.why

    def hosts(self, waiting_for: str = "", epoch: int = 0) -> None:
        self.assembled = SimpleNamespace(
            stage=SimpleNamespace(stage=self.place, version=Version(epoch)),
            training=SimpleNamespace(waiting_for=lambda: waiting_for),
        )


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "HASTE_S", 0.0)


async def take(d: FakeDaemon, presence: Any, ends: bool = False) -> int:
    return await d.take(presence, MANIFEST, named=d.config.stage, ends=ends, company=True)


async def instead(d: FakeDaemon, presence: Any, why: str) -> int:
    return await d.instead(presence, UsageFault(why, ""))


async def watch(d: FakeDaemon, presence: Any, seconds: float) -> None:
    """Let the daemon watch its stage for this time."""
    presence.until = d.clock.now() + seconds
    presence.over = asyncio.Event()
    task = asyncio.create_task(d.watch_stage(presence))
    await presence.over.wait()
    task.cancel()


async def test_a_peer_that_was_named_a_stage_shows_it_before_it_is_built(tmp_path: Path) -> None:
    for environ, flags, ends, stage in (
        ({}, {"stage": "2"}, False, 2),
        ({MOVED: "1"}, {}, False, 1),
        ({MOVED: "0"}, {}, False, ENDS),
        ({}, {"role": "ends"}, True, ENDS),
    ):
        d = FakeDaemon(tmp_path, environ, **flags)
        presence = FakePresence(d, {})
        assert await take(d, presence, ends) == stage
        assert presence.posted == [(stage, True)]
        assert not presence.pace.hasty
        assert d.open_to == ("auto" if environ else "")
    d = FakeDaemon(tmp_path, stage="3")
    with pytest.raises(UsageFault, match="not in this swarm"):
        await take(d, FakePresence(d, {}))


async def test_a_joiner_publishes_choosing_before_its_claim(tmp_path: Path) -> None:
    d = FakeDaemon(tmp_path)
    presence = FakePresence(d, {"a": Placed(0), "b": Placed(1)})
    began = d.clock.now()
    assert await take(d, presence) == 2
    assert d.clock.now() - began <= STABLE_S + 0.5
    assert presence.posted == [(None, False), (2, False)]
    assert presence.pace.hasty
    d.hosts()
    await watch(d, presence, SETTLE_S + 1)
    assert presence.posted[2:] == [(2, True)]
    assert not presence.pace.hasty
    assert d.asks == []


async def test_a_joiner_unfit_for_the_ends_takes_a_block_stage(tmp_path: Path) -> None:
    d = FakeDaemon(tmp_path)
    presence = FakePresence(d, {"a": Placed(1), "b": Placed(2), "c": Placed(2)})
    assert await take(d, presence) == ENDS
    assert await d.instead(presence, UsageFault("no data", "name it")) == 1
    assert d.open_to == "stage"
    (told,) = [e for e in d.journal.recent() if e.kind == "ends-not-hosted"]
    assert (told.level, told.text[-16:]) == ("warning", "no data; name it")
    with pytest.raises(UsageFault, match="too large"):
        await instead(d, presence, "too large")


async def test_what_its_operator_chose_has_no_other(tmp_path: Path) -> None:
    for flags, ends in (({"role": "ends"}, True), ({"stage": "1"}, False), ({}, True)):
        d = FakeDaemon(tmp_path, **flags)
        presence = FakePresence(d, {})
        await take(d, presence, ends)
        with pytest.raises(UsageFault, match="no data"):
            await instead(d, presence, "no data")


async def test_only_a_peer_awaiting_a_first_epoch_moves_to_the_ends(tmp_path: Path) -> None:
    for waiting_for, epoch, asks in (("ends", 0, [ENDS]), ("ends", 3, []), ("", 0, [])):
        d = FakeDaemon(tmp_path, {MOVED: "1"})
        presence = FakePresence(d, {"b": Placed(1), "c": Placed(2)})
        await take(d, presence)
        d.hosts(waiting_for, epoch)
        await watch(d, presence, 2 * WITHOUT_ENDS_S)
        assert d.asks == asks, (waiting_for, epoch)


async def test_a_peer_that_cannot_go_to_the_ends_stays_and_is_not_named_again(
    tmp_path: Path,
) -> None:
    d = FakeDaemon(tmp_path, {MOVED: "1"})
    presence = FakePresence(d, {"b": Placed(1), "c": Placed(2)})
    d.why = "does not fit"
    await take(d, presence)
    d.hosts("an ends peer")
    await watch(d, presence, 5 * WITHOUT_ENDS_S)
    assert (d.asks, (d.place, d.open_to)) == ([ENDS], (1, "stage"))


@pytest.mark.parametrize(("named", "solo"), [("auto", True), ("1", False)])
def test_an_owner_hosts_every_stage_unless_it_names_one(tmp_path, named, solo) -> None:
    me = Identity.ephemeral()
    daemon: Any = SimpleNamespace(
        manifest=MANIFEST.owned_by(me.peer_id),
        role="auto",
        identity=me,
        config=NodeConfig.load({"home": str(tmp_path), "stage": named}, {}),
    )
    assert Daemon._may_host_all(daemon) is solo


@pytest.mark.parametrize(
    ("come_at", "own", "alone"),
    [
        (math.inf, False, True),
        (LOOK_S + 5, False, True),
        (LOOK_S / 2, False, False),
        (0, True, True),
    ],
)
async def test_an_owner_who_sees_nobody_else_host_its_run_hosts_every_stage(
    tmp_path: Path, come_at: float, own: bool, alone: bool
) -> None:
    """It may have met a rendezvous, which hosts nothing. Children of an earlier start are its
    own."""
    d = FakeDaemon(tmp_path)
    presence: Any = FakePresence(d, {})
    presence.hosts = frozenset((PeerId("b"),))
    presence.come_at = d.clock.now() + come_at
    assert await d.alone(presence, MANIFEST, presence.hosts if own else ()) is alone


def test_the_children_of_a_home_are_known_by_their_keys(tmp_path: Path) -> None:
    config = NodeConfig.load({"home": str(tmp_path)}, {})
    daemon: Any = SimpleNamespace(config=config, manifest=MANIFEST)
    daemon._child_home = lambda stage: Daemon._child_home(daemon, stage)
    assert Daemon.own_children(daemon) == set()
    home = tmp_path / "local" / "stage-2"
    home.mkdir(parents=True)
    key = Identity.load_or_create(home / config.identity_path.name)
    assert Daemon.own_children(daemon) == {key.peer_id}


def seen(led: bool, *states: str) -> Any:
    """A view of the directory: whether somebody leads, and the states of the replicas of the own
    stage."""
    replicas = {PeerId(f"p{n}"): entry(state) for n, state in enumerate(states)}
    view = SimpleNamespace(replicas=lambda stage: replicas, led=lambda: led)
    return SimpleNamespace(view=view)


def entry(state: str) -> Any:
    return SimpleNamespace(body=SimpleNamespace(state=state))


@pytest.mark.parametrize(
    ("presence", "paused_s", "anew"),
    [
        (seen(True, "training", "ready"), CHOOSE_AGAIN_S + 1.0, True),
        (seen(True, "training"), CHOOSE_AGAIN_S - 1.0, False),
        (seen(True, "ready", "joining"), CHOOSE_AGAIN_S + 1.0, False),
        (seen(True), CHOOSE_AGAIN_S + 1.0, False),
        (seen(False, "training"), CHOOSE_AGAIN_S + 1.0, False),
    ],
    ids=["long", "short", "nobody works", "nobody there", "nobody leads"],
)
def test_a_peer_chooses_its_stage_anew_after_a_long_pause_if_others_hold_its_stage(
    tmp_path: Path, presence: Any, paused_s: float, anew: bool
) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon._stages = STAGES
    assert daemon.chooses_again(presence, 1, paused_s) is anew


def test_a_peer_whose_operator_named_the_stage_keeps_it(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, stage="1")
    daemon._stages = STAGES
    assert not daemon.chooses_again(seen(True, "training"), 1, CHOOSE_AGAIN_S + 1.0)
