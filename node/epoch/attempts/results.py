"""Results of the micro-batches of one attempt at an epoch. Pure. Enters: reports of the ends peers.
Leaves: tokens and losses that count, the micro-batches that do not."""

import hashlib

from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.pipeline.events import MicroBatchDone


class MicroBatchResults:
    """The first result of each micro-batch of ``plan``: a micro-batch contributes at most once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._results: dict[int, MicroBatchDone] = {}
        self.seed = plan.hash
        """Hash of the plan and of all results in the order of their arrival. Nobody but the leader
        knows it before the epoch is closed."""

    def report(self, e: ev.MicroBatchesReported, most_tokens: int) -> bool:
        """Take an ends peer's results for its own micro-batches. A result with more than
        ``most_tokens`` tokens (0: no bound) is ignored. Returns True if one is new."""
        known = len(self._results)
        mine = {p.index for p in self._plan.paths if p.origin == e.peer}
        for result in e.results:
            if result.index in mine and not 0 < most_tokens < result.tokens:
                self._keep(result)
        return len(self._results) > known

    def give_up(self, origin: PeerId | None) -> None:
        """Drop the unfinished micro-batches of this ends peer, or of all with None."""
        for path in self._plan.paths:
            if origin in (None, path.origin):
                self._keep(MicroBatchDone(path.index, False))

    def _keep(self, result: MicroBatchDone) -> None:
        if result.index not in self._results:
            self._results[result.index] = result
            row = f"{self.seed}/{result.index}/{float(result.loss_sum).hex()}"
            self.seed = hashlib.sha256(row.encode()).hexdigest()

    @property
    def count(self) -> int:
        """Number of micro-batches with a result, counted or not."""
        return len(self._results)

    @property
    def complete(self) -> bool:
        """True if every micro-batch has a result."""
        return self.count >= len(self._plan.paths)

    @property
    def counted(self) -> list[MicroBatchDone]:
        """Results of the micro-batches that count."""
        return [r for r in self._results.values() if r.counted]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Micro-batches that do not count."""
        return tuple(sorted(i for i, r in self._results.items() if not r.counted))

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batches that count."""
        return sum(r.tokens for r in self.counted)

    @property
    def loss(self) -> float:
        """Training loss of the micro-batches that count, nats per token."""
        return sum(r.loss_sum for r in self.counted) / max(1, self.tokens)

    def silent_origins(self, dead: set[PeerId]) -> list[PeerId]:
        """Living ends peers without a result of any of their micro-batches, if all others have
        reported all of theirs; else empty."""
        paths = [path for path in self._plan.paths if path.origin not in dead]
        told = {path.origin for path in paths if path.index in self._results}
        missing = {path.origin for path in paths if path.index not in self._results}
        if told and told.isdisjoint(missing):
            return sorted(missing)
        return []
