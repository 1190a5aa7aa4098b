"""Under which keys something is posted in the directory of a run. Pure. Enters: a run, a topic.
Leaves: keys. Never: a record.

``peers``: what every peer says of itself that is in no cell; in a run of one cell everybody.
``cell/<cell>``: the same of the peers of one cell. ``cells/<prefix>``: what leaders say of the
cells of one of 256 prefixes. ``census/<region>``: how many cells each of the 16 prefixes of a
region has; ``census``: the same of every region. ``changes``: the owner's
newest change to how cells average. ``orders``: the owner's newest order to all peers.
``outer/<window>/<key>``: the cells that look for others to average with in a window of time. A node
that stores a record sees the hash of its key only, so what is posted under a topic other than the
peers' begins with the topic: the node works the key out and compares.
"""

import hashlib
import re

from node.core.errors import WireError
from node.core.ids import CellId, RunId

PEERS, CENSUS, CHANGES, ORDERS = "peers", "census", "changes", "orders"
PREFIXES, REGIONS = 256, 16
"""Parts that the cells of a run are spread over, and regions that these are counted in: so that of
a thousand cells no answer is longer than that with the peers of one."""
MAX_WINDOW = 2**40
"""Windows are numbered below this."""
MAX_POSTING = 2048
"""Bytes of what is posted under a topic."""
WRITERS = {
    "cell": 512,
    "cells": 32,
    "census": 2 * REGIONS,
    "changes": 64,
    "orders": 64,
    "outer": 64,
}
"""Most peers that are posted under one topic of a kind: of ``outer``, more than any group has."""
_TOPIC = re.compile(
    r"peers|census(/[0-9a-f])?|changes|orders|cell/[0-9a-f]{16}|cells/[0-9a-f]{2}"
    r"|outer/(0|[1-9][0-9]{0,12})/([0-9.-]{1,32}|all)"
)
_LONGEST = len("outer/") + 13 + len("/") + 32
_END = b"\n"


def cell_topic(cell: CellId) -> str:
    """Where the peers of a cell post. Raises WireError for what names no cell."""
    return _checked(f"cell/{cell}")


def cells_topic(prefix: int) -> str:
    """Where the leaders of the cells of a prefix, 0 to 255, post. Raises WireError."""
    return _checked(f"cells/{prefix:02x}")


def region_topic(region: int) -> str:
    """Where the scribes of the prefixes of a region, 0 to 15, post. Raises WireError."""
    return _checked(f"{CENSUS}/{region:x}")


def prefix_of(cell: CellId) -> int:
    """The prefix, 0 to 255, of a cell: of a hash, so that cells spread over all."""
    return hashlib.sha256(f"tutti/prefix/{cell}".encode()).digest()[0] * PREFIXES // 256


def region_of(prefix: int) -> int:
    """The region, 0 to 15, of a prefix."""
    return prefix * REGIONS // PREFIXES


def outer_topic(window: int, key: str) -> str:
    """Where cells post that look for a group in a window, below 2^40, under a key: 1 to 32 of the
    characters 0-9 . - or the word ``all``. Raises WireError."""
    return _checked(f"outer/{window}/{key}")


def kind_of(topic: str) -> str:
    """``peers``, ``cell``, ``cells``, ``census``, ``changes``, ``orders`` or ``outer``. Raises
    WireError unless something can be posted under this topic."""
    found = _TOPIC.fullmatch(topic)
    if found is None or (found[2] is not None and int(found[2]) >= MAX_WINDOW):
        raise WireError(f"nothing is posted under {topic[:64]!r}")
    return topic.partition("/")[0]


def most_writers(topic: str) -> int:
    """How many peers are posted under a topic at once. Raises WireError as :func:`kind_of`, and for
    ``peers``, whose records are published and read, not posted and looked for."""
    if (kind := kind_of(topic)) == PEERS:
        raise WireError("peers publish their records, they do not post them")
    return WRITERS[kind]


def key_of(run_id: RunId, topic: str) -> str:
    """The key of a topic in a run. Raises WireError as :func:`kind_of`."""
    return f"tutti/{run_id}/{_checked(topic)}"


def check_posting(body: bytes, life_s: float) -> None:
    """Raises WireError for a posting that others would refuse."""
    if not 0 < len(body) <= MAX_POSTING:
        raise WireError(f"a posting has 1 to {MAX_POSTING} bytes, not {len(body)}")
    if not life_s > 0:  # true for NaN as well
        raise WireError(f"a posting lives longer than {life_s} s")


def wrap(topic: str, sealed: bytes) -> bytes:
    """A sealed record as it is stored under a topic."""
    return topic.encode() + _END + sealed


def unwrap(raw: bytes) -> tuple[str, bytes]:
    """The inverse of :func:`wrap`. Raises WireError."""
    end = raw.find(_END, 0, _LONGEST + 1)
    if end < 0 or not (topic := raw[:end]).isascii():
        raise WireError("a record without a topic")
    return _checked(topic.decode()), raw[end + 1 :]


def _checked(topic: str) -> str:
    kind_of(topic)
    return topic
