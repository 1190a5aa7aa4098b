"""Table of the texts with keys and values kept by this peer, and of the order in which they are
dropped.

Enters: the peer that brings a text, the tokens it has, times. Leaves: the cache of a text, or none.
Never: a tensor's numbers. Runs on the event loop; the caches are filled on the device thread.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from node.core.ids import PeerId
from node.model.text_cache import TextCache

IDLE_S = 120.0
"""Seconds without a turn after which a text is forgotten."""
LATELY_S = 0.5
"""Seconds after its last turn in which a text counts as under way."""
YIELD_S = 10.0
"""Seconds without a turn after which a text makes room for another one."""
GUESTS = 0.25
"""Share of the memory for the texts of peers outside the plan."""
EACH = 64
"""Texts that are kept of one origin as one hop brings them: the hop's key alone is proven. One more
takes the place of the one used longest ago."""


class TextKey(NamedTuple):
    """Identity of a text: the peer that asks for it, the number it chose, and the hop that sends
    its tokens. The connection has proven that hop's key."""

    origin: PeerId
    number: int
    before: PeerId


@dataclass(slots=True)
class _Text:
    cache: TextCache
    used: float
    guest: bool
    nbytes: int = 0
    busy: bool = True


class TextTable:
    """The cached texts of one stage, in the order of their last turns.

    ``limit``: bytes of all together. ``bytes_of(tokens)``: bytes that a text takes. A guest's text
    makes no other than a guest's give way.
    """

    def __init__(self, limit: int, bytes_of: Callable[[int], int]) -> None:
        self.limit = limit
        self._bytes_of = bytes_of
        self._texts: dict[TextKey, _Text] = {}
        self._each: Counter[tuple[PeerId, PeerId]] = Counter()
        self.used = 0
        """Bytes that are set aside for the texts."""
        self._guests = 0
        """Bytes of ``used`` that are set aside for texts of guests."""

    def __len__(self) -> int:
        return len(self._texts)

    def under_way(self, now: float, *, guests: bool = False) -> int:
        """Number of texts of members, or of guests, that had a turn within :data:`LATELY_S`."""
        return sum(
            text.guest is guests and (text.busy or now - text.used <= LATELY_S)
            for text in self._texts.values()
        )

    def take(
        self, key: TextKey, past: int, count: int, now: float, *, guest: bool = False
    ) -> TextCache | None:
        """The cache of a text that keeps its first ``past`` tokens and gets ``count`` more, with
        memory set aside for them; a text without past tokens begins. ``guest``: a peer outside the
        plan brings it. None where fewer are here, it is in a turn, or finds no room. :meth:`done`
        ends the turn."""
        self.expire(now)
        text = self._texts.get(key)
        if text is not None and text.busy:
            return None
        if past == 0:
            self.drop(key)
            text = self._begin(key, now, guest)
        elif text is not None and text.cache.length < past:
            # Its memory was needed, or a turn was lost.
            self.drop(key)
            text = None
        if text is None:
            return None
        text.busy = True
        text.used = now
        if not self._grow(text, past + count, now):
            self.drop(key)
            return None
        return text.cache

    def done(self, key: TextKey, cache: TextCache, now: float) -> None:
        """End a turn."""
        text = self._texts.get(key)
        if text is not None and text.cache is cache:
            text.busy = False
            text.used = now
            self._texts[key] = self._texts.pop(key)

    def drop(self, key: TextKey) -> None:
        """Forget a text, if it is here."""
        text = self._texts.pop(key, None)
        if text is None:
            return
        self._charge(text, -text.nbytes)
        whose = _whose(key)
        self._each[whose] -= 1
        if not self._each[whose]:
            del self._each[whose]

    def expire(self, now: float) -> None:
        """Forget the texts that have had no turn for :data:`IDLE_S`."""
        self._free(IDLE_S, now, lambda key, text: True, lambda: False)

    def _begin(self, key: TextKey, now: float, guest: bool) -> _Text:
        whose = _whose(key)
        self._free(
            0.0, now, lambda key, text: _whose(key) == whose, lambda: self._each[whose] < EACH
        )
        made = self._texts[key] = _Text(TextCache(), now, guest)
        self._each[whose] += 1
        return made

    def _grow(self, text: _Text, tokens: int, now: float) -> bool:
        more = max(0, self._bytes_of(tokens) - text.nbytes)

        def fits() -> bool:
            most = GUESTS * self.limit
            return self.used + more <= self.limit and (
                not text.guest or self._guests + more <= most
            )

        if not fits():
            self._free(YIELD_S, now, lambda key, other: other.guest or not text.guest, fits)
        if not fits():
            return False
        self._charge(text, more)
        return True

    def _charge(self, text: _Text, nbytes: int) -> None:
        text.nbytes += nbytes
        self.used += nbytes
        if text.guest:
            self._guests += nbytes

    def _free(
        self,
        idle_s: float,
        now: float,
        of: Callable[[TextKey, _Text], bool],
        enough: Callable[[], bool],
    ) -> None:
        """Forget texts that ``of`` names and that had no turn for ``idle_s``, the one used longest
        ago first, until there is ``enough``."""
        for key, text in list(self._texts.items()):
            if enough():
                return
            if not text.busy and now - text.used >= idle_s and of(key, text):
                self.drop(key)


def _whose(key: TextKey) -> tuple[PeerId, PeerId]:
    """Origin of a text, and the hop that brings it."""
    return key.origin, key.before
