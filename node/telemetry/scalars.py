"""Event files for TensorBoard: the epochs of a run as curves over its tokens.

Enters: the journal's events of kind ``EPOCH``. Leaves: event files, one directory for each run and
peer. Never: a wait of the daemon for the disk. The package ``tensorboard`` is an extra, and is
imported when a peer wants these files.
"""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from google.protobuf.message import Message

from node.core.errors import Refused, UsageFault, writing
from node.core.ids import PeerId, short
from node.core.version import extra_command
from node.telemetry.events import EPOCH, Event
from node.telemetry.sinks import ThreadedSink

TAGS = {
    "loss": "loss/training",
    "loss_val": "loss/held_out",
    "tokens_per_s": "speed/tokens_per_second",
    "seconds": "speed/epoch_seconds",
}
"""Field of an event, and the name of its curve. Losses are nats per token."""
VERSION = "brain.Event:2"
"""Version of the format, with which every event file begins."""
SUFFIX = ".tutti"
"""End of the names of files that were written here; no others are removed."""
FILE_BYTES = 16 << 20
"""Most bytes of a file; another one follows it."""
POINT_BYTES = 1 << 10
"""More than the records of one epoch take."""
TOTAL_BYTES = 256 << 20
"""Most bytes of all files of one run and peer. The oldest ones are removed."""


class Records(Protocol):
    """Encoder of the records of an event file. ``at``: Unix seconds; ``step``: tokens, less than
    2^63."""

    def head(self, at: float) -> bytes:
        """First record of a file."""
        ...

    def restart(self, at: float, step: int) -> bytes:
        """A record by which readers drop earlier points at ``step`` and behind it."""
        ...

    def scalars(self, at: float, step: int, values: Mapping[str, float]) -> bytes:
        """One point of each curve, by the curve's name."""
        ...


class TensorBoardRecords:
    """Records in TensorBoard's own encoding. Raises UsageFault if the package is not installed."""

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as e:
            raise UsageFault(
                f"--tensorboard needs the package tensorboard: {e}",
                f"{extra_command('tensorboard')}  or start without --tensorboard",
            ) from e
        # Their messages are made at run time, so they have no types.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer = RecordWriter

    def head(self, at: float) -> bytes:
        return self._framed(self._events.Event(wall_time=at, file_version=VERSION))

    def restart(self, at: float, step: int) -> bytes:
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        return self._framed(self._events.Event(wall_time=at, step=step, session_log=log))

    def scalars(self, at: float, step: int, values: Mapping[str, float]) -> bytes:
        kind = self._summaries.Summary.Value
        points = [kind(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self._summaries.Summary(value=points)
        return self._framed(self._events.Event(wall_time=at, step=step, summary=summary))

    def _framed(self, event: Message) -> bytes:
        """The event with its length and checksums."""
        buffer = io.BytesIO()
        self._writer(buffer).write(event.SerializeToString())
        return buffer.getvalue()


class TensorBoardSink(ThreadedSink):
    """Points of the curves of ``peer``, in event files under ``folder``/RUN-PEER.

    At most ``limit`` epochs wait; those that a full disk does not take are gaps in the curves. The
    files of a run take ``total_bytes`` at most; the oldest ones are removed. Raises Refused and
    OutOfResources if the directory cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        peer: PeerId,
        records: Records,
        *,
        limit: int = 1_000,
        file_bytes: int = FILE_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        with writing(folder, "name a directory that you may write with --tensorboard", Refused):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._peer = peer
        self._records = records
        self._file_bytes = file_bytes
        self._total_bytes = total_bytes
        self._file: BinaryIO | None = None
        self._number = 0
        """Files begun so far: several may begin in one second."""
        self._run_id = ""
        self._step = -1
        """Tokens at the newest point of the open file."""
        super().__init__("tensorboard", limit, "debug")

    def accept(self, event: Event) -> None:
        if event.kind == EPOCH:
            super().accept(event)

    def _write(self, batch: list[Event]) -> int:
        for done, event in enumerate(batch):
            if event.kind != EPOCH:  # the notice of lost events has no place in a curve
                continue
            try:
                self._point(event)
            except (OSError, ValueError):  # no room, or a number that no event file can hold
                # The file may end within a record. Readers allow that of the last one only, so the
                # next point begins a new file, perhaps on a disk with room.
                self._finish()
                return len(batch) - done
        return 0

    def _point(self, event: Event) -> None:
        fields = event.fields
        values = {tag: float(fields[name]) for name, tag in TAGS.items() if fields[name] > 0}
        if not values:
            return
        step = int(fields["tokens"])
        if fields["run"] != self._run_id:
            self._finish()
            self._run_id = fields["run"]
        file = self._file or self._open(event.at)
        if step <= self._step or self._step < 0:
            # The daemon or the whole swarm began again from an older version.
            file.write(self._records.restart(event.at, step))
        file.write(self._records.scalars(event.at, step, values))
        file.flush()
        self._step = step
        # Room for one more point, so that no file is longer.
        if file.tell() >= self._file_bytes - POINT_BYTES:
            self._finish()

    def _open(self, at: float) -> BinaryIO:
        """Begin a file, whose name comes after those of all earlier ones. Raises OSError, and
        leaves no file then."""
        folder = self._folder / f"{self._run_id[:12]}-{short(self._peer)}"
        folder.mkdir(parents=True, exist_ok=True)
        self._prune(folder)
        while (path := folder / self._name(at)).exists():
            self._number += 1
        self._number += 1
        file = path.open("xb")
        try:
            file.write(self._records.head(at))
            file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            path.unlink(missing_ok=True)
            raise
        self._file = file
        self._step = -1
        return file

    def _name(self, at: float) -> str:
        """Name of the next file. Readers take files in the order of their names."""
        return f"events.out.tfevents.{int(at):010}.{self._number:06}{SUFFIX}"

    def _prune(self, folder: Path) -> None:
        """Remove the oldest files until the others leave room for one more."""
        files = sorted(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
        sizes = [file.stat().st_size for file in files]
        total = sum(sizes)
        for file, size in zip(files, sizes, strict=True):
            if total <= self._total_bytes - self._file_bytes:
                break
            file.unlink(missing_ok=True)
            total -= size

    def _finish(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def sink_for(folder: Path, peer: PeerId) -> TensorBoardSink:
    """The sink of a daemon. Raises UsageFault if the package is not installed, Refused and
    OutOfResources if the directory cannot be made."""
    return TensorBoardSink(folder, peer, TensorBoardRecords())
