import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.checkpoint import files
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import ASIDE, OVERHEAD, CheckpointStore, _hash
from node.core.errors import ExitCode, LocalFault, OutOfResources, Refused
from node.wire.tensors import digest

RUN = "ab" * 32


def state(
    seed: int,
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], dict[str, object]]:
    g = torch.Generator().manual_seed(seed)
    parameters = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, 5, generator=g),
        "model.norm.weight": torch.randn(5, generator=g).bfloat16(),
        "transposed": torch.randn(4, 3, generator=g).t(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
    }
    optimizer = {
        "model.norm.weight": {"momentum": torch.randn(5, generator=g), "step": torch.tensor(seed)}
    }
    return parameters, optimizer, {"sampler": {"position": seed, "back": [1, 2]}, "loss": 2.5}


def store_in(
    root: Path, keep: int = 3, said: list[str] | None = None, run: str = RUN
) -> CheckpointStore:
    return CheckpointStore(
        root, CheckpointSettings(keep=keep), run, tell=(said if said is not None else []).append
    )


def rewritten(page: Path, **changes: object) -> None:
    """The manifest with other facts and the hash that they have."""
    body = json.loads(page.read_text())["checkpoint"] | changes
    page.write_text(json.dumps({"checkpoint": body, "sha256": _hash(body)}))


@pytest.fixture
def said() -> list[str]:
    """Messages that `store` reports."""
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> CheckpointStore:
    return store_in(tmp_path, said=said)


def names(root: Path, stage: int = 1) -> set[str]:
    return set(os.listdir(root / f"stage-{stage}"))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    parameters, optimizer, meta = state(1)
    path = store_in(tmp_path).save(1, 20, parameters, optimizer, meta)
    assert path == tmp_path / "stage-1" / "epoch-20"

    found = store_in(tmp_path).load(1, 20)
    assert (found.stage, found.epoch, found.meta) == (1, 20, meta)
    assert found.digest == digest(parameters)
    torch.testing.assert_close(
        (found.parameters, found.optimizer), (parameters, optimizer), rtol=0, atol=0
    )


def test_checkpoint_files_are_private_safetensors(tmp_path: Path) -> None:
    parameters, optimizer, meta = state(1)
    path = store_in(tmp_path).save(1, 20, parameters, optimizer, meta)
    assert torch.equal(
        load_file(path / "parameters.safetensors")["transposed"], parameters["transposed"]
    )
    assert set(load_file(path / "optimizer.safetensors")) == {
        "model.norm.weight/momentum",
        "model.norm.weight/step",
    }
    assert {os.stat(path / n).st_mode & 0o777 for n in os.listdir(path)} == {0o600}


def test_loaded_tensors_outlive_their_file(store: CheckpointStore) -> None:
    path = store.save(0, 0, {"w": torch.full((1000,), 7.0)}, {}, {})
    found = store.load(0, 0)
    (path / "parameters.safetensors").write_bytes(b"")
    assert found.parameters["w"].sum() == 7000
    assert found.optimizer == {}


@pytest.mark.parametrize(
    ("keep", "written", "left"),
    [
        (2, (9, 10, 11, 100), [11, 100]),
        # The epoch just written stays beside later epochs.
        (1, (99, 100, 7), [7]),
        (2, (99, 100, 7), [7, 100]),
    ],
)
def test_the_newest_checkpoints_of_each_stage_are_kept(
    tmp_path: Path, keep: int, written: tuple[int, ...], left: list[int]
) -> None:
    store = store_in(tmp_path, keep=keep)
    store.save(2, 5, *state(5))
    for epoch in written:
        store.save(1, epoch, *state(epoch))
    assert [store.epochs(stage) for stage in (1, 2, 3)] == [left, [5], []]
    assert names(tmp_path) == {f"epoch-{epoch}" for epoch in left}


def test_a_folder_in_an_old_checkpoint_costs_no_new_one(tmp_path: Path, said: list[str]) -> None:
    store = store_in(tmp_path, keep=1, said=said)
    store.save(1, 1, *state(1))
    (tmp_path / "stage-1" / "epoch-1" / "notes").mkdir()
    store.save(1, 2, *state(2))
    assert store.epochs(1) == [2]
    assert any("could not clear epoch-1" in line for line in said)


def test_saving_the_same_again_changes_nothing(store: CheckpointStore) -> None:
    before = os.stat(store.save(1, 4, *state(4))).st_ino
    assert os.stat(store.save(1, 4, *state(4))).st_ino == before


def test_another_branch_replaces_the_epoch(
    tmp_path: Path, store: CheckpointStore, said: list[str]
) -> None:
    store.save(1, 4, *state(4))
    store.save(1, 4, *state(5))
    assert (store.load(1, 4).digest, names(tmp_path)) == (digest(state(5)[0]), {"epoch-4"})
    assert any("replaced" in text for text in said)


def truncate(path: Path) -> None:
    target = path / "parameters.safetensors"
    os.truncate(target, target.stat().st_size - 1)


def flip(path: Path) -> None:
    target = path / "parameters.safetensors"
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)


def edit_manifest(path: Path) -> None:
    target = path / "manifest.json"
    target.write_text(target.read_text().replace('"epoch": 2', '"epoch": 3'))


def link_out(path: Path) -> None:
    (path / "parameters.safetensors").rename(path.parent.parent / "elsewhere")
    (path / "parameters.safetensors").symlink_to(path.parent.parent / "elsewhere")


def fifo(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "short": (truncate, "manifest says"),
    "flipped bit": (flip, "not the file"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "is missing"),
    "torn manifest": (lambda p: os.truncate(p / "manifest.json", 40), "cannot be read"),
    "edited manifest": (edit_manifest, "garbled"),
    "deep manifest": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "cannot be read"),
    "no tensors": (lambda p: (p / "optimizer.safetensors").unlink(), "is missing"),
    "link": (link_out, "is a link"),
    "fifo": (fifo, "not a regular file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_passed_over_and_stays(
    tmp_path: Path, store: CheckpointStore, kind: str
) -> None:
    store.save(1, 1, *state(1))
    damage, reason = DAMAGE[kind]
    damage(store.save(1, 2, *state(2)))

    with pytest.raises(Refused, match=reason) as caught:
        store.load(1, 2)
    assert caught.value.next_step
    assert store.load(1, 1).epoch == 1
    assert store.epochs(1) == [1]
    assert [name for name, why in store.problems(1) if reason in why] == ["epoch-2"]
    for epoch in range(3, 9):
        store.save(1, epoch, *state(epoch))
    assert (tmp_path / "stage-1" / "epoch-2").exists()
    assert store.epochs(1) == [6, 7, 8], "what cannot be read takes no place of what can"


@pytest.mark.parametrize("kind", ["short", "flipped bit", "no manifest"])
@pytest.mark.parametrize("seed", [2, 3])
def test_saving_over_a_damaged_one_sets_it_aside(
    tmp_path: Path, store: CheckpointStore, said: list[str], kind: str, seed: int
) -> None:
    path = store.save(1, 2, *state(2))
    DAMAGE[kind][0](path)
    left = {p.name: p.read_bytes() for p in path.iterdir()}
    store.save(1, 2, *state(seed))
    assert store.load(1, 2).digest == digest(state(seed)[0])
    (aside,) = names(tmp_path) - {"epoch-2"}
    assert aside.startswith("epoch-2.aside-")
    assert {p.name: p.read_bytes() for p in (tmp_path / "stage-1" / aside).iterdir()} == left
    assert any(aside in text for text in said)
    assert [name for name, _ in store.problems(1)] == [aside]


def test_what_is_set_aside_is_bounded_and_nothing_of_it_deleted(
    tmp_path: Path, store: CheckpointStore
) -> None:
    for _ in range(ASIDE + 1):
        truncate(store.save(1, 2, *state(2)))
    there = names(tmp_path)
    assert len(there) == ASIDE + 1
    with pytest.raises(Refused, match="were set aside") as caught:
        store.save(1, 2, *state(2))
    assert "remove what you do not need" in caught.value.next_step
    assert names(tmp_path) == there
    store.save(1, 3, *state(3))
    assert store.epochs(1) == [3], "other epochs are still written"


def test_a_distrusted_checkpoint_is_ignored_until_rewritten(
    tmp_path: Path, store: CheckpointStore
) -> None:
    store.save(1, 1, *state(1))
    store.save(1, 2, *state(2))
    store.distrust(1, 2, "of another model")
    assert store.epochs(1) == [1]
    assert store.metas(1).keys() == {1}
    assert store.problems(1) == [("epoch-2", "of another model")]
    assert store_in(tmp_path).epochs(1) == [1, 2], "another process finds out by itself"
    store.save(1, 2, *state(3))
    assert store.load(1, 2).digest == digest(state(3)[0])
    assert store.epochs(1) == [1, 2]


def test_a_later_format_is_left_for_who_can_read_it(tmp_path: Path, store: CheckpointStore) -> None:
    store.save(1, 1, *state(1))
    page = store.save(1, 2, *state(2)) / "manifest.json"
    rewritten(page, format=7, new="field")
    later = page.read_bytes()
    with pytest.raises(Refused, match="format 7, this software reads 1 and 2"):
        store.load(1, 2)
    assert store.epochs(1) == [1]
    store.save(1, 2, *state(4))
    (aside,) = names(tmp_path) - {"epoch-1", "epoch-2"}
    assert (tmp_path / "stage-1" / aside / "manifest.json").read_bytes() == later


def test_of_another_run_or_stage_is_foreign(tmp_path: Path, store: CheckpointStore) -> None:
    store_in(tmp_path, run="cd" * 32).save(1, 7, *state(7))
    assert store.epochs(1) == []
    with pytest.raises(Refused, match="belongs to run 'cdcdcdcdcdcd'"):
        store.load(1, 7)
    store.save(1, 8, *state(8))
    os.rename(tmp_path / "stage-1" / "epoch-8", tmp_path / "stage-1" / "epoch-9")
    with pytest.raises(Refused, match="written for stage 1 at epoch 8"):
        store.load(1, 9)


def test_a_linked_directory_is_not_followed(tmp_path: Path) -> None:
    store = store_in(tmp_path / "mine")
    store_in(tmp_path / "theirs").save(1, 3, *state(3))
    store.save(1, 1, *state(1))
    (tmp_path / "mine" / "stage-1" / "epoch-3").symlink_to(
        tmp_path / "theirs" / "stage-1" / "epoch-3"
    )
    assert store.epochs(1) == [1]
    (tmp_path / "mine" / "stage-2").symlink_to(tmp_path / "theirs" / "stage-1")
    with pytest.raises(LocalFault):
        store.save(2, 1, *state(1))


def test_a_header_bomb_never_reaches_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "safe_open", "is not to be called")
    bomb = tmp_path / "bomb"
    bomb.write_bytes((64 << 20).to_bytes(8, "little"))
    os.truncate(bomb, 100 << 20)
    with bomb.open("rb") as file:
        with pytest.raises(Refused, match="over the limit"):
            files.read_tensors(file.fileno(), 100 << 20)
        with pytest.raises(Refused, match="longer than the file"):
            files.read_tensors(file.fileno(), 1 << 20)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a..b",
        "/abs",
        "a/b/c",
        "",
        "a\nb",
        "x" * 300,
        "__metadata__/../x",
    ],
)
def test_a_name_that_cannot_be_kept_leaves_nothing_behind(
    tmp_path: Path, store: CheckpointStore, name: str
) -> None:
    with pytest.raises(ValueError, match="not a tensor name"):
        store.save(1, 1, {name: ONE}, {}, {})
    assert names(tmp_path) == set()


def test_unfinished_checkpoints_are_removed_and_reported(
    tmp_path: Path, store: CheckpointStore, said: list[str]
) -> None:
    store.save(1, 1, *state(1))
    left = tmp_path / "stage-1" / (".writing-2-" + "0" * 16)
    left.mkdir()
    (left / "parameters.safetensors").write_bytes(b"half")
    store.save(1, 3, *state(3))
    assert names(tmp_path) == {"epoch-1", "epoch-3"}
    assert any(left.name in text for text in said)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_any_write_may_find_the_disk_full(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        left = 1000

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: memoryview) -> int:
            if self.left == 0:
                raise OSError(code, os.strerror(code))
            self.left -= 1
            return os.write(fd, data)

    disk = Full()
    monkeypatch.setattr(files, "os", disk)
    store = CheckpointStore(tmp_path, CheckpointSettings(keep=1), RUN)
    store.save(1, 1, *state(1))
    for left in range(3):  # the two files of tensors, and the manifest
        disk.left = left
        with pytest.raises(OutOfResources) as caught:
            store.save(1, 2, *state(2))
        assert caught.value.code is ExitCode.RESOURCES
        assert str(tmp_path) in caught.value.next_step
        assert (names(tmp_path), store.load(1, 1).digest) == ({"epoch-1"}, digest(state(1)[0]))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 3},
        {"epoch": True},
        {"epoch": -1},
        {"digest": "x"},
        {"files": []},
        {"meta": 1},
        {"files": {}},
    ],
)
def test_a_manifest_that_hashes_but_means_nothing_is_refused(
    store: CheckpointStore, change: dict[str, object]
) -> None:
    page = store.save(1, 2, *state(2)) / "manifest.json"
    rewritten(page)
    assert store.load(1, 2).epoch == 2
    rewritten(page, **change)
    with pytest.raises(Refused):
        store.load(1, 2)


def test_a_checkpoint_of_format_1_is_still_read(store: CheckpointStore) -> None:
    """The digest of format 1 is of another kind; its files are hashed as they are today."""
    path = store.save(1, 2, *state(2))
    rewritten(path / "manifest.json", format=1, digest="a" * 64)
    found = store.load(1, 2)
    assert (found.digest, found.meta) == (digest(state(2)[0]), state(2)[2])
    flip(path)
    with pytest.raises(Refused, match="not the file"):
        store.load(1, 2)


def sized(root: Path, **limits: Any) -> CheckpointStore:
    return CheckpointStore(root, CheckpointSettings(**limits), RUN)


def below(root: Path) -> int:
    return sum(f.stat().st_size for f in root.rglob("*") if f.is_file())


def large(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1 << 18,), value)}


def test_checkpoints_stay_below_their_limit(tmp_path: Path) -> None:
    """One has 1 MiB, and three fit."""
    limit = 3 * ((1 << 20) + OVERHEAD)
    store = sized(tmp_path, keep=10, max_disk=limit)
    most = 0
    for epoch in range(1, 30):
        store.save(1, epoch, large(float(epoch)), {}, {})
        most = max(most, below(tmp_path))
        assert store.epochs(1)[-1] == epoch
    assert most <= limit
    assert len(store.epochs(1)) >= 2
    assert store.load(1, 29).parameters["w"][0] == 29


def test_a_limit_for_less_than_two_leaves_the_newest(tmp_path: Path) -> None:
    store = sized(tmp_path, max_disk=3 << 19)
    store.save(1, 1, large(1.0), {}, {})
    with pytest.raises(OutOfResources, match=r"checkpoint.max_disk is 1,572,864") as refused:
        store.save(1, 2, large(2.0), {}, {})
    assert f"{2 * ((1 << 20) + OVERHEAD):,}" in refused.value.next_step
    assert store.epochs(1) == [1]
    assert store.load(1, 1).parameters["w"][0] == 1


def test_stages_that_were_left_make_room_first(tmp_path: Path) -> None:
    store = sized(tmp_path, max_disk=3 * ((1 << 20) + OVERHEAD))
    store.save(2, 7, large(7.0), {}, {})
    for epoch in (8, 9, 10):
        store.save(1, epoch, large(float(epoch)), {}, {})
    assert (store.epochs(2), store.epochs(1)) == ([], [8, 9, 10][-len(store.epochs(1)) :])
    assert len(store.epochs(1)) >= 2


def test_old_checkpoints_are_removed_but_for_the_newest(tmp_path: Path) -> None:
    store = sized(tmp_path, keep=5, max_age_h=10.0)
    for stage, epoch in ((2, 3), (1, 4), (1, 5)):
        store.save(stage, epoch, *state(epoch))
    long_ago = os.stat(store.path(1, 5)).st_mtime - 11 * 3600
    for stage, epoch in ((2, 3), (1, 4)):
        os.utime(store.path(stage, epoch), (long_ago, long_ago))
    assert (store.epochs(1), store.epochs(2)) == ([4, 5], [3]), "nothing goes before the next"
    store.save(1, 6, *state(6))
    assert (store.epochs(1), store.epochs(2)) == ([5, 6], [])


def test_one_left_by_an_interrupted_replacement_is_no_obstacle(tmp_path: Path) -> None:
    parameters, optimizer, meta = state(1)
    at = tmp_path / "stage-1"
    for epoch in range(1, 5):
        store = store_in(tmp_path, keep=2)
        store.save(1, epoch, parameters, optimizer, meta)
        if epoch == 1:
            # A power cut between the two renames.
            (at / "epoch-1").rename(at / "epoch-1.replaced")
            assert store_in(tmp_path).epochs(1) == [1]
    assert names(tmp_path) == {"epoch-3", "epoch-4"}


def test_what_is_no_directory_of_a_stage_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "stage-2").write_text("a note")
    (tmp_path / "stage-3").symlink_to(tmp_path.parent)
    store_in(tmp_path).save(1, 1, *state(1))
    assert names(tmp_path) == {"epoch-1"}


def test_what_stays_beside_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep=2)
    for epoch in (1, 2, 3, 4, 5, 6):
        store.save(1, epoch, *state(epoch), stride=4)
    assert store.epochs(1) == [4, 6], "the multiple of four, and the newest"
    store.save(1, 7, *state(7), stride=4, beside=(6, 7))
    assert store.epochs(1) == [6, 7]


OLD = "aa" * 16
NEW = "bb" * 16


def lines(store: CheckpointStore) -> dict[int, object]:
    """The history of each checkpoint on the disk, by epoch."""
    return {epoch: meta["lineage"] for epoch, meta in store.metas(1).items()}


def test_what_the_run_gave_up_makes_way_for_what_it_does_now(tmp_path: Path) -> None:
    for epoch in (96, 98, 100):
        store_in(tmp_path).save(1, epoch, large(float(epoch)), {}, {"lineage": OLD}, stride=2)
    for epoch in (92, 94, 96):
        # Each time after a restart.
        store_in(tmp_path).save(1, epoch, large(-float(epoch)), {}, {"lineage": NEW}, stride=2)
        assert lines(store_in(tmp_path))[epoch] == NEW
        assert len(store_in(tmp_path).epochs(1)) == 3
    assert lines(store_in(tmp_path)) == {92: NEW, 94: NEW, 96: NEW}


def test_room_is_made_of_what_the_run_gave_up(tmp_path: Path) -> None:
    store = sized(tmp_path, max_disk=5 * ((1 << 20) + OVERHEAD) // 2)
    for epoch in (98, 100):
        store.save(1, epoch, large(float(epoch)), {}, {"lineage": OLD})
    with pytest.raises(files.Interrupted):
        store.save(1, 92, large(1.0), {}, {"lineage": NEW}, goes_on=lambda: False)
    assert lines(store) == {100: OLD}, "what was written last stays until there is another"
    store.save(1, 92, large(1.0), {}, {"lineage": NEW})
    with pytest.raises(files.Interrupted):
        store.save(1, 94, large(2.0), {}, {"lineage": NEW}, goes_on=lambda: False)
    assert lines(store) == {92: NEW}
    store.save(1, 94, large(2.0), {}, {"lineage": NEW})
    assert lines(store) == {92: NEW, 94: NEW}
    assert (store.current(1), store.newest_whole(1, 200)) == ([94, 92], 94)


def given_up_after(blocks: int) -> Callable[[], bool]:
    """Answers True to so many questions."""
    left = iter(range(blocks))
    return lambda: next(left, None) is not None


def test_a_version_that_is_written_again_stays_meanwhile(tmp_path: Path) -> None:
    """Also if the run has gone back to it."""
    store = sized(tmp_path, max_disk=5 * ((1 << 20) + OVERHEAD) // 2)
    again = {"lineage": OLD, "colleagues": []}
    for epoch in (100, 98):
        for there in (98, 100):
            store.save(1, there, large(float(there)), {}, {"lineage": OLD})
        with pytest.raises(files.Interrupted):
            # Both files of the present one are read before.
            store.save(1, epoch, large(float(epoch)), {}, again, goes_on=given_up_after(2))
        assert store.epochs(1) == [epoch], "the other one made way"
    store.save(1, 100, large(100.0), {}, {"lineage": OLD})
    with pytest.raises(files.Interrupted):
        store.save(1, 100, large(1.0), {}, {"lineage": NEW}, goes_on=given_up_after(2))
    assert lines(store) == {98: OLD}, "100 is no longer of the history that goes on"


def saved_by_older_software(store: CheckpointStore, epoch: int) -> None:
    """Save a checkpoint whose manifest has no number."""
    page = store.save(1, epoch, *state(epoch)) / "manifest.json"
    body = json.loads(page.read_text())["checkpoint"]
    del body["number"]
    page.write_text(json.dumps({"checkpoint": body, "sha256": _hash(body)}))


def test_checkpoints_of_older_software_count_by_their_epochs(store: CheckpointStore) -> None:
    for epoch in (9, 8):
        saved_by_older_software(store, epoch)
    assert store.current(1) == [9, 8]


def test_checkpoints_that_older_software_wrote_last_are_the_newest(store: CheckpointStore) -> None:
    """The user went back to the former version for a while."""
    for epoch in (3, 4):
        store.save(1, epoch, *state(epoch))
        at = time.time() - 60.0 / epoch
        os.utime(store.path(1, epoch), (at, at))
    saved_by_older_software(store, 5)
    assert store.current(1) == [5, 4, 3]
    store.save(1, 6, *state(6))
    assert store.current(1)[:2] == [6, 5]


def test_a_writing_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(1, 1, *state(1))
    for blocks in range(2):  # of two files
        asked = iter([True] * blocks + [False] * 9)
        with pytest.raises(files.Interrupted):
            store.save(1, 2, *state(2), goes_on=lambda asked=asked: next(asked))
        assert names(tmp_path) == {"epoch-1"}
    assert store.load(1, 1).epoch == 1


@pytest.mark.parametrize("refused", [0, 1])
def test_a_filesystem_that_writes_no_blocks_directly_gets_them_otherwise(
    tmp_path: Path, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of three blocks, one of which is refused after a part of it was taken."""
    monkeypatch.setattr(files, "_BLOCK", 1 << 16)
    true = files.write
    blocks = list[int]()

    def write(fd: int, data: memoryview) -> None:
        blocks.append(len(data))
        if len(blocks) == refused + 1:
            os.write(fd, data[: 1 << 12])
            raise OSError(errno.EINVAL, "no direct writing")
        true(fd, data)

    def set_direct(writer: files.BlockWriter, direct: bool) -> None:
        writer._direct = direct

    monkeypatch.setattr(files, "write", write)
    monkeypatch.setattr(files.BlockWriter, "_set_direct", set_direct)
    numbers = torch.arange(40_000, dtype=torch.float32)
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        size, sha = files.write_tensors(file.fileno(), {"w": numbers})
        assert size == os.fstat(file.fileno()).st_size == (tmp_path / "file").stat().st_size
        assert sha == files.sha256_of(file.fileno())
        assert torch.equal(files.read_tensors(file.fileno(), size)["w"], numbers)
