"""Admission to the page: a token in a header, or a cookie that the token was exchanged for. Pure
but for the secret that it draws.

A browser cannot send a header with the page itself, so a form takes the token and answers with a
cookie that no script can read and no other site can send.
"""

import hmac
import ipaddress
import secrets
from collections import deque
from enum import Enum

from starlette.requests import cookie_parser

TRIES = 10
"""Wrong tokens of one client that are looked at within :data:`TRIES_S` seconds."""
TRIES_S = 60.0
MOST_CLIENTS = 1024
"""Clients whose wrong tokens are counted; the one that guessed longest ago is forgotten first."""


class Entry(Enum):
    """The answer to a token."""

    RIGHT = "right"
    WRONG = "wrong"
    LATER = "later"
    """Too many wrong tokens lately: this one was not looked at."""


class Door:
    """``token``: what visitors must know; empty: everybody may enter. ``name``: of the cookie."""

    def __init__(self, token: str, name: str) -> None:
        self._token = token
        self._name = name
        self._pass = secrets.token_urlsafe(32)
        self._wrong: dict[str, deque[float]] = {}

    def admits(self, authorization: str, cookies: str, client: str, now: float) -> Entry:
        """The answer to a request with these two headers. ``client``: its address; ``now``:
        monotonic seconds."""
        if not self._token:
            return Entry.RIGHT
        if hmac.compare_digest(self._shown(cookies).encode(), self._pass.encode()):
            return Entry.RIGHT
        scheme, _, token = authorization.partition(" ")
        if scheme != "Bearer":
            return Entry.WRONG  # no guess: a proxy may send words of its own
        return self.enter(token, client, now)

    def enter(self, token: str, client: str, now: float) -> Entry:
        """Look at a token. ``client``: the address that it came from; ``now``: monotonic
        seconds."""
        client = _network(client)
        wrong = self._wrong.get(client, deque[float](maxlen=TRIES))
        if len(wrong) == TRIES and now - wrong[0] < TRIES_S:
            return Entry.LATER
        if self._token and hmac.compare_digest(token.encode(), self._token.encode()):
            return Entry.RIGHT
        wrong.append(now)
        self._wrong.pop(client, None)
        self._wrong[client] = wrong
        if len(self._wrong) > MOST_CLIENTS:
            self._wrong.pop(next(iter(self._wrong)))
        return Entry.WRONG

    def cookie(self) -> str:
        """The header Set-Cookie for a visitor with the right token. Only this server takes it,
        until it ends."""
        return f"{self._name}={self._pass}; HttpOnly; SameSite=Strict; Path=/"

    def _shown(self, cookies: str) -> str:
        return cookie_parser(cookies).get(self._name, "")


def _network(client: str) -> str:
    """The client whose address this is. The addresses of an IPv6 network are one client: it has
    2**64 of them to guess from."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if address.version == 4:
        return client
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))
