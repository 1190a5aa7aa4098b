"""Requests that programs of this machine make. Enters: the header Host. Never: a request to a name
that somebody's server of names has point at this machine."""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]*)?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """True for an address that only programs of this machine reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LoopbackOnly:
    """Refuses requests whose Host is not this machine. A web page may have its own name resolve to
    this machine; its requests carry that name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and not _names_loopback(Headers(scope=scope).get("host", "")):
            answer = PlainTextResponse("requests must name this machine, as 127.0.0.1 does", 400)
        await answer(scope, receive, send)


def _names_loopback(host: str) -> bool:
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback((found[1] or found[2]).lower())
