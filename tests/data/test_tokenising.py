"""Tokenising that is stopped or killed: nobody waits for it, and what it has written goes."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.app import assembly
from node.core.clock import SystemClock
from node.data.token_file import Documents, cached
from node.data.tokenizer import ByteTokenizer

ENDLESS = """
import itertools, sys
from pathlib import Path
from node.data.token_file import cached
from node.data.tokenizer import ByteTokenizer

def documents():
    for i in itertools.count():
        yield b"text " * 10_000, True
        print(i, flush=True)

cached(Path(sys.argv[1]), sys.argv[2], documents(), ByteTokenizer(), None)
"""


def test_a_stop_does_not_wait_for_text_that_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    goes_on = threading.Event()

    def tokenises(config: Any, manifest: Any) -> Any:
        begun.set()
        goes_on.wait(60.0)

    async def daemon() -> None:
        what: Any = None
        hosting = asyncio.ensure_future(assembly._opened_text(what, what, SystemClock()))
        await asyncio.to_thread(begun.wait, 60.0)
        hosting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hosting

    monkeypatch.setattr(assembly, "_text", tokenises)
    process = threading.Thread(target=lambda: asyncio.run(daemon()), daemon=True)
    process.start()
    process.join(20.0)
    ended = not process.is_alive()
    goes_on.set()
    assert ended


async def test_text_that_takes_long_is_opened_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = SystemClock()
    later = iter([0.0])
    monkeypatch.setattr(clock, "now", lambda: next(later, 1e9))
    monkeypatch.setattr("node.checkpoint.archive.aside.WATCH_S", 0.01)
    looked = threading.Event()
    monkeypatch.setattr(assembly, "_text", lambda *about: looked.wait(0.1) or ("text", "words"))
    what: Any = None
    assert await assembly._opened_text(what, what, clock) == ("text", "words")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def other(home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that tokenises in the same home, and has written something."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(home), "theirs"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def tokenised(home: Path, source: str, documents: Documents = ((b"text", True),)) -> bytes:
    found = cached(home, source, documents, ByteTokenizer(), None)
    return np.asarray(found).astype(np.uint8).tobytes()


def hidden(home: Path) -> list[Path]:
    return list((home / "data").glob(".*"))


@pytest.mark.parametrize("source", ["theirs", "another"])
def test_what_a_killed_process_has_tokenised_in_part_is_removed(
    home: Path, other: "subprocess.Popen[bytes]", source: str
) -> None:
    (left,) = hidden(home)
    tokenised(home, source)
    assert hidden(home) == [left], "its process lives"
    foreign = home / "data" / ".notes"
    foreign.write_text("mine")
    other.kill()
    other.wait()
    assert tokenised(home, source) == b"text"
    assert hidden(home) == [foreign], "also where nothing is to be tokenised"


def test_two_processes_tokenise_at_once(home: Path) -> None:
    def slowly() -> Iterator[tuple[bytes, bool]]:
        yield b"te", False
        tokenised(home, "the same")
        yield b"xt", True

    assert tokenised(home, "the same", slowly()) == b"text"
    assert not hidden(home)
