"""Measurements of a GPU: does tutti run on it, exactly, in the planned memory, and how fast.

    python -m benchmarks.gpu --json FILE            # on a machine with a GPU
    python -m benchmarks.gpu --rehearse --json -    # every part on a CPU, with tiny shapes
    python -m benchmarks.gpu --wheels DIR           # packages for a machine without an index

  a  versions, the card, packages and modules that can be imported, the program p2pd
  b  the ends and two stages as three daemons on one card, beside one process
  c  a stage's forward and backward in fp32 and under bf16 autocast, beside the CPU
  d  memory planned beside memory measured
  e  Muon's step: exactness, operations a second, share of an epoch

Each part is a process of its own with a limit of time. They run in the order a, b, c, e, d: the
machine, the swarm, then what explains it. A part prints each row at once, and FILE has it at once;
parts that did not come to their end are rows that do not hold, also after SIGTERM.
``benchmarks/gpu.md`` says how to take all this to a machine without an index.
"""

import argparse
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.report import ROOT, Report, Row, chosen, command_line
from node.core.errors import ExitCode, LocalFault

PARTS = {"a": "imports", "b": "swarm", "c": "autocast", "e": "muon", "d": "memory"}
"""Letter to module of `benchmarks.gpu`, in the order in which they run."""
LIMIT_S = {"a": 45.0, "b": 110.0, "c": 60.0, "e": 45.0, "d": 45.0}
"""Limit of each part."""
WITHIN_S = 170.0
"""Time of all parts; at its end the last one is ended. A machine may be lent for three minutes."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for a part; its daemons end in between."""
TAIL = 3
"""Last lines of a failed part's stderr that are repeated in its row."""


@dataclass
class Kept(Report):
    """A report that is in its file after every row. ``waiting``: letters of the parts that have not
    ended; ``tree_said``: the commit, where no checkout says it."""

    where: str | None = None
    waiting: list[str] = field(default_factory=list)
    tree_said: str = ""

    def add(self, *row: Any, **named: Any) -> Row:
        made = super().add(*row, **named)
        self.keep()
        return made

    def keep(self) -> None:
        """Write the file, if there is one."""
        if self.where and self.where != "-":
            self.write(self.where)

    def write(self, where: str | None, **more: Any) -> list[Row]:
        told = self.rows
        self.rows = told + [
            Row(f"6.{letter} {PARTS[letter]}, the part", "not run", "", "", "runs", holds=False)
            for letter in self.waiting
        ]
        try:
            return super().write(where, **more)
        finally:
            self.rows = told

    def _measured(self) -> str:
        return self.tree_said or super()._measured()


class Telling(Report):
    """The report of a part: each row is a line of JSON on stdout."""

    def add(self, *row: Any, **named: Any) -> Row:
        made = Row(*row, **named)
        self.rows.append(made)
        print(json.dumps(asdict(made)), flush=True)
        return made


def main() -> int:
    """Run the parts and print their rows; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(sorted(PARTS)), help="some of the letters above")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--device", default="cuda:0", help="the card (default: cuda:0)")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds of each part")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds of all parts")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--wheels", metavar="DIR", type=Path, help="fetch packages into a folder")
    parser.add_argument("--python", default="", help="Python the packages are for (default: 3.12)")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    device = "cpu" if asked.rehearse else asked.device
    try:
        if asked.wheels is not None:
            return _wheels(asked.wheels, asked.python)
        if asked.part:
            return _part(asked.part, device, asked.rehearse)
        parts = chosen(parser, asked.only, PARTS)
        if not asked.rehearse:
            require_gpu()
    except LocalFault as fault:
        print(f"benchmarks.gpu: {fault.what}: {fault.next_step}", file=sys.stderr)
        return int(fault.code)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part is ended first
    words = ["--rehearse"] if asked.rehearse else ["--device", device]
    waiting = [letter for letter in PARTS if letter in parts]
    report = Kept(where=asked.json, waiting=waiting, tree_said=asked.commit)
    report.keep()
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for letter in tuple(waiting):
            left = asked.within - (time.monotonic() - began)
            if left <= 0:
                break
            limit = min(asked.limit or LIMIT_S[letter], left)
            run(report, f"6.{letter} {PARTS[letter]}", command_of(letter, words), limit)
            waiting.remove(letter)
    return report.end(asked.json)


def command_of(letter: str, words: Sequence[str]) -> list[str]:
    """The command that runs one part."""
    return [sys.executable, "-m", "benchmarks.gpu", "--part", letter, *words]


def require_gpu() -> None:
    """Raises LocalFault with the code of a missing resource where torch has no GPU."""
    rehearse = "python -m benchmarks.gpu --rehearse  measures tiny shapes on a CPU"
    try:
        import torch
    except ImportError as error:
        raise NoGpu(f"torch cannot be imported ({error})", rehearse) from error
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
        raise NoGpu(f"there is no GPU: {build} sees none", rehearse)


class NoGpu(LocalFault):
    """This machine has no GPU that torch can use."""

    code = ExitCode.RESOURCES


def _wheels(folder: Path, python: str) -> int:
    from benchmarks.gpu.wheels import MOST, PYTHON, fetch, listed

    found = fetch(folder, python or PYTHON)
    print(listed(found))
    return int(sum(path.stat().st_size for path in found) > MOST)


def _part(letter: str, device: str, rehearse: bool) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # daemons are ended first
    module = importlib.import_module(f"benchmarks.gpu.{PARTS[letter]}")
    module.rows(Telling(), device, rehearse)
    return 0


# ------------------------------------------------------------ a part as a process


def run(report: Report, name: str, command: Sequence[str], limit_s: float) -> None:
    """Run a part as a process, add the rows that it tells, and one that says how it ended. An
    interrupt ends the part too."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    last: deque[str] = deque(maxlen=TAIL)
    readers = [
        threading.Thread(target=_rows, args=(process.stdout, lines)),
        threading.Thread(target=_words, args=(process.stderr, last)),
    ]
    for reader in readers:
        reader.start()
    ended = False
    try:
        ended = added(report, lines, began + limit_s)
    finally:
        code = _end(process, ended)
    for reader in readers:
        reader.join()
    # Told between the limit and the end.
    added(report, lines, time.monotonic())
    took = time.monotonic() - began
    why = "" if ended and code == 0 else f"code {code}: {' | '.join(last)}"[:400]
    report.add(
        f"{name}, the part",
        took,
        "s",
        why if ended else f"killed at its limit; {why}",
        f"comes to its end in {limit_s:.0f} s",
        holds=not why and ended,
    )


def _rows(out: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in out:
        lines.put(line)
    lines.put(None)


def _words(out: IO[str], last: deque[str]) -> None:
    for line in out:
        sys.stderr.write(line)
        if line.strip():
            last.append(line.strip())


def added(report: Report, lines: "queue.SimpleQueue[str | None]", until: float) -> bool:
    """Add rows until the None at their end. Returns False if the time is over first; rows that
    have arrived are added then too."""
    while True:
        left = until - time.monotonic()
        try:
            line = lines.get(timeout=left) if left > 0 else lines.get_nowait()
        except queue.Empty:
            return False
        if line is None:
            return True
        try:
            row = Row(**json.loads(line))
        except (ValueError, TypeError):  # a library printed something
            sys.stderr.write(line)
            continue
        report.add(**asdict(row))


def _end(process: subprocess.Popen[str], ended: bool) -> int:
    """End a part and return its exit code: SIGTERM unless it has ``ended``, then SIGKILL to its
    process group."""
    if not ended:
        process.terminate()
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
