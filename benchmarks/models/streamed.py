"""Two gigabytes of text of a web server, trained on below 200 MB of disk while the server and a
peer die."""

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import numpy as np
import tokenizers

from benchmarks.report import Report
from node.data.readers import file_sha256
from node.data.settings import OWN_MANIFEST, DataSettings
from node.data.sources import open_source
from node.data.streamed.documents import documents_of
from node.data.streamed.stream import Stream
from node.data.tokenizer import Tokenizer
from node.reach.interfaces import free_port
from testbed.daemons.books import COMMITTED, Books
from testbed.daemons.fleet import REPOSITORY, Box
from testbed.daemons.ledger import ledger

SHARDS = 64
BYTES = 2_000_000_000
CAP = 200_000_000
VOCAB = 4096
SEQ_LEN = 512
MICRO_BATCH = 4
FIRST_S = 5.0
COLUMNS = 8
TIMED = 32
TRIES = 3
DOWN_S = 8.0
BETWEEN_S = 12.0
AFTER = 10
SETTINGS = ("checkpoint.every=5", f"data_disk={CAP}", "data_hosts=127.0.0.0/8")
SHAPE = {"model.vocab": VOCAB, "model.seq_len": SEQ_LEN, "pipeline.micro_batch": MICRO_BATCH}


def rows(report: Report, root: Path) -> None:
    """Rows for the first batch, the cap, the tokeniser, and a swarm that reads."""
    web = root / "web"
    words = root / "words.json"
    tokenizer_of(words)
    write_shards(web)
    server = Server(web)
    server.start()
    try:
        read(report, root, server, words)
        train(report, root, server, words)
    finally:
        server.kill()


def read(report: Report, root: Path, server: "Server", words: Path) -> None:
    """One peer alone: its first batch, a long walk, the threads of the tokeniser."""
    settings = DataSettings(source=server.source, windows=1, tokenizer=str(words))
    began = time.perf_counter()
    made, tokenizer = opened(settings, root / "first")
    asyncio.run(first(made))
    took = time.perf_counter() - began
    report.add(
        f"3 {BYTES / 1e9:g} GB, nothing of it here: until the first batch",
        took,
        f"s, {made.files.received / 1e6:.0f} MB fetched",
        "",
        f"at most {FIRST_S:g}",
        holds=took <= FIRST_S,
    )
    made, _ = opened(settings, root / "walk")
    with largest(root / "walk") as most:
        asyncio.run(walk(made))
    report.add(
        "3 largest size of what is kept, while more is read",
        most[0] / 1e6,
        f"MB; {made.files.received / 1e6:.0f} MB fetched, {made.tokenised / 1e6:.0f} M tokens",
        "data_disk",
        f"at most {CAP / 1e6:g}",
        holds=most[0] <= CAP < made.files.received,
    )
    several = []
    single = []
    for i in range(TRIES):
        made, _ = opened(settings, root / f"timed-{i}")
        text = asyncio.run(fetched(made))
        began = time.perf_counter()
        asyncio.run(tokenised(made))
        several.append(made.tokenised / (time.perf_counter() - began))
        single.append(one_thread(tokenizer, text))
    ratio = median(a / b for a, b in zip(several, single, strict=True))
    report.add(
        "3 tokens per second, beside those of one thread",
        ratio,
        f"times; {median(several):,.0f} a second",
        f"one thread in a loop over the same documents, {median(single):,.0f} a second; median "
        f"of {TRIES}",
        "",
    )


def train(report: Report, root: Path, server: "Server", words: Path) -> None:
    """Two peers with the ends and two stages; the server dies twice, one of the ends once."""
    settings = DataSettings(source=server.source, windows=1, tokenizer=str(words))
    found, _ = opened(settings, root / "measured")
    windows = found.measured()
    asyncio.run(found.close())
    box = Box(root / "box", settings=SETTINGS)
    box.root.mkdir()
    given = {f"data.{key}": value for key, value in (
        ("source", server.source), ("sha256", found.sha256), ("windows", windows),
        ("tokenizer", str(words)), ("tokenizer_sha256", file_sha256(words)), ("holdout", 0.001),
    )}  # fmt: skip
    more = {"training.epochs": 100_000, "training.min_replicas": 1}
    peers = box.swarm((2, 1, 1), **SHAPE, **given, **more)
    ends = box.made["ends-0"]
    try:
        with largest(ends.home) as most:
            box.start(*peers)
            for _ in range(2):
                box.goes_on(2, 120.0)
                server.kill()
                time.sleep(DOWN_S)
                server.start()
                time.sleep(BETWEEN_S)
            box.made["ends-1"].kill()
            box.goes_on(3, 120.0)
            box.start(box.made["ends-1"])
            box.goes_on(AFTER, 120.0)
        box.stop_all()
        told = sorted((t for p in peers for t in p.told()), key=lambda t: t.at)
    except Exception:
        print(box.story(), file=sys.stderr)
        raise
    finally:
        box.clean_up()
    book = ledger(Books(told), SEQ_LEN)
    outages = sum("cannot be had" in t.text for t in told)
    dropped = sum(int(t.get("dropped", 0)) for t in told if t.kind == COMMITTED)
    commits = [t for t in told if t.kind == COMMITTED]
    report.add(
        "3 samples lost or counted twice, server killed twice, ends once",
        book.gaps + book.doubles,
        f"of {book.counted:,} in {len(commits)} epochs; {outages} times said that the server is "
        f"away, {dropped} micro-batches tried again later",
        f"loss {commits[0].get('loss'):.3f} to {commits[-1].get('loss'):.3f}",
        "0, and some were read while the server was away",
        holds=book.gaps + book.doubles == 0 < book.counted and outages >= 1,
    )
    report.add(
        "3 largest size of what a peer of the ends keeps",
        most[0] / 1e6,
        "MB",
        "data_disk",
        f"at most {CAP / 1e6:g}",
        holds=most[0] <= CAP,
    )


# ------------------------------------------------------------ one peer


def opened(settings: DataSettings, home: Path) -> tuple[Stream, Tokenizer]:
    found, tokenizer = open_source(settings, SEQ_LEN, VOCAB, home, OWN_MANIFEST, CAP)
    assert isinstance(found, Stream)
    return found, tokenizer


async def first(made: Stream) -> None:
    await made.rows(range(MICRO_BATCH))
    await made.close()


async def walk(made: Stream) -> None:
    """A sample of every piece, in the order of training."""
    lanes = made.pieces.lanes
    for start in range(0, COLUMNS * lanes, MICRO_BATCH):
        await made.rows(range(start, start + MICRO_BATCH))
    await made.close()


async def fetched(made: Stream) -> list[bytes]:
    """The documents of the pieces that are timed, their shards now here."""
    documents: list[bytes] = []
    for number in range(TIMED):
        for part in made.pieces.parts(number):
            shard = made.listing.shards[part.shard]
            found, _ = documents_of(made.files, shard, part, made.form, made.left)
            documents += [document for document in found if isinstance(document, bytes)]
    return documents


async def tokenised(made: Stream) -> None:
    made.expect(range(TIMED))
    await made.rows(range(TIMED))
    await made.close()


def one_thread(tokenizer: Tokenizer, documents: list[bytes]) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    ids = [tokenizer.encode(document) for document in documents]
    return len(np.concatenate(ids)) / (time.perf_counter() - began)


@contextmanager
def largest(home: Path) -> Iterator[list[int]]:
    """Bytes of the largest size that the kept data of a home had meanwhile."""
    folder = home / "data" / "stream"
    found = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            size = 0
            for path in folder.iterdir() if folder.exists() else ():
                try:
                    size += path.stat().st_size
                except FileNotFoundError:
                    continue
            found[0] = max(found[0], size)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


# ------------------------------------------------------------ the data


class Server:
    """The web server, a process of its own that always has the same port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port(["127.0.0.1"])
        self.source = f"http://127.0.0.1:{self.port}/SHA256SUMS"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ("-m", "testbed.fakes.web_server", str(self.directory), "--port", str(self.port))
        self._process = subprocess.Popen([sys.executable, *words], cwd=REPOSITORY)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def tokenizer_of(path: Path) -> None:
    """A byte-level BPE of the help texts of Python."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(topics.values(), trainer)
    made.save(str(path))


def write_shards(folder: Path) -> None:
    """Numbered documents of sections of the help texts, and the list of their checksums."""
    folder.mkdir()
    rng = random.Random(1)
    number = 0
    sums = list[str]()
    bodies = [json.dumps(" " + text[:8000])[1:].encode() for text in topics.values()]
    for shard in range(SHARDS):
        lines = list[bytes]()
        size = 0
        while size < BYTES // SHARDS:
            lines.append(b'{"text": "%d' % number + rng.choice(bodies) + b"}\n")
            size = size + len(lines[-1])
            number = number + 1
        content = b"".join(lines)
        name = f"part-{shard:03}.jsonl"
        (folder / name).write_bytes(content)
        sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums))
