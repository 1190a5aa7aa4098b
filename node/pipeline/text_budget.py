"""The share of a device's time that texts may take from training. Pure.

Enters: that training computed, and the processor time of each job of a text. Leaves: how long the
next job of a text waits.
"""

TRAINS_S = 5.0
"""Seconds after the last job of training until texts have the device to themselves."""
LONGEST_S = 10.0
"""Longest pause before a job of a text. A job takes up to 128 tokens of a prompt: seconds of a slow
processor. After the pause the next one must be done within the time of a hop, 30 s unless the run
says otherwise. Jobs behind which the share asks for a longer pause take more than their
share."""


class TextBudget:
    """Pauses between the jobs of texts while the device trains: after a job of t seconds the next
    one begins ``t / share`` seconds after it began, at most :data:`LONGEST_S` after its end.
    ``share``: from 0 to 1; with 1 nothing waits."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._trained = float("-inf")
        """Time of the last job of training."""
        self._next = float("-inf")
        """Earliest time of the next job of a text."""

    def train(self, now: float) -> None:
        """A job of training has run, or with ``now`` infinite: it begins."""
        self._trained = now

    def spend(self, began: float, took: float, now: float, daemons: int = 1) -> None:
        """A job of a text has run from ``began`` to ``now``, for ``took`` seconds of its processor;
        ``daemons``: those that share the processor, and with it the share."""
        pause = took * daemons / self.share
        self._next = min(began + pause, now + LONGEST_S)

    def wait_s(self, now: float) -> float:
        """Seconds until the next job of a text may run."""
        if self.share >= 1.0 or now - self._trained > TRAINS_S:
            return 0.0
        return max(0.0, self._next - now)
