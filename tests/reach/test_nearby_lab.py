"""Discovery on a private segment of hosts in namespaces: IPv4 only, IPv6 only; both loops."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.internet import Internet, why_not
from node.identity.peers import peer_id_of
from tests.reach.lan_host import PORT, RUN

WAIT_S = 15.0
ROOT = Path(__file__).parents[2]
ANNA, CARL = (peer_id_of(bytes([n]) * 32) for n in (1, 2))


class Program:
    """lan_host.py on one host: what it says, and a way to end it."""

    def __init__(self, net: Internet, host: str, *words: str) -> None:
        command = [sys.executable, "-m", "tests.reach.lan_host", *words]
        pipe = subprocess.PIPE
        self._process = net.popen(
            host,
            command,
            cwd=ROOT,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self.heard: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            try:
                self._said.put(json.loads(line))
            except ValueError:
                self._said.put({"what": "noise", "text": line})

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next thing said that is ``wanted``."""
        while True:
            try:
                said = self._said.get(timeout=WAIT_S)
            except queue.Empty:
                raise AssertionError(f"nothing more after {self.heard}") from None
            self.heard.append(said)
            if wanted(said):
                return said

    def until_there(self, *peers: str) -> None:
        self.until(lambda s: s["what"] == "there" and s["peers"] == sorted(peers))

    def until_event(self, kind: str) -> dict[str, Any]:
        return self.until(lambda s: s["what"] == "event" and s["kind"] == kind)

    def write(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        """Close its standard input; all it said, after a look at what it left behind."""
        self._process.stdin.close()
        left = self.until(lambda s: s["what"] == "closed")
        assert (left["tasks"], left["threads"], left["handlers"]) == ([], [], [])
        assert self._process.wait(WAIT_S) == 0
        assert not [s for s in self.heard if s["what"] in ("noise", "error")]
        return self.heard


@pytest.fixture(params=[(4, "uvloop", "asyncio"), (6, "asyncio", "uvloop")], ids=["ipv4", "ipv6"])
def lan(request: pytest.FixtureRequest) -> Iterator[tuple[Internet, int, str, str]]:
    if why := why_not():
        pytest.skip(why)
    family, one_loop, other_loop = request.param
    with Internet(dict.fromkeys(("anna", "ben", "carl"), "lan"), (family,)) as net:
        yield net, family, one_loop, other_loop


def test_peers_of_a_lan_are_found_dialled_and_seen_to_leave(lan):
    net, family, one_loop, other_loop = lan
    anna = Program(net, "anna", one_loop, "announce", "1")
    anna.until_event("lan-announced")
    place = net["anna"]
    address = f"/ip{family}/{place.address or place.address6}/tcp/{PORT}/p2p/{ANNA}"

    for host in ("ben", "anna"):  # from elsewhere, and from the host itself
        heard = Program(net, host, other_loop, "look", "10").end()
        connected = [s for s in heard if s["what"] == "connected"]
        assert [(s["address"], s["peer"], s["run"]) for s in connected] == [(address, ANNA, RUN)]

    ben = Program(net, "ben", other_loop, "browse")
    ben.until_there(ANNA)
    carl = Program(net, "carl", one_loop, "announce", "2")
    ben.until_there(ANNA, CARL)
    carl.write("renamed")
    ben.until(lambda s: s["what"] == "found" and (s["peer"], s["name"]) == (CARL, "renamed"))
    anna.end()
    ben.until_there(CARL)

    net.run("carl", ["ip", "link", "set", "eth0", "down"])
    assert carl.until_event("lan-unavailable")["level"] == "info"
    net.run("carl", ["ip", "link", "set", "eth0", "up"])
    if family == 6:  # which an interface loses when it goes down
        six = f"{net['carl'].address6}/64"
        net.run("carl", ["ip", "addr", "replace", six, "dev", "eth0", "nodad"])
    carl.until_event("lan-announced")
    complaints = [s for s in carl.end() if s["what"] == "event" and s["kind"] == "log"]
    assert complaints, "the goodbye could not be sent"
    assert {s["level"] for s in complaints} == {"debug"}
    ben.end()
