"""``tutti web``: the server of the page beside a running daemon, and the page as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from typing import Any

import grpc.aio
import uvicorn

from node.config import write_atomically
from node.control.client import as_fault
from node.core.errors import ExitCode, UsageFault, writing
from node.serve import command as serving
from node.serve.app import Endpoint
from node.serve.command import STATUS_S, STOP_S, ControlDaemon
from node.web.app import LIBRARY, POLICY, STATIC, Page
from node.web.hub import Hub, PageOffer
from node.web.view import for_strangers
from protos import ask_pb2, control_pb2

MOST_CONNECTIONS = 128
"""Connections to the server; others are answered with 503."""
FROZEN = "data.js"
"""File of an export with the document."""
OURS = b"globalThis.tuttiFrozen = "
"""Beginning of that file."""
PAGE = ("page.css", "page.js", "icon.svg", *LIBRARY)
"""Files of an export beside the page and the document."""
SITE_MODE = 0o644
"""Mode of the files of an export: a web server of another user may read them."""
MARK = "<!-- frozen -->"
"""Place in the page for what only an export has."""


def listen(host: str, port: int, token: str) -> socket:
    """As :func:`node.serve.command.listen`."""
    return serving.listen(host, port, token, "web")


class PageDaemon(ControlDaemon):
    """The daemon behind a control socket: :class:`node.web.hub.Watched`."""

    async def status(self) -> control_pb2.Snapshot:
        """The snapshot that ``tutti status`` shows."""
        return await self._ask(self._stub.Status, control_pb2.StatusRequest())

    async def peers(self) -> ask_pb2.PeersAnswer:
        """The peers that ``tutti peers`` shows."""
        return await self._ask(self._stub.Peers, control_pb2.PeersRequest())

    async def history(self, after: int, edition: int) -> control_pb2.RunHistory:
        """Epochs above ``after``, or all of them."""
        request = control_pb2.RunHistoryRequest(after=after, edition=edition)
        return await self._ask(self._stub.History, request)

    async def news(self, last: int) -> list[control_pb2.Event]:
        """The newest events, oldest first."""
        request = control_pb2.EventsRequest(last=last, level="info")
        stream = self._stub.Events(request, timeout=STATUS_S)
        try:
            return [event async for event in stream]
        except grpc.aio.AioRpcError as error:
            raise as_fault(error, self._path) from error
        finally:
            stream.cancel()

    async def _ask(self, call: Any, request: Any) -> Any:
        try:
            return await call(request, timeout=STATUS_S)
        except grpc.aio.AioRpcError as error:
            raise as_fault(error, self._path) from error


class _Server(uvicorn.Server):
    """A server that ends the streams of its viewers before it waits for its answers."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        await self._hub.close()
        await super().shutdown(sockets)


async def serve(
    path: Path, sock: socket, token: str, *, prompt: str, when: str, chat: bool
) -> ExitCode:
    """Show the page on ``sock`` until the process is asked to end. ``path``: the control socket;
    ``when``: one of :data:`node.web.hub.WHEN`."""
    daemon = PageDaemon(path)
    api = None
    if chat:
        api = Endpoint(daemon, token).app()
    hub = Hub(daemon, PageOffer(prompt=prompt, when=when, chat=chat))
    hub.begin()
    app = Page(hub, token, sock.getsockname()[1], api).app()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=int(STOP_S),
    )
    try:
        await _Server(config, hub).serve(sockets=[sock])
    finally:
        await hub.close()
        await daemon.close()
    return ExitCode.OK


async def export(path: Path, directory: Path, prompt: str) -> list[str]:
    """Write the page as it is now into ``directory``; returns the names of its files. Raises
    UsageFault for a directory with other files in it, LocalFault if the daemon does not answer."""
    _check_empty(directory)
    daemon = PageDaemon(path)
    hub = Hub(daemon, PageOffer(prompt=prompt, when="never", kept=True))
    try:
        document = await hub.now()
    finally:
        await hub.close()
        await daemon.close()
    if hub.latest.fault is not None:
        raise hub.latest.fault
    return freeze(for_strangers(document), directory)


def freeze(document: dict[str, Any], directory: Path) -> list[str]:
    """Write the page with this document. Opened from the disk it asks nobody for anything."""
    # A text inside of a text: whatever the names in it are, it is a literal and no program.
    literal = json.dumps(json.dumps(document, allow_nan=False))
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    policy = POLICY.replace("connect-src 'self'", "connect-src 'none'")
    policy = policy.replace("; frame-ancestors 'none'", "")  # which only a header may say
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<script src="{FROZEN}" defer></script>'
    )
    # The document comes first: a directory with it can be exported to again.
    files = {
        FROZEN: OURS + f"JSON.parse({literal});\n".encode(),
        "index.html": html.replace(MARK, head).encode(),
    }
    files |= {name: (STATIC / name).read_bytes() for name in PAGE}
    with writing(directory, "choose another directory with  --export DIR"):
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(directory / name, content, SITE_MODE)
    return sorted(files)


def _check_empty(directory: Path) -> None:
    """Raises UsageFault if files would be lost in a directory that no export made."""
    if not directory.exists() or _is_export(directory / FROZEN):
        return
    if not directory.is_dir() or _names(directory):
        raise UsageFault(f"{directory} has other files in it", "name a new directory")


def _is_export(file: Path) -> bool:
    """Return True for the document of an export. Raises LocalFault if it cannot be read."""
    if file.is_symlink() or not file.is_file():
        return False
    with writing(file, "choose another directory with  --export DIR"), file.open("rb") as opened:
        return opened.read(len(OURS)) == OURS


def _names(directory: Path) -> Sequence[str]:
    return [file.name for file in directory.iterdir()]
