"""The HTTP side of ``tutti web``: the page and its files, the stream of its document, the entrance,
and beside them the endpoint of ``tutti serve`` for the chat.

Enters: HTTP requests, each checked at the door. Leaves: files of this package, documents, events.
Never: a change to the daemon.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.serve.loopback import LoopbackOnly
from node.web.door import Door, Entry
from node.web.hub import Hub

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
}
LIBRARY = ("uPlot.iife.min.js", "uPlot.min.css", "uPlot-LICENSE.txt")
"""Files of the chart library."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content security policy of every answer: nothing inline, nothing from elsewhere, no frames."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
MOST_FORM = 4096
"""Bytes of the form at the entrance."""
FORM_S = 10.0
SEND_S = 30.0
"""Seconds within which a viewer must take an event; a viewer that does not is hung up on."""
BUSY_S = 15
"""Seconds after which a viewer that found no place may ask again."""
ENTRANCE = ("/enter", "/page.css", "/icon.svg", "/entrance.html")
"""Paths that need no token."""
LATER = "too many wrong tokens: wait a minute"


class Page:
    """The routes. ``token``: what visitors must know; empty: none, for a server that only programs
    of this machine reach. ``api``: the endpoint of ``tutti serve``, None without a chat."""

    def __init__(
        self, hub: Hub, token: str = "", port: int = 0, api: ASGIApp | None = None
    ) -> None:
        self._hub = hub
        self._token = token
        self._api = api
        self._door = Door(token, f"tutti-web-{port}")
        self._files = {file.name: file.read_bytes() for file in STATIC.iterdir()}

    def app(self) -> Starlette:
        """The application for a server of ASGI."""
        middleware = [Middleware(_Headers)]
        if not self._token:
            middleware.append(Middleware(LoopbackOnly))
        middleware.append(Middleware(_Guard, door=self._door, token=self._token))
        routes: list[BaseRoute] = [
            Route("/", self._file, methods=["GET"]),
            Route("/document.json", self._document, methods=["GET"]),
            Route("/stream", self._stream, methods=["GET"]),
            Route("/enter", self._enter, methods=["POST"]),
            Route("/{name}", self._file, methods=["GET"]),
        ]
        if self._api is not None:
            routes.append(Mount("/", self._api))
        return Starlette(routes=routes, middleware=middleware)

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content = self._files.get(name)
        if content is None:
            return PlainTextResponse("there is no such page", 404)
        return Response(content, media_type=KINDS[Path(name).suffix])

    async def _document(self, request: Request) -> Response:
        return JSONResponse(await self._hub.now())

    async def _stream(self, request: Request) -> Response:
        if self._hub.crowded:
            text = "as many viewers as there may be are here"
            return PlainTextResponse(text, 503, {"retry-after": str(BUSY_S)})
        return _Events(self._hub.stream(), media_type="text/event-stream")

    async def _enter(self, request: Request) -> Response:
        token = await _token(request)
        entry = self._door.enter(token, _client(request.scope), time.monotonic())
        if entry is Entry.RIGHT:
            return RedirectResponse("/", 303, {"set-cookie": self._door.cookie()})
        if entry is Entry.LATER:
            return PlainTextResponse(LATER, 429)
        return Response(self._files["entrance.html"], 401, media_type=KINDS[".html"])


class _Events(StreamingResponse):
    """The stream of one viewer. It ends when the viewer hangs up, or takes nothing for
    :data:`SEND_S` seconds."""

    async def stream_response(self, send: Send) -> None:
        """As starlette's, with a time for every part, and an end of the events with it."""

        async def in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        async with contextlib.AsyncExitStack() as held:
            held.push_async_callback(self.body_iterator.aclose)  # pyright: ignore
            held.enter_context(contextlib.suppress(TimeoutError))
            await super().stream_response(in_time)


class _Headers:
    """Puts :data:`HEADERS` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, with_headers)


class _Guard:
    """Lets in who may enter. Others get the entrance in place of the page, and 401 in place of
    everything else. A request that another site's page makes is refused."""

    def __init__(self, app: ASGIApp, door: Door, token: str) -> None:
        self._app = app
        self._door = door
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        if _of_another_site(headers, scope["method"]):
            refused = PlainTextResponse("pages of other sites may not ask this", 403)
            await refused(scope, receive, send)
            return
        shown = headers.get("authorization", "")
        cookies = headers.get("cookie", "")
        entry = self._door.admits(shown, cookies, _client(scope), time.monotonic())
        known = entry is Entry.RIGHT
        if not known and path == "/":
            await RedirectResponse("/entrance.html", 303)(scope, receive, send)
            return
        if entry is Entry.LATER and path not in ENTRANCE:
            await PlainTextResponse(LATER, 429)(scope, receive, send)
            return
        if not known and path not in ENTRANCE:
            text = "give the token of  tutti web --token"
            await PlainTextResponse(text, 401)(scope, receive, send)
            return
        if known and self._token:
            # The endpoint of the chat looks at the token itself.
            own = (b"authorization", f"Bearer {self._token}".encode())
            others = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
            scope = {**scope, "headers": [*others, own]}
        await self._app(scope, receive, send)


def _client(scope: Scope) -> str:
    """The address that a request came from, "" if the server does not know it."""
    return (scope.get("client") or ("", 0))[0]


def _of_another_site(headers: Headers, method: str) -> bool:
    """Return True for a request that a page of another site makes, but for a link that is
    followed. Only browsers say so, and only they make such requests."""
    if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
        return False
    return method != "GET" or headers.get("sec-fetch-mode") != "navigate"


async def _token(request: Request) -> str:
    """The token of the form; "" for a form that is too large, late, or no form."""
    raw = bytearray()
    with contextlib.suppress(TimeoutError, ClientDisconnect, ValueError):
        async with asyncio.timeout(FORM_S):
            async for part in request.stream():
                raw += part
                if len(raw) > MOST_FORM:
                    return ""
        fields = parse_qs(raw.decode("ascii"), max_num_fields=8)
        return fields.get("token", [""])[0]
    return ""
