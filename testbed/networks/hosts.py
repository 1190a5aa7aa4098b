"""Processes of :mod:`testbed.networks.reach_peer` on the hosts of an
:class:`~testbed.networks.internet.Internet`, spoken to by JSON lines."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from testbed.daemons.fleet import REPOSITORY
from testbed.daemons.forks import Forks
from testbed.networks.internet import Internet

PROGRAM = "testbed.networks.reach_peer"


class HostPeer:
    """One peer without a model. ``started``: seconds of the steady clock when its process began to
    run. ``forks``: the process that forks it; None: it is started as any program."""

    def __init__(
        self,
        net: Internet,
        name: str,
        home: Path,
        host: str = "",
        forks: Forks | None = None,
        **asked: Any,
    ) -> None:
        self.name = name
        self.home = home
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        words = [json.dumps({"home": str(home), **asked})]
        self.started = time.monotonic()
        if forks is not None:
            log = home / "stderr"
            namespace = net[host or name].namespace
            self.process = forks.talk(PROGRAM, words, log, namespace)
            net.ends(self.process)
        else:
            self.process = self._run(net, host or name, words)
        self._facts: dict[str, Any] = {}

    def _run(self, net: Internet, host: str, words: list[str]) -> subprocess.Popen[Any]:
        with (self.home / "stderr").open("wb") as err:
            return net.popen(
                host,
                [sys.executable, "-m", PROGRAM, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=REPOSITORY,
            )

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the program printed when it ran. Raises RuntimeError when it ended
        instead."""
        if not self._facts:
            self._facts = self._read()
        return self._facts

    @property
    def peer(self) -> str:
        return str(self.facts["peer"])

    @property
    def door(self) -> str:
        """Its first TCP multiaddr."""
        return next(a for a in self.facts["addresses"] if "/tcp/" in a)

    def tell(self, **asked: Any) -> None:
        """Send a command; :meth:`hear` its answer later."""
        assert self.facts
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        return self._read()

    def do(self, **asked: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.tell(**asked)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {(self.home / 'stderr').read_text()[-2000:]}")
        return json.loads(line)
