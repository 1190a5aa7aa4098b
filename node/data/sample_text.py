"""Samples for a terminal: the text of their tokens, and which of it is trained on. Enters: samples.
Never: a character that moves a cursor."""

from collections.abc import Callable, Iterator

from node.data.samples import Sample
from node.data.tokenizer import Tokenizer

BEGIN = "{+"
"""Mark before text that is trained on, where nothing is printed bold."""
STOP = "+}"
"""Mark after text that is trained on."""
_BOLD = "\x1b[1m"
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"
SHORT = 600
"""Characters of a sample where several are shown."""


def sample_lines(
    sample: Sample, number: int, tokenizer: Tokenizer, *, bold: bool, most: int = 0
) -> Iterator[str]:
    """Describe a sample, counted from 1. ``bold``: the terminal shows weights of letters; ``most``:
    characters after which the text is cut, 0 for all."""
    trained = int(sample.trained.sum())
    all_of_it = trained >= len(sample.ids) - 1 - int(sample.ends[:-1].sum())
    how = f"{trained:,} trained on"
    if all_of_it:
        how = "all trained on"
    yield f"sample {number:,}: {len(sample.ids) - 1:,} tokens, {how}"
    mark = _painted(bold) if not all_of_it else lambda text, _: text
    left = most or None
    line = ""
    for ids, counts, ends in sample.runs():
        text = _clean(tokenizer.decode(ids.tolist(), special=True))
        cut = left is not None and len(text) > left
        if left is not None:
            text = text[:left]
            left -= len(text)
        first, *others = text.split("\n")
        line += mark(first, counts)
        for other in others:
            yield f"  | {line}"
            line = mark(other, counts)
        if cut:
            yield f"  | {line} …"
            return
        if ends:
            if line:
                yield f"  | {line}"
            yield "  |-- the next document, which does not see this one --"
            line = ""
    if line:
        yield f"  | {line}"


def _painted(bold: bool) -> Callable[[str, bool], str]:
    def paint(text: str, counts: bool) -> str:
        if not text:
            return ""
        if bold:
            style = _BOLD if counts else _DIM
            return f"{style}{text}{_PLAIN}"
        if counts:
            return f"{BEGIN}{text}{STOP}"
        return text

    return paint


def _clean(text: str) -> str:
    """Text without characters that a terminal obeys."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text.replace("\t", " "))
