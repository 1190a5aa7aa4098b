"""A program on one host of the lab: reads its output, and ends it."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.networks.internet import Internet

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0


class Program:
    """A module of tests.reach that prints JSON lines, the last one with `what` "closed"."""

    def __init__(self, net: Internet, host: str, module: str, *words: str) -> None:
        pipe = subprocess.PIPE
        self._process = net.popen(
            host,
            [sys.executable, "-m", f"tests.reach.{module}", *words],
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

    def until(self, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return the next line of output that is `wanted`."""
        while True:
            try:
                said = self._said.get(timeout=WAIT_S)
            except queue.Empty:
                raise AssertionError(f"nothing more after {self.heard}") from None
            self.heard.append(said)
            if wanted(said):
                return said

    def write(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        """Close the program's standard input and return all its output; fails if it left anything
        behind."""
        self._process.stdin.close()
        left = self.until(lambda s: s["what"] == "closed")
        assert not any(left["left"].values()), left
        assert self._process.wait(WAIT_S) == 0
        assert not [s for s in self.heard if s["what"] in ("noise", "error")]
        return self.heard
