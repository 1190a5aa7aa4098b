"""The digests that the committed members of a stage report: which parameters are right. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from node.core.ids import PeerId
from node.epoch.peers.versions import majority


@dataclass(frozen=True)
class StageDigests:
    """Digests of one stage. ``said``: as its committed members report them; ``current``: members
    that held the version before; ``copied``: members that copied their parameters, so that their
    digest is no evidence of which parameters are right."""

    said: Mapping[PeerId, str]
    current: Collection[PeerId]
    copied: Collection[PeerId]

    def verdict(self) -> tuple[str, bool]:
        """The most common digest among members that have not copied it, and True if more than half
        of them have it; failing that, the same among members that held the version before."""
        witnesses = self._witnesses()
        for words in (self._own(), witnesses):
            most = majority(words, "")
            if 2 * sum(digest == most for digest in words.values()) > len(words):
                return most, True
        return majority(witnesses, ""), False

    def strays(self, agreed: str) -> list[PeerId]:
        """Members with another digest than ``agreed``."""
        return [p for p in sorted(self.said) if self.said[p] != agreed]

    def camps(self) -> list[frozenset[PeerId]]:
        """Members grouped by the parameters that they made, without copies, and without listeners
        if there are others."""
        camps: dict[str, set[PeerId]] = {}
        for peer, digest in self._witnesses().items():
            camps.setdefault(digest, set()).add(peer)
        return [frozenset(camps[digest]) for digest in sorted(camps)]

    def _own(self) -> Mapping[PeerId, str]:
        """Digests of members that have not copied their parameters, if there are any."""
        return {p: digest for p, digest in self.said.items() if p not in self.copied} or self.said

    def _witnesses(self) -> Mapping[PeerId, str]:
        """The digests that say most about the right parameters: from members that held the version
        before, if there are any."""
        own = self._own()
        return {p: own[p] for p in self.current if p in own} or own
