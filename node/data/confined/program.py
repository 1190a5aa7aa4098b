"""The program of a confined process: parses bytes that others wrote, and answers on its standard
output.

Started as a script with three arguments: the module path of its parent, the bytes of memory that it
may have, and the seconds of processor time for one part of an answer. It keeps itself below these
limits, opens no file of the parent's and writes none. Whatever a library raises is an answer; where
a limit or a crash ends the process, the parent sees the end of its output.

A frame is one byte that says its kind, four that say its length, and its content. A call is a frame
of JSON and a frame of bytes; its answer is any number of PARTs, then END or FAULT. While it lasts,
the program may send ASK and then reads one frame of bytes.
"""

import contextlib
import io
import json
import math
import os
import select
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

HEAD = struct.Struct(">cI")
"""Kind and length of a frame."""
CALL = b"C"
BYTES = b"B"
PART = b"P"
ASK = b"A"
END = b"E"
FAULT = b"F"
IDLE_S = 300.0
"""Seconds without a call after which the process ends."""
BUFFER = 1 << 20
"""Bytes of a file that are asked for at once."""
Answer = Iterator[bytes]


def limit(memory: int) -> None:
    """Keep this process below its limits: no files written, no core, no more memory."""
    import resource

    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, memory),
    ):
        with contextlib.suppress(OSError, ValueError):  # macOS refuses some
            resource.setrlimit(kind, (most, most))


def more_time(cpu_s: int) -> None:
    """Allow ``cpu_s`` more seconds of processor time from now on; the kernel ends the process after
    them."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time()) + cpu_s
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


# ------------------------------------------------------------ frames


def send(kind: bytes, content: bytes) -> None:
    view = memoryview(HEAD.pack(kind, len(content)) + content)
    while view:
        view = view[os.write(1, view) :]


def receive() -> bytes:
    """The content of the next frame. Raises EOFError when the parent has closed the pipe."""
    _, length = HEAD.unpack(_exactly(HEAD.size))
    return _exactly(length)


def _exactly(size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        if not (more := os.read(0, min(size - len(found), 1 << 20))):
            raise EOFError
        found += more
    return bytes(found)


class CallFile(io.RawIOBase):
    """The file of a call, for libraries that want a file: each read asks the parent for bytes."""

    mode = "rb"

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open here."""

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        self._at = max(0, begins[whence] + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        """All of ``size`` bytes unless the file ends before."""
        stop = self._size
        if size is not None and size >= 0:
            stop = min(self._at + size, self._size)
        found = bytearray()
        while self._at < stop:
            send(ASK, json.dumps([self._at, min(BUFFER, stop - self._at)]).encode())
            got = receive()
            if not got:
                break
            found += got
            self._at += len(got)
        return bytes(found)


# ------------------------------------------------------------ the tokenizer


class Tokenizer:
    """A tokenizer.json, which is loaded once and asked many times."""

    def __init__(self) -> None:
        self._inner: Any = None

    def load(self, head: dict[str, Any], body: bytes) -> Answer:
        """JSON: ``ids``, one more than the largest id, and ``ends``, ids of the words ``ends``."""
        from tokenizers import Tokenizer as RustTokenizer

        self._inner = RustTokenizer.from_buffer(body)
        self._inner.no_truncation()
        self._inner.no_padding()
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        ends = [self._inner.token_to_id(word) for word in head["ends"]]
        yield json.dumps({"ids": max(ids, default=-1) + 1, "ends": ends}).encode()

    def encode(self, _: dict[str, Any], body: bytes) -> Answer:
        """Ids of a text in UTF-8, uint32 of this machine; no special ids added."""
        text = body.decode("utf-8", errors="replace")
        [found] = self._inner.encode_batch_fast([text], add_special_tokens=False)
        yield array("I", found.ids).tobytes()

    def marked(self, head: dict[str, Any], body: bytes) -> Answer:
        """Ids of a text as :meth:`encode` gives them, with the bit ``mark`` where a token does not
        begin in one of the ranges of characters ``trained``."""
        text = body.decode("utf-8", errors="replace")
        found = self._inner.encode(text, add_special_tokens=False)
        yield array("I", marked_ids(found, head["trained"], head["mark"])).tobytes()

    def decode(self, head: dict[str, Any], body: bytes) -> Answer:
        """The text of ids in UTF-8, without special ones unless ``special``."""
        ids = array("I", body).tolist()
        found = self._inner.decode(ids, skip_special_tokens=not head.get("special"))
        yield found.encode("utf-8", errors="replace")


def marked_ids(found: Any, trained: list[list[int]], mark: int) -> Iterator[int]:
    """Ids of an encoding; ``mark`` is set in tokens that begin in none of the ranges."""
    ranges = iter(sorted(trained))
    start, stop = next(ranges, (0, 0))
    for number, (begin, _) in zip(found.ids, found.offsets, strict=True):
        while stop and begin >= stop:
            start, stop = next(ranges, (0, 0))
        yield number if start <= begin < stop else number | mark


def serve(cpu_s: int) -> None:
    """Answer calls until the parent closes the pipe, or makes none for :data:`IDLE_S`."""
    from node.data.confined.rows import Reader, Unfit

    tokenizer = Tokenizer()
    reader = Reader(CallFile)
    operations: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
        "template": reader.load,
        "prompt": reader.prompt,
        "parquet": reader.parquet,
        "lines": reader.lines,
        "rows": reader.rows,
        "look": reader.look,
        "unpack": reader.unpack,
        "load": tokenizer.load,
        "encode": tokenizer.encode,
        "marked": tokenizer.marked,
        "decode": tokenizer.decode,
    }
    while select.select([0], [], [], IDLE_S)[0]:
        head = json.loads(receive())
        body = receive()
        try:
            more_time(cpu_s)
            for part in operations[head["op"]](head, body):
                send(PART, part)
                more_time(cpu_s)
            send(END, b"")
        except (EOFError, BrokenPipeError):
            raise
        except Unfit as e:
            send(FAULT, json.dumps(e.args).encode())
        except BaseException as e:  # noqa: BLE001 - a panic of a library in Rust is no Exception
            send(FAULT, json.dumps([f"{type(e).__name__}: {e}"[:500], ""]).encode())


def main() -> None:
    sys.path[:] = sys.argv[1].split(os.pathsep)
    limit(int(sys.argv[2]))
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(int(sys.argv[3]))


if __name__ == "__main__":
    main()
