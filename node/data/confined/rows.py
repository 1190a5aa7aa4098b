"""Rows of foreign files to documents, in a confined process: parquet, JSON, lines of JSON and
tables of text, also packed. Enters: bytes, by way of the parent.

A document is one part of an answer: "+" and a text in UTF-8, or "=" and the JSON of a conversation
(``text``, ``trained``, ``open``). A row without a document is "-" and the reason. Libraries are
imported where they are needed: most processes need none.
"""

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

ROWS = 256
"""Rows of parquet that are decoded at once."""
UNPACKED = 1 << 22
"""Bytes of unpacked text in one part of an answer."""
LONGEST = 64 << 20
"""Bytes of one row, at most."""
LOOKED_AT = 16
"""Rows that are read to find the fields of a file."""
_LARGEST_WINDOW = 27
"""Logarithm of the bytes that a packed file may look back, as pyarrow reads them."""
_SPACE = " \t\r\n"
Answer = Iterator[bytes]


class Unfit(Exception):
    """The data is not what the call needs: a sentence, and the next step for the user."""


class Reader:
    """Reads rows; with a chat template they are conversations."""

    def __init__(self, source: Callable[[int], Any]) -> None:
        """``source``: makes the file of a call, from its size."""
        self._source = source
        self._template: Any = None

    def load(self, head: dict[str, Any], body: bytes) -> Answer:
        """Keep a chat template, for the calls that follow."""
        from node.data.chat import BadTemplate, Template

        try:
            self._template = Template(body.decode("utf-8"), head["special"])
        except BadTemplate as e:
            raise Unfit(str(e), "the run needs a tokenizer with another template") from e
        yield from ()

    def prompt(self, _: dict[str, Any], body: bytes) -> Answer:
        """Prompt of the next answer to messages in JSON, by the template: "+" and its text, or "-"
        and the reason for which there is none."""
        from node.data.chat import Misfit

        try:
            text = self._template.render(json.loads(body), add_generation_prompt=True)
            yield b"+" + text.encode("utf-8", "replace")
        except Misfit as e:
            yield b"-" + str(e).encode("utf-8", "replace")

    def parquet(self, head: dict[str, Any], _: bytes) -> Answer:
        """Documents of the rows from ``start`` / ``parts`` of all to ``stop`` / ``parts``. Of texts
        that are not ``strict``, strings that are no UTF-8 are taken as they are."""
        import pyarrow
        import pyarrow.parquet as pq

        # A buffer: pages are decoded one after the other, however large a row group is.
        source = self._source(head["size"])
        with pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = [head["column"]]
            if head["chat"]:
                columns = _chat_columns(file.schema_arrow.names, head["column"])
            else:
                _check_column(pyarrow.types, file.schema_arrow, head["name"], head["column"])
            for rows, first, last in _batches(file, head, columns):
                if head["strict"]:
                    rows.validate(full=True)
                begin = max(0, first)
                chosen = rows.slice(begin, max(0, last - begin))
                if head["chat"]:
                    for row in chosen.to_pylist():
                        yield from self._document(row, head)
                else:
                    yield from _texts(pyarrow, chosen.column(0), head["column"])

    def lines(self, head: dict[str, Any], body: bytes) -> Answer:
        """Documents of lines of JSON; blank ones are passed over."""
        for line in body.split(b"\n"):
            yield from self._line(line, head)

    def rows(self, head: dict[str, Any], _: bytes) -> Answer:
        """Documents of a whole file of the form ``form``."""
        if head["form"] == "lines":
            for line in _split(self._text(head)):
                if line is None:
                    yield b"-a line of more than %d bytes" % LONGEST
                else:
                    yield from self._line(line, head)
            return
        for row in self._rows(head):
            yield from self._document(row, head)

    def look(self, head: dict[str, Any], _: bytes) -> Answer:
        """JSON of the first rows: their ``fields``, and whether they are conversations
        (``chat``)."""
        from node.data.chat import looks_like_chat

        found = list(islice(self._first(head), LOOKED_AT))
        fields = list(dict.fromkeys(str(n)[:80] for row in found for n in row))[:32]
        chat = bool(found) and all(looks_like_chat(row) for row in found)
        yield json.dumps({"fields": fields, "chat": chat}).encode()

    def unpack(self, head: dict[str, Any], _: bytes) -> Answer:
        """The text of a file in UTF-8; of a JSON array or a table its rows as lines of JSON."""
        if head.get("form", "text") in ("text", "lines"):
            yield from self._text(head, UNPACKED)
            return
        batch = bytearray()
        for row in self._rows(head):
            batch += json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if len(batch) >= UNPACKED:
                yield bytes(batch)
                batch.clear()
        if batch:
            yield bytes(batch)

    def _first(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if head["form"] == "parquet":
            import pyarrow.parquet as pq

            source = self._source(head["size"])
            with pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20) as file:
                for rows in file.iter_batches(LOOKED_AT, use_threads=False):
                    yield from rows.to_pylist()
            return
        if head["form"] == "lines":
            rows = map(_parsed, self._lines(head))
        else:
            rows = self._rows(head)
        yield from (row for row in rows if isinstance(row, dict))

    def _lines(self, head: dict[str, Any]) -> Iterator[bytes]:
        return (line for line in _split(self._text(head)) if line and line.strip())

    def _rows(self, head: dict[str, Any]) -> Iterator[Any]:
        """Rows of a JSON file or a table."""
        text = _decoded(self._text(head))
        if head["form"] == "json":
            yield from _json_rows(text, head["name"])
        else:
            yield from _table_rows(text, head)

    def _text(self, head: dict[str, Any], size: int = 1 << 20) -> Iterator[bytes]:
        """A file in pieces of about ``size`` bytes, unpacked, in UTF-8."""
        source = self._source(head["size"])
        packed = head.get("packed", "")
        if packed:
            import pyarrow

            if packed == "zstd":
                _check_window(source, head.get("name", ""))
            source = pyarrow.input_stream(source, compression=packed)
        pieces = iter(lambda: source.read(size), b"")
        encoding = head.get("encoding", "utf-8")
        if encoding == "utf-8":
            return pieces
        return transcoded(pieces, encoding)

    def _line(self, line: bytes, head: dict[str, Any]) -> Answer:
        if not line.strip():
            return
        row = _parsed(line)
        if row is None:
            yield b"-a line that is no JSON object"
        else:
            yield from self._document(row, head)

    def _document(self, row: Any, head: dict[str, Any]) -> Answer:
        """The documents of a row, or the reason for which it has none."""
        column = head["column"]
        if not head.get("chat"):
            yield _text_of(row, column)
            return
        from node.data.chat import Misfit, conversations

        try:
            for found in conversations(row, column, self._template):
                said = {"text": found.text, "trained": found.trained, "open": found.open}
                yield b"=" + json.dumps(said).encode()
        except Misfit as e:
            yield b"-" + str(e).encode("utf-8", "replace")


def transcoded(pieces: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Text in UTF-8; a mark of the byte order at the beginning is left out."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    first = True
    for piece in pieces:
        text = decoder.decode(piece)
        if first and text:
            text = text.removeprefix("\ufeff")
            first = False
        if text:
            yield text.encode("utf-8", "replace")
    if rest := decoder.decode(b"", True):
        yield rest.encode("utf-8", "replace")


def _decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    """Text of pieces of UTF-8, without a mark of the byte order."""
    return codecs.iterdecode(pieces, "utf-8-sig", "replace")


def _split(pieces: Iterable[bytes]) -> Iterator[bytes | None]:
    """Lines; None for each that is longer than :data:`LONGEST`."""
    rest = bytearray()
    skipping = False
    for piece in pieces:
        *lines, tail = piece.split(b"\n")
        for line in lines:
            if not skipping:
                yield bytes(rest + line)
            rest.clear()
            skipping = False
        if not skipping:
            rest += tail
        if len(rest) > LONGEST:
            yield None
            rest.clear()
            skipping = True
    if rest:
        yield bytes(rest)


def _parsed(line: bytes) -> Any:
    """The JSON of a line, None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _text_of(row: Any, column: str) -> bytes:
    """The text of a row, or the reason for which it has none."""
    if not isinstance(row, dict):
        return b"-a row that is no object"
    text = row.get(column)
    if isinstance(text, str):
        return b"+" + text.encode("utf-8", errors="replace")
    if column in row:
        what = "nothing" if text is None else type(text).__name__
        why = f"{what} in {column!r} in place of a text"
    else:
        names = ", ".join(str(name)[:40] for name in islice(row, 8))
        why = f"no field {column!r}; the fields are {names}"
    return b"-" + why.encode("utf-8", "replace")


# ------------------------------------------------------------ JSON


def _json_rows(text: Iterator[str], name: str) -> Iterator[Any]:
    """Rows of a JSON file: the elements of an array, objects one behind the other, or the objects
    in the only list of one object."""
    found = _values(text, name)
    first = next(found, None)
    second = next(found, None)
    if second is None and isinstance(first, dict):
        rows = [v for v in first.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        keys = ("messages", "conversations", "conversation", "prompt", "text")
        if len(rows) == 1 and not any(key in first for key in keys):
            yield from rows[0]
            return
    for value in (first, second):
        if value is not None:
            yield value
    yield from found


def _values(text: Iterator[str], name: str) -> Iterator[Any]:
    """Yield the elements of an array, or values one behind the other. A null becomes an empty
    object. Raises Unfit for text that is no JSON, and for a value of more than 2 :data:`LONGEST`
    characters."""
    buffer = next(text, "")
    while not buffer.strip(_SPACE) and (more := next(text, "")):
        buffer += more
    at = _after_space(buffer, 0)
    array = buffer[at : at + 1] == "["
    at += array
    decoder = json.JSONDecoder()
    wanted = 0
    done = False
    while True:
        at = _after_space(buffer, at)
        if array and buffer[at : at + 1] == ",":
            at = _after_space(buffer, at + 1)
        if array and buffer[at : at + 1] == "]":
            return
        try:
            value, stop = decoder.raw_decode(buffer, at)
            # The rest of a number may come with the next piece.
            whole = done or stop < len(buffer)
        except (ValueError, RecursionError):
            value = None
            stop = at
            whole = False
        if whole:
            if value is None:
                value = {}
            yield value
            at = stop
            continue
        if done:
            if array or buffer[at:].strip(_SPACE):
                raise Unfit(f"{name} is no JSON, or is cut", "check it:  python -m json.tool FILE")
            return
        buffer = buffer[at:]
        at = 0
        if len(buffer) > 2 * LONGEST:
            raise Unfit(
                f"{name} has a value of more than {2 * LONGEST >> 20} MiB",
                "write one row a line:  jq -c '.[]' FILE > FILE.jsonl",
            )
        # The buffer doubles with each try, so that a long value is parsed only a few times.
        wanted = len(buffer)
        while not done and len(buffer) <= 2 * wanted:
            more = next(text, None)
            done = more is None
            buffer += more or ""


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at


# ------------------------------------------------------------ tables


def _table_rows(text: Iterator[str], head: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the rows of a table. The first line names the columns; empty fields are left out.
    Raises Unfit for text that is no table."""
    csv.field_size_limit(LONGEST)
    lines = _text_lines(text)
    names = next(lines, "")
    comma = ","
    if head["form"] == "tsv":
        comma = "\t"
    elif "," not in names:
        comma = next((other for other in ";\t|" if other in names), ",")

    def all_lines() -> Iterator[str]:
        yield names
        yield from lines

    try:
        table = csv.reader(all_lines(), delimiter=comma)
        columns = next(table, [])
        for row in table:
            if row:
                yield {n: v for n, v in zip(columns, row, strict=False) if v}
    except csv.Error as e:
        raise Unfit(f"{head['name']} is no table: {e}", "write it with a library for CSV") from e


def _text_lines(text: Iterator[str]) -> Iterator[str]:
    """Lines with their ends."""
    rest = ""
    for piece in text:
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            yield f"{line}\n"
        if len(rest) > LONGEST:
            raise Unfit(f"a line of more than {LONGEST >> 20} MiB", "write shorter rows")
    if rest:
        yield rest


# ------------------------------------------------------------ parquet


def _batches(file: Any, head: dict[str, Any], columns: list[str]) -> Iterator[tuple[Any, int, int]]:
    """Batches of the wanted rows of some columns, and where the wanted rows begin and end, counted
    from the beginning of each batch."""
    meta = file.metadata
    first = head["start"] * meta.num_rows // head["parts"]
    last = head["stop"] * meta.num_rows // head["parts"]
    seen = 0
    for group in range(meta.num_row_groups):
        begin = seen
        seen += meta.row_group(group).num_rows
        if seen <= first or last <= begin:
            continue
        for rows in file.iter_batches(ROWS, [group], columns, use_threads=False):
            yield rows, first - begin, last - begin
            begin += len(rows)
            if begin >= last:
                break


def _chat_columns(names: list[str], column: str) -> list[str]:
    from node.data.chat import FIELDS

    wanted = (column,)
    if column == "text":
        wanted = (*FIELDS, "prompt", "completion")
    return [name for name in names if name in (*wanted, "tools")]


def _check_column(types: Any, schema: Any, name: str, column: str) -> None:
    # Of several columns of one name, which pyarrow does not find by it, the first.
    if column not in schema.names:
        names = ", ".join(schema.names[:8])[:500]
        raise Unfit(
            f"{name} has no column {column!r}", f"it has {names}; name one:  --set data.column=NAME"
        )
    kind = schema.field(schema.names.index(column)).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise Unfit(
            f"{name} holds {str(kind)[:80]} in {column!r}, not text",
            "name a column of strings:  --set data.column=NAME",
        )


def _texts(pyarrow: Any, column: Any, name: str) -> Answer:
    """Strings as bytes: they may be no UTF-8."""
    found = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
    for text in found.to_pylist():
        if text is None:
            yield b"-nothing in %r in place of a text" % name.encode()
        else:
            yield b"+" + text


# ------------------------------------------------------------ packed files


def _check_window(source: Any, name: str) -> None:
    """Raises Unfit for a zstd file that needs more memory than its reader gives it (RFC 8878,
    3.1.1.1)."""
    start = source.read(6)
    source.seek(0)
    if start[:4] != b"\x28\xb5\x2f\xfd" or len(start) < 6 or start[4] & 0x20:
        return
    log = 10 + (start[5] >> 3)
    if log > _LARGEST_WINDOW:
        raise Unfit(
            f"{name or 'the file'} is packed with a window of {1 << (log - 20)} MiB, and at most "
            f"{1 << (_LARGEST_WINDOW - 20)} are read",
            "pack it again:  zstd -d --long=31 -c FILE | zstd -c --long=27 > NEW",
        )
