"""The share of a run that is done, and the time that the rest will take. Pure: epochs and times in.

The speed is measured over the last ten minutes, or over the last two epochs where these take
longer. Every cell of a run makes all of its epochs, so a peer counts the epochs of its own cell.
"""

from collections import deque

OVER_S = 600.0
"""Seconds over which the speed is measured."""
LEAST = 2
"""Fewest epochs over which the speed is measured."""
LATE = 1.5
"""An epoch that lasts longer than this many usual epochs lowers the speed before it has ended."""


class Progress:
    """The epochs of the last minutes."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque()
        """Epochs and the times at which this peer heard of them, oldest first."""

    def reached(self, epoch: int, now: float) -> None:
        """A plan starts from ``epoch``. An older epoch than the last one means that the swarm went
        back, and the speed is measured anew."""
        if self._marks and epoch < self._marks[-1][0]:
            self._marks.clear()
        if not self._marks or epoch > self._marks[-1][0]:
            self._marks.append((epoch, now))
        while len(self._marks) > LEAST + 1 and now - self._marks[1][1] >= OVER_S:
            self._marks.popleft()

    def restart(self) -> None:
        """Measure the speed anew, because this peer belongs to another cell."""
        self._marks.clear()

    def left(self, epochs: int, now: float) -> tuple[float, float]:
        """Seconds until epoch ``epochs``, and the seconds over which the speed was measured; (0, 0)
        while it is not known, and at the end."""
        if len(self._marks) <= LEAST or self._marks[-1][0] >= epochs:
            return 0.0, 0.0
        first, began = self._marks[0]
        last, ended = self._marks[-1]
        each = (ended - began) / (last - first)
        if now - ended > LATE * each:
            ended = now
        over = ended - began
        if over <= 0:
            return 0.0, 0.0
        return (epochs - last) * over / (last - first), over
