"""Formats of files, by their names. A manifest's word counts: all peers read a file in the same
way, whatever it is called where it lies."""

from dataclasses import dataclass
from pathlib import Path

from node.core.errors import UsageFault

_FORMS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_PACKED = {".zst": "zstd", ".gz": "gzip"}
READ = "use .txt, .md, .jsonl, .json, .csv or .tsv, each also with .zst or .gz, or .parquet"
"""Advice for a format that cannot be read."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """``form``: text, lines (of JSON), json (an array, an object with rows, or lines), csv, tsv or
    parquet; ``packed``: zstd, gzip or ""."""

    form: str
    packed: str = ""

    @property
    def table(self) -> bool:
        """Return True for a file that can only be read from its beginning."""
        return self.form in ("json", "csv", "tsv")


def known_kind(name: str) -> FileKind | None:
    """The format that a file's name says; None for one that cannot be read."""
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0]
    path = Path(name)
    packed = _PACKED.get(path.suffix.lower(), "")
    if packed:
        path = path.with_suffix("")
    form = _FORMS.get(path.suffix.lower())
    if form is None or (packed and form == "parquet"):
        return None
    return FileKind(form, packed)


def kind_of(name: str) -> FileKind:
    """As :func:`known_kind`. Raises UsageFault for a format that cannot be read."""
    if (found := known_kind(name)) is None:
        raise UsageFault(f"cannot read {name}: unknown ending", READ)
    return found
