"""The HTTP side of ``tutti serve``: requests of the OpenAI API, answered through the daemon.

Enters: HTTP requests. Leaves: documents and streams of events. Every request ends with an answer or
an error of the API; a client that hangs up ends its text at the daemon.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from node.core.errors import LocalFault
from node.core.tasks import Tasks
from node.serve.answers import ClientAnswer, error_document, fault_document
from node.serve.loopback import LoopbackOnly
from node.serve.requests import BadRequest, ClientRequest, read_chat, read_prompt
from protos.control_pb2 import GenerateRequest, Piece

T = TypeVar("T")
MOST_BODY = 512 << 10
"""Bytes of a request."""
BODY_S = 30.0
"""Seconds within which a request must be complete."""
LOOK_S = 1.0
"""Seconds between two looks for a client that has hung up."""


class ServedDaemon(Protocol):
    """The daemon, as this endpoint needs it."""

    async def model(self) -> str:
        """Name of the run. Raises LocalFault."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        """A text in pieces. Raises LocalFault."""
        ...


class Endpoint:
    """The routes. ``token``: what a client must show; empty: none, for a server that only programs
    of this machine reach."""

    def __init__(self, daemon: ServedDaemon, token: str = "") -> None:
        self._daemon, self._token = daemon, token

    def app(self) -> Starlette:
        """The application for a server of ASGI."""
        middleware: list[Middleware] = []
        if not self._token:
            middleware.append(Middleware(LoopbackOnly))
        return Starlette(
            routes=[
                Route("/v1/models", self._guarded(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/completions", self._guarded(self._complete), methods=["POST"]),
            ],
            middleware=middleware,
            exception_handlers={HTTPException: _refused},
        )

    def _guarded(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """``answer`` for clients that show the token, with its errors as errors of the API."""

        async def guarded(request: Request) -> Response:
            if not self._may(request):
                why = "give the token of  tutti serve --token  as the API key"
                return _error(401, why, "invalid_request_error", code="invalid_api_key")
            try:
                return await answer(request)
            except BadRequest as e:
                return _error(400, e.reason, "invalid_request_error", e.param)
            except UnicodeEncodeError:
                # JSON can escape half a character, and no other format holds one.
                why = "a text of the request is no Unicode: it has half a surrogate pair"
                return _error(400, why, "invalid_request_error")
            except LocalFault as e:
                status, body = fault_document(e)
                return JSONResponse(body, status)
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _may(self, request: Request) -> bool:
        shown = request.headers.get("authorization", "").encode()
        return not self._token or hmac.compare_digest(shown, f"Bearer {self._token}".encode())

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(await self._daemon.model())]})

    async def _one_model(self, request: Request) -> Response:
        name = await self._daemon.model()
        if request.path_params["name"] != name:
            why = f"no such model: this daemon serves {name}"
            return _error(404, why, "invalid_request_error", "model", "model_not_found")
        return JSONResponse(_model(name))

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat(await _body(request)), chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, read_prompt(await _body(request)), chat=False)

    async def _answer(self, request: Request, question: ClientRequest, *, chat: bool) -> Response:
        answer = ClientAnswer(await self._daemon.model(), chat)
        pieces = self._daemon.generate(question.generate)
        if not question.stream:
            await _while_connected(request, _collect(answer, pieces))
            return JSONResponse(answer.whole())
        # An impossible request fails before the first piece, so its error can be an HTTP status.
        first = await _while_connected(request, _next(pieces))
        events = _events(answer, first, pieces, question.with_usage)
        return StreamingResponse(events, media_type="text/event-stream")


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises BadRequest."""
    # A page of another site may send forms and plain text without asking, but no JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest("the content type must be application/json")
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                raw += part
                if len(raw) > MOST_BODY:
                    raise BadRequest(f"a request has at most {MOST_BODY:,} bytes")
    except TimeoutError:
        raise BadRequest(f"the request was not complete after {BODY_S:.0f} s") from None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRequest("the request is no JSON") from None
    if not isinstance(found, dict):
        raise BadRequest("the request is no JSON object")
    return found


async def _collect(answer: ClientAnswer, pieces: AsyncGenerator[Piece, None]) -> None:
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            answer.take(piece)


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece | None:
    """The first piece; None of an answer without any."""
    return await anext(pieces, None)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up. Raises
    ClientDisconnect."""
    tasks = Tasks("serve")
    task = tasks.spawn(work, "answer")
    try:
        while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        return task.result()
    finally:
        await tasks.close()


async def _events(
    answer: ClientAnswer, first: Piece | None, pieces: AsyncGenerator[Piece, None], with_usage: bool
) -> AsyncIterator[str]:
    """The answer as server-sent events. An error after the first piece is an event too."""
    async with contextlib.aclosing(pieces):
        try:
            for chunk in answer.first():
                yield _event(chunk)
            async for piece in _behind(first, pieces):
                if text := answer.take(piece):
                    yield _event(answer.delta(text))
        except LocalFault as e:
            yield _event(fault_document(e)[1])
            return
        for chunk in answer.last(with_usage):
            yield _event(chunk)
        yield "data: [DONE]\n\n"


async def _behind(first: Piece | None, pieces: AsyncGenerator[Piece, None]) -> AsyncIterator[Piece]:
    if first is not None:
        yield first
        async for piece in pieces:
            yield piece


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tutti"}


def _error(
    status: int, message: str, kind: str, param: str | None = None, code: str | None = None
) -> Response:
    return JSONResponse(error_document(message, kind, param, code), status)


async def _refused(request: Request, error: Exception) -> Response:
    """An unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"{request.method} {request.url.path}: {getattr(error, 'detail', 'failed')}"
    return _error(status, text, "invalid_request_error")
