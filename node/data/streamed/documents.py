"""The documents of one part of a shard: plain text, JSON, tables and parquet, also packed.

A document belongs to the part in which it begins, so that parts that lie side by side give each
document once. If the text has no documents, a part gives the characters that begin in it.
"""

import codecs
from collections.abc import Iterator

from node.core.errors import refuse
from node.data.confined.rows import LONGEST
from node.data.kinds import FileKind, kind_of
from node.data.readers import Document, LeftOut, RowFormat, Rows, json_lines, parquet
from node.data.streamed.files import BLOCK, Files, Ranges, Shard
from node.data.streamed.pieces import Part


def documents_of(
    files: Files, shard: Shard, part: Part, form: RowFormat, left: LeftOut
) -> tuple[Iterator[Document], bool]:
    """Documents of a part, and True if each is to be ended by a mark; rows without one are counted
    in ``left``.

    Raises NetworkFault, UsageFault if there is no such shard, LocalFault if there is no space.
    """
    kind = kind_in(files, shard, form)
    if kind.form == "parquet":
        rows = Rows(part.start, part.stop, shard.size)
        read = Ranges(files, shard).read
        found = parquet(
            files.parsers, read, shard.size, shard.name, form, left, rows=rows, strict=False
        )
        return found, True
    start = part.start
    stop = part.stop
    if made_anew(kind, form):
        stored = shard.size
        shard = files.unpacked(shard, kind, form.encoding)
        start, stop = (at * shard.size // stored for at in (start, stop))
    if kind.form == "text":
        return iter((_characters(files, shard, start, stop),)), False
    return _lines(files, shard, start, stop, form, left), True


def made_anew(kind: FileKind, form: RowFormat) -> bool:
    """Return True if the text of a shard is written to this disk beside it."""
    if kind.form == "parquet":
        return False
    return bool(kind.packed) or kind.table or form.encoding != "utf-8"


def kind_in(files: Files, shard: Shard, form: RowFormat) -> FileKind:
    """The format of a shard. A name ending in .json stands for lines of JSON where an object ends
    with the first line and another one begins the next. Raises as :func:`documents_of`."""
    kind = kind_of(shard.name)
    if kind == FileKind("json") and _has_lines(files, shard, form.encoding):
        return FileKind("lines")
    return kind


def _has_lines(files: Files, shard: Shard, encoding: str) -> bool:
    """Return True if the first line of a shard of JSON ends with an object and the next one begins
    with another. Within an array, or a larger object, a comma stands between two objects."""
    stored = Ranges(files, shard)
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    start = ""
    at = 0
    while at < min(shard.size, LONGEST):
        raw = stored.read(at, BLOCK)
        at += len(raw)
        if encoding == "utf-8":
            _check_text(raw, shard)
        start = (start + decoder.decode(raw)).removeprefix("\ufeff").lstrip()
        if start.startswith("["):
            return False
        line, _, rest = start.partition("\n")
        if rest := rest.lstrip():
            return line.rstrip().endswith("}") and rest.startswith("{")
    return False


def _characters(files: Files, shard: Shard, start: int, stop: int) -> bytes:
    raw = files.read(shard, start, stop + 3)
    _check_text(raw, shard)
    return raw[_boundary(raw, 0) : _boundary(raw, stop - start)]


def _lines(
    files: Files, shard: Shard, start: int, stop: int, form: RowFormat, left: LeftOut
) -> Iterator[Document]:
    # Read one byte more in front: it shows if a line begins at ``start``.
    first = max(0, start - 1)
    raw = files.read(shard, first, stop)
    _check_text(raw, shard)
    begin = 0
    if start:
        begin = raw.find(b"\n") + 1
        if not begin:
            return  # the middle of a long line, which begins in a part before
    at = first + len(raw)
    rest = list[bytes]()
    if len(raw) > begin:
        rest.append(raw[begin:])
    while rest and not rest[-1].endswith(b"\n") and at < shard.size:
        more = files.read(shard, at, at + BLOCK)
        at += len(more)
        rest.append(more[: more.find(b"\n") + 1] or more)
        if sum(map(len, rest)) > LONGEST + stop - start:
            # The line that is cut here is no JSON, and left out: nobody can mend it any more.
            break
    yield from json_lines(files.parsers, b"".join(rest), form, shard.name, left)


def _check_text(raw: bytes, shard: Shard) -> None:
    """Raises UsageFault for bytes of which every fifth or more is a NUL."""
    refuse(
        (
            5 * raw.count(0) > len(raw),
            f"{shard.name} is no text in UTF-8: it has NUL bytes",
            "say its encoding:  --set data.encoding=utf-16-le  (or utf-16-be)",
        )
    )


def _boundary(raw: bytes, at: int) -> int:
    """The first byte from ``at`` on that begins a UTF-8 character, at most three further."""
    stop = min(len(raw), at + 3)
    while at < stop and raw[at] & 0xC0 == 0x80:
        at += 1
    return at
