"""Epochs as curves: event files that TensorBoard reads, on disks of bounded and of no room."""

import errno
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from node.core.errors import Refused, UsageFault
from node.core.ids import PeerId
from node.telemetry.events import EPOCH, Event
from node.telemetry.scalars import TAGS, TensorBoardRecords, TensorBoardSink, sink_for

PEER = PeerId("12D3KooW" + "p" * 44)
RUN = "ab" * 32


class Lines:
    """Records as lines of JSON. ``full``: the disk takes no point while it is set."""

    full = False

    def head(self, at: float) -> bytes:
        return self._line("head")

    def restart(self, at: float, step: int) -> bytes:
        return self._line("restart", step)

    def scalars(self, at: float, step: int, values: Mapping[str, float]) -> bytes:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._line("point", step, dict(values))

    def _line(self, *words: object) -> bytes:
        return json.dumps(words).encode() + b"\n"


def epoch(tokens: int, run: str = RUN, at: float = 1_700_000_000.0, **fields: float) -> Event:
    usual = {"loss": 3.0, "loss_val": 0.0, "seconds": 2.0, "tokens_per_s": 50.0}
    told = {"run": run, "epoch": tokens // 100, "tokens": tokens, **usual, **fields}
    return Event(at, "debug", "daemon", EPOCH, "an epoch", told)


def through(sink: TensorBoardSink, *events: Event) -> None:
    for event in events:
        sink.accept(event)
    sink.close()


def files(folder: Path, run: str = RUN) -> list[Path]:
    return sorted((folder / f"{run[:12]}-{PEER[-6:]}").iterdir())


def lines(*paths: Path) -> list[list]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def steps(*paths: Path) -> list[int]:
    return [words[1] for words in lines(*paths) if words[0] == "point"]


def test_an_epoch_is_one_point_of_each_curve_that_it_has_a_value_for(tmp_path: Path) -> None:
    other = Event(1.0, "error", "daemon", "doing", "trains", {})
    nothing = dict.fromkeys(TAGS, 0.0)
    through(
        TensorBoardSink(tmp_path / "board", PEER, Lines()),
        epoch(100),
        other,
        epoch(200, loss_val=2.5, seconds=0.0),
        epoch(300, **nothing),
    )
    first = {"loss/training": 3.0, "speed/tokens_per_second": 50.0, "speed/epoch_seconds": 2.0}
    second = {"loss/training": 3.0, "loss/held_out": 2.5, "speed/tokens_per_second": 50.0}
    assert lines(*files(tmp_path / "board")) == [
        ["head"],
        ["restart", 100],
        ["point", 100, first],
        ["point", 200, second],
    ]


def test_a_swarm_that_goes_back_replaces_its_points(tmp_path: Path) -> None:
    through(TensorBoardSink(tmp_path, PEER, Lines()), epoch(100), epoch(200), epoch(150))
    restarts = [words[1] for words in lines(*files(tmp_path)) if words[0] == "restart"]
    assert restarts == [100, 150]


def test_each_run_has_a_directory_and_each_start_a_file(tmp_path: Path) -> None:
    other = "cd" * 32
    through(TensorBoardSink(tmp_path, PEER, Lines()), epoch(100), epoch(100, run=other))
    through(TensorBoardSink(tmp_path, PEER, Lines()), epoch(200))
    assert steps(*files(tmp_path, other)) == [100]
    first, second = files(tmp_path)
    assert (steps(first), steps(second)) == ([100], [200])
    assert "tfevents" in first.name, "TensorBoard reads no other files"


def test_old_files_make_room_for_new_ones_and_those_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / f"{RUN[:12]}-{PEER[-6:]}"
    folder.mkdir()
    theirs = folder / "events.out.tfevents.0000000001.theirs"
    theirs.write_bytes(b"x" * 5_000)
    sink = TensorBoardSink(tmp_path, PEER, Lines(), file_bytes=2_048, total_bytes=8_192)
    through(sink, *(epoch(100 * n) for n in range(1, 301)))
    found = files(tmp_path)
    assert found[0] == theirs
    assert sum(file.stat().st_size for file in found[1:]) <= 8_192
    kept = steps(*found[1:])
    assert kept == list(range(kept[0], 30_001, 100))
    assert 5 < len(kept) < 300


def test_a_disk_without_room_leaves_a_gap(tmp_path: Path) -> None:
    records = Lines()
    sink = TensorBoardSink(tmp_path, PEER, records)
    assert sink._write([epoch(100)]) == 0
    records.full = True
    assert sink._write([epoch(200), epoch(300)]) == 2
    records.full = False
    assert sink._write([epoch(400)]) == 0
    sink.close()
    assert [steps(file) for file in files(tmp_path)] == [[100], [400]]


def test_no_file_stays_of_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    class Full(Lines):
        def head(self, at: float) -> bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    sink = TensorBoardSink(tmp_path, PEER, Full())
    assert sink._write([epoch(100)]) == 1
    sink.close()
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot write") as caught:
        TensorBoardSink(tmp_path / "file", PEER, Lines())
    assert "--tensorboard" in caught.value.next_step


def test_without_the_package_a_daemon_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "tensorboard.compat.proto", "tensorboard.summary.writer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageFault, match="tensorboard") as caught:
        sink_for(tmp_path / "board", PEER)
    assert "tutti[tensorboard]" in caught.value.next_step
    assert not (tmp_path / "board").exists()


def test_tensorboard_reads_the_curves_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path, PEER, TensorBoardRecords())
    through(first, epoch(100, loss=5.0), epoch(200, loss=4.0), epoch(300, loss=3.5))
    again = TensorBoardSink(tmp_path, PEER, TensorBoardRecords())
    # The daemon starts again from the version behind the first epoch.
    through(again, epoch(200, loss=4.5, loss_val=4.25), epoch(300, loss=4.0))
    read = EventAccumulator(str(tmp_path / f"{RUN[:12]}-{PEER[-6:]}")).Reload()
    assert {*read.Tags()["scalars"]} == {*TAGS.values()}
    found = [(point.step, point.value) for point in read.Scalars("loss/training")]
    assert found == [(100, 5.0), (200, 4.5), (300, 4.0)]
    held_out = [(point.step, point.value) for point in read.Scalars("loss/held_out")]
    assert held_out == [(200, 4.25)]
