"""Settings for reading the user's own data, found by looking at it: the encoding of its text, and
whether its rows are conversations. Enters: files that this user has named. Never: a file of
somebody else's manifest, for its owner has made these settings.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from node.core.errors import UsageFault
from node.data.confined.process import Pool
from node.data.encodings import encoding_of
from node.data.kinds import FileKind, known_kind
from node.data.places import data_directory, data_file, is_directory
from node.data.readers import looked_at, plain_text
from node.data.settings import DataSettings, Places
from node.data.sources import split_below

CHAT = {"data.rows": "chat", "data.document_mask": True}
"""Settings of conversations: none sees another one."""


def settings_found(settings: DataSettings, places: Places) -> dict[str, Any]:
    """Fields of a manifest for files of this disk. Reads their text once.

    Raises UsageFault for text in an encoding that is not recognised, and for files of different
    encodings.
    """
    kind, _, name = settings.source.partition(":")
    if kind != "file":
        return {}
    found = dict[str, Any]()
    files = list(_files(name, settings, places))
    if settings.encoding == "utf-8":
        with closing(Pool()) as parsers:
            encodings = {
                _encoding(parsers, path, kind): path
                for path, kind in files
                if kind.form != "parquet"
            }
        if len(encodings) > 1:
            one, other = list(encodings.values())[:2]
            raise UsageFault(
                f"{one} and {other} have different encodings",
                f"convert one of them:  iconv -f UTF-16 -t UTF-8 {one} > NEW",
            )
        (encoding,) = encodings or ("utf-8",)
        if encoding != "utf-8":
            found["data.encoding"] = encoding
    if settings.rows == "text" and settings.column == "text":
        rows = next(((path, kind) for path, kind in files if kind.form != "text"), None)
        encoding = found.get("data.encoding", settings.encoding)
        if rows is not None and looked_at(*rows, encoding)["chat"]:
            found |= CHAT
    return found


def _files(name: str, settings: DataSettings, places: Places) -> Iterator[tuple[Path, FileKind]]:
    if is_directory(name):
        base = data_directory(name, settings.sha256, places)
        paths = [base / inside for inside in split_below(base)]
    else:
        paths = [data_file(name, settings.sha256, places)]
    for path in paths:
        kind = known_kind(path.name if is_directory(name) else name)
        if kind is not None:
            yield path, kind


def _encoding(parsers: Pool, path: Path, kind: FileKind) -> str:
    return encoding_of(plain_text(parsers, path, FileKind("text", kind.packed)), str(path))
