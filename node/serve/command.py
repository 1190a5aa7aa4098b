"""``tutti serve``: a server for the clients of the OpenAI API beside a running daemon."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvicorn

from node.control.client import as_fault
from node.control.sockets import CHANNEL
from node.core.errors import ExitCode, UsageFault
from node.core.home import socket_target
from node.reach.interfaces import taken
from node.serve.app import Endpoint
from node.serve.loopback import is_loopback
from protos import control_pb2
from protos.control_pb2_grpc import ControlStub

TEXT_S = 600.0
"""For one whole answer."""
STATUS_S = 10.0
"""For the name of the run."""
STOP_S = 2.0
"""Seconds that open answers have when the server ends."""


class ControlDaemon:
    """The daemon behind a control socket, asked in an event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel = grpc.aio.insecure_channel(socket_target(path), options=CHANNEL)
        self._stub: Any = ControlStub(self._channel)

    async def model(self) -> str:
        """As :meth:`node.serve.app.ServedDaemon.model`."""
        try:
            snapshot = await self._stub.Status(control_pb2.StatusRequest(), timeout=STATUS_S)
        except grpc.aio.AioRpcError as error:
            raise as_fault(error, self._path) from error
        return snapshot.swarm.name or "tutti"

    async def generate(
        self, request: control_pb2.GenerateRequest
    ) -> AsyncGenerator[control_pb2.Piece, None]:
        """As :meth:`node.serve.app.ServedDaemon.generate`."""
        stream = self._stub.Generate(request, timeout=TEXT_S)
        try:
            async for piece in stream:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise as_fault(error, self._path) from error
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()


def listen(host: str, port: int, token: str, verb: str = "serve") -> socket.socket:
    """A socket that listens for ``tutti VERB``. Raises UsageFault for an address that others reach
    without a token and for a token that no header can carry, NetworkFault for an address that is
    taken."""
    if not token.isascii() or not token.isprintable() or token != token.strip():
        raise UsageFault(
            "the token has letters that a header cannot carry",
            "choose one of ASCII letters, digits and signs, without spaces at its ends",
        )
    if not token and not is_loopback(host):
        raise UsageFault(
            f"others can reach {host}, and no token is set",
            f"set one:  tutti {verb} --token TEXT  or the variable TUTTI_{verb.upper()}_TOKEN; or "
            "listen on 127.0.0.1",
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        made = socket.create_server(address[:2], family=family, backlog=512)
    except OSError as e:
        # The words of create_server repeat the address.
        why = e.strerror or str(e)
        if e.errno is not None and e.errno in errno.errorcode:
            why = os.strerror(e.errno)
        raise taken(host, port, "--port PORT", socket.SOCK_STREAM, why) from e
    return made


async def serve(path: Path, sock: socket.socket, token: str) -> ExitCode:
    """Answer on ``sock`` until the process is asked to end. ``path``: the control socket."""
    daemon = ControlDaemon(path)
    app = Endpoint(daemon, token).app()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(STOP_S),
    )
    try:
        await uvicorn.Server(config).serve(sockets=[sock])
    finally:
        await daemon.close()
    return ExitCode.OK
