"""A confined process, as its parent uses it: calls, their answers, its end.

Every way in which it can fail is one typed fault: a library's exception, a crash, a limit of memory
or of time.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from node.core.errors import UsageFault
from node.data.confined import program
from node.data.confined.program import ASK, BUFFER, BYTES, CALL, END, FAULT, HEAD, IDLE_S, PART

ROOT = Path(program.__file__).parents[3]
"""Directory of this program's top package."""
MEMORY = 2 << 30
"""Bytes of address space of a process, where the system keeps such a limit."""
CPU_S = 30
"""Seconds of processor time for one part of an answer, unless the parent allows less."""
MOST_FRAME = 1 << 30
"""Bytes of one part of an answer."""
WAIT_S = 600.0
"""Seconds without a byte after which a process is ended: it has :data:`CPU_S` of processor
time, and this machine may be busy."""
KEPT = 4
"""Processes that wait for the next call."""
KEPT_S = IDLE_S / 2
"""Seconds for which they do; they end by themselves after :data:`IDLE_S`."""
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "TMPDIR")
_ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    # Others reserve more addresses than the process may have.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}


class ParseFault(UsageFault):
    """Foreign data that a library cannot parse, or not within the limits."""


Read = Callable[[int, int], bytes]
"""``size`` bytes of the file of a call from ``start`` on."""


class Confined:
    """One process; of one thread at a time."""

    def __init__(self, cpu_s: int | None = None) -> None:
        """``cpu_s``: seconds of processor time for one part of an answer; None for
        :data:`CPU_S`."""
        if cpu_s is None:
            cpu_s = CPU_S
        self._cpu_s = cpu_s
        limits = (str(MEMORY), str(self._cpu_s))
        known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        # An editable installation finds this program by a hook, and the process has none.
        entries = [str(ROOT), *sys.path]
        path = os.pathsep.join(os.path.abspath(entry) for entry in entries)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(program.__file__)), path, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=known | _ONE_THREAD,
            cwd="/",
            start_new_session=True,
        )
        self.used = time.monotonic()
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the process, and let go of it."""
        self._finalizer()

    def interrupt(self) -> None:
        """End the process: the call that waits for it raises. Any thread may do this."""
        self._process.kill()

    def call(
        self, head: Mapping[str, Any], body: bytes = b"", read: Read | None = None
    ) -> Iterator[bytes]:
        """The parts of an answer, as they come. ``read`` gives bytes of the file of the call.

        Raises ParseFault when the data cannot be parsed, and what ``read`` raises. After a fault,
        and where the caller leaves before the end, the process must be ended.
        """
        try:
            self._send(CALL, json.dumps(head).encode())
            self._send(BYTES, body)
            while True:
                kind, content = self._receive()
                if kind == PART:
                    yield content
                elif kind == ASK and read is not None:
                    start, size = json.loads(content)
                    self._send(BYTES, read(max(0, start), min(size, BUFFER)))
                elif kind == FAULT:
                    why, step = json.loads(content)
                    raise ParseFault(printable(why), printable(step))
                elif kind == END:
                    return
                else:
                    raise ParseFault("the process that reads it answers something else")
        except (BrokenPipeError, EOFError) as e:
            raise ParseFault(
                f"the process that reads it has ended: more than {MEMORY >> 20} MiB of memory, "
                f"more than {self._cpu_s} s of processor time, or a crash of a library"
            ) from e
        finally:
            self.used = time.monotonic()

    def _send(self, kind: bytes, content: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise EOFError
        pipe.write(HEAD.pack(kind, len(content)))
        pipe.write(content)
        pipe.flush()

    def _receive(self) -> tuple[bytes, bytes]:
        kind, length = HEAD.unpack(self._exactly(HEAD.size))
        if length > MOST_FRAME:
            raise EOFError
        return kind, self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            raise EOFError
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        found = bytearray()
        while len(found) < size:
            if not waiting.poll(1000 * WAIT_S):
                raise EOFError
            more = os.read(pipe.fileno(), min(size - len(found), 1 << 20))
            if not more:
                raise EOFError
            found += more
        return bytes(found)


def explained(parts: Iterator[bytes], what: str, next_step: str) -> Iterator[bytes]:
    """The parts of an answer. A fault of the process that gives them says ``what`` failed, unless
    it knows a next step itself."""
    while True:
        try:
            part = next(parts, None)
        except ParseFault as e:
            if e.next_step:
                raise
            raise ParseFault(f"{what}: {e.what}", next_step) from e
        if part is None:
            return
        yield part


def printable(text: str) -> str:
    """Printable characters of words of a library, which may repeat the data; at most 1,000."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:1000])


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class Pool:
    """Confined processes that know the same, such as one tokenizer. Any thread may use it."""

    def __init__(
        self,
        prepare: Callable[[Confined], None] = lambda process: None,
        cpu_s: int | None = None,
        most: int | None = None,
    ) -> None:
        """``prepare`` is called once with each new process. ``cpu_s``: as of :class:`Confined`.
        ``most``: calls at once, while further ones wait; None: any number, for a pool that is
        called while an answer of it is read."""
        self._prepare = prepare
        self._cpu_s = cpu_s
        self._most = most
        self._lock = threading.Lock()
        self._place_free = threading.Condition(self._lock)
        self._calls = 0
        """Calls under way, without those that wait."""
        self._interrupts = 0
        self._idle = list[Confined]()
        self._busy = set[Confined]()

    def close(self) -> None:
        """Let go of the processes that wait."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for process in idle:
            process.end()

    def interrupt(self) -> None:
        """End every process that works. Its call raises, and so do calls that wait for one."""
        with self._lock:
            for process in self._busy:
                process.interrupt()
            self._interrupts += 1
            self._place_free.notify_all()

    def call(
        self, head: Mapping[str, Any], body: bytes = b"", read: Read | None = None
    ) -> Iterator[bytes]:
        """Like :meth:`Confined.call`, in a process that is free."""
        with self._one() as process:
            yield from process.call(head, body, read)

    @contextlib.contextmanager
    def _one(self) -> Iterator[Confined]:
        self._enter()
        try:
            process, fresh = self._taken()
            try:
                if fresh:
                    self._prepare(process)
                yield process
            except BaseException:  # also GeneratorExit: the rest of an answer is in the pipe
                self._let_go(process, keep=False)
                raise
            self._let_go(process, keep=True)
        finally:
            self._leave()

    def _enter(self) -> None:
        """Wait for a place among the calls. Raises ParseFault when the calls are interrupted."""
        with self._place_free:
            interrupts = self._interrupts
            while self._most is not None and self._calls >= self._most:
                self._place_free.wait()
                if self._interrupts != interrupts:
                    raise ParseFault("it was interrupted")
            self._calls += 1

    def _leave(self) -> None:
        with self._place_free:
            self._calls -= 1
            self._place_free.notify()

    def _taken(self) -> tuple[Confined, bool]:
        """A process that works from now on, and True if it is a new one."""
        now = time.monotonic()
        with self._lock:
            usable = [p for p in self._idle if now - p.used < KEPT_S and p.running]
            old = [p for p in self._idle if p not in usable]
            process = None
            if usable:
                process = usable.pop()
            self._idle = usable
            if process is not None:
                self._busy.add(process)
        for one in old:
            one.end()
        if process is not None:
            return process, False
        process = Confined(self._cpu_s)
        with self._lock:
            self._busy.add(process)
        return process, True

    def _let_go(self, process: Confined, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            keep = keep and len(self._idle) < KEPT
            if keep:
                self._idle.append(process)
        if not keep:
            process.end()
