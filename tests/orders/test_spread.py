"""Orders spread through the directory: keepers of many peers in virtual time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.core.errors import LocalFault, Refused
from node.core.ids import PeerId, RunId
from node.dht.settings import DirectorySettings
from node.dht.topics import ORDERS
from node.identity.keys import Identity
from node.orders.keeper import LOOK_S, OrderKeeper, OrderPorts
from node.orders.machine import POSTERS
from node.orders.order import Order, Verb, signed
from node.sim.process import SimClock
from node.sim.setup import LinkProfile
from node.sim.world.directory import SimDht, SimDirectory
from node.sim.world.loop import ProcessLoop, VirtualTime
from node.sim.world.network import SimLinks
from node.telemetry.events import Journal

RUN = RunId("ab" * 32)
SPREAD_S = 0.5


class Somebody:
    """One peer's keeper: its process may end and begin anew, its disk stays."""

    def __init__(self, swarm: "Company", name: str) -> None:
        self.swarm = swarm
        self.name = PeerId(name)
        self.disk = ""
        self.obeyed: list[Verb] = []
        self.blamed: list[PeerId] = []
        self.full = False
        self.boot()

    def boot(self) -> None:
        self.loop = ProcessLoop(self.swarm.world)
        self.journal = Journal([])
        self.clock = SimClock(self.swarm.world)
        ports = OrderPorts(
            SimDirectory(self.swarm.dht, self.name, self.clock),
            self.clock,
            self.journal,
            self._keep,
            lambda order: self.obeyed.append(order.verb),
            lambda peer, why, weight: self.blamed.append(peer),
        )

        def begin() -> None:
            self.keeper = OrderKeeper(
                self.name, RUN, self.swarm.owner.peer_id, ports, kept=self.disk
            )
            self.loop.create_task(self.keeper.run())

        self.swarm.world.push(0.0, begin, loop=self.loop)

    def _keep(self, text: str) -> None:
        if self.full:
            raise LocalFault("the disk is full", "make room")
        self.disk = text

    def kill(self) -> None:
        self.loop.kill()

    def give(self, text: str) -> None:
        self.swarm.world.push(0.0, self.keeper.give, text, loop=self.loop)

    def posts(self, body: bytes) -> None:
        self.swarm.dht.put(ORDERS, self.name, body, self.clock.wall(), 600.0)


class Company:
    """Peers of one run, which see each other through the directory."""

    def __init__(self, owner: Identity, count: int) -> None:
        self.owner = owner
        self.world = VirtualTime(7)
        self.world.now = 1_800_000_000.0
        links = SimLinks(self.world.rng, LinkProfile(0.002, 0.002))
        self.dht = SimDht(links, DirectorySettings(), SPREAD_S, lambda: self.world.now)
        self.peers = [Somebody(self, f"peer{i:02d}") for i in range(count)]

    def text(self, verb: Verb, number: int, *, delay: float = 0.0, run: RunId = RUN) -> str:
        begins = self.world.now + delay
        return signed(
            run, self.owner.peer_id, self.owner, verb, number=number, begins=begins, reason="why"
        )

    def passes(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def posters(self) -> set[PeerId]:
        return {entry.peer for entry in self.dht.under(ORDERS)}


@pytest.fixture
def company(tmp_path: Path) -> Iterator[Company]:
    made = Company(Identity.load_or_create(tmp_path / "owner.key"), 12)
    made.passes(1.0)
    yield made
    made.world.close()


def test_all_obey_at_one_moment_and_go_on_together(company: Company) -> None:
    company.peers[5].give(company.text(Verb.PAUSE, 1, delay=15.0))
    company.passes(14.9)
    assert all(p.keeper.known is not None for p in company.peers), "all know it before"
    assert not any(p.obeyed for p in company.peers)
    company.passes(0.2)
    assert all(p.obeyed == [Verb.PAUSE] for p in company.peers)
    assert all(p.keeper.paused for p in company.peers)
    company.peers[3].give(company.text(Verb.RESUME, 2))
    company.passes(2 * LOOK_S + SPREAD_S)
    assert all(p.obeyed == [Verb.PAUSE, Verb.RESUME] for p in company.peers)
    assert not any(p.keeper.paused for p in company.peers)


def test_the_owner_goes_and_those_who_were_away_learn_it(company: Company) -> None:
    away = company.peers[2]
    away.kill()
    owner = company.peers[0]
    owner.give(company.text(Verb.PAUSE, 1))
    company.passes(2 * LOOK_S)
    owner.kill()
    company.passes(3600.0)
    assert len(company.posters()) >= POSTERS, "others post for the owner"
    away.boot()
    company.passes(2 * LOOK_S)
    assert away.obeyed == [Verb.PAUSE]
    newcomer = Somebody(company, "stranger")
    company.passes(2 * LOOK_S)
    assert newcomer.obeyed == [Verb.PAUSE]


def test_few_post_although_all_know(company: Company) -> None:
    company.peers[0].give(company.text(Verb.PAUSE, 1))
    company.passes(1300.0)
    assert len(company.posters()) == POSTERS


def test_an_order_survives_a_restart_of_everybody(company: Company) -> None:
    company.peers[1].give(company.text(Verb.PAUSE, 1))
    company.passes(2 * LOOK_S)
    for peer in company.peers:
        peer.kill()
    company.passes(1300.0)
    assert not company.posters(), "no posting outlives its writers for long"
    for peer in company.peers:
        peer.obeyed.clear()
        peer.boot()
    company.passes(1.0)
    assert all(p.obeyed == [Verb.PAUSE] for p in company.peers)


def test_forged_and_foreign_postings_cost_their_writer_and_an_old_one_does_not(
    company: Company, tmp_path: Path
) -> None:
    stranger = Identity.load_or_create(tmp_path / "stranger.key")
    company.peers[0].give(company.text(Verb.PAUSE, 5))
    company.passes(2 * LOOK_S)
    forger = Somebody(company, "forger")
    forger.kill()
    forged = signed(RUN, stranger.peer_id, stranger, Verb.END, number=9, begins=0.0, reason="bad")
    forger.posts(forged.encode())
    foreign = Somebody(company, "foreign")
    foreign.kill()
    foreign.posts(company.text(Verb.END, 9, run=RunId("cd" * 32)).encode())
    noisy = Somebody(company, "noisy")
    noisy.kill()
    noisy.posts(b"\xff\xfe")
    behind = Somebody(company, "behind")
    behind.kill()
    behind.posts(company.text(Verb.RESUME, 4).encode())
    company.passes(4 * LOOK_S)
    witness = company.peers[7]
    assert sorted(witness.blamed) == ["foreign", "forger", "noisy"], "each once"
    assert witness.obeyed == [Verb.PAUSE]
    assert witness.keeper.paused


def test_the_operator_hears_why_an_order_is_refused(company: Company) -> None:
    keeper = company.peers[0].keeper
    newest = company.text(Verb.PAUSE, 5)
    assert keeper.give(newest).number == 5
    assert keeper.give(newest).number == 5, "handed in twice is no fault"
    with pytest.raises(Refused, match="order 4 is older than order 5"):
        keeper.give(company.text(Verb.RESUME, 4))
    with pytest.raises(Refused, match="another run"):
        keeper.give(company.text(Verb.END, 9, run=RunId("cd" * 32)))
    with pytest.raises(Refused, match="paused already"):
        keeper.give(company.text(Verb.PAUSE, 6, delay=7200.0))
    keeper.give(company.text(Verb.END, 6))
    with pytest.raises(Refused, match="an end is final"):
        keeper.give(company.text(Verb.RESUME, 7))


def test_a_newcomer_waits_in_a_pause_although_an_end_is_ordered_for_later(
    company: Company,
) -> None:
    company.peers[0].give(company.text(Verb.PAUSE, 1))
    company.passes(2 * LOOK_S)
    company.peers[0].give(company.text(Verb.END, 2, delay=1500.0))
    company.passes(1300.0)
    assert len(company.posters()) == POSTERS
    newcomer = Somebody(company, "stranger")
    company.passes(2 * LOOK_S)
    assert newcomer.obeyed == [Verb.PAUSE]
    assert newcomer.keeper.paused
    newcomer.kill()
    newcomer.boot()
    company.passes(1.0)
    assert newcomer.obeyed == [Verb.PAUSE, Verb.PAUSE]
    told = Somebody(company, "told")
    company.passes(0.1)
    told.keeper.hear(company.peers[3].keeper.text)
    assert told.obeyed == [Verb.PAUSE]
    company.passes(1500.0)
    assert newcomer.obeyed[-1] is Verb.END
    assert newcomer.keeper.ended
    assert not any(p.blamed for p in company.peers)


def test_a_full_disk_does_not_keep_an_order_from_being_obeyed(company: Company) -> None:
    peer = company.peers[4]
    peer.full = True
    company.peers[0].give(company.text(Verb.PAUSE, 1))
    company.passes(2 * LOOK_S)
    assert peer.obeyed == [Verb.PAUSE]
    assert any(e.kind == "order-not-kept" for e in peer.journal.recent())


def test_a_damaged_order_on_the_disk_is_ignored(company: Company) -> None:
    peer = company.peers[4]
    peer.kill()
    peer.disk = "rubbish"
    peer.boot()
    company.passes(1.0)
    assert peer.keeper.known is None
    assert any(e.kind == "order-ignored" for e in peer.journal.recent())


def test_words_of_the_order_that_counts(company: Company) -> None:
    keeper = company.peers[0].keeper
    order: Order = keeper.give(company.text(Verb.PAUSE, 1))
    assert "'why'" in order.words(company.world.now + 120)
