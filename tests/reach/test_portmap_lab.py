"""The mapper behind miniupnpd in network namespaces: every way alone, and one that comes late."""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.internet import Internet, why_not

ROOT = Path(__file__).parents[2]
PORTS = ["tcp:31337", "udp:31337", "tcp:31338"]
HOW = {"upnp": "UPnP", "natpmp": "NAT-PMP", "pcp": "PCP"}
CALL = """
import socket, sys
print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(9).decode())
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if shutil.which("miniupnpd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
        pytest.skip("miniupnpd is not installed")
    if why := why_not():
        pytest.skip(why)


class Mapper:
    """The mapper on host "a", and what it says."""

    def __init__(self, net: Internet) -> None:
        self.process = net.popen(
            "a",
            [sys.executable, str(ROOT / "tests/reach/mapper_process.py"), *PORTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)

    def until(self, true: Callable[[dict[str, Any]], object], within_s: float) -> dict[str, Any]:
        """The first state it tells that is so."""
        deadline, said = time.monotonic() + within_s, {}
        while True:
            try:
                said = json.loads(self._lines.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                pytest.fail(f"not within {within_s} s; the last it said: {said}")
            if true(said):
                return said

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.until(lambda said: "closed" in said, 10)
        assert self.process.wait(10) == 0


@pytest.fixture
def net() -> Iterator[Internet]:
    with Internet({"a": "home", "hub": "open"}) as made:
        yield made


def rules(net: Internet) -> int:
    """How many ports the router sends inside."""
    listed = ["ip", "netns", "exec", net["a"].router, "nft", "list", "table", "inet", "upnp"]
    done = subprocess.run(listed, capture_output=True, text=True, check=True)
    return done.stdout.count("dnat ip to")


def reached(net: Internet, mappings: list[list[Any]]) -> bool:
    """Whether a client on the hub reaches every TCP port through what the router says."""
    outside = [(host, str(port)) for name, _, host, port, _ in mappings if name == "tcp"]
    said = [net.run("hub", [sys.executable, "-c", CALL, *to]).stdout.strip() for to in outside]
    return said == ["here", "here"]


@pytest.mark.parametrize("way", HOW)
def test_a_way_alone(net: Internet, way: str) -> None:
    net.map_ports("a", [way])
    mapper = Mapper(net)
    said = mapper.until(lambda said: said["mappings"] and len(said["tried"]) == 3, 30)
    assert [m[4] for m in said["mappings"]] == [HOW[way]] * 3
    assert {m[2] for m in said["mappings"]} == {net["a"].public}
    assert [name for name, why in said["tried"].items() if not why] == [HOW[way]]
    assert "is used" not in str(said["tried"]), "the router offers this way alone"
    assert reached(net, said["mappings"])
    assert rules(net) == 3
    mapper.close()
    assert rules(net) == 0


def test_a_service_that_comes_up_later(net: Internet) -> None:
    mapper = Mapper(net)
    said = mapper.until(lambda said: len(said["tried"]) == 3, 30)
    assert all(said["tried"].values())
    net.map_ports("a")
    said = mapper.until(lambda said: said["mappings"], 30)
    assert {m[4] for m in said["mappings"]} == {"PCP"}
    assert reached(net, said["mappings"])
    mapper.close()
