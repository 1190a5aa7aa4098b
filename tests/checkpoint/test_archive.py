"""Copies of checkpoints at another place: whole or absent, compared, kept in number, put back."""

import asyncio
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from node.checkpoint.archive import aside
from node.checkpoint.archive.address import Address, masked
from node.checkpoint.archive.aside import Aside, ThreadWork
from node.checkpoint.archive.guarded import LocalFiles
from node.checkpoint.archive.keeper import ArchiveKeeper, ArchivePorts
from node.checkpoint.archive.machine import OnDisk
from node.checkpoint.archive.place import BEGUN, FILES, WHOLE, Archive, CopyRecord, Whole
from node.checkpoint.archive.restore import restore as restore_of
from node.checkpoint.files import Interrupted, write
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import OVERHEAD, CheckpointStore, FileEntry
from node.core.clock import SystemClock
from node.core.errors import LocalFault, OutOfResources, Refused, UsageFault
from node.core.ids import PeerId
from node.core.journey import Version
from node.telemetry.events import Journal
from testbed.fakes.clock import VirtualClock
from tests.checkpoint.test_store import state

RUN = "ab" * 32
ME = PeerId("me")
STAGE = 2
EPOCHS = 50
restore = partial(restore_of, epochs=EPOCHS)


def written(root: Path, *epochs: int, run: str = RUN, seed: int = 0) -> CheckpointStore:
    """A store with checkpoints of these epochs."""
    store = CheckpointStore(root, CheckpointSettings(keep=100), run)
    for epoch in epochs:
        parameters, optimizer, meta = state(seed or epoch)
        store.save(STAGE, epoch, parameters, optimizer, meta | {"lineage": f"{epoch:032x}"})
    return store


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return written(tmp_path / "disk", 1, 2, 3, 4, 5, 6)


@pytest.fixture(params=["directory", "file://", "memory://"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of an archive, in each form that is at hand everywhere."""
    there = tmp_path / "there"
    there.mkdir()
    if request.param == "directory":
        yield str(there)
    elif request.param == "file://":
        yield f"file://{there}"
    else:
        yield f"memory://{tmp_path.name}/there"
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


def archive_at(text: str, me: str = ME, run: str = RUN, files: Any = None) -> Archive:
    return Archive(Address(text), run, PeerId(me), files)


def epochs(archive: Archive) -> list[int]:
    return [whole.epoch for whole in archive.copies(STAGE)]


# ----------------------------------------------------------- whole or absent


def test_a_copy_has_the_bytes_of_the_checkpoint_and_is_put_back(
    text: str, store: CheckpointStore, tmp_path: Path
) -> None:
    whole = archive_at(text).save(store, STAGE, 4, keep=5)
    assert (whole.stage, whole.epoch, whole.peer) == (STAGE, 4, ME)
    again = archive_at(text).copies()
    assert again == [whole]
    archive_at(text).fetch(whole, str(tmp_path / "back"))
    for name in FILES:
        assert (tmp_path / "back" / name).read_bytes() == (store.path(STAGE, 4) / name).read_bytes()
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(text), fresh, STAGE, tmp_path / "scratch", Journal([])) == [4]
    here = fresh.load(STAGE, 4)
    there = store.load(STAGE, 4)
    assert (here.digest, here.meta) == (there.digest, there.meta)
    torch.testing.assert_close(here.optimizer, there.optimizer, rtol=0, atol=0)
    assert not (tmp_path / "scratch").exists()


def test_the_oldest_beyond_the_number_goes_and_nothing_foreign(
    text: str, store: CheckpointStore
) -> None:
    archive = archive_at(text)
    other = archive_at(text, "somebody")
    other.save(store, STAGE, 1, keep=1)
    for epoch in (1, 2, 3):
        archive.save(store, STAGE, epoch, keep=2)
    fs, root = archive.address.open()
    own = f"{root}/{RUN[:12]}/stage-{STAGE}/{ME}"
    fs.pipe_file(f"{own}/epoch-2/notes.txt", b"mine")
    fs.pipe_file(f"{own}/letters.txt", b"mine too")
    fs.makedirs(f"{own}/epoch-99", exist_ok=True)
    fs.pipe_file(f"{own}/epoch-99/parameters.safetensors", b"of a person")
    assert epochs(archive) == [3, 2, 1]
    for epoch in (4, 5):
        archive.save(store, STAGE, epoch, keep=2)
    fs.invalidate_cache()
    found = archive.copies(STAGE)
    assert [(w.epoch, w.peer) for w in found] == [(5, ME), (4, ME), (1, "somebody")]
    assert fs.cat_file(f"{own}/epoch-2/notes.txt") == b"mine", "its directory stays for it"
    assert not fs.exists(f"{own}/epoch-2/{FILES[0]}")
    assert not fs.exists(f"{own}/epoch-3")
    assert fs.cat_file(f"{own}/letters.txt") == b"mine too"
    assert fs.cat_file(f"{own}/epoch-99/parameters.safetensors") == b"of a person"


def test_what_a_person_put_in_the_way_is_not_overwritten(text: str, store: CheckpointStore) -> None:
    archive = archive_at(text)
    fs, root = archive.address.open()
    here = f"{root}/{RUN[:12]}/stage-{STAGE}/{ME}/epoch-3"
    fs.makedirs(here, exist_ok=True)
    fs.pipe_file(f"{here}/{FILES[0]}", b"of a person")
    with pytest.raises(Refused, match="did not write"):
        archive.save(store, STAGE, 3, keep=2)
    assert fs.cat_file(f"{here}/{FILES[0]}") == b"of a person"


def test_a_copy_that_is_there_is_not_written_again(text: str, store: CheckpointStore) -> None:
    archive = archive_at(text)
    first = archive.save(store, STAGE, 4, keep=5)
    never = Never()
    assert archive_at(text).save(store, STAGE, 4, keep=5, goes_on=never) == first
    assert not never.asked


class Never:
    """Answers no to the question whether work goes on."""

    asked = False

    def __call__(self) -> bool:
        self.asked = True
        return False


@pytest.mark.parametrize("page", [WHOLE, *FILES])
def test_a_copy_with_a_part_missing_or_torn_is_no_checkpoint(
    text: str, store: CheckpointStore, tmp_path: Path, page: str
) -> None:
    archive = archive_at(text)
    archive.save(store, STAGE, 3, keep=5)
    whole = archive.save(store, STAGE, 4, keep=5)
    fs, _ = archive.address.open()
    path = f"{whole.directory}/{page}"
    fs.pipe_file(path, fs.cat_file(path)[:-3])
    fresh = written(tmp_path / "fresh")
    journal = Journal([])
    assert restore(archive_at(text), fresh, STAGE, tmp_path / "s", journal) == [3]
    if page != WHOLE:
        [event] = [e for e in journal.recent() if e.kind == "copy-unusable"]
        assert "epoch 4" in event.text
    assert archive.save(store, STAGE, 5, keep=5).epoch == 5
    assert 3 in epochs(archive)


# ----------------------------------------------------------- a place that fails


class Elsewhere(LocalFileSystem):
    """Files of this machine behind a name that is none of its file system, so that they are read
    and written as those of another machine."""

    protocol = "elsewhere"
    cachable = False


class Failing(Elsewhere):
    """A file system that fails at one moment. ``at``: number of the opening that fails; ``how``:
    called with the file."""

    def __init__(self, at: int, how: Callable[[Any], Any]) -> None:
        super().__init__(auto_mkdir=False)
        self.at = at
        self.how = how
        self.opened = 0

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:  # type: ignore[override]
        file = super().open(path, mode, **more)
        self.opened += 1
        if self.opened == self.at:
            return self.how(file)
        return file


class Breaks:
    """A file whose second write fails."""

    def __init__(self, file: Any, error: Exception) -> None:
        self._file = file
        self._error = error

    def __enter__(self) -> "Breaks":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        raise self._error

    def read(self, size: int = -1) -> bytes:
        raise self._error

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


def broken(error: Exception) -> Callable[[Any], Breaks]:
    return lambda file: Breaks(file, error)


def openings(store: CheckpointStore, tmp_path: Path) -> int:
    """How often a copy opens a file, reading pages included."""
    files = Failing(0, lambda file: file)
    archive_at(str(tmp_path / "count"), files=files).save(store, STAGE, 4, keep=1)
    return files.opened


def test_wherever_it_breaks_off_the_older_copy_stays_and_the_next_try_is_whole(
    store: CheckpointStore, tmp_path: Path
) -> None:
    most = openings(store, tmp_path)
    assert most > 8
    for at in range(1, most + 1):
        there = tmp_path / f"there-{at}"
        good = archive_at(str(there))
        good.save(store, STAGE, 3, keep=1)
        files = Failing(at + 1, broken(OSError(errno.EIO, "broken pipe")))
        if at < most:
            assert fails(archive_at(str(there), files=files), store), f"opening {at}"
        assert max(epochs(good)) >= 3, f"opening {at}: the older one is gone"
        assert good.save(store, STAGE, 4, keep=1).epoch == 4
        assert epochs(good) == [4], f"opening {at}"
        left = {path.name for path in there.rglob("*") if path.is_file()}
        assert left == {*FILES, WHOLE}, f"opening {at}: nothing of the attempt stays"


def fails(archive: Archive, store: CheckpointStore) -> bool:
    """Return True if a copy of epoch 4 fails, or is whole and leaves something beside it."""
    try:
        whole = archive.save(store, STAGE, 4, keep=1)
    except LocalFault as e:
        return "cannot be used" in e.what
    return epochs(archive)[0] == 4 and "cannot be used" in whole.untidy


def test_a_full_place_is_said_to_be_full(store: CheckpointStore, tmp_path: Path) -> None:
    there = tmp_path / "there"
    files = Failing(4, broken(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OutOfResources, match="is full") as e:
        archive_at(str(there), files=files).save(store, STAGE, 4, keep=1)
    assert "checkpoint.to_keep" in e.value.next_step
    assert epochs(archive_at(str(there))) == []


def test_a_place_that_loses_bytes_makes_no_copy(store: CheckpointStore, tmp_path: Path) -> None:
    class Forgets(Elsewhere):
        def open(self, path: str, mode: str = "rb", **more: Any) -> Any:  # type: ignore[override]
            if mode == "rb" and path.endswith(FILES[1]):
                content = bytearray(Path(path).read_bytes())
                content[-1] ^= 1
                Path(path).write_bytes(bytes(content))
            return super().open(path, mode, **more)

    there = str(tmp_path / "there")
    with pytest.raises(LocalFault, match="not what was written"):
        archive_at(there, files=Forgets()).save(store, STAGE, 4, keep=1)
    assert epochs(archive_at(there)) == []


def test_a_checkpoint_that_is_damaged_on_this_disk_is_not_copied(
    store: CheckpointStore, tmp_path: Path
) -> None:
    path = store.path(STAGE, 4) / FILES[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    archive = archive_at(str(tmp_path / "there"))
    with pytest.raises(Refused, match="not what its manifest describes"):
        archive.save(store, STAGE, 4, keep=1)
    with pytest.raises(Refused, match="cannot be read"):
        archive.save(store, STAGE, 77, keep=1)
    assert epochs(archive) == []


def test_a_checkpoint_that_is_removed_meanwhile_is_copied_whole(
    store: CheckpointStore, tmp_path: Path
) -> None:
    asked: list[int] = []

    def goes_on() -> bool:
        if not asked:
            for file in store.path(STAGE, 4).iterdir():
                file.unlink()
        asked.append(1)
        return True

    archive = archive_at(str(tmp_path / "there"))
    assert archive.save(store, STAGE, 4, keep=1, goes_on=goes_on).epoch == 4


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_a_copy_that_is_given_up_is_none(store: CheckpointStore, tmp_path: Path, at: int) -> None:
    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(1)
        return len(asked) < at

    archive = archive_at(str(tmp_path / "there"))
    archive.save(store, STAGE, 3, keep=1)
    with pytest.raises(Interrupted):
        archive.save(store, STAGE, 4, keep=1, goes_on=goes_on)
    assert epochs(archive) == [3]


def test_a_copy_whose_older_ones_cannot_be_removed_counts(
    store: CheckpointStore, tmp_path: Path
) -> None:
    class Keeps(Elsewhere):
        def rm_file(self, path: str) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    there = str(tmp_path / "there")
    archive = archive_at(there, files=Keeps())
    archive_at(there).save(store, STAGE, 3, keep=1)
    whole = archive.save(store, STAGE, 4, keep=1)
    assert "not permitted" in whole.untidy
    assert epochs(archive) == [4, 3]
    assert archive_at(there).save(store, STAGE, 4, keep=1).untidy == ""
    assert epochs(archive) == [4]


# ----------------------------------------------------------- a place of a stranger


def own(there: Path, epoch: int, me: str = ME) -> Path:
    return there / RUN[:12] / f"stage-{STAGE}" / me / f"epoch-{epoch}"


def test_a_flush_that_fails_makes_no_copy(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    flushed: list[str] = []
    fails_at: list[str] = []

    def fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        flushed.append(name)
        if name in fails_at:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    archive_at(str(there)).save(store, STAGE, 3, keep=1)
    names = {*FILES, BEGUN, WHOLE, "epoch-3", ME, f"stage-{STAGE}", RUN[:12], "there"}
    assert set(flushed) == names
    assert flushed.index(WHOLE) > flushed.index(FILES[0])
    for name in sorted(names - {"epoch-3", BEGUN}):
        fails_at[:] = [name]
        with pytest.raises(LocalFault, match="Input/output error"):
            archive_at(str(there)).save(store, STAGE, 4, keep=1)
        shutil.rmtree(own(there, 4))


class PowerCut(BaseException):
    """Nothing may catch this: after a power cut no cleaning up runs."""


@pytest.mark.parametrize("at", range(len(FILES)))
def test_a_power_cut_in_a_copy_leaves_nothing_that_blocks_the_next(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """``at``: number of files that are written whole before it. What was not flushed is torn."""
    there = tmp_path / "there"
    flushed: set[str] = set()
    fsync = os.fsync
    writing = LocalFiles.writing

    def notes(fd: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def fails(files: LocalFiles, path: str) -> Any:
        if path.endswith(FILES[at]):
            Path(path).write_bytes(b"a part of it")
            for file in own(there, 4).iterdir():
                if str(file) not in flushed:
                    os.truncate(file, file.stat().st_size // 2)
            raise PowerCut
        return writing(files, path)

    with monkeypatch.context() as power:
        power.setattr(os, "fsync", notes)
        power.setattr(LocalFiles, "writing", fails)
        with pytest.raises(PowerCut):
            archive_at(str(there)).save(store, STAGE, 4, keep=1)
    archive = archive_at(str(there))
    assert archive.save(store, STAGE, 4, keep=1).epoch == 4
    assert {p.name for p in there.rglob("*") if p.is_file()} == {*FILES, WHOLE}


@pytest.mark.parametrize("name", [BEGUN, WHOLE, *FILES])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_somebody_planted_is_not_followed(
    store: CheckpointStore, tmp_path: Path, name: str, kind: str
) -> None:
    there = tmp_path / "there"
    precious = tmp_path / "precious"
    precious.write_bytes(b"of a person")
    here = own(there, 4)
    here.mkdir(parents=True)
    plant(here / name, kind, precious)
    with pytest.raises(Refused):
        archive_at(str(there)).save(store, STAGE, 4, keep=1)
    assert precious.read_bytes() == b"of a person"
    assert epochs(archive_at(str(there))) == []
    archive_at(str(there)).save(store, STAGE, 3, keep=1)
    assert epochs(archive_at(str(there))) == [3], "another epoch is copied all the same"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_planted_while_a_copy_is_under_way_is_not_followed(
    store: CheckpointStore, tmp_path: Path, kind: str
) -> None:
    there = tmp_path / "there"
    precious = tmp_path / "precious"
    precious.write_bytes(b"of a person")
    whole = own(there, 4) / WHOLE

    def goes_on() -> bool:
        if (whole.parent / BEGUN).exists() and not os.path.lexists(whole):
            plant(whole, kind, precious)
        return True

    with pytest.raises(Refused):
        archive_at(str(there)).save(store, STAGE, 4, keep=1, goes_on=goes_on)
    assert precious.read_bytes() == b"of a person"
    assert epochs(archive_at(str(there))) == []


@pytest.mark.parametrize("name", [BEGUN, WHOLE, *FILES])
def test_a_link_that_is_planted_at_the_last_moment_is_not_followed(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    there = tmp_path / "there"
    precious = tmp_path / "precious"
    precious.write_bytes(b"of a person")
    here = own(there, 4)

    def before(path: Any) -> None:
        if Path(path).name == name and here.is_dir() and not (here / name).is_symlink():
            (here / name).symlink_to(precious)

    calls_back(monkeypatch, before)
    with pytest.raises(Refused, match="is a link"):
        archive_at(str(there)).save(store, STAGE, 4, keep=1)
    assert precious.read_bytes() == b"of a person"


@pytest.mark.parametrize("name", [BEGUN, WHOLE, *FILES])
def test_a_directory_that_becomes_a_link_meanwhile_is_not_entered(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    there = tmp_path / "there"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    here = own(there, 4)

    def before(path: Any) -> None:
        if Path(path).name == name and here.is_dir() and not here.is_symlink():
            here.rename(tmp_path / "moved")
            here.symlink_to(elsewhere)

    calls_back(monkeypatch, before)
    with pytest.raises(LocalFault):
        archive_at(str(there)).save(store, STAGE, 4, keep=1)
    assert [*elsewhere.iterdir()] == []


def calls_back(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None]) -> None:
    """Call ``before`` with each path that is looked at, and each name that is opened."""
    look = os.lstat
    opened = os.open

    def lstat(path: Any, **more: Any) -> os.stat_result:
        try:
            return look(path, **more)
        finally:
            before(path)

    def open_(path: Any, *args: Any, **more: Any) -> int:
        before(path)
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "open", open_)


def plant(at: Path, kind: str, target: Path) -> None:
    if kind == "link":
        at.symlink_to(target)
    else:
        os.mkfifo(at)


@pytest.mark.parametrize("name", [WHOLE, *FILES])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_copy_with_a_part_that_was_planted_is_not_put_back(
    store: CheckpointStore, tmp_path: Path, name: str, kind: str
) -> None:
    there = tmp_path / "there"
    archive_at(str(there)).save(store, STAGE, 3, keep=9)
    whole = archive_at(str(there)).save(store, STAGE, 4, keep=9)
    part = Path(whole.directory) / name
    moved = tmp_path / "moved"
    part.rename(moved)
    plant(part, kind, moved)
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(str(there)), fresh, STAGE, tmp_path / "s", Journal([])) == [3]


def test_files_in_place_of_directories_hide_no_copy(store: CheckpointStore, tmp_path: Path) -> None:
    there = tmp_path / "there"
    archive_at(str(there)).save(store, STAGE, 3, keep=9)
    own(there, 5).write_text("a file")
    own(there, 5, "README").parent.write_text("a file")
    (own(there, 6) / WHOLE).mkdir(parents=True)
    (there / RUN[:12] / "stage-7").write_text("a file")
    assert [w.epoch for w in archive_at(str(there)).copies()] == [3]


@pytest.mark.parametrize("depth", range(4))
def test_a_directory_that_is_a_link_is_not_entered(
    store: CheckpointStore, tmp_path: Path, depth: int
) -> None:
    there = tmp_path / "there"
    elsewhere = tmp_path / "elsewhere"
    archive_at(str(elsewhere)).save(store, STAGE, 4, keep=9)
    before = sorted(elsewhere.rglob("*"))
    link = [own(there, 4), *own(there, 4).parents][depth]
    target = [own(elsewhere, 4), *own(elsewhere, 4).parents][depth]
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    assert epochs(archive_at(str(there))) == []
    with pytest.raises(Refused, match="is a link"):
        archive_at(str(there)).save(store, STAGE, 4, keep=1)
    assert sorted(elsewhere.rglob("*")) == before
    (tmp_path / "mine").symlink_to(elsewhere)
    assert epochs(archive_at(str(tmp_path / "mine"))) == [4], "the operator's own link is good"


def test_a_file_that_never_ends_is_not_read_to_its_end(
    store: CheckpointStore, tmp_path: Path
) -> None:
    class Grows(Elsewhere):
        read = 0

        def open(self, path: str, mode: str = "rb", **more: Any) -> Any:  # type: ignore[override]
            file = super().open(path, mode, **more)
            if mode == "rb" and path.endswith(FILES[0]):
                return Endless(file, self)
            return file

    class Endless:
        def __init__(self, file: Any, files: Grows) -> None:
            self._file = file
            self._files = files

        def __enter__(self) -> "Endless":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def read(self, size: int = -1) -> bytes:
            self._files.read += 1
            assert self._files.read < 10
            return b"x" * size

    there = str(tmp_path / "there")
    with pytest.raises(LocalFault, match="not what was written"):
        archive_at(there, files=Grows()).save(store, STAGE, 4, keep=1)


def test_the_page_of_another_peer_is_neither_believed_nor_overwritten(
    text: str, store: CheckpointStore
) -> None:
    archive = archive_at(text)
    other = archive_at(text, "somebody").save(store, STAGE, 4, keep=1)
    fs, root = archive.address.open()
    here = f"{root}/{RUN[:12]}/stage-{STAGE}/{ME}/epoch-4"
    fs.makedirs(here, exist_ok=True)
    page = fs.cat_file(f"{other.directory}/{WHOLE}")
    for name in (WHOLE, BEGUN):
        fs.pipe_file(f"{here}/{name}", page)
        assert archive_at(text).newest(STAGE) is None
        assert [w.peer for w in archive_at(text).copies(STAGE)] == ["somebody"]
        with pytest.raises(Refused, match="did not write"):
            archive_at(text).save(store, STAGE, 4, keep=1)
        assert fs.cat_file(f"{here}/{name}") == page
        fs.rm_file(f"{here}/{name}")
        fs.invalidate_cache()


# ----------------------------------------------------------- putting back


def test_the_states_of_all_owners_are_put_together(tmp_path: Path) -> None:
    parameters, _, meta = state(4)
    meta = meta | {"lineage": "04" * 16}
    first = {"model.norm.weight": {"momentum": torch.ones(5)}}
    second = {
        "model.norm.weight": {"momentum": torch.zeros(5)},
        "transposed": {"momentum": torch.ones(3, 4)},
    }
    old = {"copies": {"model.norm.weight": [3, "03" * 16]}}
    there = str(tmp_path / "there")
    for who, optimizer, more in (("a", first, {}), ("b", second, old)):
        store = CheckpointStore(tmp_path / who, CheckpointSettings(), RUN)
        store.save(STAGE, 4, parameters, optimizer, meta | more)
        archive_at(there, who).save(store, STAGE, 4, keep=1)
    stranger = CheckpointStore(tmp_path / "c", CheckpointSettings(), RUN)
    other = meta | {"lineage": "ff" * 16}
    stranger.save(STAGE, 4, parameters, {"scalar": {"m": torch.ones(1)}}, other)
    archive_at(there, "c").save(stranger, STAGE, 4, keep=1)
    for me in ("a", "b", "z"):
        fresh = CheckpointStore(tmp_path / f"fresh-{me}", CheckpointSettings(), RUN)
        restore(archive_at(there, me), fresh, STAGE, tmp_path / "s", Journal([]))
        found = fresh.load(STAGE, 4)
        assert set(found.optimizer) == {"model.norm.weight", "transposed"}, "another history"
        assert found.optimizer["model.norm.weight"]["momentum"].sum() == 5, "of this version"
        assert found.meta["copies"] == {}


def test_only_what_is_newer_than_the_disk_is_put_back(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    for epoch in (2, 3, 4, 5, 6):
        archive_at(there).save(store, STAGE, epoch, keep=9)
    fresh = written(tmp_path / "fresh", 3)
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [4, 5, 6]
    assert fresh.epochs(STAGE) == [3, 4, 5, 6]
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == []


def test_a_disk_that_keeps_one_checkpoint_gets_all_that_stages_may_have_in_common(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    for epoch in (2, 3, 4, 5):
        archive_at(there).save(store, STAGE, epoch, keep=9)
    fresh = CheckpointStore(tmp_path / "fresh", CheckpointSettings(keep=1), RUN)
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [3, 4, 5]
    assert fresh.epochs(STAGE) == [3, 4, 5]


OLD = "aa" * 16
NEW = "bb" * 16
"""Lineages of a history that a run gave up, and of the one in which it goes on."""


def copied(archive: Archive, root: Path, line: str, *numbers: int, keep: int = 9) -> None:
    """Copies of checkpoints of these epochs in that history."""
    store = CheckpointStore(root / line[:2], CheckpointSettings(keep=100), RUN)
    for epoch in numbers:
        parameters, optimizer, meta = state(epoch + 100 * (line == NEW))
        store.save(STAGE, epoch, parameters, optimizer, meta | {"lineage": line})
        archive.save(store, STAGE, epoch, keep=keep)


def test_epochs_that_a_run_gave_up_are_not_put_back(text: str, tmp_path: Path) -> None:
    archive = archive_at(text)
    copied(archive, tmp_path, OLD, 10, 20, 30, 40)
    copied(archive, tmp_path, NEW, 25)
    assert archive.newest(STAGE) == Version(25, NEW)
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(text), fresh, STAGE, tmp_path / "s", Journal([])) == [10, 20, 25]
    assert fresh.load(STAGE, 25).meta["lineage"] == NEW


def test_an_epoch_to_which_a_run_went_back_is_the_newest_copy_again(
    text: str, tmp_path: Path
) -> None:
    archive = archive_at(text)
    copied(archive, tmp_path, OLD, 10, 20, 30)
    copied(archive, tmp_path, OLD, 20)
    assert archive.newest(STAGE) == Version(20, OLD)
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(text), fresh, STAGE, tmp_path / "s", Journal([])) == [10, 20]


def test_an_epoch_whose_page_is_torn_when_the_run_goes_back_is_copied_again(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")
    for epoch in (2, 3, 4):
        archive_at(there).save(store, STAGE, epoch, keep=9)
    put = LocalFiles.put

    def torn(files: LocalFiles, path: str, data: bytes) -> None:
        whole = path.endswith(WHOLE)
        put(files, path, data[: len(data) // 2 if whole else None])
        if whole:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "put", torn)
        with pytest.raises(OutOfResources):
            archive_at(there).save(store, STAGE, 3, keep=9)
    assert epochs(archive_at(there)) == [4, 2]
    assert archive_at(there).save(store, STAGE, 3, keep=9).epoch == 3
    assert epochs(archive_at(there)) == [4, 3, 2]
    assert archive_at(there).newest(STAGE) == Version(3, f"{3:032x}")
    assert {path.name for path in own(Path(there), 3).iterdir()} == {*FILES, WHOLE}


def test_copies_that_were_made_last_stay_whatever_their_epochs(text: str, tmp_path: Path) -> None:
    archive = archive_at(text)
    copied(archive, tmp_path, OLD, 30, 40, keep=2)
    copied(archive, tmp_path, NEW, 20, 25, keep=2)
    assert epochs(archive_at(text)) == [25, 20]


def test_copies_of_another_history_by_others_are_not_put_back(tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    copied(archive_at(there, "away"), tmp_path, OLD, 10, 20, 30, 40)
    copied(archive_at(there), tmp_path, OLD, 10)
    copied(archive_at(there), tmp_path, NEW, 20)
    copied(archive_at(there, "z"), tmp_path, NEW, 20, 22)
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [10, 20, 22]


def damage(store: CheckpointStore, epoch: int) -> None:
    """Turn one bit of its parameters."""
    damaged = store.path(STAGE, epoch) / FILES[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)


def test_what_the_run_gave_up_on_the_disk_hides_no_copy(tmp_path: Path) -> None:
    archive = archive_at(str(tmp_path / "there"))
    disk = CheckpointStore(tmp_path / "disk", CheckpointSettings(keep=100), RUN)
    for epoch, line in ((38, OLD), (40, OLD), (32, NEW), (34, NEW)):
        parameters, optimizer, meta = state(epoch)
        disk.save(STAGE, epoch, parameters, optimizer, meta | {"lineage": line})
        archive.save(disk, STAGE, epoch, keep=9)
    damage(disk, 34)
    assert restore(archive, disk, STAGE, tmp_path / "s", Journal([])) == [34]
    assert disk.newest_whole(STAGE, EPOCHS) == 34


@pytest.mark.parametrize("goes_on", [(32, 34), (32, 36), (32, 34, 36)])
def test_own_copies_tell_that_the_run_gave_up_what_is_on_the_disk(
    goes_on: tuple[int, ...], tmp_path: Path
) -> None:
    """The disk is as it was before the run went back; another one wrote the newest copies."""
    archive = archive_at(str(tmp_path / "there"))
    copied(archive, tmp_path, OLD, 10, 36, 38, 40)
    copied(archive, tmp_path / "later", NEW, *goes_on)
    disk = CheckpointStore(tmp_path / "aa", CheckpointSettings(keep=100), RUN)
    assert disk.newest_whole(STAGE, EPOCHS) == 40
    found = restore(archive, disk, STAGE, tmp_path / "s", Journal([]))
    assert found == sorted(goes_on)
    assert disk.current(STAGE) == [*reversed(goes_on), 10]
    assert restore(archive, disk, STAGE, tmp_path / "s", Journal([])) == []


@pytest.mark.parametrize("copies", [(2, 3, 4, 5), (5,)])
def test_where_not_all_has_room_the_newest_is_put_back(
    copies: tuple[int, ...], tmp_path: Path
) -> None:
    """Two checkpoints fit."""
    source = CheckpointStore(tmp_path / "disk", CheckpointSettings(keep=100), RUN)
    archive = archive_at(str(tmp_path / "there"))
    for epoch in copies:
        large = {"w": torch.full((1 << 18,), float(epoch))}
        source.save(STAGE, epoch, large, {}, {"lineage": f"{epoch:032x}"})
        archive.save(source, STAGE, epoch, keep=9)
    limit = 12 * ((1 << 20) + OVERHEAD) // 5
    fresh = CheckpointStore(tmp_path / "fresh", CheckpointSettings(max_disk=limit), RUN)
    found = restore(archive, fresh, STAGE, tmp_path / "s", Journal([]))
    assert found == fresh.epochs(STAGE) == list(copies)[-2:]
    none = CheckpointStore(tmp_path / "none", CheckpointSettings(max_disk=1), RUN)
    with pytest.raises(OutOfResources, match="max_disk"):
        restore(archive, none, STAGE, tmp_path / "s", Journal([]))


def test_a_restoring_can_be_given_up_at_every_block(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is also asked between all blocks that are written, so that slow work is not given up."""
    monkeypatch.setattr("node.checkpoint.files._BLOCK", 1 << 12)
    archive = archive_at(str(tmp_path / "there"))
    source = CheckpointStore(tmp_path / "large", CheckpointSettings(), RUN)
    source.save(STAGE, 4, {"w": torch.ones(1 << 13)}, {}, {"lineage": OLD})
    archive.save(source, STAGE, 4, keep=9)
    asked: list[str] = []

    def counted(fd: int, data: memoryview) -> None:
        asked.append("a block is written")
        write(fd, data)

    def asks() -> bool:
        asked.append("")
        return True

    monkeypatch.setattr("node.checkpoint.files.write", counted)
    whole = CheckpointStore(tmp_path / "whole", CheckpointSettings(), RUN)
    assert restore(archive, whole, STAGE, tmp_path / "s", Journal([]), asks) == [4]
    blocks = [n for n, what in enumerate(asked) if what]
    assert len(blocks) >= 8
    assert all(asked[n - 1] == "" for n in blocks)
    for call in (whole.newest_whole, whole.load):
        asked.clear()
        call(STAGE, 4, asks)
        assert len(asked) >= 8
        with pytest.raises(Interrupted):
            call(STAGE, 4, lambda: False)
    assert whole.newest_whole(STAGE, EPOCHS) == 4, "it is not damaged"
    calls = 0
    while True:
        left = iter([True] * calls + [False])
        fresh = CheckpointStore(tmp_path / f"fresh{calls}", CheckpointSettings(), RUN)
        try:
            restore(
                archive, fresh, STAGE, tmp_path / "s", Journal([]), lambda left=left: next(left)
            )
        except Interrupted:
            assert fresh.epochs(STAGE) == []
        else:
            break
        calls += 1
    assert calls >= 2 * 8, "it is read and written by blocks"


def test_pages_of_older_software_count_by_their_epochs(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")

    def older(page: CopyRecord) -> bytes:
        body = json.loads(encode(page))["archive"]
        del body["lineage"], body["number"]
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
        sha = hashlib.sha256(canonical.encode()).hexdigest()
        return json.dumps({"archive": body, "sha256": sha}).encode()

    encode = CopyRecord.encode
    monkeypatch.setattr(CopyRecord, "encode", older)
    for epoch in (3, 4):
        archive_at(there).save(store, STAGE, epoch, keep=9)
    monkeypatch.undo()
    assert archive_at(there).newest(STAGE) == Version(4)
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [3, 4]


def test_copies_that_no_peer_of_the_run_can_have_made_are_named_and_left_out(
    text: str, tmp_path: Path
) -> None:
    archive = archive_at(text)
    copied(archive, tmp_path, OLD, 10, 20)
    for who, lineage, epoch in (("a", OLD, EPOCHS + 1), ("b", "", 30), ("c", "", 20)):
        copied(archive_at(text, who), tmp_path / who, lineage, epoch)
    lies = archive_at(text, "d")
    copied(lies, tmp_path / "d", NEW, 40)
    [whole] = [w for w in lies.copies(STAGE) if w.peer == "d"]
    fs, _ = archive.address.open()
    page = CopyRecord(RUN, "d", STAGE, 40, whole.files, OLD, whole.number)
    fs.pipe_file(f"{whole.directory}/{WHOLE}", page.encode())
    fresh = written(tmp_path / "fresh")
    journal = Journal([])
    assert restore(archive_at(text), fresh, STAGE, tmp_path / "s", journal) == [10, 20]
    told = sorted(e.text for e in journal.recent() if e.kind == "copy-unusable")
    assert [line.partition(" is not used: ")[2] for line in told] == [
        "its page does not name its history",
        "its page does not name its history",
        "its manifest names another history than its page",
        f"it is of epoch {EPOCHS + 1}, and the run has {EPOCHS}",
    ]
    assert [line.split()[4] for line in told] == ["20", "30", "40", str(EPOCHS + 1)]


def test_own_copies_without_a_history_are_left_out(tmp_path: Path) -> None:
    archive = archive_at(str(tmp_path / "there"))
    copied(archive, tmp_path, OLD, 10)
    copied(archive, tmp_path, "", 20)
    fresh = written(tmp_path / "fresh")
    journal = Journal([])
    assert restore(archive, fresh, STAGE, tmp_path / "s", journal) == [10]
    [event] = [e for e in journal.recent() if e.kind == "copy-unusable"]
    assert "does not name its history" in event.text


def test_a_checkpoint_beyond_the_run_on_the_disk_hides_no_copy(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    archive_at(there).save(store, STAGE, 4, keep=9)
    fresh = written(tmp_path / "fresh", EPOCHS + 1)
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [4]


def test_a_damaged_checkpoint_on_the_disk_hides_no_copy(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    for epoch in (3, 4, 5):
        archive_at(there).save(store, STAGE, epoch, keep=9)
    fresh = written(tmp_path / "fresh", 2, 6)
    damage(fresh, 6)
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [3, 4, 5]
    assert fresh.newest_whole(STAGE, EPOCHS) == 5


def test_a_copy_that_says_it_is_larger_than_the_disk_stops_no_other(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    archive_at(there).save(store, STAGE, 3, keep=9)
    whole = archive_at(there, "liar").save(store, STAGE, 4, keep=9)
    page = Path(whole.directory) / WHOLE
    files = {name: FileEntry(1 << 60, entry.sha256) for name, entry in whole.files.items()}
    files["manifest.json"] = whole.files["manifest.json"]
    page.write_bytes(CopyRecord(RUN, "liar", STAGE, 4, files, whole.lineage).encode())
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [3]
    shutil.rmtree(own(Path(there), 3))
    with pytest.raises(OutOfResources, match="free on this disk"):
        restore(archive_at(there), written(tmp_path / "b"), STAGE, tmp_path / "s", Journal([]))


def test_a_place_full_of_names_is_looked_at_within_bounds(
    text: str, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_at(text)
    archive.save(store, STAGE, 4, keep=9)
    other = archive_at(text, "zz").save(store, STAGE, 5, keep=9)
    fs, root = archive.address.open()
    page = fs.cat_file(f"{other.directory}/{WHOLE}")
    for n in range(30):
        there = f"{root}/{RUN[:12]}/stage-{STAGE}/a{n:02d}/epoch-{n}"
        fs.makedirs(there, exist_ok=True)
        fs.pipe_file(f"{there}/{WHOLE}", page)
        fs.makedirs(f"{root}/{RUN[:12]}/stage-{STAGE}/zz/epoch-{n + 100}", exist_ok=True)
    monkeypatch.setattr("node.checkpoint.archive.place.LOOKED", 31)
    assert [w.peer for w in archive_at(text).copies(STAGE)] == [ME]
    monkeypatch.setattr("node.checkpoint.archive.place.LOOKED", 32)
    assert [w.peer for w in archive_at(text).copies(STAGE)] == ["zz", ME]
    monkeypatch.setattr("node.checkpoint.archive.place.COPIES", 30)
    assert [w.peer for w in archive_at(text).copies(STAGE)] == [ME]


def test_the_number_of_copies_that_are_kept_has_no_other_bound(
    text: str, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.checkpoint.archive.place.COPIES", 2)
    for epoch in (1, 2, 3, 4, 5, 6):
        assert archive_at(text).save(store, STAGE, epoch, keep=4).number == epoch
    assert epochs(archive_at(text)) == [6, 5, 4, 3]


def test_the_names_of_a_directory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(20):
        (tmp_path / f"n{n:02d}").touch()
    monkeypatch.setattr("node.checkpoint.archive.guarded.LISTED", 7)
    files = LocalFiles(str(tmp_path.parent), "there")
    assert len(files.names(str(tmp_path))) == 7


def test_a_bounded_number_of_copies_is_put_together(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")
    for n in range(9):
        archive_at(there, f"peer{n}").save(store, STAGE, 4, keep=1)
    fetched: list[str] = []
    fetch = Archive.fetch

    def counting(self: Archive, whole: Whole, *more: Any) -> None:
        fetched.append(whole.peer)
        fetch(self, whole, *more)

    monkeypatch.setattr(Archive, "fetch", counting)
    monkeypatch.setattr("node.checkpoint.archive.restore.GATHERED", 5)
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [4]
    assert fetched == [f"peer{n}" for n in range(5)]


def test_older_copies_are_taken_where_the_newest_are_all_damaged(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    archive = archive_at(there)
    wholes = [archive.save(store, STAGE, epoch, keep=9) for epoch in (1, 2, 3, 4, 5)]
    for whole in wholes[2:]:
        (Path(whole.directory) / FILES[0]).write_bytes(b"rubbish")
    fresh = written(tmp_path / "fresh")
    assert restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([])) == [1, 2]


def test_an_archive_without_this_run_or_stage_says_so(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    fresh = written(tmp_path / "fresh")
    with pytest.raises(UsageFault, match="no whole checkpoint of this run"):
        restore(archive_at(there), fresh, STAGE, tmp_path / "s", Journal([]))
    archive_at(there).save(store, STAGE, 4, keep=1)
    with pytest.raises(UsageFault, match="of this run"):
        restore(
            archive_at(there, run="cd" * 32),
            written(tmp_path / "other", run="cd" * 32),
            STAGE,
            tmp_path / "s",
            Journal([]),
        )
    journal = Journal([])
    assert restore(archive_at(there), fresh, STAGE + 1, tmp_path / "s", journal) == []
    assert "only of 2" in journal.recent()[-1].text


def test_pages_that_a_stranger_wrote_are_not_believed(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    whole = archive_at(str(there)).save(store, STAGE, 4, keep=1)
    page = Path(whole.directory) / WHOLE
    honest = json.loads(page.read_text())
    for bad in (
        b"",
        b"[]",
        b"{" * 2000,
        b"x" * (1 << 17),
        json.dumps({"archive": honest["archive"], "sha256": "0" * 64}).encode(),
        json.dumps({"archive": honest["archive"] | {"epoch": 5}, **honest}).encode()[:-1],
    ):
        page.write_bytes(bad)
        assert epochs(archive_at(str(there))) == []


# ----------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret77@bucket/run", "s3://***@bucket/run"),
        ("https://host/run?token=abcdef77", "https://host/run?***"),
        ("sftp://anna:secret77@nas.lan:22/b#secret77", "sftp://***@nas.lan:22/b#***"),
        ("/mnt/backup", "/mnt/backup"),
        ("~/backup", "~/backup"),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    address = Address(text)
    assert address.shown == shown
    assert address.has_secrets == (text != shown)
    secrets = [word for word in ("secret77", "abcdef77") if word in text]
    said = address.clean(f"cannot reach {text}: {' or '.join(secrets)} is wrong\nTraceback")
    assert said.startswith(f"cannot reach {shown}")
    assert not [word for word in secrets if word in said]
    assert said.endswith(" is wrong Traceback")


def test_text_without_addresses_is_not_touched() -> None:
    assert masked("what? nobody@home #1") == "what? nobody@home #1"


@pytest.mark.parametrize(
    ("text", "says", "step"),
    [
        ("backup", "whole path", "/mnt/backup"),
        ("simplecache::s3://bucket/run", "chain", "one place"),
    ],
)
def test_what_is_no_address_is_refused(text: str, says: str, step: str) -> None:
    with pytest.raises(UsageFault, match=says) as e:
        Address(text)
    assert step in e.value.next_step


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(UsageFault, match="s3:// needs a package") as e:
        Address("s3://key:secret77@bucket/run").check()
    assert e.value.next_step == "pip install s3fs"
    with pytest.raises(UsageFault, match="not installed") as e:
        Address("sftp://nas.lan/backup").check()
    assert e.value.next_step == "pip install paramiko"
    with pytest.raises(UsageFault, match="cannot hold checkpoints"):
        Address("nonsense://bucket/run").check()


def test_no_message_of_a_library_holds_a_secret(store: CheckpointStore, tmp_path: Path) -> None:
    class Talks(MemoryFileSystem):
        cachable = False

        def open(self, path: str, mode: str = "rb", **more: Any) -> Any:  # type: ignore[override]
            raise ValueError("signing memory://key:secret77@there/run?token=abcdef77 failed")

    address = Address("memory://key:secret77@there/run?token=abcdef77")
    archive = Archive(address, RUN, ME, Talks())
    whole = Whole(STAGE, 4, ME, "/there", dict.fromkeys(FILES, FileEntry(1, "0" * 64)))
    for call in (
        lambda: archive.save(store, STAGE, 4, keep=1),
        lambda: archive.fetch(whole, str(tmp_path / "back")),
    ):
        with pytest.raises(LocalFault) as e:
            call()
        said = f"{e.value.what} {e.value.next_step} {e.value.__cause__}"
        assert "secret77" not in said
        assert "abcdef77" not in said


# ----------------------------------------------------------- the service


def on_disk(*epochs: int) -> OnDisk:
    return OnDisk([Version(epoch) for epoch in epochs])


def keeper_of(
    archive: Archive, store: CheckpointStore, journal: Journal, clock: Any = None
) -> ArchiveKeeper:
    settings = CheckpointSettings(to="x", to_every="2 epochs", to_keep=2)
    ports = ArchivePorts(
        store, lambda: on_disk(*store.epochs(STAGE)), clock or SystemClock(), journal
    )
    return ArchiveKeeper(archive, STAGE, settings, ports)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_checkpoints_are_copied_by_the_schedule(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.checkpoint.archive.keeper.LOOK_S", 0.01)
    archive = archive_at(str(tmp_path / "there"))
    journal = Journal([])
    keeper = keeper_of(archive, store, journal)
    running = asyncio.create_task(keeper.run())
    await until(lambda: keeper.last == 6)
    for epoch in (7, 8):
        parameters, optimizer, meta = state(epoch)
        store.save(STAGE, epoch, parameters, optimizer, meta)
    await until(lambda: keeper.last == 8)
    running.cancel()
    assert epochs(archive) == [8, 6], "epoch 7 is behind no line of the grid"
    assert not keeper.trouble
    again = keeper_of(archive, store, journal)
    running = asyncio.create_task(again.run())
    await until(lambda: again.last == 8)
    running.cancel()
    assert again.copied is None, "what is there is not copied again"
    assert await again.copy_newest(5.0)


async def test_failures_are_told_once_and_nothing_stops(
    store: CheckpointStore, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.write_text("a file where the directory should be")
    journal = Journal([])
    clock = VirtualClock()
    keeper = keeper_of(archive_at(str(there)), store, journal, clock)
    await keeper._step(on_disk(6))
    assert keeper.trouble.startswith(f"checkpoints are not copied to {there}: ")
    assert keeper.trouble.endswith("tried again in 30 s")
    await keeper._step(on_disk(6))
    clock.advance(31.0)
    await keeper._step(on_disk(6))
    assert keeper.trouble.endswith("tried again in 1 min")
    errors = [e for e in journal.recent(level="error") if e.kind == "archive-failed"]
    assert len(errors) == 1, "the same reason once"
    there.unlink()
    clock.advance(61.0)
    await keeper._step(on_disk(6))
    assert (keeper.last, keeper.trouble) == (6, "")
    assert "again" in [e for e in journal.recent() if e.kind == "archived"][-1].text


async def test_a_place_that_hangs_holds_nobody_up(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "WATCH_S", 0.01)
    woken = threading.Event()

    def hangs(file: Any) -> Any:
        woken.wait(20)
        return file

    there = str(tmp_path / "there")
    journal = Journal([])
    clock = VirtualClock()
    files = Failing(3, hangs)
    keeper = keeper_of(archive_at(there, files=files), store, journal, clock)
    copying = asyncio.create_task(keeper._step(on_disk(6)))
    await until(lambda: files.opened == 3)
    clock.advance(aside.STALL_S + 1)
    await copying
    assert "nothing has moved" in keeper.trouble
    clock.advance(61.0)
    await keeper._step(on_disk(6))
    assert "has not ended" in keeper.trouble, "one thread hangs, not more and more"
    woken.set()
    await until(keeper._aside.free.is_set)
    assert epochs(archive_at(there)) == [], "what wakes later makes no copy whole"
    clock.advance(1000.0)
    await keeper._step(on_disk(6))
    assert keeper.last == 6


async def test_a_copy_can_be_cancelled(store: CheckpointStore, tmp_path: Path) -> None:
    going = threading.Event()
    woken = threading.Event()

    def hangs(file: Any) -> Any:
        going.set()
        woken.wait(20)
        return file

    there = str(tmp_path / "there")
    keeper = keeper_of(archive_at(there, files=Failing(3, hangs)), store, Journal([]))
    copying = asyncio.create_task(keeper._step(on_disk(6)))
    await asyncio.to_thread(going.wait, 20)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    woken.set()
    assert await keeper.copy_newest(20.0), "the next one waits until its thread has ended"
    assert epochs(archive_at(there)) == [6]
    assert not _files_named(BEGUN, there)


def _files_named(name: str, root: str) -> list[Path]:
    return list(Path(root).rglob(name))


async def test_an_error_of_the_work_is_raised_and_a_late_one_is_not() -> None:
    side = Aside(SystemClock())

    def fails(work: ThreadWork) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await side.call(fails)
    assert await side.call(lambda work: 7) == 7


async def test_a_last_copy_has_its_time(store: CheckpointStore, tmp_path: Path) -> None:
    woken = threading.Event()

    def hangs(file: Any) -> Any:
        woken.wait(20)
        return file

    journal = Journal([])
    files = Failing(3, hangs)
    keeper = keeper_of(archive_at(str(tmp_path / "there"), files=files), store, journal)
    assert not await keeper.copy_newest(0.05)
    assert [e for e in journal.recent() if e.kind == "archive-late"]
    woken.set()
