"""The page on loopback, in front of a canned daemon."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn

from node.core.errors import LocalFault
from node.serve.app import Endpoint
from node.serve.command import listen
from node.web.app import Page
from node.web.hub import Hub, PageOffer
from protos import control_pb2 as pb
from protos.ask_pb2 import PeersAnswer
from testbed.fakes.canned_crowd import CannedCrowd
from testbed.fakes.page_patch import merged


class Canned:
    """:class:`node.web.hub.Watched` in this process. ``fault``: raised instead of any answer.
    ``stands_at``: letters after which an answer stands still, 0 for none; ``missing``: stages
    without which answers are made."""

    def __init__(self, window: CannedCrowd, home: str) -> None:
        self.window = window
        window.said.home = home
        self.fault: LocalFault | None = None
        self.asked = 0
        self.prompts: list[str] = []
        self.requests: list[pb.GenerateRequest] = []
        self.stands_at = 0
        self.missing: pb.Missing | None = None

    async def model(self) -> str:
        return "crowd"

    async def status(self) -> pb.Snapshot:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        return self.window.said

    async def peers(self) -> PeersAnswer:
        return self.window.seen

    async def history(self, after: int, edition: int) -> pb.RunHistory:
        return await self.window.history(after, edition)

    async def news(self, last: int) -> list[pb.Event]:
        return [pb.Event(at=1.0, level="info", text=e.text) for e in self.window.journal.recent(9)]

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Piece, None]:
        self.prompts.append(request.prompt or request.messages[-1].content)
        self.requests.append(request)
        if self.missing is not None:
            yield pb.Piece(missing=self.missing)
        letters = 0
        async for piece in self.window.generate(request):
            yield piece
            letters += len(piece.text)
            if letters == self.stands_at:
                await asyncio.Event().wait()


@pytest.fixture
async def canned(tmp_path) -> Canned:
    return Canned(CannedCrowd(9, 1, 3), str(tmp_path))


@pytest.fixture
async def hub(canned: Canned) -> AsyncIterator[Hub]:
    made = Hub(canned, PageOffer(prompt="The ", chat=True, tick_s=0.02))
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def serving(hub: Hub, canned: Any, token: str = "", port: int = 0) -> AsyncIterator[str]:
    """The base URL of a server in this loop. ``port``: 0 for a free one."""
    sock = listen("127.0.0.1", port, token)
    port = sock.getsockname()[1]
    app = Page(hub, token, port, Endpoint(canned, token).app()).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    server.install_signal_handlers = lambda: None  # pyright: ignore
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await hub.close()
        server.should_exit = True
        await running


@pytest.fixture
async def url(hub: Hub, canned: Canned) -> AsyncIterator[str]:
    async with serving(hub, canned) as where:
        yield where


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url) as made:
        yield made


class Viewer:
    """Reads a stream as the page does, and keeps the ``document``."""

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts
        self._rest = ""
        self.document: dict[str, Any] = {}
        self.kinds: list[str] = []

    async def event(self) -> dict[str, Any]:
        """The value of the next event, taken into the document."""
        async with asyncio.timeout(60):
            while True:
                name, found = self._next()
                if name:
                    break
                part = await anext(self._parts)
                self._rest += part if isinstance(part, str) else part.decode()
        self.kinds.append(name)
        value = json.loads(found)
        self.document = value if name == "whole" else merged(self.document, value)
        return value

    async def until(self, epoch: int) -> None:
        """Read until the document is of that epoch."""
        while not self.document or self.document["run"]["epoch"] < epoch:
            await self.event()

    def _next(self) -> tuple[str, str]:
        while "\n\n" in self._rest:
            block, _, self._rest = self._rest.partition("\n\n")
            lines = block.split("\n")
            if lines[0].startswith("event: "):
                return lines[0].removeprefix("event: "), lines[1].removeprefix("data: ")
        return "", ""
