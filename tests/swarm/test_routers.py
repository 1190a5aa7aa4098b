"""Peers behind routers of five kinds, in network namespaces: every pair finds a way, and a swarm
outlives its relay."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.daemons.fleet import START_S, WORKING, Box
from testbed.daemons.forks import Forks
from testbed.networks.hosts import HostPeer
from testbed.networks.internet import Internet, miniupnpd, why_not
from testbed.swarms.routed import ROUTERS, boxed, daemon, founded, hosting, printed, to_it

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

PIECE = 256 << 10
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


def wait(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not in {LIMIT_S:.0f} s: {what}"
        time.sleep(0.3)


@contextlib.contextmanager
def lab(
    root: Path, forks: Forks, hosts: dict[str, str], families: tuple[int, ...] = (4,)
) -> Iterator[tuple[Internet, Box]]:
    with Internet(hosts, families) as net, boxed(root, forks) as box:
        yield net, box


def test_every_pair_of_routers_finds_a_way_and_moves_bytes(tmp_path: Path, forks: Forks) -> None:
    hosts = {f"{kind}-{side}": kind for kind in ROUTERS for side in "ab"}
    with Internet({"hub": "open", **hosts}) as net:
        hub = HostPeer(net, "hub", tmp_path / "hub", forks=forks)
        peers = {
            name: HostPeer(net, name, tmp_path / name, forks=forks, join=[hub.door])
            for name in hosts
        }
        pairs = [
            (peers[f"{a}-a"], peers[f"{b}-b"])
            for a, b in itertools.combinations_with_replacement(ROUTERS, 2)
        ]
        for one, other in pairs:
            # Each side finds its own relay: one may hear of the other's relay before it is heard
            # of.
            for near, far in ((one, other), (other, one)):
                wait(
                    f"a way from {near.name} to {far.name}",
                    lambda n=near, p=far.peer: "path" in n.do(do="way", peer=p),
                )
            got = [
                one.do(do="fetch", peer=other.peer, bytes=PIECE),
                other.do(do="fetch", peer=one.peer, bytes=PIECE),
            ]
            assert [g.get("bytes") for g in got] == [PIECE, PIECE], (one.name, other.name, got)
            assert got[0]["digest"] == got[1]["digest"]
        named = {peer.name: peer for pair in pairs for peer in pair}
        # No router can prevent the first result; two routers that map each destination differently
        # force the second.
        for kind, path in (("open", "direct"), ("symmetric", "relayed")):
            near = named[f"{kind}-a"]
            far = named[f"{kind}-b"]
            wait(
                f"a {path} way from {near.name} to {far.name}",
                lambda n=near, f=far, p=path: n.do(do="way", peer=f.peer).get("path") == p,
            )


def test_bytes_between_peers_behind_routers_go_past_libp2p(tmp_path: Path, forks: Forks) -> None:
    hosts = {"hub": "open", "home-a": "home", "home-b": "home", "far": "symmetric"}
    with Internet(hosts) as net:
        hub = HostPeer(net, "hub", tmp_path / "hub", forks=forks)
        peers = {"hub": hub}
        for name in ("home-a", "home-b", "far"):
            peers[name] = HostPeer(net, name, tmp_path / name, forks=forks, join=[hub.door])
        pairs = {
            ("hub", "home-a"): "reversed",
            ("home-a", "home-b"): "punched",
            ("home-a", "far"): "relayed",
        }
        for (near, far), path in pairs.items():
            here = peers[near]
            there = peers[far]

            def goes_past(here: HostPeer = here, there: HostPeer = there, path: str = path) -> bool:
                way = here.do(do="way", peer=there.peer)
                return (way.get("path"), way.get("bypass")) == (path, True)

            wait(f"{path} past libp2p", goes_past)
            got = here.do(do="fetch", peer=there.peer, bytes=PIECE)
            assert (got.get("bytes"), got.get("path")) == (PIECE, path)


def test_machines_with_the_same_nine_bridges_meet_on_the_lan(tmp_path: Path, forks: Forks) -> None:
    """Each machine has more bridges for containers than a peer may announce addresses. Their
    addresses sort before the LAN's and are the same on both machines."""
    with Internet({"one": "lan", "two": "lan"}) as net:
        for name in ("one", "two"):
            net.add_bridges(name, 9)
        one = HostPeer(net, "one", tmp_path / "one", forks=forks)
        assert f"/ip4/{net['one'].address}/tcp/" in one.door
        two = HostPeer(net, "two", tmp_path / "two", forks=forks, join=[one.door])
        wait("a way", lambda: two.do(do="way", peer=one.peer).get("path") == "direct")
        wait("its record", lambda: two.peer in one.do(do="look")["others"])
        wait("a way back", lambda: one.do(do="way", peer=two.peer).get("path") == "direct")


def test_a_swarm_behind_routers_outlives_its_rendezvous(tmp_path: Path, forks: Forks) -> None:
    hosts = {"hub": "open", "relay": "open", "ends": "home", "one": "symmetric", "two": "cgnat"}
    with lab(tmp_path, forks, hosts) as (net, box):
        file, _ = founded(box, stages=2)
        hub = daemon(box, net, "hub", "bootstrap", "--swarm", str(file))
        box.wait(
            "the rendezvous",
            lambda: hub.status().healthy and "tutti join" in hub.said(),
            START_S,
            (hub,),
        )
        invite = printed(hub)
        relay = daemon(box, net, "relay", "bootstrap", "--swarm", str(file), "--join", invite)
        box.wait("the second relay", lambda: relay.status().healthy, START_S, (relay,))
        roles = {"ends": ("--role", "ends"), "one": ("--stage", "1"), "two": ("--stage", "2")}
        members = [
            daemon(box, net, name, "join", invite, "--yes", *words) for name, words in roles.items()
        ]
        for peer in members:
            box.wait(f"{peer.label} to host", lambda p=peer: hosting(p), START_S, (peer,))
        wait("three epochs", lambda: min(p.status().epoch for p in members) >= 3)
        one = members[1]
        two = members[2]
        wait("the relayed way", lambda: to_it(one, two.key) == "relayed")

        before = min(p.status().epoch for p in members)
        hub.kill()
        wait(
            "three more epochs over the other relay",
            lambda: min(p.status().epoch for p in members) >= before + 3,
        )
        wait("the other relay's way", lambda: to_it(one, two.key) == "relayed")

        if miniupnpd() is None:
            pytest.skip("all but the port that a router maps: miniupnpd is not installed")
        net.map_ports("ends", ["upnp"])
        wait("the mapped port to be used", lambda: to_it(one, members[0].key) == "mapped")
        before = min(p.status().epoch for p in members)
        wait(
            "an epoch over the mapped port", lambda: min(p.status().epoch for p in members) > before
        )


def test_two_machines_with_ipv6_only_train_together(tmp_path: Path, forks: Forks) -> None:
    with lab(tmp_path, forks, {"one": "lan", "two": "lan"}, (6,)) as (net, box):
        founder = daemon(box, net, "one", "start")
        box.wait(
            "the founder to train alone",
            lambda: founder.status().epoch >= 1,
            2 * START_S,
            (founder,),
        )
        joiner = daemon(box, net, "two", "join", printed(founder), "--yes")
        box.wait("the joiner to host", lambda: hosting(joiner), 2 * START_S, (joiner,))
        wait("an epoch with both", lambda: joiner.status().state in WORKING)
        wait("the direct way", lambda: to_it(joiner, founder.key) == "direct")
