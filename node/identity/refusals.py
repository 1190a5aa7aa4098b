"""Refusals: how many calls were refused lately, of how many peers and for which reason. Pure but
for the clock that it is given."""

import time
from collections import Counter, deque
from collections.abc import Callable

from node.core.ids import PeerId

LATELY_S = 60.0
"""Seconds over which refusals are summed."""
MUCH = 60
"""Refusals in that time from which people are told."""
MOST = 4096
"""Refusals that are remembered; beyond them only the number counts."""
WORDS = {
    "token": "no handshake",
    "ban": "banned",
    "rate": "too often",
    "place": "no place free",
    "late": "unfinished messages",
    "size": "messages too large",
    "sender": "not from the leader",
    "connection": "connections",
    "directory": "places in the directory",
    "relay": "places at the relay",
}
"""Kinds of refusals, and a few words for each."""


class Refusals:
    """The refusals of one peer. ``on_count(kind)`` is called for each one."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        on_count: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._now = now
        self._on_count = on_count
        self._seconds: deque[tuple[int, Counter[str]]] = deque()
        self._peers: deque[tuple[float, str]] = deque(maxlen=MOST)

    def count(self, kind: str, whom: PeerId | str | None, times: int = 1) -> None:
        """Note a refusal of a kind in :data:`WORDS`. ``whom``: the peer or address; None for an
        unknown one."""
        now = self._now()
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter()))
            self._forget(now)
        self._seconds[-1][1][kind] += times
        if whom is not None:
            self._peers.append((now, str(whom)))
        self._on_count(kind)

    def lately(self) -> tuple[Counter[str], int]:
        """The refusals of the last minute by kind, and the number of peers that were refused."""
        now = self._now()
        self._forget(now)
        kinds = Counter[str]()
        for _, row in self._seconds:
            kinds += row
        return kinds, len({whom for at, whom in self._peers if now - at < LATELY_S})

    def line(self) -> str:
        """A sentence for people when much is refused, else ""."""
        kinds, peers = self.lately()
        if kinds.total() < MUCH:
            return ""
        whom = ""
        if peers == 1:
            whom = " of 1 peer"
        elif peers:
            whom = f" of {peers} peers"
        why = ", ".join(WORDS[kind] for kind, _ in kinds.most_common(2))
        return f"{kinds.total()} calls{whom} refused in the last minute: {why}"

    def _forget(self, now: float) -> None:
        while self._seconds and now - self._seconds[0][0] > LATELY_S:
            self._seconds.popleft()
