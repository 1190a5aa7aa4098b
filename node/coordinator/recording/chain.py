"""Lines of a recording, each with a hash over itself and all lines before it. Pure. Enters:
documents, or the lines of a file. Leaves: the other. Never: the meaning of a document.

    sha256 of (hash of the line before, document), 32 hex digits, a space, the document as JSON

The hashes find damage; they are no signature, so anybody can write a whole recording anew."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

from node.core.errors import Refused

HASH = 32
"""Hex digits of a hash."""
BEGINS = "0" * HASH
"""The hash before the first line."""
MOST_LINE = 64 << 20
"""Bytes of the longest line that is read: a plan has at most 4 MiB, a leader's start the records of
a few thousand peers."""


GET_AGAIN = "the records before it are whole; get the file again from where it was written"


class RecordingDamaged(Refused):
    """A recording that cannot be read on. ``record``: number of the record that is damaged, the
    first is 0."""

    def __init__(self, record: int, what: str, next_step: str = GET_AGAIN) -> None:
        super().__init__(f"record {record} of the recording {what}", next_step)
        self.record = record


class Chain:
    """The writing end: makes the lines of a recording."""

    def __init__(self) -> None:
        self._hash = BEGINS

    def line(self, document: Any) -> bytes:
        """The next line, with its end."""
        text = text_of(document).encode()
        self._hash = _next_hash(self._hash, text)
        return b"%s %s\n" % (self._hash.encode(), text)


def text_of(document: Any) -> str:
    """JSON without spaces and with sorted keys: the same text for the same document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. A longer one than is read comes in pieces, of which the first has no
    end."""
    return iter(partial(file.readline, MOST_LINE), b"")


def documents(lines: Iterable[bytes]) -> Iterator[Any]:
    """The documents of a recording, each once its hash was found to be right. Raises
    RecordingDamaged for the first line that is cut or changed."""
    before = BEGINS
    for number, line in enumerate(lines):
        if not line.endswith(b"\n"):
            raise RecordingDamaged(number, "is cut: the line has no end")
        written, _, text = line[:-1].partition(b" ")
        before = _next_hash(before, text)
        if written != before.encode():
            raise RecordingDamaged(number, "was changed: its hash is of other bytes")
        try:
            yield json.loads(text)
        except (ValueError, RecursionError) as e:
            raise RecordingDamaged(number, f"is no JSON: {e}") from e


def _next_hash(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()[:HASH]
