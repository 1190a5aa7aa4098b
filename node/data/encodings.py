"""Encoding of a text, found by its mark of the byte order, its NUL bytes, and a test for UTF-8.
Enters: bytes of the user's own files. Leaves: a name, or a refusal with the command that helps.
"""

import codecs
from collections.abc import Iterable

from node.core.errors import UsageFault, refuse

_LOOKED_AT = 1 << 16
"""Bytes at the beginning that tell about NULs."""
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


def encoding_of(pieces: Iterable[bytes], name: str) -> str:
    """The encoding of a text: utf-8, utf-16-le or utf-16-be. Reads all of it.

    Raises UsageFault for a text that is neither, such as one in Latin-1, which no rule tells from
    its neighbours for certain, and for bytes that are no text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    seen = 0
    for piece in pieces:
        if not seen and (found := _by_beginning(piece[:_LOOKED_AT], name)):
            return found
        _check_utf8(decoder, piece, seen, name)
        seen += len(piece)
    _check_utf8(decoder, b"", seen, name, final=True)
    return "utf-8"


def _by_beginning(start: bytes, name: str) -> str:
    """The encoding that the first bytes say, "" for none."""
    refuse(
        (
            start.startswith(_UTF_32),
            f"{name} is UTF-32",
            f"convert it:  iconv -f UTF-32 -t UTF-8 {name} > NEW",
        )
    )
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding
    nuls = start.count(0)
    if not nuls:
        return ""
    odd = start[1::2].count(0)
    if 5 * nuls > len(start) and odd in (0, nuls):
        return "utf-16-le" if odd else "utf-16-be"
    raise UsageFault(
        f"{name} has NUL bytes: it is no text, or in an encoding that is not recognised",
        f"look at it with  file {name} , and convert it:  iconv -f NAME -t UTF-8 {name} > NEW",
    )


def _check_utf8(
    decoder: codecs.IncrementalDecoder, piece: bytes, seen: int, name: str, *, final: bool = False
) -> None:
    try:
        decoder.decode(piece, final)
    except UnicodeDecodeError as e:
        raise UsageFault(
            f"{name} is not UTF-8 (near byte {seen + e.start:,}); it may be Latin-1 or "
            "Windows-1252",
            "say its encoding:  --set data.encoding=latin-1  (or cp1252), or convert it:  "
            f"iconv -f latin1 -t utf-8 {name} > NEW",
        ) from e
