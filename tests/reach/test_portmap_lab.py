"""The mapper behind miniupnpd in network namespaces: every way alone, and one that comes late."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.networks.internet import Internet, miniupnpd, why_not
from tests.reach.program import Program

PORTS = ["tcp:31337", "udp:31337", "tcp:31338"]
HOW = {"upnp": "UPnP", "natpmp": "NAT-PMP", "pcp": "PCP"}
CALL = """
import socket, sys
print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(9).decode())
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if miniupnpd() is None:
        pytest.skip("miniupnpd is not installed")
    if why := why_not():
        pytest.skip(why)


@pytest.fixture
def net() -> Iterator[Internet]:
    with Internet({"a": "home", "hub": "open"}) as made:
        yield made


def rules(net: Internet) -> int:
    """Number of ports that the router forwards."""
    listed = ["ip", "netns", "exec", net["a"].router, "nft", "list", "table", "inet", "upnp"]
    return subprocess.check_output(listed, text=True).count("dnat ip to")


def reached(net: Internet, mappings: list[list[Any]]) -> bool:
    """Return True if a client on the hub reaches both TCP ports at the mapped addresses."""
    outside = [(host, str(port)) for name, _, host, port, _ in mappings if name == "tcp"]
    said = [net.run("hub", [sys.executable, "-c", CALL, *to]).stdout.strip() for to in outside]
    return said == ["here", "here"]


@pytest.mark.parametrize("way", HOW)
def test_a_router_with_one_protocol_maps_all_ports(net: Internet, way: str) -> None:
    net.map_ports("a", [way])
    mapper = Program(net, "a", "mapper_process", *PORTS)
    said = mapper.until(lambda s: s.get("mappings") and len(s["tried"]) == 3)
    assert [m[4] for m in said["mappings"]] == [HOW[way]] * 3
    assert {m[2] for m in said["mappings"]} == {net["a"].public}
    assert [name for name, why in said["tried"].items() if not why] == [HOW[way]]
    assert "is used" not in str(said["tried"]), "the router offers this way alone"
    assert reached(net, said["mappings"])
    assert rules(net) == 3
    mapper.end()
    assert rules(net) == 0


def test_a_service_that_comes_up_later(net: Internet) -> None:
    mapper = Program(net, "a", "mapper_process", *PORTS)
    said = mapper.until(lambda s: len(s.get("tried", ())) == 3)
    assert all(said["tried"].values())
    net.map_ports("a")
    said = mapper.until(lambda s: s.get("mappings"))
    assert {m[4] for m in said["mappings"]} == {"PCP"}
    assert reached(net, said["mappings"])
    mapper.end()
