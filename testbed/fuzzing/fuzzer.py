"""Mutated messages for every parser, and a check of what each parser does with them.

A parser returns or raises one of its typed errors. Beside :data:`BASE_BYTES` it allocates no more
for each byte that it was given, and makes no more calls, than :class:`Parser` says."""

import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from types import FrameType

from testbed.fuzzing.mutations import mutated
from testbed.fuzzing.parsers import PARSERS, kind_of_message, seeds_of

BASE_BYTES = 1 << 20
"""Bytes that one parse may allocate for a message of any length."""

KEPT = 20
"""Failures of a run that are reported."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A parser that broke its promise, and the bytes that made it."""

    parser: str
    raw: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.parser}: {self.what}\n  {len(self.raw)} bytes: {self.raw[:120]!r}"


@dataclass
class Fuzzed:
    """Result of a run. ``examples`` were parsed, ``refused`` of them with a typed error;
    ``growth``: bytes by which the process has grown over the messages of protobuf."""

    failures: list[Failure] = field(default_factory=list)
    examples: int = 0
    refused: int = 0
    nbytes: int = 0
    growth: int = 0


class _Calls:
    """Counts calls of functions while it is the profiler."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        self.count += event in ("call", "c_call")


def trial(name: str, raw: bytes) -> tuple[str, bool]:
    """Parse ``raw`` once: why the parser broke its promise, "" if it did not; and whether it
    refused the bytes."""
    parser = PARSERS[name]
    refused = False
    calls = _Calls()
    tracemalloc.start()
    try:
        sys.setprofile(calls)
        try:
            parser.read(raw)
        finally:
            sys.setprofile(None)
    except parser.allowed:
        refused = True
    except BaseException as e:  # a panic of a library in Rust is no Exception
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        place = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__}: {str(e)[:200]} ({place.filename}:{place.lineno})", False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if peak > BASE_BYTES + parser.bytes_per_byte * len(raw):
        return f"{peak} bytes allocated", refused
    if calls.count > parser.calls + parser.calls_per_byte * len(raw):
        return f"{calls.count} calls", refused
    return "", refused


def example(name: str, dice: Random) -> bytes:
    """Mutated valid bytes for a parser."""
    seeds = seeds_of(name)
    return mutated(dice.choice(seeds), seeds, kind_of_message(name), dice)


def run(seconds: float, seed: int = 0, only: Collection[str] = ()) -> Fuzzed:
    """Fuzz all parsers, or the ones named `only`, for `seconds`; parsers of protobuf messages come
    first."""
    found = Fuzzed()
    dice = Random(seed)
    names = [name for name in PARSERS if not only or name in only]
    for name in names:  # modules that a parser loads on first use count against none
        for raw in seeds_of(name):
            trial(name, raw)
    messages = [name for name in names if kind_of_message(name) is not None]
    others = [name for name in names if name not in messages]
    before = _most_resident()
    _fuzz(found, messages, seconds * len(messages) / len(names), dice)
    found.growth = _most_resident() - before
    _fuzz(found, others, seconds * len(others) / len(names), dice)
    return found


def _fuzz(found: Fuzzed, names: Sequence[str], seconds: float, dice: Random) -> None:
    """Fuzz these parsers in turns."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(found.failures) < KEPT:
        for name in names:
            raw = example(name, dice)
            why, refused = trial(name, raw)
            found.examples += 1
            found.refused += refused
            found.nbytes += len(raw)
            if why:
                found.failures.append(Failure(name, raw, why))


def _most_resident() -> int:
    """Most bytes of this process that were in memory at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
