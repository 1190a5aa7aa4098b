"""Names of peers for texts that people read. Pure.

Code that reports something writes the short id of a peer, because it knows no names. Whoever shows
the text adds them: :meth:`Names.within` puts the name of a known peer before its short id. So the
log, ``tutti status`` and ``tutti peers`` name a peer alike: ``brisk-otter (kJ4m2a)``.
"""

import re

from node.core.ids import PeerId, named, short
from node.core.newest import Newest

MOST = 4096
"""Peers that are remembered, the newest."""
LONGEST = 24
"""Characters of a name that a text shows."""
_STRANGE = re.compile(r"[^\w .-]")
_SHORT_ID = re.compile(r"(?<![\w(])[1-9A-HJ-NP-Za-km-z]{6}(?!\w)")
"""A word that can be a short id. An id in brackets stands behind its name already."""


class Names:
    """The names that peers told, by PeerId."""

    def __init__(self) -> None:
        self._by_peer: Newest[PeerId, str] = Newest(MOST)
        self._by_short: Newest[str, str] = Newest(MOST)

    def learn(self, peer: PeerId, name: str) -> None:
        """Remember the name that a peer told. Letters, digits, spaces, dots and dashes are kept; an
        empty name is ignored."""
        kept = _STRANGE.sub("", name)[:LONGEST].strip()
        if kept and self._by_peer.get(peer) != kept:
            self._by_peer[peer] = kept
            self._by_short[short(peer)] = named(peer, kept)

    def known(self, peer: PeerId | None) -> str:
        """The name that a peer told, empty if none is known."""
        if peer is None:
            return ""
        return self._by_peer.get(peer, "")

    def everybody(self) -> dict[PeerId, str]:
        """The names of all peers that are remembered."""
        return dict(self._by_peer)

    def of(self, peer: PeerId) -> str:
        """The name of a peer with its short id, or the short id alone while no name is known."""
        return named(peer, self.known(peer))

    def within(self, text: str) -> str:
        """``text`` with the name of every known peer before its short id."""
        if not self._by_short:
            return text
        return _SHORT_ID.sub(lambda found: self._by_short.get(found[0], found[0]), text)
