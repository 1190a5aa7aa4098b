"""Standard output and standard error: characters that a terminal cannot show, closed streams, and
abilities of a terminal. Only this module decides how to write a character that the encoding does
not have."""

import codecs
import contextlib
import functools
import io
import os
import sys
import unicodedata
from typing import TextIO

ERRORS = "tutti-plain"
"""Name of the handler of encoding errors, as :func:`codecs.register_error` has it."""
UNKNOWN = "?"
PLAIN = {
    "…": "~",
    "–": "-",
    "—": "-",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "·": ".",
    "•": "*",
    "×": "x",
    "µ": "u",
    "α": "a",
    "→": ">",
    "←": "<",
    "↑": "^",
    "↓": "v",
    "≤": "<",
    "≥": ">",
    "≈": "~",
    "−": "-",
    "●": "*",
    "○": "o",
    "◐": "%",
    "✓": "+",
    "✗": "x",
    "█": "#",
    "▓": "%",
    "▒": "=",
    "░": ".",
    "▁": ".",
    "▂": ",",
    "▃": ":",
    "▄": "-",
    "▅": "=",
    "▆": "+",
    "▇": "*",
    "\N{REPLACEMENT CHARACTER}": UNKNOWN,
}
"""Characters as ASCII, one for one, so that columns and frames stay as they are."""


@functools.lru_cache(maxsize=1024)
def plain(character: str) -> str:
    """ASCII of the same width for one character."""
    if found := PLAIN.get(character):
        return found
    name = unicodedata.name(character, "")
    if name.startswith("BOX DRAWINGS"):
        return _line(name)
    if "BLOCK" in name or name.startswith(("QUADRANT", "BRAILLE")):
        return "#"
    from rich.cells import cell_len  # which few commands need to load

    width = cell_len(character)
    base = unicodedata.normalize("NFKD", character)[0]
    likeness = base if base.isascii() and base.isprintable() else UNKNOWN * width
    return likeness.ljust(width)[:width]


def _line(name: str) -> str:
    """ASCII of a box drawing character."""
    flat = any(word in name for word in ("HORIZONTAL", "LEFT", "RIGHT"))
    upright = any(word in name for word in ("VERTICAL", "UP", "DOWN"))
    if "DIAGONAL" in name:
        if "CROSS" in name:
            return "X"
        if "UPPER RIGHT TO LOWER LEFT" in name:
            return "/"
        return "\\"
    if flat and upright:
        return "+"
    if flat:
        return "-"
    return "|"


def _encode(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(plain, error.object[error.start : error.end])), error.end


def prepare() -> None:
    """Make the standard streams of this process safe to write to.

    A character that the encoding does not have is written as :func:`plain` says; for a stream that
    was closed before the start there is one that leads nowhere.
    """
    codecs.register_error(ERRORS, _encode)
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = _safe(sys.stdout)
    sys.stderr = _safe(sys.stderr)


def _safe(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # for the life of the process
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=ERRORS)
    return stream


def mute(*streams: TextIO) -> None:
    """Connect streams that cannot be written to a device that takes everything, so that the rest of
    their buffers fails no more."""
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def as_file(stream: TextIO) -> None:
    """Write UTF-8 from now on unless ``stream`` is a terminal: the output becomes a file."""
    if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
        stream.reconfigure(encoding="utf-8")


def shows(text: str, stream: TextIO) -> bool:
    """Return True if the encoding of ``stream`` has every character of ``text``."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def full_screen() -> bool:
    """Return True if standard input and output are a terminal on which a cursor can be moved."""
    there = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    return there and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
