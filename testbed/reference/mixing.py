"""A round of averaging as a matrix: what theorems are about."""

import numpy as np
from numpy.typing import NDArray

from node.averaging.strategies.strategy import Groups, Meeting, Pushes


def mixing(meeting: Meeting, alive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The round as a matrix [n, n]: new values are ``mixing @ values``. Members that are not alive
    keep theirs.

    Rows and columns sum to 1. Raises ValueError for pushes, which depend on their order.
    """
    if isinstance(meeting, Pushes):
        raise ValueError("pushes without a barrier are no matrix")
    together = (
        (meeting.labels[:, None] == meeting.labels[None, :]) & alive[:, None] & alive[None, :]
    )
    if not _owned(meeting, alive):
        together[:] = False
    elif meeting.whole:
        together &= ~np.isin(meeting.labels, meeting.labels[~alive])[:, None]
    together |= np.eye(len(alive), dtype=bool)
    return together / together.sum(1, keepdims=True)


def _owned(meeting: Groups, alive: NDArray[np.bool_]) -> bool:
    return not meeting.owners or bool(alive[list(meeting.owners)].all())
