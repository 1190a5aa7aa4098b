"""Checkpoints on disk: a directory a checkpoint, whole or absent.

    <root>/stage-<s>/epoch-<n>/parameters.safetensors
                               optimizer.safetensors      keys "<part>/<state>"
                               manifest.json              written last: sha256 and size of both,
                                                          digest, meta

A checkpoint is written under a hidden name, flushed, then renamed, so that a reader (after a crash,
after a power cut) finds the old one, the new one, or both, and never half of one. A directory that
is torn, garbled, of another run or of a later format is left where it is and reported: a directory
that cannot be read may be the last copy. Where its name is wanted for a new checkpoint it is
renamed to "<name>.aside-<hex>", up to :data:`ASIDE` of them in a stage.

Old checkpoints are removed by number, by age and by the bytes that all of them take. Those of a
history that the run gave up when it went back are removed before others. The newest one of a stage
stays until a newer one is whole.
"""

import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from node.checkpoint.files import (
    Interrupted,
    directory,
    local_fault,
    new_file,
    read_tensors,
    reading,
    remove_tree,
    sha256_of,
    write,
    write_tensors,
)
from node.checkpoint.schedule import current, kept
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import by_part
from node.core import numbers
from node.core.errors import LocalFault, OutOfResources, Refused, WireError
from node.core.journey import lineage
from node.wire.remote import HeldTensor
from node.wire.tensors import digest

PARAMETERS = "parameters.safetensors"
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 16 << 20
FORMAT = 2
"""1 named parameters by another digest; its files are hashed alike, and it is still read."""
_HEX = re.compile(r"[0-9a-f]{64}")
_EPOCH = re.compile(r"epoch-(0|[1-9][0-9]{0,17})(\.replaced)?")
_HIDDEN = re.compile(r"\.(writing|removing)-[0-9]{1,18}-[0-9a-f]{16}")
_ASIDE = re.compile(r"epoch-[0-9]{1,18}\.aside-[0-9a-f]{8}")
_STAGE = re.compile(r"stage-(0|[1-9][0-9]{0,8})")
OVERHEAD = 1 << 18
"""Bytes assumed for the manifest, headers and directory of a checkpoint, beside its tensors."""
HOUR_S = 3600.0
ASIDE = 8
"""Unusable directories of a stage that are renamed to make way; a person has to look at this number
of them before the next."""


@dataclass(frozen=True)
class Checkpoint:
    """One stage at one epoch, read back and verified; tensors on the CPU."""

    stage: int
    epoch: int
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]]
    meta: dict[str, Any]
    digest: str

    def check_history(self, epochs: int) -> str:
        """The lineage of its version. Raises Refused if no run of ``epochs`` epochs has such a
        version: the epoch is beyond the run, or has no lineage, which only epoch 0 lacks."""
        if self.epoch > epochs:
            raise Refused(f"it is of epoch {self.epoch}, and the run has {epochs}")
        try:
            found = lineage(self.meta.get("lineage", ""))
        except WireError as e:
            raise Refused(f"it does not name its history: {e}") from e
        if self.epoch and not found:
            raise Refused(f"it is of epoch {self.epoch} and does not name its history")
        return found


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Bytes and hex sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """``digest`` is the stage digest of the parameters, "" in format 1;
    ``meta`` is JSON of the caller that saved (the sampler's place, …); ``number`` rises with each
    checkpoint of the stage on this disk, 0 in one of older software."""

    run_id: str
    stage: int
    epoch: int
    digest: str
    files: dict[str, FileEntry]
    meta: dict[str, Any]
    number: int = 0

    def encode(self) -> bytes:
        """The file: the facts and the sha256 of their canonical form. ``meta`` is lists, numbers
        and objects with strings for keys, as JSON gives them back."""
        body = {"format": FORMAT} | asdict(self)
        page = {"checkpoint": body, "sha256": _hash(body)}
        return json.dumps(page, sort_keys=True, indent=1, allow_nan=False).encode()

    @classmethod
    def parse(cls, raw: bytes) -> "CheckpointManifest":
        """The inverse of :meth:`encode`. Raises Refused for bytes that are torn, garbled or of
        another format."""
        try:
            page = json.loads(raw)
            body = page["checkpoint"]
            if page["sha256"] != _hash(body):
                raise Refused("its manifest is garbled: it does not have the hash it names")
            if body["format"] not in (1, FORMAT):
                raise Refused(
                    f"its manifest has format {body['format']}, this software reads 1 and {FORMAT}"
                )
            files = {
                str(name): FileEntry(numbers.whole(f["size"]), _hex(f["sha256"]))
                for name, f in body["files"].items()
            }
            if not isinstance(body["meta"], dict):
                raise ValueError("meta is no object")
            return cls(
                str(body["run_id"]),
                numbers.whole(body["stage"]),
                numbers.whole(body["epoch"]),
                _hex(body["digest"]) if body["format"] == FORMAT else "",
                files,
                body["meta"],
                numbers.whole(body.get("number", 0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise Refused(f"its manifest cannot be read: {e}") from e


class CheckpointStore:
    """The checkpoints of one run below ``root``. Calls block on the disk: run them outside the
    event loop.

    ``run_id`` is written into every manifest and asked of every one that is read. ``tell`` hears,
    in one sentence, of everything that was ignored, set aside or cleared away. One process writes a
    root at a time.

    A checkpoint that :meth:`load` could not read, or :meth:`distrust` named, counts as absent from
    then on, although its manifest is intact: large files are only hashed when they are read.
    """

    def __init__(
        self,
        root: Path | str,
        settings: CheckpointSettings,
        run_id: str = "",
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.root = Path(root)
        self.settings = settings
        self.run_id = run_id
        self._tell = tell
        self._distrusted: dict[tuple[int, str], str] = {}

    def save(
        self,
        stage: int,
        epoch: int,
        parameters: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, Mapping[str, HeldTensor]],
        meta: Mapping[str, Any],
        *,
        stride: int = 1,
        beside: Collection[int] = (),
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Path:
        """Write one checkpoint and remove old ones; returns its directory.

        The tensors must not change during the call. Optimizer state of other processes is read one
        tensor at a time. Saving an existing checkpoint is a no-op.
        ``stride``: other peers have the epochs that are multiples of it, so these stay before
        others; ``beside``: epochs that stay whatever the settings say; ``goes_on`` is asked between
        blocks of bytes and ends the call by returning False.

        Raises OutOfResources when the disk is full or ``settings.max_disk`` leaves no room, and
        LocalFault when the disk refuses (the newest checkpoint is then as it was); Interrupted when
        ``goes_on`` said so; Refused when an unreadable directory has the wanted name and
        :data:`ASIDE` others were set aside before; ValueError for names that cannot be kept.
        """
        flat = {
            f"{part}/{key}": tensor
            for part, states in optimizer.items()
            for key, tensor in states.items()
        }
        stage_digest = digest(parameters)
        try:
            with self._stage(stage, create=True) as at:
                self._sweep(at)
                old, why = self._look(at, _named(epoch), stage, epoch, goes_on)
                if old is not None and (old.digest, old.meta) == (stage_digest, dict(meta)):
                    return self.path(stage, epoch)
                files: dict[str, Mapping[str, HeldTensor]] = {
                    PARAMETERS: parameters,
                    OPTIMIZER: flat,
                }
                size = sum(t.nbytes for named in files.values() for t in named.values())
                number = 1 + max(self._numbers(stage).values(), default=0)
                new = CheckpointManifest(
                    self.run_id, stage, epoch, stage_digest, {}, dict(meta), number
                )
                self._make_room(new, size + OVERHEAD, beside)
                self._write(at, new, files, why, goes_on)
                self._prune(at, stage, {epoch, *beside}, stride)
        except OSError as e:
            raise local_fault("write a checkpoint", self.root, e) from e
        return self.path(stage, epoch)

    def epochs(self, stage: int) -> list[int]:
        """Epochs with a checkpoint that looks whole (manifest intact, files of the right size),
        oldest first."""
        return sorted(
            {epoch for epoch, _, manifest, _ in self._survey(stage) if manifest is not None}
        )

    def current(self, stage: int) -> list[int]:
        """The epochs of :meth:`epochs`, newest first, without those that the run has given up. The
        order in which they were written tells which."""
        return current(self._written(stage))

    def newest_whole(
        self, stage: int, most: int, goes_on: Callable[[], bool] = lambda: True
    ) -> int | None:
        """Newest epoch of :meth:`current` up to ``most`` with an intact checkpoint, None without
        one. Compares whole files with the hashes of the manifest. A damaged checkpoint counts as
        absent from then on. Raises Interrupted when ``goes_on``, asked between blocks, returns
        False."""
        for epoch in [found for found in self.current(stage) if found <= most]:
            for name in _names(epoch):
                try:
                    with self._stage(stage) as at:
                        found, why = self._look(at, name, stage, epoch, goes_on)
                except OSError as e:
                    raise local_fault("read checkpoints", self.root, e) from e
                if found is not None:
                    return epoch
                self._distrusted[stage, name] = why
        return None

    def metas(self, stage: int) -> dict[int, dict[str, Any]]:
        """Metadata of every checkpoint that looks whole, by epoch. Of two checkpoints of one epoch
        it is the one that :meth:`load` reads first."""
        found = reversed(self._survey(stage))  # "epoch-5" comes before "epoch-5.replaced"
        return {epoch: dict(m.meta) for epoch, _, m, _ in found if m is not None}

    def problems(self, stage: int) -> list[tuple[str, str]]:
        """(directory, why it is not used) of everything under the stage that is no usable
        checkpoint."""
        return [(name, why) for _, name, _, why in self._survey(stage) if why]

    def distrust(self, stage: int, epoch: int, why: str) -> None:
        """This process does not count the checkpoint of ``epoch`` any more: it can be read, but not
        used."""
        for name in _names(epoch):
            self._distrusted[stage, name] = why

    def load(
        self, stage: int, epoch: int, goes_on: Callable[[], bool] = lambda: True
    ) -> Checkpoint:
        """Read one checkpoint, verifying every hash. Raises Refused when it is missing, torn,
        garbled or foreign, Interrupted when ``goes_on``, asked between blocks, returns False."""
        reasons: list[str] = []
        for name in _names(epoch):
            try:
                with self._stage(stage) as at, directory(name, at) as fd:
                    return self._read(fd, stage, epoch, goes_on)
            except FileNotFoundError:
                continue
            except (OSError, Refused) as e:
                self._distrusted[stage, name] = str(e)
                reasons.append(f"{name}: {e}")
        where = self.path(stage, epoch)
        why = "; ".join(reasons) or "there is none"
        raise Refused(
            f"checkpoint {where} cannot be used: {why}",
            "use another epoch, or fetch the state from a peer",
        )

    def free(self) -> int:
        """Bytes this user may still write to the disk of ``root``, or where it will be. Raises
        OSError."""
        there = next((p for p in (self.root, *self.root.parents) if p.is_dir()), Path("/"))
        return shutil.disk_usage(there).free

    def path(self, stage: int, epoch: int) -> Path:
        """Directory of the checkpoint of ``stage`` at ``epoch``, present or not."""
        return self.root / f"stage-{stage}" / _named(epoch)

    def _write(
        self,
        at: int,
        manifest: CheckpointManifest,
        files: Mapping[str, Mapping[str, HeldTensor]],
        unusable: str,
        goes_on: Callable[[], bool],
    ) -> None:
        """``unusable``: the fault of the present directory of this name, empty for a whole one."""
        stage = manifest.stage
        epoch = manifest.epoch
        hidden = f".writing-{epoch}-{secrets.token_hex(8)}"
        os.mkdir(hidden, 0o700, dir_fd=at)
        try:
            with directory(hidden, at) as fd:
                for name, tensors in files.items():
                    with new_file(name, fd) as out:
                        manifest.files[name] = FileEntry(*write_tensors(out, tensors, goes_on))
                page = manifest.encode()
                if len(page) > MANIFEST_LIMIT:
                    raise ValueError(
                        f"a manifest of {len(page)} bytes is over the limit of {MANIFEST_LIMIT}"
                    )
                with new_file(MANIFEST, fd) as out:
                    write(out, memoryview(page))
                os.fsync(fd)
            if _named(epoch) in os.listdir(at):
                self._make_way(at, stage, epoch, unusable)
        except (OSError, ValueError, LocalFault):
            remove_tree(hidden, at)
            raise
        _rename(hidden, _named(epoch), at)
        self._distrusted.pop((stage, _named(epoch)), None)
        if _named(epoch) + ".replaced" in os.listdir(at):
            self._clear(at, epoch, _named(epoch) + ".replaced")

    def _make_way(self, at: int, stage: int, epoch: int, why: str) -> None:
        """Free the final name. A whole one that differs stays readable as ".replaced" until the new
        one is named; one that cannot be used, ``why``, is set aside."""
        name = _named(epoch)
        if why:
            before = [n for n in os.listdir(at) if _ASIDE.fullmatch(n)]
            if len(before) >= ASIDE:
                raise Refused(
                    f"{name} under {self.root / f'stage-{stage}'} cannot be read ({why}), and "
                    f"{len(before)} others were set aside",
                    "look at what is set aside there (*.aside-*), remove what you do not need, and "
                    "check the disk",
                )
            aside = f"{name}.aside-{secrets.token_hex(4)}"
            self._tell(f"stage {stage}: {name} is set aside as {aside}: {why}")
        else:
            aside = f"{name}.replaced"
            self._tell(f"stage {stage}: {name} is replaced by one with other contents")
            if aside in os.listdir(at):
                self._clear(at, epoch, aside)
        _rename(name, aside, at)

    def _prune(self, at: int, stage: int, protected: Collection[int], stride: int) -> None:
        """Remove checkpoints of this stage beyond ``settings.keep``, and checkpoints of any stage
        past ``settings.max_age_h``."""
        epochs = self._written(stage)
        stay = kept(epochs, protected, keep=self.settings.keep, stride=stride)
        for epoch in epochs:
            aged = epoch not in protected and self._aged(at, epoch)
            if aged or epoch not in stay:
                self._remove(at, epoch)
        for other in self._other_stages(stage):
            with self._stage(other) as there:
                for epoch in self.epochs(other):
                    if self._aged(there, epoch):
                        self._remove(there, epoch)

    def _make_room(self, new: CheckpointManifest, size: int, beside: Collection[int]) -> None:
        """Remove checkpoints of this run until ``size`` bytes more keep below
        ``settings.max_disk``: of other stages, then those that the run gave up, then the oldest.
        Raises OutOfResources if the newest one of this stage alone is too much, and then has
        removed nothing."""
        limit = self.settings.max_disk
        if not limit:
            return
        stage = new.stage
        written = self._written(stage)
        before = current([*written, new.epoch])[1:]
        protected = {*beside, self._newest_beside(new, written)}
        here = [e for e in written if e not in protected]
        here.sort(key=lambda epoch: (epoch in before, epoch))
        order = [
            (o, e, self._bytes(o, e)) for o in self._other_stages(stage) for e in self.epochs(o)
        ]
        order += [(stage, e, self._bytes(stage, e)) for e in here]
        used = self._bytes()
        if used - sum(o[2] for o in order) + size > limit:
            raise OutOfResources(
                f"a checkpoint has {size:,} bytes and may not stand beside the newest one: "
                f"checkpoint.max_disk is {limit:,}",
                f"set it to {2 * size:,} at least; the newest checkpoint is untouched",
            )
        for other, epoch, nbytes in order:
            if used + size <= limit:
                return
            with self._stage(other) as there:
                self._remove(there, epoch)
            used -= nbytes

    def _newest_beside(self, new: CheckpointManifest, written: list[int]) -> int:
        """The epoch of the checkpoint that stays until ``new`` is whole, -1 without any: the same
        version, else the newest epoch before it that the run has not given up, else the last
        one written."""
        line = new.meta.get("lineage")
        if new.epoch in written and self.metas(new.stage)[new.epoch].get("lineage") == line:
            return new.epoch
        before = current([*written, new.epoch])[1:]
        return next(iter([*before, *reversed(written)]), -1)

    def _written(self, stage: int) -> list[int]:
        """Epochs of :meth:`epochs` in the order in which they were written. Older software gives no
        numbers: its checkpoints come by epoch, and behind those that were there before them."""
        numbers = self._numbers(stage)
        unnumbered = [epoch for epoch, number in numbers.items() if not number]
        if unnumbered and len(unnumbered) < len(numbers):
            with self._stage(stage) as at:
                times = {epoch: self._written_at(at, epoch) for epoch in numbers}
            for epoch in unnumbered:
                earlier = [n for e, n in numbers.items() if times[e] < times[epoch]]
                numbers[epoch] = max(earlier, default=0)
        later = set(unnumbered)
        return sorted(numbers, key=lambda epoch: (numbers[epoch], epoch in later, epoch))

    def _numbers(self, stage: int) -> dict[int, int]:
        """The number of every checkpoint that looks whole, by epoch, as in :meth:`metas`."""
        found = reversed(self._survey(stage))
        return {epoch: m.number for epoch, _, m, _ in found if m is not None}

    def _other_stages(self, stage: int) -> list[int]:
        """Stages that this peer has hosted before ``stage`` and has checkpoints of."""
        with os.scandir(self.root) as entries:
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        found = (_STAGE.fullmatch(name) for name in names)
        return [int(match[1]) for match in found if match and int(match[1]) != stage]

    def _bytes(self, stage: int | None = None, epoch: int | None = None) -> int:
        """Bytes of one checkpoint, or of everything below the root."""
        if stage is None or epoch is None:
            places = [self.root]
        else:
            places = [self.path(stage, epoch), self.path(stage, epoch).with_suffix(".replaced")]
        return sum(f.lstat().st_size for place in places for f in place.rglob("*") if f.is_file())

    def _aged(self, at: int, epoch: int) -> bool:
        """Return True if the checkpoint was written longer than ``settings.max_age_h`` ago."""
        if not self.settings.max_age_h:
            return False
        return time.time() - self._written_at(at, epoch) > self.settings.max_age_h * HOUR_S

    def _written_at(self, at: int, epoch: int) -> float:
        """Unix time at which the checkpoint was written."""
        # After a power cut the one that was to be replaced may be there alone.
        name = next(n for n in _names(epoch) if n in os.listdir(at))
        return os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime

    def _remove(self, at: int, epoch: int) -> None:
        for name in _names(epoch):
            if name in os.listdir(at):
                self._clear(at, epoch, name)

    def _clear(self, at: int, epoch: int, name: str) -> None:
        gone = f".removing-{epoch}-{secrets.token_hex(8)}"
        _rename(name, gone, at)
        try:
            remove_tree(gone, at)
        except OSError as e:  # a folder that somebody made there: no reason to lose a checkpoint
            self._tell(f"could not clear {name}, now {gone}: {e}")

    def _sweep(self, at: int) -> None:
        """Hidden names are this store's own unfinished work: nobody can read them, and a crash
        leaves them behind."""
        for name in filter(_HIDDEN.fullmatch, sorted(os.listdir(at))):
            try:
                remove_tree(name, at)
            except OSError as e:
                self._tell(f"could not clear {name}, left by an interrupted run: {e}")
            else:
                self._tell(f"cleared {name}, left by an interrupted run")

    def _survey(self, stage: int) -> list[tuple[int, str, CheckpointManifest | None, str]]:
        """(epoch, directory, manifest or None, why it is not used) of everything in the stage's
        directory."""
        found: list[tuple[int, str, CheckpointManifest | None, str]] = []
        try:
            with self._stage(stage) as at:
                for name in itertools.filterfalse(_HIDDEN.fullmatch, sorted(os.listdir(at))):
                    if match := _EPOCH.fullmatch(name):
                        epoch = int(match[1])
                        found.append((epoch, name, *self._look(at, name, stage, epoch)))
                    elif _ASIDE.fullmatch(name):
                        found.append((-1, name, None, "set aside, because it could not be read"))
                    else:
                        found.append((-1, name, None, "not a name a checkpoint has"))
        except FileNotFoundError:
            return []
        except OSError as e:
            raise local_fault("read checkpoints", self.root, e) from e
        return found

    def _look(
        self,
        at: int,
        name: str,
        stage: int,
        epoch: int,
        goes_on: Callable[[], bool] | None = None,
    ) -> tuple[CheckpointManifest | None, str]:
        """The manifest, or why this is no checkpoint; with ``goes_on`` after reading all of it.
        Raises Interrupted."""
        if why := self._distrusted.get((stage, name), ""):
            return None, why
        try:
            with directory(name, at) as fd:
                manifest = self._manifest(fd, stage, epoch)
                for file, entry in manifest.files.items():
                    with _described(file, fd, entry, goes_on):
                        pass
        except Interrupted:
            raise
        except (OSError, LocalFault) as e:
            return None, str(e)
        return manifest, ""

    def _manifest(self, fd: int, stage: int, epoch: int) -> CheckpointManifest:
        with reading(MANIFEST, fd) as (file, size):
            if size > MANIFEST_LIMIT:
                raise Refused(f"a manifest of {size} bytes is over the limit of {MANIFEST_LIMIT}")
            manifest = CheckpointManifest.parse(os.pread(file, size, 0))
        if set(manifest.files) != {PARAMETERS, OPTIMIZER}:
            raise Refused("its manifest names other files than a checkpoint has")
        if manifest.run_id != self.run_id:
            raise Refused(
                f"it belongs to run {manifest.run_id[:12]!r}, not to {self.run_id[:12]!r}"
            )
        if (manifest.stage, manifest.epoch) != (stage, epoch):
            raise Refused(f"it was written for stage {manifest.stage} at epoch {manifest.epoch}")
        return manifest

    def _read(self, fd: int, stage: int, epoch: int, goes_on: Callable[[], bool]) -> Checkpoint:
        manifest = self._manifest(fd, stage, epoch)
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, entry in manifest.files.items():
            with _described(name, fd, entry, goes_on) as file:
                parts[name] = read_tensors(file, entry.size, goes_on)
        whole = all(t.is_floating_point() for t in parts[PARAMETERS].values())
        found = ""
        if whole:
            found = digest(parts[PARAMETERS])
        if not whole or manifest.digest not in ("", found):
            raise Refused("its parameters do not have the digest its manifest names")
        optimizer = by_part(parts[OPTIMIZER])
        return Checkpoint(stage, epoch, parts[PARAMETERS], optimizer, manifest.meta, found)

    @contextmanager
    def _stage(self, stage: int, create: bool = False) -> Iterator[int]:
        name = f"stage-{stage}"
        if create:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with directory(self.root) as root:
            if create and name not in os.listdir(root):
                os.mkdir(name, 0o700, dir_fd=root)
                os.fsync(root)
            with directory(name, root) as fd:
                yield fd


def _named(epoch: int) -> str:
    return f"epoch-{epoch}"


def _names(epoch: int) -> tuple[str, str]:
    """Directories of the checkpoint of ``epoch``, in the order in which they are read."""
    return _named(epoch), _named(epoch) + ".replaced"


def _rename(old: str, new: str, at: int) -> None:
    """Rename for good: else a power cut could bring a name back with its files gone."""
    os.rename(old, new, src_dir_fd=at, dst_dir_fd=at)
    os.fsync(at)


@contextmanager
def _described(
    name: str, at: int, entry: FileEntry, goes_on: Callable[[], bool] | None
) -> Iterator[int]:
    """A file open for reading, as its manifest describes it: its size, and with ``goes_on`` its
    hash. Raises Refused, OSError, Interrupted."""
    with reading(name, at) as (file, size):
        if size != entry.size:
            raise Refused(f"{name} has {size} bytes, its manifest says {entry.size}")
        if goes_on is not None and sha256_of(file, goes_on) != entry.sha256:
            raise Refused(f"{name} is not the file its manifest describes")
        yield file


def _hash(body: Any) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _hex(value: Any) -> str:
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise ValueError("expected a hex sha256")
    return value
