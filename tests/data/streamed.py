"""Shards on a disk, and streams of them from a server."""

import gzip
import hashlib
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pyarrow
import pyarrow.parquet as pq

from node.data.readers import LeftOut, RowFormat
from node.data.settings import OWN_MANIFEST, DataSettings, Places
from node.data.streamed.documents import documents_of
from node.data.streamed.files import Files, Shard
from node.data.streamed.pieces import Part
from node.data.streamed.stream import Stream, open_stream
from node.data.tokenizer import ByteTokenizer, Tokenizer
from testbed.fakes.web_server import FileServer

CAP = 64 << 20
TEXT = bytes(i % 251 for i in range(4000))


def documents(count: int, seed: int = 1) -> list[str]:
    """Texts of many lengths, none the same, with characters of one to four bytes."""
    rng = random.Random(seed)
    return [
        f"<{seed}.{i}>" + "".join(rng.choices("abc 🤖éü\n", k=rng.choice((0, 3, 40, 400))))
        for i in range(count)
    ]


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def write(path: Path, texts: list[str], frames: int = 3) -> Path:
    """A shard of these texts in the format that its name says."""
    lines = [json.dumps({"text": t}).encode() + b"\n" for t in texts]
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        pq.write_table(table, path, row_group_size=max(1, len(texts) // 4))
        return path
    content = lines if "json" in path.name else [t.encode() for t in texts]
    if path.name == "a.json":
        content = [b"[", b",".join(lines), b"]"]
    elif ".csv" in path.name:
        quoted = (t.replace('"', '""') for t in texts)
        content = [b"id,text\n", *(f'7,"{t}"\n'.encode() for t in quoted)]
    cuts = [len(content) * i // frames for i in range(frames + 1)]
    parts = [b"".join(content[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    pack = {".zst": zstd, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(b"".join(pack(p) for p in parts))
    return path


def listed(directory: Path) -> Path:
    """A list of checksums of everything in a directory."""
    names = sorted(p for p in directory.iterdir() if p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in names]
    (directory / "SHA256SUMS").write_text("".join(lines))
    return directory / "SHA256SUMS"


def published(directory: Path, shards: dict[str, list[str]]) -> Path:
    """The list of a new directory of these shards."""
    directory.mkdir()
    for name, texts in shards.items():
        write(directory / name, texts)
    return listed(directory)


def opened(folder: Path, cap: int = CAP) -> Files:
    return Files(httpx2.Client(), folder / "kept", cap)


def shard_of(path: Path) -> Shard:
    return Shard(str(path), path.stat().st_size)


def given(
    found: Files, shard: Shard, column: str = "text", part: Part | None = None
) -> list[bytes]:
    """Documents of a part of a shard; of the whole shard without a part."""
    part = part or Part(0, 0, shard.size)
    left = LeftOut(shard.name)
    texts, _ = documents_of(found, shard, part, RowFormat(column), left)
    return [text for text in texts if isinstance(text, bytes)]


def stream(source: str, home: Path, *, windows: int = 8, seq_len: int = 16, cap: int = CAP,
           holdout: float = 0.05, masked: bool = False, places: Places = OWN_MANIFEST,
           tokenizer: Tokenizer | None = None, **more: Any) -> Stream:  # fmt: skip
    """A stream at the run's owner; a manifest of the owner's own may name hosts of this machine."""
    settings = DataSettings(
        source=source, windows=windows, holdout=holdout, document_mask=masked, **more
    )
    return open_stream(settings, seq_len, tokenizer or ByteTokenizer(), home, places, cap)


@contextmanager
def served(directory: Path) -> Iterator[FileServer]:
    """A file server of a directory, on a thread."""
    with FileServer(directory) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def reply(handler, status: int, body: bytes, **headers: str) -> None:
    """Answer a request with `body`; Content-Length is the body's length unless given."""
    handler.send_response(status)
    for name, value in {"content_length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)
