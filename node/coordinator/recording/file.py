"""The file of a recording: written by a thread of its own, and never over another file. A line is
written whole or taken back, so a killed process leaves whole lines."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from node.coordinator.recording.recorder import MOST_BYTES, Recorder
from node.core.errors import UsageFault, writing

MOST_FILES = 1000
"""Files of one name: FILE, FILE.2 and so on."""
CLOSE_S = 5.0
"""Seconds that the last lines may take to be written."""


class RecordingFile:
    """A recording on the disk. ``path``: the name that was asked for; :attr:`path` is a new file of
    that name, or of that name and a number: a daemon that starts again goes on in the next one.
    ``on_end(why)`` is called by another thread if the recording ends early. Raises LocalFault if
    no such file can be made."""

    def __init__(self, path: Path, on_end: Callable[[str], None], most: int = MOST_BYTES) -> None:
        self._fd, self.path = _new_file(path)
        self._size = 0
        self._on_end = on_end
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self.recorder = Recorder(self._lines.put, most, on_end)
        self._thread = threading.Thread(target=self._run, name="tutti-recording", daemon=True)
        self._thread.start()

    def close(self, why: str) -> None:
        """Write the last lines and the reason for the end, for at most :data:`CLOSE_S`."""
        self.recorder.close(why)
        self._lines.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._append(line)
        except OSError as e:
            self.recorder.ended = True
            self._on_end(f"{self.path} cannot be written: {e.strerror or e}")
            while self._lines.get() is not None:
                pass  # the machines go on, and their lines are lost
        finally:
            os.close(self._fd)

    def _append(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)


def _new_file(path: Path) -> tuple[int, Path]:
    """Descriptor and path of a file that was not there before, mode 0600."""
    with writing(path, "name another file with --record"):
        for number in range(1, MOST_FILES + 1):
            found = path if number == 1 else path.with_name(f"{path.name}.{number}")
            with contextlib.suppress(FileExistsError):
                return os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), found
    raise UsageFault(f"{MOST_FILES} recordings are named {path}", "name another file with --record")
