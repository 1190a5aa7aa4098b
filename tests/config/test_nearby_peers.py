"""Peers that a daemon meets because they announce themselves on the LAN."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.app.daemon import LAN_PEERS, Daemon
from node.identity.keys import Identity
from node.manifest import Manifest
from node.reach import nearby
from node.reach.nearby import Advert, Found
from node.telemetry.events import Journal
from node.transport.addresses import AddressBook

MANIFEST = Manifest.default_demo()


class Lan:
    """A daemon on a LAN, and the peers that it has met there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.me = Identity.ephemeral()
        self.found: Any = None
        self.seeds: list[tuple[str, ...]] = []
        self.book = AddressBook(self.me.peer_id)
        monkeypatch.setattr(nearby, "Nearby", self._nearby)

    def _nearby(self, journal: Journal, found: Any, failed: Any, advert: Advert) -> Any:
        async def start() -> None:
            self.found = found

        return SimpleNamespace(start=start)

    async def enter(self) -> None:
        transport = SimpleNamespace(
            reachable=SimpleNamespace(local=False),
            p2p=SimpleNamespace(book=self.book),
            ports=(4001, 5001),
        )
        daemon: Any = SimpleNamespace(
            config=SimpleNamespace(reach=SimpleNamespace(lan=True)),
            transport=transport,
            identity=self.me,
            name="otter",
            journal=Journal(),
            _failed=None,
        )
        directory: Any = SimpleNamespace(meet=self.seeds.append)
        await Daemon._meet_on_the_lan(daemon, MANIFEST, directory)

    def hears(self, peer: str, host: str, run_id: str = MANIFEST.run_id) -> tuple[str, ...]:
        """Hear the announcement of a peer; returns its addresses."""
        addresses = (f"/ip4/{host}/tcp/4001/p2p/{peer}",)
        self.found(Found(run_id, "swarm", self.me.peer_id, peer, "", 1, addresses))
        return addresses


@pytest.fixture
async def lan(monkeypatch: pytest.MonkeyPatch) -> Lan:
    made = Lan(monkeypatch)
    await made.enter()
    return made


async def test_new_addresses_of_a_peer_on_the_lan_are_learned(lan: Lan) -> None:
    peer = Identity.ephemeral().peer_id
    old = lan.hears(peer, "192.168.1.5")
    new = lan.hears(peer, "10.0.0.5")
    assert lan.seeds == [old, new]
    assert lan.book.of(peer)[0] == "/ip4/10.0.0.5/tcp/4001"


async def test_few_peers_of_a_lan_are_met_and_those_may_move(lan: Lan) -> None:
    peers = [Identity.ephemeral().peer_id for _ in range(LAN_PEERS + 1)]
    for peer in peers:
        lan.hears(peer, "192.168.1.5")
    assert len(lan.seeds) == LAN_PEERS
    assert lan.book.of(peers[-1]) == ()
    moved = lan.hears(peers[0], "10.0.0.5")
    assert lan.seeds[LAN_PEERS:] == [moved]


async def test_a_daemon_meets_neither_itself_nor_peers_of_other_runs(lan: Lan) -> None:
    lan.hears(lan.me.peer_id, "192.168.1.5")
    lan.hears(Identity.ephemeral().peer_id, "192.168.1.5", "f" * 64)
    assert lan.seeds == []
