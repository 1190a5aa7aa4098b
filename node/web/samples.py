"""The texts with which the model went on from the fixed prompt, kept in a file of the home, so that
they outlive the server of the page."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.control.words import shown
from node.core.numbers import whole_number

FILE = "web-samples.json"
MOST = 24
"""Samples that are kept: the first ones and the newest, with growing gaps between them."""
FRESH = 8
"""Newest samples that are all kept."""
MOST_TEXT = 600
"""Characters of a sample."""
MOST_FILE = 1 << 20
"""Bytes of a file that is read."""


@dataclass(frozen=True, slots=True)
class TextSample:
    """A text of the model. ``epoch`` and ``tokens``: of the run when it was made."""

    epoch: int
    tokens: int
    text: str


def with_sample(kept: Sequence[TextSample], new: TextSample) -> list[TextSample]:
    """The samples with a new one, by epoch; when there are too many, every second of the older ones
    goes, never the first."""
    made = [one for one in kept if one.epoch < new.epoch]
    made.append(new)
    if len(made) > MOST:
        older = made[:-FRESH]
        made = older[::2] + made[-FRESH:]
    return made


class SampleFile:
    """The file of one home. A file of another run or prompt, or a damaged one, counts as empty."""

    def __init__(self, home: Path, run_id: str, prompt: str) -> None:
        self._path = home / FILE
        self._of = {"run_id": run_id, "prompt": prompt}

    def read(self) -> list[TextSample]:
        """The samples, by epoch."""
        try:
            if self._path.stat().st_size > MOST_FILE:
                return []
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return []
        if not isinstance(found, dict) or any(found.get(k) != v for k, v in self._of.items()):
            return []
        rows = found.get("samples")
        if not isinstance(rows, list):
            return []
        samples = [made for row in rows[-MOST:] if (made := _sample(row)) is not None]
        return sorted(samples, key=lambda one: one.epoch)

    def write(self, samples: Sequence[TextSample]) -> None:
        """Replace the file. A disk that takes nothing costs only the file."""
        text = json.dumps(self._of | {"samples": [asdict(one) for one in samples]})
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(text, encoding="utf-8")
            os.replace(part, self._path)


def _sample(row: Any) -> TextSample | None:
    if not isinstance(row, dict):
        return None
    epoch = whole_number(str(row.get("epoch")))
    tokens = whole_number(str(row.get("tokens")))
    text = row.get("text")
    if epoch is None or tokens is None or not isinstance(text, str):
        return None
    return TextSample(epoch, tokens, shown(text[:MOST_TEXT]))
