"""Discovery on a private segment of hosts in namespaces: IPv4 only, IPv6 only; both loops."""

from collections.abc import Iterator
from typing import Any

import pytest

from node.identity.keys import peer_id_of
from testbed.networks.internet import Internet, why_not
from tests.reach.lan_host import PORT, RUN
from tests.reach.program import Program

ANNA, CARL = (peer_id_of(bytes([n]) * 32) for n in (1, 2))


def until_there(program: Program, *peers: str) -> None:
    program.until(lambda s: s["what"] == "there" and s["peers"] == sorted(peers))


def until_event(program: Program, kind: str) -> dict[str, Any]:
    return program.until(lambda s: s["what"] == "event" and s["kind"] == kind)


@pytest.fixture(params=[(4, "uvloop", "asyncio"), (6, "asyncio", "uvloop")], ids=["ipv4", "ipv6"])
def lan(request: pytest.FixtureRequest) -> Iterator[tuple[Internet, int, str, str]]:
    if why := why_not():
        pytest.skip(why)
    family, one_loop, other_loop = request.param
    with Internet(dict.fromkeys(("anna", "ben", "carl"), "lan"), (family,)) as net:
        yield net, family, one_loop, other_loop


def test_peers_of_a_lan_are_found_dialled_and_seen_to_leave(lan):
    net, family, one_loop, other_loop = lan
    anna = Program(net, "anna", "lan_host", one_loop, "announce", "1")
    until_event(anna, "lan-announced")
    place = net["anna"]
    address = f"/ip{family}/{place.address or place.address6}/tcp/{PORT}/p2p/{ANNA}"

    for host in ("ben", "anna"):  # from elsewhere, and from the host itself
        heard = Program(net, host, "lan_host", other_loop, "look", "10").end()
        connected = [s for s in heard if s["what"] == "connected"]
        assert [(s["address"], s["peer"], s["run"]) for s in connected] == [(address, ANNA, RUN)]

    ben = Program(net, "ben", "lan_host", other_loop, "browse")
    until_there(ben, ANNA)
    carl = Program(net, "carl", "lan_host", one_loop, "announce", "2")
    until_there(ben, ANNA, CARL)
    carl.write("renamed")
    ben.until(lambda s: s["what"] == "found" and (s["peer"], s["name"]) == (CARL, "renamed"))
    anna.end()
    until_there(ben, CARL)

    net.run("carl", ["ip", "link", "set", "eth0", "down"])
    assert until_event(carl, "lan-unavailable")["level"] == "info"
    net.run("carl", ["ip", "link", "set", "eth0", "up"])
    if family == 6:  # which an interface loses when it goes down
        six = f"{net['carl'].address6}/64"
        net.run("carl", ["ip", "addr", "replace", six, "dev", "eth0", "nodad"])
    until_event(carl, "lan-announced")
    complaints = [s for s in carl.end() if s["what"] == "event" and s["kind"] == "log"]
    assert complaints, "the goodbye could not be sent"
    assert {s["level"] for s in complaints} == {"debug"}
    ben.end()
