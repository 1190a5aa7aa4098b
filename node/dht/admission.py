"""Who may use this node's part of the DHT, and how often.

In a private run every request carries the caller's admission token, in a field of hivemind's
messages that nobody else uses here. A token names its peer, and libp2p has proven who calls, so it
need not be kept secret.
"""

# hivemind ships no types for its generated messages.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
from hivemind.p2p import PeerID

from node.core.clock import Clock
from node.core.errors import Refused
from node.core.ids import PeerId, short
from node.dht.record_store import Admit
from node.identity.rates import TokenBucket

REQUESTS_PER_S, REQUESTS_AT_ONCE = 50.0, 100.0
"""DHT requests of one peer: sustained rate, and burst. Reading and posting every few seconds takes
one or two a second."""

Tell = Callable[[PeerId, str, str], None]
"""``tell(peer, kind, text)`` records something a peer did."""


class AdmissionFilter:
    """Checks and makes the admission tokens of DHT requests, and limits how often a peer may ask.
    ``admit`` raises Refused for a peer that the run does not admit (None: an open run),
    ``admission`` is our own token."""

    def __init__(
        self,
        clock: Clock,
        admit: Admit | None = None,
        admission: bytes = b"",
        tell: Tell = lambda peer, kind, text: None,
    ) -> None:
        self._clock, self._admit, self._admission, self._tell = clock, admit, admission, tell
        self._rate = TokenBucket(REQUESTS_PER_S, REQUESTS_AT_ONCE)

    def admits(self, caller: PeerID, request: Any) -> bool:
        """Whether the caller belongs to the run, by the token in its request."""
        if self._admit is None:
            return True
        peer = PeerId(caller.to_base58())
        try:
            self._admit(peer, request.auth.client_access_token.signature, self._clock.wall())
        except Refused as e:
            self._tell(peer, "not-admitted", f"{short(peer)} may not use the directory: {e.what}")
            return False
        return True

    def in_time(self, caller: PeerID) -> bool:
        """Count a request; False when it is one too many."""
        peer = PeerId(caller.to_base58())
        if self._rate.allow(peer, self._clock.now()):
            return True
        self._tell(
            peer, "rate-limited", f"{short(peer)} sends too many DHT requests; some are refused"
        )
        return False

    def label(self, stub: Any) -> Any:
        """``stub`` with our token in every request."""
        return _Labelled(stub, self._admission) if self._admission else stub


class _Labelled:
    """A stub that adds a token to what it sends."""

    def __init__(self, stub: Any, token: bytes) -> None:
        self._stub, self._token = stub, token

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._stub, name)

        async def labelled(request: Any, **options: Any) -> Any:
            request.auth.client_access_token.signature = self._token
            return await call(request, **options)

        return labelled
