"""Parts of programs that measure the event loop of forked daemons from inside: lines in a file of
the daemon's home, the running code, and the place where a daemon starts its loop."""

import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def read_lines(path: Path, kind: Callable[..., T]) -> list[T]:
    """Records of a file with one JSON object a line, as values of ``kind``; none if there is no
    file. A last line that is cut off is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [kind(**json.loads(line)) for line in lines if line.endswith("}")]


def running_code(frame: FrameType | None, *, ours: int, libraries: int = 0) -> str:
    """The innermost functions below a frame, innermost first: at most ``ours`` of the project, and
    ``libraries`` of others before them."""
    found: list[str] = []
    while frame is not None and ours:
        path = frame.f_code.co_filename
        name = f"{'/'.join(path.split('/')[-2:])}:{frame.f_code.co_name}"
        if "/node/" in path and "site-packages" not in path:
            ours -= 1
            found.append(name)
        elif len(found) < libraries:
            found.append(name)
        frame = frame.f_back
    return " < ".join(found)


def run_daemons(file: Path, run: Callable[..., Any]) -> None:
    """Let ``run(path, body, **options)`` run the coroutine of every daemon that this process
    becomes. ``path``: ``file`` in the daemon's home."""

    def started(body: Coroutine[Any, Any, Any], **options: Any) -> Any:
        words = sys.orig_argv
        path = Path(words[words.index("--home") + 1]) / file
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return run(path, body, **options)

    uvloop.run = started
