"""One JSON document from a file or from stdin, bounded in size. Enters: a path. Leaves: the
document's values, unchecked. Never: a guess at their meaning."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from node.core.errors import UsageFault, refuse


def read(path: str, most: int, smaller: str, example: str) -> Any:
    """The document in a file, or on stdin for ``-``. At most ``most`` bytes are read.

    Raises UsageFault when it cannot be read, is larger (next step: ``smaller``), or is not JSON
    with finite numbers (next step: ``example``).
    """
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(most + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(most + 1)
    except OSError as e:
        raise UsageFault(
            f"cannot read {path}: {e.strerror}", "name a JSON file, or  -  for stdin"
        ) from e
    refuse((len(raw) > most, f"{path} is larger than {most >> 20} MiB", smaller))
    try:
        return json.loads(raw.decode(), parse_constant=_not_finite)
    except (ValueError, RecursionError) as e:
        raise UsageFault(f"{path} is not JSON: {e}"[:300], example) from e


def _not_finite(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")
