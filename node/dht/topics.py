"""Under which keys something is posted in the directory of a run. Pure. Enters: a run, a topic.
Leaves: keys. Never: a record.

``peers``: what every peer says of itself. ``outer/<window>/<key>``: the cells that look for others
to average with in a window of time. A node that stores a record sees the hash of its key only, so
what is posted under a topic other than the peers' begins with the topic: the node works the key out
and compares.
"""

from __future__ import annotations

import re

from node.core.errors import WireError
from node.core.ids import RunId

PEERS = "peers"
OUTER_WRITERS = 64
"""Cells that are posted under one key: more than any group has."""
MAX_POSTING = 2048
"""Bytes of what is posted under a topic."""
_OUTER = re.compile(r"outer/(0|[1-9][0-9]{0,11})/[a-z0-9._-]{1,64}")
_END = b"\n"


def check(topic: str) -> None:
    """Raises WireError unless something can be posted under this topic."""
    if topic != PEERS and not _OUTER.fullmatch(topic):
        raise WireError(f"nothing is posted under {topic[:64]!r}")


def key_of(run_id: RunId, topic: str) -> str:
    """The key of a topic in a run. Raises WireError as :func:`check`."""
    check(topic)
    return f"tutti/{run_id}/{topic}"


def wrap(topic: str, sealed: bytes) -> bytes:
    """A sealed record as it is stored under a topic."""
    return topic.encode() + _END + sealed


def unwrap(raw: bytes) -> tuple[str, bytes]:
    """The inverse of :func:`wrap`. Raises WireError."""
    topic, end, sealed = raw.partition(_END)
    if not end or len(topic) > 96 or not topic.isascii():
        raise WireError("a record without a topic")
    check(found := topic.decode())
    return found, sealed
