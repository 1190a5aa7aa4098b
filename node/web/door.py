"""Admission to the page: a token in a header, or a cookie that the token was exchanged for. Pure
but for the secret that it draws.

A browser cannot send a header with the page itself, so a form takes the token and answers with a
cookie that no script can read and no other site can send.
"""

import hmac
import secrets
from collections import deque
from enum import Enum
from http.cookies import CookieError, SimpleCookie

TRIES = 10
"""Wrong tokens that are looked at within :data:`TRIES_S` seconds, from anybody together."""
TRIES_S = 60.0


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
        self._wrong = deque[float](maxlen=TRIES)

    def open_to(self, authorization: str, cookies: str) -> bool:
        """Return True for a request with these two headers that may enter."""
        if not self._token:
            return True
        if hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return True
        return hmac.compare_digest(self._shown(cookies).encode(), self._pass.encode())

    def enter(self, token: str, now: float) -> Entry:
        """Look at a token. ``now``: monotonic seconds."""
        if len(self._wrong) == TRIES and now - self._wrong[0] < TRIES_S:
            return Entry.LATER
        if self._token and hmac.compare_digest(token.encode(), self._token.encode()):
            return Entry.RIGHT
        self._wrong.append(now)
        return Entry.WRONG

    def cookie(self) -> str:
        """The header Set-Cookie for a visitor with the right token. Only this server takes it,
        until it ends."""
        return f"{self._name}={self._pass}; HttpOnly; SameSite=Strict; Path=/"

    def _shown(self, cookies: str) -> str:
        try:
            found = SimpleCookie(cookies).get(self._name)
        except CookieError:
            return ""
        if found is None:
            return ""
        return found.value
