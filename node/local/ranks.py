"""Rank 0's control of the other ranks: starts their processes, sends commands, and reports when one
is gone. Commands go to each process's standard input as JSON lines, tensors through
torch.distributed: a rank waits for a command without a timeout, and for a tensor with one. An error
inside a command leaves the ranks at different places, so it ends them all.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

from node.core.errors import DeviceLost
from node.local.rank import NEXT_STEP, TIMEOUT_S, Rank
from node.model.device import Device
from node.model.products import by_onednn
from node.model.settings import ModelSettings
from node.optim.settings import OptimSettings
from node.transport import parent_watch

START_S = 300.0
"""Seconds for a process to load torch, on a busy machine."""
END_S = 10.0
"""A process that was told to end and has not ended by then is killed."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Handle:
    """A key under which the other ranks keep something. They free it once the handle is freed
    here."""

    number: int


class Ranks:
    """The processes of ranks 1 and above. :meth:`start` them, then :meth:`meet`, then
    :meth:`command`, at last :meth:`close`.

    ``folder`` is theirs alone: it is emptied at the start and gone at the end. ``lost`` is called
    at most once, from any thread, when the ranks cannot go on; from then on every command raises
    DeviceLost.
    """

    def __init__(
        self, folder: Path, lost: Callable[[DeviceLost], None], timeout_s: float = TIMEOUT_S
    ) -> None:
        self._folder = folder
        self._lost = lost
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._forgotten = deque[int]()
        self._fault: DeviceLost | None = None
        self._closing = False
        self._said = threading.Lock()

    def start(
        self,
        devices: Sequence[str],
        model: ModelSettings,
        stages: int,
        stage: int,
        threads: int,
        *,
        optimizer: OptimSettings,
        epochs: int,
    ) -> None:
        """Start a process for every device but the first, which is this process's. Call it on the
        main thread. ``epochs``: of the run, for the optimizer's schedule.

        The kernel ends such a process with the thread that started it.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        for rank, device in enumerate(devices[1:], 1):
            watch = [sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid())]
            process = subprocess.Popen(
                [*watch, sys.executable, "-m", "node.local.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
            self._processes.append(process)
            self._tell(
                process,
                {
                    "rank": rank,
                    "size": len(devices),
                    "device": device,
                    "store": str(self._folder / "ranks"),
                    "model": asdict(model),
                    "stages": stages,
                    "stage": stage,
                    "optimizer": asdict(optimizer),
                    "epochs": epochs,
                    "threads": threads,
                    "onednn": by_onednn(),
                    "timeout_s": self._timeout_s,
                },
            )

    def meet(self, device: Device) -> Rank:
        """Wait for the processes and become rank 0. Raises DeviceLost when one does not come up."""
        deadline = time.monotonic() + START_S
        for rank, process in enumerate(self._processes, 1):
            out = process.stdout
            left = max(0.0, deadline - time.monotonic())
            if (
                out is None
                or not select.select([out], [], [], left)[0]
                or out.readline() != b"ready\n"
            ):
                raise self._broken(f"the process of local device {rank} did not come up")
        rank = Rank.meet(
            0, len(self._processes) + 1, device, self._folder / "ranks", self._timeout_s
        )
        for number, process in enumerate(self._processes, 1):
            threading.Thread(
                target=self._watch, args=(number, process), name=f"local-{number}", daemon=True
            ).start()
        return rank

    def handle(self) -> Handle:
        """A new number under which the other ranks keep something, until the handle is garbage
        here."""
        handle = Handle(next(self._numbers))
        finalize(handle, self._forgotten.append, handle.number).atexit = False
        return handle

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which no other thread sends a command, for a look before one is sent."""
        with self._lock:
            yield

    @contextmanager
    def command(self, do: str, **words: Any) -> Iterator[None]:
        """Send the command ``do`` to all ranks; inside the block, do rank 0's part of it. One
        command at a time, from any thread.

        Raises DeviceLost, also for any error inside the block. Check the data for possible errors
        before.
        """
        with self._lock:
            if self._fault is not None:
                raise self._fault
            forget = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            try:
                for process in self._processes:
                    self._tell(process, {"do": do, "forget": forget, **words})
                yield
            except Exception as e:
                # After any error the ranks are no longer at one place in the program.
                raise self._broken(self._cause(e)) from e
            if self._fault is not None:
                # An abandoned collective leaves numbers that nobody made, and no error.
                raise self._fault

    def close(self) -> None:
        """End the processes and wait for them. Safe to call twice, and when they are gone
        already."""
        self._closing = True
        # A command that hangs would be waited for; without the others it fails.
        ours = self._lock.acquire(timeout=END_S)
        try:
            for process in self._processes:
                self._end(process)
            if ours:
                Rank.leave()
        finally:
            if ours:
                self._lock.release()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(END_S if self._fault is None else 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._broken(f"the process of local device {rank} ended with code {code}")

    def _broken(self, why: str) -> DeviceLost:
        with self._said:
            if self._fault is not None:
                return self._fault
            self._fault = fault = DeviceLost(why, NEXT_STEP)
        for process in self._processes:
            process.kill()
        if not self._closing:
            self._lost(fault)
        Rank.abandon()
        return fault

    def _cause(self, error: Exception) -> str:
        """A process that died is why a collective failed; it may take the system a moment to say
        so."""
        for rank, process in enumerate(self._processes, 1):
            with suppress(subprocess.TimeoutExpired):
                return f"the process of local device {rank} ended with code {process.wait(0.5)}"
        return (
            f"a local device failed: {type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0][:200]}"
        )

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], words: dict[str, Any]) -> None:
        if process.stdin is None:
            raise OSError("no pipe")
        process.stdin.write(json.dumps(words, separators=(",", ":")).encode() + b"\n")
        process.stdin.flush()
