"""What the named regressions need: real peers on loopback, a proxy that goes silent, a machine of
the leader."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import pytest

from node.identity.keys import Identity
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.handshake import Facts
from node.transport.service import Transport
from node.transport.settings import TransportSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def peers() -> AsyncIterator[Callable[..., Any]]:
    """``make(**settings)`` gives a started Transport with its own p2pd."""
    made: list[Transport] = []

    async def make(**settings: Any) -> Transport:
        transport = Transport(
            Identity.ephemeral(),
            TransportSettings(**{"host": "127.0.0.1", **settings}),
            Journal(),
            Metrics(),
            lambda: Facts("a" * 64, "test", "0"),
            lambda peer, hello: None,
        )
        made.append(transport)
        await transport.start()
        return transport

    yield make
    for transport in made:
        await transport.close()


class OneWay:
    """A TCP proxy on loopback that can stop delivering replies without closing anything."""

    def __init__(self, port: int) -> None:
        self._to, self.port, self.silent = port, 0, False
        self._pumps: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._pumps.add(asyncio.ensure_future(self._pump(reader, far_writer, lambda: False)))
        self._pumps.add(asyncio.ensure_future(self._pump(far_reader, writer, lambda: self.silent)))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, silent: Callable[[], bool]
    ) -> None:
        try:
            while piece := await source.read(1 << 16):
                if not silent():
                    sink.write(piece)
                    await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@pytest.fixture
async def one_way() -> AsyncIterator[tuple[int, OneWay]]:
    """A free port, and a proxy that leads to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    proxy = OneWay(port)
    await proxy.start()
    yield port, proxy
    await proxy.close()


@pytest.fixture
def apart() -> Callable[[str], str]:
    """Run this code in a process of its own; what it printed. Fails when the process does not end
    by itself in peace."""

    def run(code: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        assert done.returncode == 0, f"ended with {done.returncode}\n{done.stderr[-2000:]}"
        return done.stdout

    return run
