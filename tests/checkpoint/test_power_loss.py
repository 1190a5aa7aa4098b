"""A power cut after every single call a checkpoint makes: the loader finds the old one, the new
one, whole."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import files, store
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore

KEEP = CheckpointSettings(keep=2)


class PowerCut(BaseException):
    """Nothing may catch this: after a power cut no cleaning up runs."""


class FailingDisk:
    """Substitute for `os` that loses power before call number `until`, and with it all unflushed
    data.

    A file that was written and not flushed may hold anything afterwards: it is cut to half. A name
    that was given and whose directory was not flushed may be there or not: `forgetful` decides.
    """

    def __init__(self, until: int, forgetful: bool) -> None:
        self.until = until
        self.forgetful = forgetful
        self.calls = 0
        self.dirty: dict[tuple[int, int], Path] = {}
        self.unsaid: list[tuple[Path, Path | None, Path | None]] = []
        """Names not yet flushed: (directory, new name, old name)."""

    def _tick(self) -> None:
        if self.calls == self.until:
            raise PowerCut
        self.calls += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def _path(fd: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None or not flags & os.O_CREAT:
            return os.open(path, flags, dir_fd=dir_fd)
        self._tick()
        self.unsaid.append((self._path(dir_fd), self._path(dir_fd) / path, None))
        return os.open(path, flags, mode, dir_fd=dir_fd)

    def write(self, fd: int, data: memoryview) -> int:
        self._tick()
        found = os.fstat(fd)
        self.dirty[found.st_dev, found.st_ino] = self._path(fd)
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        self._tick()
        found = os.fstat(fd)
        self.dirty.pop((found.st_dev, found.st_ino), None)
        here = self._path(fd)
        self.unsaid = [entry for entry in self.unsaid if entry[0] != here]

    def mkdir(self, name: str, mode: int, *, dir_fd: int) -> None:
        self._tick()
        os.mkdir(name, mode, dir_fd=dir_fd)
        self.unsaid.append((self._path(dir_fd), self._path(dir_fd) / name, None))

    def rename(self, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._tick()
        os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        here = self._path(dst_dir_fd)
        self.unsaid = [
            (d.parent / new if d == here / old else d, *self._moved(e, here / old, here / new))
            for d, *e in self.unsaid
        ]
        self.dirty = {
            key: here / new / p.name if p.parent == here / old else p
            for key, p in self.dirty.items()
        }
        self.unsaid.append((here, here / new, here / old))

    @staticmethod
    def _moved(entry: list[Path | None], old: Path, new: Path) -> list[Path | None]:
        return [new / p.name if p is not None and p.parent == old else p for p in entry]

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._tick()
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        self._tick()
        os.rmdir(name, dir_fd=dir_fd)

    def come_back(self) -> None:
        """Put the disk into its state when the power is on again."""
        for path in self.dirty.values():
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        if not self.forgetful:
            return
        for _, new, old in reversed(self.unsaid):
            if new is None or not new.exists():
                continue
            if old is not None:
                os.rename(new, old)
            elif new.is_dir():
                shutil.rmtree(new)
            else:
                new.unlink()


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((50,), value), "b.weight": torch.full((3, 3), value)}


def save(root: Path, epoch: int, value: float) -> None:
    optimizer = {"a.weight": {"momentum": torch.full((50,), -value)}}
    CheckpointStore(root, KEEP, "run").save(1, epoch, tensors(value), optimizer, {"value": value})


def whole(root: Path, epoch: int) -> float:
    """The value every tensor of a checkpoint has; fails when they do not agree."""
    found = CheckpointStore(root, KEEP, "run").load(1, epoch)
    values = {float(x) for t in found.parameters.values() for x in t.flatten()}
    values |= {-float(x) for x in found.optimizer["a.weight"]["momentum"]} | {found.meta["value"]}
    assert len(values) == 1
    return values.pop()


def cuts(
    where: Path, forgetful: bool, before: dict[int, float], epoch: int, value: float
) -> Iterator[Path]:
    """Cut the power at each moment while `epoch` is saved beside the checkpoints in `before`;
    yields the directory that is left on the disk each time."""
    for until in range(200):
        root = where / str(until)
        disk = FailingDisk(until, forgetful)
        for earlier, its_value in before.items():
            save(root, earlier, its_value)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(files, "os", disk)
                patch.setattr(store, "os", disk)
                save(root, epoch, value)
        except PowerCut:
            disk.come_back()
            yield root
        else:
            assert until > 10, "the rehearsal must reach into the write"
            assert whole(root, epoch) == value
            return
    raise AssertionError("it was never saved")


@pytest.mark.parametrize("forgetful", [True, False])
@pytest.mark.parametrize(
    ("before", "epoch", "seen", "unseen"),
    [
        ((), 1, {()}, {(1,)}),
        # Epoch 1 is pruned: 2 is always whole, and 3 once it is named.
        ((1, 2), 3, {(1, 2), (1, 2, 3), (2, 3)}, set()),
    ],
    ids=["first", "prunes"],
)
def test_every_prefix_of_a_save(
    tmp_path: Path,
    forgetful: bool,
    before: tuple[int, ...],
    epoch: int,
    seen: set[tuple[int, ...]],
    unseen: set[tuple[int, ...]],
) -> None:
    """`seen`: sets of epochs that must occur; `unseen`: sets that may occur too."""
    outcomes = set()
    for root in cuts(tmp_path, forgetful, {e: float(e) for e in before}, epoch, float(epoch)):
        store = CheckpointStore(root, KEEP, "run")
        epochs = store.epochs(1)
        assert [whole(root, e) for e in epochs] == [float(e) for e in epochs]
        assert store.problems(1) == []
        outcomes.add(tuple(epochs))
        save(root, 4, 4.0)  # the next save clears what the cut left behind
        assert set(os.listdir(root / "stage-1")) == {f"epoch-{e}" for e in store.epochs(1)}
    assert seen <= outcomes <= seen | unseen


@pytest.mark.parametrize("forgetful", [True, False])
def test_every_prefix_of_replacing_an_epoch(tmp_path: Path, forgetful: bool) -> None:
    """An abandoned branch leaves the same epoch with other contents: one of the two is always
    there."""
    outcomes = set()
    for root in cuts(tmp_path, forgetful, {5: 1.0}, 5, 2.0):
        store = CheckpointStore(root, KEEP, "run")
        assert store.epochs(1) == [5]
        value = whole(root, 5)
        assert store.metas(1) == {5: {"value": value}}, "what is said is what is read"
        outcomes.add(value)
        save(root, 5, 3.0)
        assert whole(root, 5) == 3.0
    assert outcomes == {1.0, 2.0}
