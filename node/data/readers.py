"""File formats to bytes of text. Everything is read in pieces: a source may be larger than
memory."""

import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.core.errors import NetworkFault, UsageFault, refuse
from node.data.confined.process import Pool, Read, explained
from node.data.places import open_regular
from node.data.token_file import TokenFile

PIECE = 1 << 22
"""Bytes read at once."""
LONGEST = 64 << 20
"""Bytes of one document, at most."""
MOST_NOTE = 1 << 16
"""Bytes of the note beside an array of token ids."""

_GET = "name the file with  --data PATH ; who owns the run has it, and a block stage needs none"


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


def text_pieces(path: Path) -> Iterator[bytes]:
    """A text file in order, in pieces that end behind a line end where there is one, else at a
    character's end."""
    with open(path, "rb") as file:
        rest = b""
        while more := file.read(PIECE):
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


def jsonl(path: Path) -> Iterator[bytes]:
    """The field "text" of each line. Raises UsageFault, with the line number, for a line without
    one, and for a line longer than :data:`LONGEST`."""
    first = 1
    with closing(Pool()) as parsers:
        for batch in _line_batches(path):
            for found in json_lines(parsers, batch, "text", str(path)):
                if isinstance(found, int):
                    raise UsageFault(
                        f'{path}, line {first + found}: not a JSON object with a string "text"',
                        'write {"text": "…"} on every line',
                    )
                yield found
            first += batch.count(b"\n")


def json_lines(parsers: Pool, raw: bytes, column: str, name: str) -> Iterator[bytes | int]:
    """Of each line that is not blank the string ``column`` of its JSON object, or the line's number
    from 0 where it is no such object. Raises UsageFault for lines of ``name`` that take too much
    memory."""
    parts = parsers.call({"op": "lines", "column": column}, raw)
    for found in explained(parts, f"cannot read lines of {name}", "write shorter lines"):
        yield found[1:] if found.startswith(b"+") else int(found[1:])


def _line_batches(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, :data:`PIECE` bytes or more of them at once."""
    with open(path, "rb") as file:
        batch = bytearray()
        while line := file.readline(LONGEST + 1):
            refuse(
                (
                    len(line) > LONGEST,
                    f"{path} has a line of more than {LONGEST} bytes",
                    'write {"text": "…"} on every line, a document each',
                )
            )
            batch += line
            if len(batch) >= PIECE:
                yield bytes(batch)
                batch.clear()
        if batch:
            yield bytes(batch)


def library(name: str, what: str) -> Any:
    """A module of the extra ``data``. Raises UsageFault without it, which says that ``what`` needs
    it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise _not_installed(name, what) from e


def check_installed(name: str, what: str) -> None:
    """Raises UsageFault without this module, which says that ``what`` needs it; imports nothing."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # an entry of sys.modules without a specification
        found = None
    if found is None:
        raise _not_installed(name, what)


def _not_installed(name: str, what: str) -> UsageFault:
    return UsageFault(f"{what} needs {name}, which is not installed", 'pip install "tutti[data]"')


@dataclass(frozen=True)
class Rows:
    """Rows of a parquet file: those from ``start`` / ``parts`` of all to ``stop`` / ``parts``."""

    start: int = 0
    stop: int = 1
    parts: int = 1


ALL_ROWS = Rows()


def parquet_file(path: Path) -> Iterator[bytes]:
    """The strings of the column "text" of a file of this disk, as UTF-8; nulls are left out. Raises
    as :func:`parquet`."""
    with open(path, "rb") as file, closing(Pool()) as parsers:

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        size = os.fstat(file.fileno()).st_size
        yield from parquet(parsers, read, size, str(path), strict=True)


def parquet(
    parsers: Pool,
    read: Read,
    size: int,
    name: str,
    column: str = "text",
    *,
    rows: Rows = ALL_ROWS,
    strict: bool,
) -> Iterator[bytes]:
    """The strings of a column, as UTF-8; nulls are left out. ``read`` gives bytes of the file,
    which has ``size``. Not ``strict``: strings that are no UTF-8 are taken as they are.

    Raises UsageFault without pyarrow, for another kind of file, for a column that is not there or
    holds no text, and for a file that takes too much memory or time; and what ``read`` raises.
    """
    check_installed("pyarrow", "reading parquet")
    head = {"op": "parquet", "name": name, "size": size, "column": column, "strict": strict}
    found = parsers.call(head | asdict(rows), read=read)
    yield from explained(found, f"cannot read {name}", "check that it is a parquet file")


def note_beside(path: Path) -> Path:
    """Where the dtype and vocabulary of an array of token ids may stand."""
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
    name = note.get("dtype", "uint16" if known and vocab <= 1 << 16 else "uint32")
    refuse(
        (not known, f"{side}: vocab is {vocab!r}", "give the number of token ids"),
        (
            name not in ("uint16", "uint32"),
            f"{side}: dtype is {name!r}",
            'use "uint16" or "uint32"',
        ),
    )
    ids = token_file(path, np.dtype("<u2") if name == "uint16" else np.dtype("<u4"))
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
    if ``saved``, else a name on the Hub.

    Raises UsageFault without the extra, or for a name, split or column that is not there;
    NetworkFault when the Hub cannot be reached.
    """
    datasets = library("datasets", "hf:")
    where, split, column = (*name.split(":", 2), "", "")[:3]
    split = split or "train"
    column = column or "text"
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
    if column not in (found.column_names or ()):
        raise UsageFault(
            f"{where} has no column {column!r}",
            f"it has {', '.join(map(str, found.column_names or ()))}",
        )
    return found, column


def hub_documents(dataset: Any, column: str) -> Iterator[bytes]:
    """The strings of one column; nulls are left out."""
    for row in dataset.select_columns([column]):
        value = row[column]
        what = f"column {column} holds {type(value).__name__}, not text"
        refuse((not isinstance(value, str | None), what, "name a column of strings"))
        if value is not None:
            yield value.encode("utf-8", errors="replace")
