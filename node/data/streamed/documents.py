"""The documents of one part of a shard: plain text, JSON lines and parquet, also packed.

A document belongs to the part in which it begins, so that parts that lie side by side give each
document once. Of text without documents a part gives the characters that begin in it.
"""

import logging
from collections.abc import Iterator

from node.data.readers import LONGEST, Rows, json_lines, parquet
from node.data.streamed.files import BLOCK, Files, Ranges, Shard, kind_of
from node.data.streamed.pieces import Part

_log = logging.getLogger("tutti.data")


def documents_of(
    files: Files, shard: Shard, part: Part, column: str
) -> tuple[Iterator[bytes], bool]:
    """UTF-8 text of the documents of a part, and whether each is to be ended by a mark. ``column``
    is the field, or the column, that is the text.

    Raises NetworkFault, UsageFault for what is no such shard, LocalFault where there is no space.
    """
    kind = kind_of(shard.name)
    if kind.form == "parquet":
        rows = Rows(part.start, part.stop, shard.size)
        read = Ranges(files, shard).read
        found = parquet(
            files.parsers, read, shard.size, shard.name, column, rows=rows, strict=False
        )
        return found, True
    start, stop = part.start, part.stop
    if kind.packed:
        stored, shard = shard.size, files.unpacked(shard, kind.packed)
        start, stop = (at * shard.size // stored for at in (start, stop))
    if kind.form == "text":
        return iter((_characters(files, shard, start, stop),)), False
    return _lines(files, shard, start, stop, column), True


def _characters(files: Files, shard: Shard, start: int, stop: int) -> bytes:
    raw = files.read(shard, start, stop + 3)
    return raw[_boundary(raw, 0) : _boundary(raw, stop - start)]


def _lines(files: Files, shard: Shard, start: int, stop: int, column: str) -> Iterator[bytes]:
    # From one byte before: whether a line begins at ``start`` shows there.
    first = max(0, start - 1)
    raw = files.read(shard, first, stop)
    begin = 0 if start == 0 else raw.find(b"\n") + 1
    if start and not begin:
        return  # the middle of a long line, which begins in a part before
    at = first + len(raw)
    rest = [raw[begin:]] if len(raw) > begin else []
    while rest and not rest[-1].endswith(b"\n") and at < shard.size:
        more = files.read(shard, at, at + BLOCK)
        at += len(more)
        rest.append(more[: more.find(b"\n") + 1] or more)
        if sum(map(len, rest)) > LONGEST + stop - start:
            # The line that is cut here is no JSON, and left out: nobody can mend it any more.
            break
    bad = 0
    for found in json_lines(files.parsers, b"".join(rest), column, shard.name):
        if isinstance(found, int):
            bad += 1
        else:
            yield found
    if bad:
        _log.warning(
            "%s, bytes %d to %d: %d lines are no JSON object with a string %r and are left out",
            shard.name, start, stop, bad, column,
        )  # fmt: skip


def _boundary(raw: bytes, at: int) -> int:
    """The first byte from ``at`` on that begins a UTF-8 character, at most three further."""
    stop = min(len(raw), at + 3)
    while at < stop and raw[at] & 0xC0 == 0x80:
        at += 1
    return at
