"""File formats to bytes of text. Everything is read in pieces: a source may be larger than
memory."""

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from node.core.errors import LocalFault, NetworkFault, UsageFault, refuse
from node.core.home import expanded
from node.data.token_file import TokenFile

PIECE = 1 << 22
"""Bytes read at once."""
BUFFER, ROWS = 1 << 20, 256
"""Bytes of parquet that are read, and rows that are decoded, at once."""

_GET = "name the file with  --data PATH ; who owns the run has it, and a block stage needs none"


def pydoc() -> bytes:
    """The topics of Python's own help, in key order, as UTF-8: about half a megabyte of English."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics)).encode()


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file. Raises UsageFault when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as e:  # a name with a zero byte is a ValueError
        why = e.strerror if isinstance(e, OSError) else e
        raise UsageFault(f"cannot read {path}: {why}", _GET) from e


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
    one."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                yield text.encode("utf-8", errors="replace")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
                raise UsageFault(
                    f'{path}, line {number}: not a JSON object with a string "text"',
                    'write {"text": "…"} on every line',
                ) from e


def library(name: str, what: str) -> Any:
    """A module of the extra ``data``. Raises UsageFault without it, which says that ``what`` needs
    it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UsageFault(
            f"{what} needs {name}, which is not installed", 'pip install "tutti[data]"'
        ) from e


def parquet(
    source: Any,
    name: str,
    column: str = "text",
    start: int = 0,
    stop: int = 1,
    size: int = 1,
    strict: bool = True,
) -> Iterator[bytes]:
    """The strings of a column, as UTF-8, in the rows from ``start`` / ``size`` of all to ``stop`` /
    ``size``; nulls are left out. ``source``: a path, or an open file called ``name``. Not
    ``strict``: strings that are no UTF-8 are taken as they are.

    Raises UsageFault without pyarrow, for another kind of file and for a column that is not there
    or holds no text; and the fault of ours with which reading ``source`` fails.
    """
    pq = library("pyarrow.parquet", "reading parquet")
    pyarrow = library("pyarrow", "reading parquet")
    try:
        # A buffer: pages are decoded one after the other, however large a row group is.
        with pq.ParquetFile(source, pre_buffer=False, buffer_size=BUFFER) as file:
            meta, schema = file.metadata, file.schema_arrow
            _check_column(pyarrow.types, schema, name, column)
            first, last = (at * meta.num_rows // size for at in (start, stop))
            seen = 0
            for group in range(meta.num_row_groups):
                begin, seen = seen, seen + meta.row_group(group).num_rows
                if first < seen and begin < last:
                    for rows in file.iter_batches(ROWS, [group], [column], use_threads=False):
                        if strict:
                            rows.validate(full=True)
                        yield from _texts(pyarrow, rows.column(0), first - begin, last - begin)
                        begin += len(rows)
                        if begin >= last:
                            break
    except (pyarrow.ArrowException, OSError) as e:
        raise _cause(e) or UsageFault(
            f"cannot read {name}: {e}", "check that it is a parquet file"
        ) from e


def _check_column(types: Any, schema: Any, name: str, column: str) -> None:
    # Of several columns of one name, which pyarrow does not find by it, the first.
    kind = schema.field(schema.names.index(column)).type if column in schema.names else None
    kind = kind.value_type if kind and types.is_dictionary(kind) else kind
    text = (types.is_string, types.is_large_string, types.is_string_view)
    refuse(
        (
            kind is None,
            f"{name} has no column {column!r}",
            f"it has {', '.join(schema.names[:8])}; of a stream  data.column  names one",
        ),
        (
            kind is not None and not any(is_text(kind) for is_text in text),
            f"{name} holds {kind} in {column!r}, not text",
            "name a column of strings; of a stream by  data.column",
        ),
    )


def _texts(pyarrow: Any, rows: Any, first: int, last: int) -> Iterator[bytes]:
    """Rows ``first`` to ``last`` of those given, as bytes: strings may be no UTF-8."""
    begin = max(0, first)
    found = rows.slice(begin, max(0, last - begin)).cast(pyarrow.large_string())
    return (text for text in found.cast(pyarrow.large_binary()).to_pylist() if text is not None)


def _cause(e: BaseException) -> LocalFault | None:
    """The fault of ours that a library has wrapped."""
    found: BaseException | None = e
    while found is not None and not isinstance(found, LocalFault):
        found = found.__cause__ or found.__context__
    return found


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
            note = json.loads(side.read_bytes())
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


def hub(name: str) -> tuple[Any, str]:
    """(dataset, column) for NAME[:SPLIT[:COLUMN]]; NAME is a directory written by ``save_to_disk``,
    or a name on the Hub.

    Raises UsageFault without the extra, or for a name, split or column that is not there;
    NetworkFault when the Hub cannot be reached.
    """
    datasets = library("datasets", "hf:")
    where, split, column = (*name.split(":", 2), "", "")[:3]
    split, column = split or "train", column or "text"
    try:
        if (saved := expanded(where)).is_dir():
            found = datasets.load_from_disk(str(saved))
            if isinstance(found, datasets.DatasetDict):
                found = found[split]
        else:
            found = datasets.load_dataset(where, split=split)
    except ConnectionError as e:
        raise NetworkFault(
            f"cannot download {where}: {e}", "check the network, or give a directory saved to disk"
        ) from e
    except (OSError, ValueError, KeyError) as e:
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
