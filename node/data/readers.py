"""File formats to documents: texts and conversations. Everything is read in pieces: a source may be
larger than memory."""

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from node.core.errors import NetworkFault, UsageFault, refuse
from node.data.confined.process import Confined, Pool, Read, explained
from node.data.confined.rows import transcoded
from node.data.kinds import FileKind
from node.data.library import check_installed, library
from node.data.marks import Conversation
from node.data.places import open_regular
from node.data.prompts import load_template
from node.data.token_file import TokenFile

PIECE = 1 << 22
"""Bytes read at once."""
MOST_REASONS = 16
"""Reasons for which rows are left out that are counted apart."""
AT_ONCE = 256
"""Rows of a data set that are written at once."""
MOST_NOTE = 1 << 16
"""Bytes of the note beside an array of token ids."""

Document = bytes | Conversation
"""A text in UTF-8, or a conversation."""

_NO_FIELD = "name the field of the text:  --set data.column=NAME"
_NO_TEMPLATE = (
    "begin from a model that has one,  --from DIR , or name its tokenizer:  --tokenizer "
    "DIR/tokenizer.json"
)
_CHECK = "check that file"
_log = logging.getLogger("tutti.data")
_GET = (
    "check the path; a peer of somebody else's run names its own copy with  --data PATH , and a "
    "block stage needs none"
)


def pydoc() -> bytes:
    """The topics of Python's own help, in key order, as UTF-8: about half a megabyte of English."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics)).encode()


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file. Raises UsageFault when it cannot be read."""
    with open_regular(path, _GET) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as e:
            raise UsageFault(f"cannot read {path}: {e.strerror}", _GET) from e


def documents_sha256(documents: Iterable[bytes]) -> str:
    """Hex sha256 over each document's length (8 bytes, little-endian) and bytes."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return digest.hexdigest()


def token_file(path: Path, dtype: np.dtype) -> TokenFile:
    """A file as an array of ``dtype``. Raises UsageFault when its size is no multiple of an
    item's."""
    size = path.stat().st_size
    refuse(
        (
            size % dtype.itemsize,
            f"{path} has {size} bytes, no multiple of {dtype.itemsize}",
            f"write it as {dtype.name}, little-endian",
        )
    )
    return TokenFile(path, dtype, size // dtype.itemsize)


@dataclass(frozen=True)
class RowFormat:
    """Rule that makes a document of a row. ``column``: the field with its text or its messages;
    ``chat``: a row is a conversation, written by ``template``; ``encoding``: encoding of text
    files; ``special``: words of the tokenizer by their roles, which a template may write."""

    column: str = "text"
    chat: bool = False
    encoding: str = "utf-8"
    template: str | None = None
    special: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Name of all settings that change the documents of a file; "" for the default."""
        if self == RowFormat():
            return ""
        return json.dumps(astuple(self))

    @property
    def head(self) -> dict[str, Any]:
        """Words of a call that reads rows."""
        return {"column": self.column, "chat": self.chat, "encoding": self.encoding}

    def check(self, source_form: str, name: str) -> None:
        """Raises UsageFault for plain text where rows are conversations: all of it would be
        trained on. ``source_form``: as of :class:`FileKind`."""
        refuse(
            (
                self.chat and source_form == "text",
                f"{name} is plain text, and data.rows = chat",
                "give conversations as .jsonl, .json, .csv or .parquet, or leave data.rows away",
            )
        )

    def parsers(self) -> Pool:
        """Pool of confined processes that have loaded the chat template."""
        return Pool(self._prepare)

    def _prepare(self, process: Confined) -> None:
        if self.chat and self.template is not None:
            load_template(process, self.template, dict(self.special))


TEXTS = RowFormat()
"""Rows with a document in the field "text"."""


class LeftOut:
    """Counts the rows of a source that have no document, by their reasons."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.given = 0
        """Number of documents."""
        self.reasons = Counter[str]()
        self._reported = 0
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Count a row without a document."""
        with self._lock:
            if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
                reason = "other reasons"
            self.reasons[reason] += 1

    @property
    def said(self) -> str:
        """The number of rows that were left out and why, for people; empty for none."""
        if not (total := self.reasons.total()):
            return ""
        rows = f"{total:,} rows are"
        if total == 1:
            rows = "1 row is"
        if len(self.reasons) == 1:
            return f"{rows} left out ({self._most})"
        counts = (f"{n:,}: {reason}" for reason, n in self.reasons.most_common(3))
        return f"{rows} left out ({'; '.join(counts)})"

    @property
    def _most(self) -> str:
        """The most frequent reason."""
        return self.reasons.most_common(1)[0][0]

    def check(self) -> None:
        """Log the rows that were left out. Raises UsageFault if every row was."""
        if not self.reasons:
            return
        step = _NO_FIELD
        if "chat template" in self._most:
            step = _NO_TEMPLATE
        refuse((not self.given, f"{self._name} has no row that can be read: {self._most}", step))
        self.report()

    def report(self) -> None:
        """Log the rows that were left out each time that their number has doubled."""
        with self._lock:
            total = self.reasons.total()
            if total < 2 * self._reported or not total:
                return
            self._reported = total
        _log.warning("%s: %s", self._name, self.said)


def documents_in(parts: Iterator[bytes], left: LeftOut) -> Iterator[Document]:
    """Documents of the answers of a confined process; rows without one are counted in ``left``."""
    for part in parts:
        kind = part[:1]
        content = part[1:]
        if kind == b"-":
            left.add(content.decode("utf-8", "replace")[:200])
            continue
        left.given += 1
        if kind == b"+":
            yield content
        else:
            yield _conversation(content)


def _conversation(content: bytes) -> Conversation:
    said = json.loads(content)
    trained = tuple((start, stop) for start, stop in said["trained"])
    return Conversation(said["text"], trained, said["open"])


def documents(
    parsers: Pool, path: Path, kind: FileKind, form: RowFormat, left: LeftOut
) -> Iterator[tuple[Document, bool]]:
    """Documents of a file of this disk, each with True if a mark ends it: of plain text only the
    last piece is. ``parsers``: the parsers of ``form``.

    Raises UsageFault for a file that is not of its kind, and that takes too much memory or time.
    """
    name = str(path)
    if kind.form == "text":
        yield from _ended_last(cut_at_lines(plain_text(parsers, path, kind, form.encoding)))
        return
    with open_regular(path, _GET) as file:
        size = os.fstat(file.fileno()).st_size

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        if kind.form == "parquet":
            for found in parquet(parsers, read, size, name, form, left, strict=True):
                yield found, True
            return
        head = asdict(kind) | {"op": "rows", "name": name, "size": size}
        parts = parsers.call(head | form.head, read=read)
        for found in documents_in(explained(parts, f"cannot read {name}", _CHECK), left):
            yield found, True


def looked_at(path: Path, kind: FileKind, encoding: str) -> dict[str, Any]:
    """The ``fields`` of a file's first rows, and whether these are conversations (``chat``). Raises
    as :func:`documents`."""
    if kind.form == "parquet":
        check_installed("pyarrow", "reading parquet")
    with open_regular(path, _GET) as file, closing(Pool()) as parsers:

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        head = asdict(kind) | {"op": "look", "name": str(path), "encoding": encoding}
        found = parsers.call(head | {"size": os.fstat(file.fileno()).st_size}, read=read)
        return json.loads(b"".join(explained(found, f"cannot read {path}", _CHECK)))


def plain_text(
    parsers: Pool, path: Path, kind: FileKind, encoding: str = "utf-8"
) -> Iterator[bytes]:
    """A text file in pieces, unpacked, in UTF-8."""
    with open_regular(path, _GET) as file:
        if not kind.packed:
            pieces = iter(lambda: file.read(PIECE), b"")
            if encoding == "utf-8":
                yield from pieces
            else:
                yield from transcoded(pieces, encoding)
            return
        check_installed("pyarrow", "reading .zst and .gz")

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        head = {"op": "unpack", "packed": kind.packed, "name": str(path), "encoding": encoding}
        found = parsers.call(head | {"size": os.fstat(file.fileno()).st_size}, read=read)
        yield from explained(found, f"cannot unpack {path}", "check that file")


def cut_at_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A text in larger pieces. Each ends with a line where it has one, else with a character."""
    rest = b""
    for more in pieces:
        rest += more
        cut = rest.rfind(b"\n") + 1
        if not cut and len(rest) >= 4 * PIECE:
            # The first byte of the last character, which may go on in the next piece.
            last = range(len(rest) - 4, len(rest))
            cut = max((at for at in last if rest[at] & 0xC0 != 0x80), default=last.start)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _ended_last(pieces: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    piece = next(pieces, None)
    while piece is not None:
        following = next(pieces, None)
        yield piece, following is None
        piece = following


def json_lines(
    parsers: Pool, raw: bytes, form: RowFormat, name: str, left: LeftOut
) -> Iterator[Document]:
    """Documents of lines of JSON. Raises UsageFault for lines of ``name`` that take too much
    memory."""
    parts = parsers.call({"op": "lines"} | form.head, raw)
    yield from documents_in(
        explained(parts, f"cannot read lines of {name}", "write shorter lines"), left
    )


@dataclass(frozen=True)
class Rows:
    """Rows of a parquet file, from ``start`` / ``parts`` of all to ``stop`` / ``parts``."""

    start: int = 0
    stop: int = 1
    parts: int = 1


ALL_ROWS = Rows()


def parquet(
    parsers: Pool,
    read: Read,
    size: int,
    name: str,
    form: RowFormat,
    left: LeftOut,
    *,
    rows: Rows = ALL_ROWS,
    strict: bool,
) -> Iterator[Document]:
    """Documents of a parquet file. ``read`` gives bytes of the file, which has ``size``. Not
    ``strict``: strings that are no UTF-8 are taken as they are.

    Raises UsageFault without pyarrow, for another kind of file, for a column that is not there or
    holds no text, and for a file that takes too much memory or time; and what ``read`` raises.
    """
    check_installed("pyarrow", "reading parquet")
    head = {"op": "parquet", "name": name, "size": size, "strict": strict}
    found = parsers.call(head | form.head | asdict(rows), read=read)
    yield from documents_in(
        explained(found, f"cannot read {name}", "check that it is a parquet file"), left
    )


def note_beside(path: Path) -> Path:
    """Path of the file with the dtype and vocabulary of an array of token ids; it may be absent."""
    return path.with_name(f"{path.name}.json")


def pretokenised(path: Path, vocab: int) -> tuple[TokenFile, int]:
    """(ids, vocab) of a little-endian array of uint16 or uint32.

    ``path`` + ".json" may say ``{"dtype": "uint16" | "uint32", "vocab": n}``; otherwise ``vocab``
    ids are assumed, two bytes wide when they fit. Raises UsageFault for a bad note, or when an id
    is out of range: it would be a wild read later.
    """
    note: Any = {}
    side = note_beside(path)
    if side.is_file():
        try:
            with open_regular(side, _GET) as file:
                note = json.loads(file.read(MOST_NOTE))
            vocab = note.get("vocab", vocab)
        except (OSError, ValueError, AttributeError, RecursionError) as e:
            raise UsageFault(
                f"cannot read {side}: {e}", 'write {"dtype": "uint16", "vocab": 50257}'
            ) from e
    known = type(vocab) is int and 0 < vocab <= 1 << 32
    smallest = "uint32"
    if known and vocab <= 1 << 16:
        smallest = "uint16"
    name = note.get("dtype", smallest)
    refuse(
        (not known, f"{side}: vocab is {vocab!r}", "give the number of token ids"),
        (
            name not in ("uint16", "uint32"),
            f"{side}: dtype is {name!r}",
            'use "uint16" or "uint32"',
        ),
    )
    if name == "uint16":
        ids = token_file(path, np.dtype("<u2"))
    else:
        ids = token_file(path, np.dtype("<u4"))
    for start in range(0, len(ids), PIECE):
        largest = int(np.asarray(ids[start : start + PIECE]).max())
        refuse(
            (
                largest >= vocab,
                f"{path} holds the id {largest}, but only {vocab} exist",
                f"say dtype and vocab in {side.name}",
            )
        )
    return ids, vocab


def hub(name: str, saved: bool) -> tuple[Any, str]:
    """(dataset, column) for NAME[:SPLIT[:COLUMN]]; NAME is a directory written by ``save_to_disk``
    if ``saved``, else a name on the Hub. ``column`` is "" where none is named.

    Raises UsageFault without the extra, or for a name, split or column that is not there;
    NetworkFault when the Hub cannot be reached.
    """
    datasets = library("datasets", "hf:")
    where, split, column = (*name.split(":", 2), "", "")[:3]
    split = split or "train"
    try:
        if saved:
            found = datasets.load_from_disk(where)
            if isinstance(found, datasets.DatasetDict):
                found = found[split]
        else:
            found = datasets.load_dataset(where, split=split)
    except ConnectionError as e:
        raise NetworkFault(
            f"cannot download {where}: {e}", "check the network, or give a directory saved to disk"
        ) from e
    except Exception as e:  # whatever the library meets in files of others
        raise UsageFault(
            f"cannot open the data set {where!r}, split {split!r}: {e}",
            "check hf:NAME[:SPLIT[:COLUMN]]",
        ) from e
    return found, column


def hub_texts(dataset: Any, column: str, left: LeftOut) -> Iterator[bytes]:
    """The strings of one column; nulls are left out. Raises UsageFault for a column that is not
    there or holds something else."""
    names = ", ".join(map(str, dataset.column_names or ()))
    refuse(
        (
            column not in (dataset.column_names or ()),
            f"the data set has no column {column!r}",
            f"it has {names}; name one:  --set data.column=NAME ; conversations are read with  "
            "--set data.rows=chat",
        )
    )
    for row in dataset.select_columns([column]):
        value = row[column]
        what = f"column {column} holds {type(value).__name__}, not text"
        refuse((not isinstance(value, str | None), what, "name a column of strings"))
        if value is None:
            left.add(f"nothing in {column!r} in place of a text")
        else:
            left.given += 1
            yield value.encode("utf-8", errors="replace")


def hub_rows(dataset: Any) -> Iterator[bytes]:
    """Rows of a data set as JSON."""
    return (json.dumps(row, default=str).encode() for row in dataset)


def hub_documents(dataset: Any, form: RowFormat, left: LeftOut) -> Iterator[Document]:
    """Documents of a data set that the library ``datasets`` reads."""
    if not form.chat:
        yield from hub_texts(dataset, form.column, left)
        return
    rows = hub_rows(dataset)
    with closing(form.parsers()) as parsers:
        while raw := b"\n".join(islice(rows, AT_ONCE)):
            yield from json_lines(parsers, raw, form, "the data set", left)
