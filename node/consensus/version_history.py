"""The versions from which one peer has begun epochs, and the loss when its side of a partition
gives up its history. Pure. Enters: versions that were followed here, the versions of another
history. Leaves: where the histories parted. Never: a question to another peer."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from node.core.journey import Version
from node.wire.limits import PAST


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A loss: ``epochs`` and ``tokens`` since epoch ``since`` belong to no history that goes on."""

    since: int
    epochs: int
    tokens: int


class VersionHistory:
    """History of one peer. ``given_up_epochs`` and ``given_up_tokens`` were committed here and
    undone because another history went on."""

    def __init__(self) -> None:
        self.versions: deque[tuple[Version, int]] = deque(maxlen=PAST)
        """Versions with the tokens counted until then, the newest first."""
        self.given_up_epochs = self.given_up_tokens = 0
        self._given_up: Version | None = None
        """The version that was counted as given up last, until an epoch begins here."""

    def stood(self, version: Version, tokens: int) -> None:
        """This peer has begun an epoch from ``version``."""
        while self.versions and self.versions[0][0].epoch >= version.epoch:
            self.versions.popleft()  # undone since
        self.versions.appendleft((version, tokens))
        self._given_up = None

    def give_up(
        self, at: Version, tokens: int, theirs: Sequence[tuple[Version, int]]
    ) -> GivenUp | None:
        """The cell goes on with the history ``theirs`` (versions with tokens, the newest first)
        instead of from ``at``, which this peer held with ``tokens`` counted. Count and return the
        loss; None if ``at`` is part of that history, or its loss is counted already: this peer may
        listen to many plans before it begins an epoch. Raises LookupError if ``at`` belongs to no
        history in ``theirs``."""
        if at == self._given_up:
            return None
        known = {version for version, _ in theirs}
        if at in known:
            return None  # only behind: nothing is lost
        common = next(((v, t) for v, t in self.versions if v in known), None)
        if common is None:
            # Older than all versions that the leader remembers: this peer is probably only behind.
            if theirs and at.epoch <= theirs[0][0].epoch + 1:
                return None
            raise LookupError(
                f"epoch {at.epoch} here belongs to no history that the leader remembers"
            )
        version, counted = common
        lost = GivenUp(version.epoch, at.epoch - version.epoch, max(0, tokens - counted))
        self._given_up = at
        self.given_up_epochs += lost.epochs
        self.given_up_tokens += lost.tokens
        return lost
