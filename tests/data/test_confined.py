"""Foreign data is parsed in a process that can be ended: panics, patterns that never end, bombs."""

import asyncio
import gzip
import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import tokenizers

from node.core.errors import UsageFault
from node.data.confined import process
from node.data.confined.process import Confined, ParseFault, Pool
from node.data.settings import OWN_MANIFEST, DataSettings
from node.data.sources import open_data
from node.data.streamed import files
from node.data.tokenizer import FileTokenizer
from tests.data.streamed import given, opened, published, shard_of, stream

BACKTRACKS = r"(?:a|aa)+$"
"""A pattern that doubles its tries with each letter of a text that never ends."""
PANICS = "a" * 1000 + "c"
"""A text for which the library gives up the pattern, by a panic."""
ENDLESS = ("a" * 27 + "c") * 10_000
"""A text for which the library never gives it up: each position takes a tenth of a second."""


def letters(path: Path, change=lambda rust: None) -> Path:
    """File of a tokenizer with two letters, after `change` was made to it."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "c": 1, "<|eos|>": 2}, []))
    change(rust)
    rust.save(str(path))
    return path


def backtracks(rust: tokenizers.Tokenizer) -> None:
    pattern = tokenizers.Regex(BACKTRACKS)
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")


def grows(rust: tokenizers.Tokenizer) -> None:
    rust.normalizer = tokenizers.normalizers.Replace("a", "a" * 100_000)


def test_a_process_finds_this_program_without_the_hooks_of_an_installation(monkeypatch):
    here = [entry for entry in sys.path if not (Path(entry) / "node").is_dir()]
    monkeypatch.setattr(sys, "path", here)
    confined = Confined()
    try:
        found = list(confined.call({"op": "lines", "column": "text"}, b'{"text": "a"}'))
    finally:
        confined.end()
    assert len(found) == 1
    assert found[0].endswith(b"a")


def test_a_pattern_that_the_library_gives_up_is_a_fault(tmp_path):
    ours = FileTokenizer(letters(tmp_path / "t.json", backtracks))
    with pytest.raises(ParseFault, match=r"t\.json fails .*PanicException.*retry-limit") as fault:
        ours.encode(PANICS)
    assert "without such patterns" in fault.value.next_step
    assert ours.encode("aca").tolist() == [0, 1, 0]  # and the next text is read as ever


def test_a_pattern_that_does_not_end_is_ended_by_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "CPU_S", 1)
    ours = FileTokenizer(letters(tmp_path / "t.json", backtracks))
    with pytest.raises(ParseFault, match="more than 1 s of processor time"):
        ours.encode(ENDLESS)
    assert ours.encode("aca").tolist() == [0, 1, 0]


@pytest.mark.skipif(not os.path.exists("/proc"), reason="only Linux bounds addresses")
def test_a_tokenizer_that_makes_much_of_little_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MEMORY", 512 << 20)
    ours = FileTokenizer(letters(tmp_path / "t.json", grows))
    with pytest.raises(ParseFault, match="512 MiB of memory"):
        ours.encode("a" * 100_000)


async def test_a_stream_whose_tokenizer_fails_everywhere_says_so(tmp_path, small):
    source = published(tmp_path / "here", {"a.txt": [f"{PANICS}\n" * 40]})
    tokenizer = FileTokenizer(letters(tmp_path / "t.json", backtracks))
    made = stream(f"file:{source}", tmp_path, tokenizer=tokenizer)
    with pytest.raises(ParseFault, match="retry-limit"):
        await asyncio.wait_for(made.rows(range(2)), 60)
    assert "retry-limit" in made.trouble
    await made.close()


async def test_a_worker_that_dies_leaves_nobody_waiting(tmp_path, small, monkeypatch):
    source = published(tmp_path / "here", {"a.txt": ["some text\n" * 400]})
    made = stream(f"file:{source}", tmp_path)

    class Panic(BaseException):
        pass

    def dies(*_):
        raise Panic("of a library")

    monkeypatch.setattr(made, "_make", dies)
    with pytest.raises(Panic, match="of a library"):
        await asyncio.wait_for(made.rows(range(2)), 60)
    await made.close()


async def test_closing_ends_a_tokenizer_at_work(tmp_path, small, monkeypatch):
    loop = asyncio.get_running_loop()
    at_work = asyncio.Event()
    call = Confined.call

    def told(self, head, *what):
        if head["op"] == "encode":
            loop.call_soon_threadsafe(at_work.set)
        return call(self, head, *what)

    monkeypatch.setattr(Confined, "call", told)
    source = published(tmp_path / "here", {"a.txt": [ENDLESS]})
    tokenizer = FileTokenizer(letters(tmp_path / "t.json", backtracks))
    at_work.clear()
    made = stream(f"file:{source}", tmp_path, tokenizer=tokenizer)
    asking = asyncio.ensure_future(made.rows(range(2)))
    await at_work.wait()
    await asyncio.wait_for(made.close(), 20)
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_a_corpus_is_refused_with_its_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text(f"{PANICS}\n" * 40)
    names = DataSettings(source=f"file:{tmp_path}/a.txt", tokenizer=f"{tmp_path}/t.json")
    letters(tmp_path / "t.json", backtracks)
    with pytest.raises(UsageFault, match="retry-limit"):
        open_data(names, 16, 259, tmp_path / "home", OWN_MANIFEST)
    assert not list((tmp_path / "home").rglob("*.uint16"))


# ---------------------------------------------------------------- bombs

RUBBISH = [b"PAR1" + bytes(100) + b"PAR1", b"\x28\xb5\x2f\xfd" + bytes(range(256)) * 20]
"""Headers that a library knows, with nothing behind them."""


@pytest.mark.skipif(not os.path.exists("/proc"), reason="only Linux bounds addresses")
def test_a_page_of_parquet_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MEMORY", 512 << 20)
    path = tmp_path / "a.parquet"
    words = pyarrow.array(["x" * (4 << 20)])
    often = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 256, pyarrow.int32()), words)
    pq.write_table(pyarrow.table({"text": often}), path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ParseFault, match="cannot read .*parquet"):
        given(opened(tmp_path), shard_of(path))


def test_a_gzip_bomb_is_refused_before_it_is_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 1 << 20)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(UsageFault, match="MiB of text"):
        given(opened(tmp_path), shard_of(path))
    assert not any((tmp_path / "kept").iterdir())


@pytest.mark.skipif(not os.path.exists("/proc"), reason="only Linux bounds addresses")
def test_json_that_takes_far_more_than_its_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MEMORY", 256 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[" + b"[]," * (8 << 20) + b"[]]\n")
    with pytest.raises(ParseFault, match=r"lines of .*a\.jsonl"):
        given(opened(tmp_path), shard_of(path))


@pytest.mark.parametrize("content", RUBBISH)
@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst", "a.jsonl.gz"])
def test_rubbish_is_a_fault(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ParseFault, match=name) as fault:
        given(opened(tmp_path), shard_of(path))
    assert fault.value.next_step


# ---------------------------------------------------------------- the process


def test_a_process_writes_no_file_and_knows_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    one = Confined()
    environment = Path(f"/proc/{one._process.pid}/environ")
    limits = Path(f"/proc/{one._process.pid}/limits")
    list(one.call({"op": "lines", "column": "text"}, b""))
    if environment.exists():
        assert b"secret" not in environment.read_bytes()
        [row] = [line for line in limits.read_text().splitlines() if "Max file size" in line]
        assert row.split()[3:5] == ["0", "0"]
    one.end()
    with pytest.raises(ParseFault, match="has ended"):
        list(one.call({"op": "lines", "column": "text"}, b""))


def test_an_answer_that_is_left_does_not_spoil_the_next():
    pool = Pool()
    raw = b'{"text": "a"}\n' * 10
    left = pool.call({"op": "lines", "column": "text"}, raw)
    assert next(left) == b"+a"
    left.close()
    assert list(pool.call({"op": "lines", "column": "text"}, raw)) == [b"+a"] * 10
    pool.close()


def waits(pool: Pool, monkeypatch) -> threading.Event:
    """Event of a call that waits for a place."""
    waiting = threading.Event()
    real = pool._place_free.wait

    def wait() -> None:
        waiting.set()
        real()

    monkeypatch.setattr(pool._place_free, "wait", wait)
    return waiting


LINES = {"op": "lines", "column": "text"}
RAW = b'{"text": "a"}\n' * 10


def test_calls_beyond_the_limit_wait_for_a_process(monkeypatch):
    made = list[Confined]()
    pool = Pool(made.append, most=1)
    waiting = waits(pool, monkeypatch)
    first = pool.call(LINES, RAW)
    assert next(first) == b"+a"
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(lambda: list(pool.call(LINES, RAW)))
        assert waiting.wait(60)
        assert list(first) == [b"+a"] * 9
        assert second.result(60) == [b"+a"] * 10
    assert len(made) == 1
    pool.close()


def test_an_interruption_ends_calls_that_wait(monkeypatch):
    pool = Pool(most=1)
    waiting = waits(pool, monkeypatch)
    first = pool.call(LINES, RAW)
    assert next(first) == b"+a"
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(lambda: list(pool.call(LINES, RAW)))
        assert waiting.wait(60)
        pool.interrupt()
        try:
            with pytest.raises(ParseFault, match="interrupted"):
                second.result(60)
        finally:
            first.close()
    assert list(pool.call(LINES, RAW)) == [b"+a"] * 10
    pool.close()


def test_a_call_that_fails_leaves_its_place():
    def fails(process: Confined) -> None:
        raise ParseFault("no template")

    pool = Pool(fails, most=1)
    with pytest.raises(ParseFault, match="no template"):
        list(pool.call(LINES, RAW))
    assert not pool._calls


def test_a_tokenizer_has_few_processes(tmp_path):
    assert FileTokenizer(letters(tmp_path / "t.json"))._pool._most == process.KEPT


def test_what_reading_raises_is_raised(tmp_path):
    buffer = io.BytesIO()
    pq.write_table(pyarrow.table({"text": ["a"] * 10}), buffer)

    def fails(start, size):
        raise UsageFault("the server says 404", "ask")

    head = {"op": "parquet", "name": "x", "size": len(buffer.getvalue()), "column": "text"}
    rows = {"start": 0, "stop": 1, "parts": 1, "strict": True}
    with pytest.raises(UsageFault, match="404"):
        list(Pool().call(head | rows, read=fails))


def test_ids_outside_the_vocabulary_never_come(tmp_path, monkeypatch):
    ours = FileTokenizer(letters(tmp_path / "t.json"))
    monkeypatch.setattr(ours, "_call", lambda *_: np.asarray([0, 3], np.uint32).tobytes())
    with pytest.raises(ParseFault, match="ids that it does not have"):
        ours.encode("a")
