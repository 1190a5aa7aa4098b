"""The endpoint of ``tutti serve`` on loopback, in front of a model that says the letters of a
text."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn

from node.core.errors import LocalFault
from node.serve.app import Endpoint
from node.serve.command import listen
from protos.control_pb2 import GenerateRequest, Missing, Piece


class Letters:
    """A daemon that answers with the last message, or the prompt, letter by letter, each a token.

    ``fault``: raised before the letter of that number. ``missing``: stages left out from a
    letter on. ``gate``: closed, answers wait.
    """

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.fault: tuple[int, LocalFault] | None = None
        self.missing: tuple[int, Missing] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Semaphore(0)
        self.ended = asyncio.Event()
        self.under_way = 0

    async def model(self) -> str:
        return "letters"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Piece]:
        self.asked.append(request)
        self.under_way += 1
        self.arrived.release()
        said = request.messages[-1].content if request.messages else request.prompt
        try:
            await self.gate.wait()
            for i, letter in enumerate(said):
                if self.fault is not None and self.fault[0] == i:
                    raise self.fault[1]
                if self.missing is not None and self.missing[0] == i:
                    yield Piece(missing=self.missing[1])
                if i == request.max_tokens:
                    yield Piece(last=True, finish="length")
                    return
                yield Piece(text=letter, token=ord(letter), prompt_tokens=7 if i == 0 else 0)
            yield Piece(last=True, finish="stop")
        finally:
            self.under_way -= 1
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(daemon: Letters, token: str = "") -> AsyncIterator[str]:
    """The base URL of a server in this loop."""
    sock = listen("127.0.0.1", 0, token)
    app = Endpoint(daemon, token).app()  # pyright: ignore[reportArgumentType]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    server.install_signal_handlers = lambda: None  # pyright: ignore
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await running


@pytest.fixture
async def letters() -> Letters:
    return Letters()


@pytest.fixture
async def url(letters: Letters) -> AsyncIterator[str]:
    async with serving(letters) as where:
        yield where
