"""The directory over real p2pd processes: first peer, bootstrap peers that come late, restarts."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from node.core.clock import Clock, SystemClock
from node.core.errors import UsageFault, WireError
from node.dht import directory as directory_module
from node.dht import guard
from node.dht.directory import FRESH_S, Directory
from node.dht.settings import DirectorySettings
from node.identity.admission import Gate, admission_token, shown
from node.identity.keys import Identity
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock
from tests.dht.conftest import RUN, addresses, eventually


async def both_see(one: Directory, other: Directory) -> None:
    async def seen() -> bool:
        want = {one.me, other.me}
        return set(await one.read()) == want == set(await other.read())

    assert await eventually(seen)


async def test_a_bootstrap_peer_that_starts_later_is_found(swarm, body) -> None:
    late = swarm.identity()
    gone = await swarm.p2p(late)
    (address,) = await addresses(gone)
    await gone.shutdown()

    early, _ = await swarm.node((address,))
    await early.publish(body("early"))
    assert set(await early.read()) == {early.me}

    directory = swarm.directory(late)
    p2p = await swarm.p2p(late, host_maddrs=(address.rpartition("/p2p/")[0],))
    await directory.attach(p2p)
    await directory.publish(body("late"))
    await both_see(early, directory)


async def test_a_peer_gives_its_own_record_to_who_asks_it(swarm, body, monkeypatch) -> None:
    """Also where no record is offered to either of them."""

    async def learns_nothing(*args: object, **options: object) -> None: ...

    monkeypatch.setattr(guard.SwarmProtocol, "update_routing_table", learns_nothing)
    other, p2p_other = await swarm.node(refresh_s=3600)
    await other.publish(body("other"))
    one, _ = await swarm.node(await addresses(p2p_other), refresh_s=3600)
    one.ask(other.me)
    one.ask(other.me)
    assert one._asking == {other.me}

    async def known() -> bool:
        return other.me in one._record_store

    assert await eventually(known)
    assert [key for key, _ in one._node.protocol.storage.items()] == [
        DHTID.generate(source=one._record_store.key)
    ], "it is passed on with the others"

    async def ended() -> bool:
        return not one._asking

    assert await eventually(ended)


async def test_a_bootstrap_peer_that_has_moved_is_found_at_its_new_address(swarm, body) -> None:
    mover = swarm.identity()
    gone = await swarm.p2p(mover)
    old = await addresses(gone)
    await gone.shutdown()
    stays, p2p_stays = await swarm.node(old)
    await stays.publish(body("stays"))

    directory = swarm.directory(mover)
    p2p = await swarm.p2p(mover)
    await directory.attach(p2p)
    await directory.publish(body("mover"))
    new = await addresses(p2p)
    stays.meet(new)
    await both_see(stays, directory)
    known = [f"{at}/p2p/{mover.peer_id}" for at in stays._seeds[mover.peer_id]]
    assert known == [*new, *old], "it may be back at its old place"

    await stays.attach(p2p_stays, old)
    known = [f"{at}/p2p/{mover.peer_id}" for at in stays._seeds[mover.peer_id]]
    assert known == [*new, *old], "a restart of p2pd brings up old addresses only"


async def test_few_addresses_of_a_bootstrap_peer_are_kept(swarm) -> None:
    identity = swarm.identity()
    directory = swarm.directory(swarm.identity())
    for number in range(100):
        directory.meet([f"/ip4/10.0.0.{number}/tcp/1/p2p/{identity.peer_id}"])
    (kept,) = directory._seeds.values()
    newest = range(99, 99 - directory_module.SEED_ADDRESSES, -1)
    assert [str(at) for at in kept] == [f"/ip4/10.0.0.{n}/tcp/1" for n in newest]


async def test_after_a_restart_of_p2pd_the_record_is_posted_again(swarm, body) -> None:
    one, p2p_one = await swarm.node()
    seeds = await addresses(p2p_one)
    identity = swarm.identity()
    other, p2p_other = await swarm.node(seeds, identity, lookup_timeout_s=1.0)
    await one.publish(body("one"))
    await other.publish(body("other"))
    await both_see(one, other)

    await p2p_other.shutdown()
    before = (await one.read())[other.me].seq
    await other.publish(body("other", state="training"))  # nobody hears it: kept for later
    await other.attach(await swarm.p2p(identity), seeds)

    async def heard() -> bool:
        entry = (await one.read()).get(other.me)
        return entry is not None and entry.seq > before and entry.body.state == "training"

    assert await eventually(heard)


async def test_a_restarted_first_peer_finds_the_others_by_records(swarm, body) -> None:
    identity = swarm.identity()
    first, p2p_first = await swarm.node(identity=identity)
    other, p2p_other = await swarm.node(await addresses(p2p_first))
    await first.publish(body("first"))
    await other.publish(body("other", maddrs=await addresses(p2p_other)))
    await both_see(first, other)

    await p2p_first.shutdown()
    # on another port, with only the peers that it remembers to ask
    await first.attach(await swarm.p2p(identity))

    assert await eventually(lambda: first.neighbours > 0)
    await both_see(first, other)


def freeze(p2p) -> None:
    p2p._child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, p2p._child.pid, os.WSTOPPED)


async def test_a_slow_p2pd_is_waited_for(swarm, body) -> None:
    directory, p2p = await swarm.node()
    freeze(p2p)
    asyncio.get_running_loop().call_later(1.5, p2p._child.send_signal, signal.SIGCONT)
    for serving in (False, True):
        await directory.serve(serving)
    assert await directory.publish(body("slow"))


async def test_a_p2pd_that_does_not_answer_is_given_up(swarm, body, monkeypatch) -> None:
    identity = swarm.identity()
    directory, frozen = await swarm.node(identity=identity)
    await directory.serve(False)
    freeze(frozen)
    monkeypatch.setattr(directory_module, "ATTACH_S", 0.1)
    await asyncio.wait_for(directory.serve(True), 10)
    frozen._child.kill()
    monkeypatch.undo()
    await directory.attach(await swarm.p2p(identity))
    assert await directory.publish(body("again"))


async def test_a_p2pd_that_takes_long_is_attached_to_in_the_end(swarm, body, monkeypatch) -> None:
    directory, p2p = await swarm.node()
    await directory.serve(False)
    freeze(p2p)
    monkeypatch.setattr(directory_module, "ATTACH_S", 0.1)
    await asyncio.wait_for(directory.serve(True), 10)
    assert not await directory.publish(body("slow"))
    p2p._child.send_signal(signal.SIGCONT)
    assert await eventually(lambda: directory._node is not None)
    assert await directory.publish(body("slow"))


async def test_another_mode_wanted_while_it_attaches_is_not_lost(swarm, monkeypatch) -> None:
    directory, p2p = await swarm.node()
    await directory.serve(False)
    freeze(p2p)
    monkeypatch.setattr(directory_module, "ATTACH_S", 0.1)
    await asyncio.wait_for(directory.serve(True), 10)
    await directory.serve(False)
    monkeypatch.undo()
    p2p._child.send_signal(signal.SIGCONT)
    assert await eventually(lambda: directory._node is not None)
    await directory.serve(False)
    assert not p2p._client.control.unary_handlers, "it answers nobody"


async def test_without_a_network_reading_and_publishing_still_work(swarm, body) -> None:
    directory = swarm.directory(swarm.identity())
    assert await directory.publish(body()) is False
    assert set(await directory.read()) == {directory.me}
    await directory.withdraw()
    assert await directory.read() == {}
    await directory.close()
    await directory.close()


async def test_being_alone_is_reported_once(swarm) -> None:
    journal = Journal()
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{swarm.identity().peer_id}"
    await swarm.node([nobody], journal=journal, rejoin_s=0.01, rejoin_max_s=0.01)

    assert await eventually(lambda: any(e.kind == "alone" for e in journal.recent(10)))
    assert [event.level for event in journal.recent(10) if event.kind == "alone"] == ["warning"]


async def test_an_address_that_refuses_is_not_dialled_by_p2pd(swarm, monkeypatch) -> None:
    """p2pd would not try it again for seconds, and the peer there may be about to start."""
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        where = Multiaddr(f"/ip4/127.0.0.1/tcp/{later.getsockname()[1]}")
        directory, p2p = await swarm.node()
        dialled: list[Multiaddr] = []

        async def connect(who: object, addresses: Sequence[Multiaddr]) -> None:
            dialled.extend(addresses)
            raise P2PDaemonError("nobody")

        monkeypatch.setattr(p2p._client, "connect", connect)
        peer = swarm.identity().peer_id
        assert not await directory._meet(p2p, directory._node, peer, [where])
        assert not dialled
        later.listen()
        assert not await directory._meet(p2p, directory._node, peer, [where])
        assert dialled == [where]


async def test_a_peer_that_nobody_can_dial_is_met_over_its_own_connection(swarm) -> None:
    directory, p2p = await swarm.node()
    other, _ = await swarm.node(await addresses(p2p))
    assert await eventually(lambda: other.neighbours == 1)
    nobody = [Multiaddr("/ip4/127.0.0.1/tcp/1")]
    assert await directory._meet(p2p, directory._node, other.me, nobody)


async def test_a_name_that_is_none_is_no_peer(swarm) -> None:
    """Anybody may claim it as its address."""
    directory, p2p = await swarm.node()
    claimed = [Multiaddr(f"/dns4/{70 * 'a'}/tcp/5")]
    assert not await directory._meet(p2p, directory._node, swarm.identity().peer_id, claimed)


@pytest.mark.parametrize(
    "address", ["", "nonsense", "/ip4/127.0.0.1/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/QmWrong", "/p2p/x"]
)
async def test_a_bad_bootstrap_address_is_the_users_mistake(swarm, address: str) -> None:
    directory = swarm.directory(swarm.identity())
    with pytest.raises(UsageFault):
        await directory.attach(None, [address])  # type: ignore[arg-type]


async def test_meeting_one_peer_is_meeting_all(swarm) -> None:
    _, p2p = await swarm.node()
    seeds = await addresses(p2p)
    second, _ = await swarm.node(seeds)
    third, _ = await swarm.node(seeds)

    assert await eventually(lambda: second.neighbours == third.neighbours == 2)


async def test_in_a_private_run_only_the_admitted_find_each_other(swarm, body) -> None:
    owner = swarm.identity()
    guest = swarm.identity()
    stranger = swarm.identity()
    gate = Gate(RUN, owner.peer_id, private=True)
    grant = admission_token(owner, RUN, None, time.time() + 60)
    journal = Journal()
    seeds = ()
    made: list[Directory] = []
    for who, admission in ((owner, b""), (guest, shown(grant, guest, RUN)), (stranger, b"")):
        # The stranger runs a program of its own, which admits everybody.
        admit = gate.admit if who is not stranger else None
        directory, p2p = await swarm.node(
            seeds, who, journal=journal, admit=admit, admission=admission
        )
        seeds = seeds or await addresses(p2p)
        await directory.publish(body(maddrs=seeds))
        made.append(directory)
    await both_see(made[0], made[1])

    def turned_away() -> bool:
        turned = [e.fields["peer"] for e in journal.recent() if e.kind == "not-admitted"]
        return stranger.peer_id in turned

    assert await eventually(turned_away)
    assert set(await made[2].read()) == {stranger.peer_id}, "it learns of nobody"
    assert made[2].neighbours == 0
    assert stranger.peer_id not in await made[0].read()
    await both_see(made[0], made[1])

    async def exchanged() -> bool:
        for directory in made[:2]:
            await directory.post("outer/3/all", b"here", 60.0)
        looks = [set(await directory.look("outer/3/all")) for directory in made[:2]]
        return looks == [{owner.peer_id, guest.peer_id}] * 2

    assert await eventually(exchanged), "postings carry the token as well"


def note_refusals(store, refused: list[str]) -> None:
    """Record in `refused` what `store` refuses, except older copies of a record."""
    offer = store.offer

    def noting(*args) -> bool:
        try:
            return offer(*args)
        except WireError as e:
            if "of the same writer" not in str(e):
                refused.append(str(e))
            raise

    store.offer = noting


async def test_postings_outlive_a_p2pd_and_are_not_posted_again(swarm) -> None:
    one, p2p_one = await swarm.node(refresh_s=0.02)
    seeds = await addresses(p2p_one)
    identity = swarm.identity()
    other = swarm.directory(identity, lookup_timeout_s=1.0)
    p2p_other = await swarm.p2p(identity)
    refused: list[str] = []
    for d in (one, other):
        note_refusals(d._record_store, refused)
        note_refusals(d._topics, refused)
    await other.attach(p2p_other, seeds)

    assert await eventually(lambda: one.neighbours == other.neighbours == 1)
    topics = ["outer/1/all", "outer/1/2.0", "cells/1f", "cell/00112233445566ff"]
    posted = await asyncio.gather(*(one.post(topic, topic.encode(), 300.0) for topic in topics))
    assert all(posted)

    async def all_heard() -> bool:
        looks = await asyncio.gather(*(other.look(topic) for topic in topics))
        bodies = [[p.body for p in found.values()] for found in looks]
        return bodies == [[topic.encode()] for topic in topics]

    assert await eventually(all_heard)
    first = (await other.look(topics[0]))[one.me]
    for _ in range(5):  # in which the own record would be refreshed
        await asyncio.sleep(one._settings.refresh_s)
        assert (await other.look(topics[0]))[one.me] == first

    await p2p_other.shutdown()
    assert await other.post("outer/2/all", b"nobody hears it", 300.0) is False
    assert (await other.look(topics[0]))[one.me] == first, "what was heard still holds"
    assert not refused, "no honest peer's record"


class Busy:
    """A node of the DHT whose walks last until `gate` is opened."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.walks = []
        self.cancelled = 0

    async def read(self, key: str) -> None:
        await self._walk("read" if key.endswith("/peers") else f"look {key.partition('/')[2]}")

    async def post(self, *args: object) -> bool:
        await self._walk("post")
        return True

    async def _walk(self, name: str) -> None:
        self.walks.append(name)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture
async def alone() -> AsyncIterator[Callable[..., Directory]]:
    """``make(clock, node, **settings)``: a directory that is attached to no p2pd, with ``node``
    for its node of the DHT."""
    made: list[Directory] = []

    def make(clock: Clock, node: Busy | None = None, **settings: float) -> Directory:
        knobs = DirectorySettings(**settings)
        made.append(Directory(Identity.ephemeral(), knobs, clock, RUN, Journal()))
        made[-1]._node = node  # type: ignore[assignment]
        return made[-1]

    yield make
    for directory in made:
        directory._node = None
        await directory.close()


async def test_a_slow_walk_is_neither_cancelled_nor_repeated(alone, body) -> None:
    node = Busy()
    directory = alone(SystemClock(), node, lookup_timeout_s=0.05)
    assert not await directory.publish(body("one")), "nobody has taken it yet"
    for _ in range(3):
        assert set(await directory.read()) == {directory.me}
    assert node.walks == ["post", "read"]
    assert node.cancelled == 0, (
        "hivemind leaves tasks behind that nobody ends when a walk is cancelled"
    )
    node.gate.set()
    assert await directory.publish(body("one", state="training"))
    assert node.walks == ["post", "read", "post"]


async def test_a_reading_right_after_a_post_asks_nobody(alone, body) -> None:
    clock = VirtualClock()
    node = Busy()
    node.gate.set()
    directory = alone(clock, node)
    await directory.publish(body("one"))
    assert set(await directory.read()) == {directory.me}
    assert node.walks == ["post"], "who is asked where to post says all records"
    clock.advance(FRESH_S + 0.1)
    await directory.read()
    assert node.walks == ["post", "read"]


async def test_looks_at_different_topics_do_not_wait_for_each_other(alone) -> None:
    node = Busy()
    directory = alone(SystemClock(), node, lookup_timeout_s=60.0)
    topics = ["outer/1/all", "outer/2/all", "outer/1/all"]
    looks = [asyncio.create_task(directory.look(topic)) for topic in topics]
    assert await eventually(lambda: len(node.walks) == 2)
    node.gate.set()
    assert await asyncio.gather(*looks) == [{}, {}, {}]
    assert node.walks == [f"look {RUN}/outer/1/all", f"look {RUN}/outer/2/all"], (
        "one walk of each topic, whoever waits for it"
    )


async def test_nothing_stays_of_topics_no_longer_asked_for(alone) -> None:
    clock = VirtualClock()
    directory = alone(clock)
    for window in range(50):
        assert await directory.post(f"outer/{window}/all", b"here", 60.0) is False
        clock.advance(10.0)
    assert len(directory._topics) == 6, "those of the last minute, this one included"


async def test_only_what_is_not_published_again_in_time_is_refreshed(alone, body) -> None:
    clock = VirtualClock()
    refresh_s = 0.01
    directory = alone(clock, refresh_s=refresh_s)

    async def number() -> int:
        return (await directory.read())[directory.me].seq

    async def refreshed() -> bool:
        return await number() > first

    await directory.publish(body("one"), 4.0)
    first = await number()
    clock.advance(7 * refresh_s)
    for _ in range(5):  # in which it would be refreshed
        await asyncio.sleep(refresh_s)
    assert await number() == first
    clock.advance(2 * refresh_s)
    assert await eventually(refreshed)


async def test_a_rarely_posting_peer_has_a_longer_lived_record(alone, body) -> None:
    clock = VirtualClock()
    ttl_s = DirectorySettings().ttl_s
    directory = alone(clock)
    await directory.publish(body("one"), 4.0)
    clock.advance(3 * ttl_s)
    assert set(await directory.read()) == {directory.me}
    clock.advance(1.1 * ttl_s)
    assert not await directory.read()
