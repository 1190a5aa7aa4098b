"""An archive of checkpoints: the files of this peer's checkpoints at another place. Every call
blocks: run it outside the event loop.

    <address>/<run>/stage-<s>/<peer>/epoch-<n>/begun.json       written first, removed last
                                              parameters.safetensors
                                              optimizer.safetensors
                                              manifest.json
                                              whole.json        written last: sha256 and size of
                                                                the three

Object stores cannot rename, so a small file that is written last makes a checkpoint whole: a reader
that finds this file finds all others, and a directory without it holds no checkpoint. Every file is
read back and compared before that. ``begun.json`` names the files of an attempt, so that the next
one can clear them away. The archive removes only files that one of these two pages names, in a
directory of this peer. A page that names another peer than its directory does is ignored.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, BinaryIO

from node.checkpoint.archive.address import Address
from node.checkpoint.archive.guarded import PlaceFiles, place_files
from node.checkpoint.files import Interrupted, directory, reading
from node.checkpoint.store import (
    MANIFEST,
    MANIFEST_LIMIT,
    OPTIMIZER,
    PARAMETERS,
    CheckpointManifest,
    CheckpointStore,
    FileEntry,
)
from node.core import numbers
from node.core.errors import DISK_FULL, LocalFault, OutOfResources, Refused, WireError
from node.core.ids import PeerId
from node.core.journey import Version, lineage

BEGUN = "begun.json"
WHOLE = "whole.json"
FILES = (PARAMETERS, OPTIMIZER, MANIFEST)
FORMAT = 1
PAGE_LIMIT = 1 << 16
"""Size limit of ``begun.json`` and ``whole.json`` in bytes."""
LOOKED = 2048
"""Number of other peers' directories that are searched for copies, at most."""
COPIES = 256
"""Number of copies of another peer and stage that are read, at most, from the highest epoch
down."""
BLOCK = 8 << 20
RUN_DIGITS = 12
_STAGE = re.compile(r"stage-(0|[1-9][0-9]{0,8})")
_EPOCH = re.compile(r"epoch-(0|[1-9][0-9]{0,17})")
_HEX = re.compile(r"[0-9a-f]{64}")
GoesOn = Callable[[], bool]
"""Called between two blocks of bytes; False ends the work."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole checkpoint in an archive. ``directory``: its path in the file system; ``lineage``:
    the lineage of its version, empty if the copy has none; ``number``: number that rises with each
    copy of this peer and stage, 0 for a copy of older software; ``untidy``: the reason why older
    copies were not removed, empty if they were."""

    stage: int
    epoch: int
    peer: str
    directory: str
    files: Mapping[str, FileEntry]
    lineage: str = ""
    number: int = 0
    untidy: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """Record of a copy in ``begun.json`` or ``whole.json``: the run, the peer, the stage, the epoch
    and the files of its checkpoint. ``lineage`` and ``number`` as in :class:`Whole`."""

    run: str
    peer: str
    stage: int
    epoch: int
    files: Mapping[str, FileEntry]
    lineage: str = ""
    number: int = 0

    def encode(self) -> bytes:
        """The file: the facts and the sha256 of their canonical form."""
        body = {
            "format": FORMAT,
            "run": self.run,
            "peer": self.peer,
            "stage": self.stage,
            "epoch": self.epoch,
            "files": {name: [entry.size, entry.sha256] for name, entry in self.files.items()},
            "lineage": self.lineage,
            "number": self.number,
        }
        page = {"archive": body, "sha256": _hash(body)}
        return json.dumps(page, sort_keys=True, indent=1).encode()

    @classmethod
    def parse(cls, raw: bytes) -> "CopyRecord":
        """The inverse of :meth:`encode`. Raises Refused for bytes that are torn, garbled, too long
        or of another format."""
        if len(raw) > PAGE_LIMIT:
            raise Refused(f"a page of more than {PAGE_LIMIT} bytes")
        try:
            page = json.loads(raw)
            body = page["archive"]
            if page["sha256"] != _hash(body) or body["format"] != FORMAT:
                raise ValueError("another hash or format")
            files: dict[str, FileEntry] = {}
            for name, (size, sha256) in body["files"].items():
                if not _HEX.fullmatch(sha256):
                    raise ValueError("expected a hex sha256")
                files[str(name)] = FileEntry(numbers.whole(size), sha256)
            return cls(
                str(body["run"]),
                str(body["peer"]),
                numbers.whole(body["stage"]),
                numbers.whole(body["epoch"]),
                files,
                lineage(body.get("lineage", "")),
                numbers.whole(body.get("number", 0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise Refused(f"a page of an archive that cannot be read: {e}") from e


class Archive:
    """The archive of one run at ``address``, as one peer writes and reads it. The place is opened
    by the first call. ``files`` replaces the file system that the address names."""

    def __init__(self, address: Address, run_id: str, me: PeerId, files: Any = None) -> None:
        self.address = address
        self.me = me
        self._run_id = run_id
        self._given = files

    @cached_property
    def _files(self) -> PlaceFiles:
        files, path = self.address.open()
        if self._given is not None:
            files = self._given
        return place_files(files, path, self.address.shown)

    @property
    def _root(self) -> str:
        """The directory of the run."""
        return f"{self._files.top}/{self._run_id[:RUN_DIGITS]}"

    # ----------------------------------------------------------- writing

    def save(
        self,
        store: CheckpointStore,
        stage: int,
        epoch: int,
        keep: int,
        goes_on: GoesOn = lambda: True,
    ) -> Whole:
        """Copy a checkpoint of ``store``, compare what was written, and remove the oldest copies of
        this peer and stage beyond ``keep``. The files of a copy that is whole already are left as
        they are; it becomes the newest one. Where older ones cannot be removed, the copy counts all
        the same.

        Raises OutOfResources if the place is full, Refused if the checkpoint cannot be read or
        foreign files have the wanted names, Interrupted when ``goes_on`` said so, and LocalFault
        for all other faults of the place; no message holds a secret. A copy that failed is no
        checkpoint, and older ones stay.
        """
        try:
            return self._save(store, stage, epoch, keep, goes_on)
        except LocalFault:
            raise
        except Exception as e:  # noqa: BLE001
            # Every library behind fsspec has errors of its own.
            raise self._fault(e) from None

    def _save(
        self, store: CheckpointStore, stage: int, epoch: int, keep: int, goes_on: GoesOn
    ) -> Whole:
        own = self._own(stage)
        here = f"{own}/epoch-{epoch}"
        self._files.forget()
        with _sources(store, stage, epoch) as (sources, manifest, line):
            found = self._whole(here, stage, epoch, self.me)
            number = 1 + max((w.number for w in self._wholes(stage, self.me)), default=0)
            files = {name: entry for name, (_, entry) in sources.items()}
            page = CopyRecord(self._run_id, self.me, stage, epoch, files, line, number).encode()
            if found is not None and found.files[MANIFEST] == manifest:
                if found.number + 1 < number:
                    # The run went back to this epoch or behind it, so it is the newest one again.
                    # If the page is torn meanwhile, the other one still names the files here.
                    for name in (BEGUN, WHOLE):
                        self._files.put(f"{here}/{name}", page)
                        self._files.sync(here, (name,))
                    found = replace(found, lineage=line, number=number)
                # The attempt that made it whole may have ended before it removed older ones.
                return self._tidied(found, keep)
            for name in self._files.names(own):
                # Files that a failed attempt has left.
                if _EPOCH.fullmatch(name) and self._page(f"{own}/{name}", WHOLE) is None:
                    self._clear(f"{own}/{name}")
            if found is not None:
                self._clear(here)
            foreign = {*FILES, WHOLE}
            if self._page(here, BEGUN) is not None:
                foreign.add(BEGUN)
            if left := [name for name in self._files.names(here) if name in foreign]:
                raise Refused(
                    f"{self.address.shown} has {', '.join(left)} of epoch {epoch}, which this peer "
                    "did not write",
                    "move them away; nothing of them was changed",
                )
            self._files.make_directory(here)
            self._files.put(f"{here}/{BEGUN}", page)
            # Torn by a power cut, the page would name no file of this attempt, and what had been
            # written by then would be in the way of every later one.
            self._files.sync(here, (BEGUN,))
            for name, (source, entry) in sources.items():
                self._put(source, f"{here}/{name}", entry, goes_on)
            for name, entry in files.items():
                self._compare(f"{here}/{name}", entry, goes_on)
        self._files.sync(here, (BEGUN, *FILES))
        if not goes_on():
            raise Interrupted()
        self._files.put(f"{here}/{WHOLE}", page)
        self._files.sync(here, (WHOLE,))
        made = self._whole(here, stage, epoch, self.me)
        if made is None:
            raise LocalFault(
                f"a copy at {self.address.shown} does not read as it was written",
                "look at that place: it loses what is written there",
            )
        return self._tidied(made, keep)

    def newest(self, stage: int) -> Version | None:
        """The version of ``stage`` that this peer copied last and completely; None if there is
        none. Raises LocalFault."""
        try:
            self._files.forget()
            found = self._wholes(stage, self.me)
        except LocalFault:
            raise
        except Exception as e:  # noqa: BLE001
            raise self._fault(e) from None
        if not found:
            return None
        last = max(found, key=lambda w: (w.number, w.epoch))
        return Version(last.epoch, last.lineage)

    def _put(self, source: BinaryIO, path: str, entry: FileEntry, goes_on: GoesOn) -> None:
        """Write a file, and compare the bytes of its source with ``entry`` meanwhile."""
        sha = hashlib.sha256()
        size = 0
        with self._files.writing(path) as out:
            while block := source.read(BLOCK):
                if not goes_on():
                    raise Interrupted()
                sha.update(block)
                size += len(block)
                out.write(block)
        if (size, sha.hexdigest()) != (entry.size, entry.sha256):
            raise Refused(
                "the checkpoint on this disk is not what its manifest describes",
                "see  tutti status ; another epoch is copied next",
            )

    def _compare(self, path: str, entry: FileEntry, goes_on: GoesOn) -> None:
        """Read a written file back. Raises LocalFault if its content differs."""
        sha = hashlib.sha256()
        size = 0
        with self._files.reading(path) as file:
            while size <= entry.size and (block := file.read(BLOCK)):
                if not goes_on():
                    raise Interrupted()
                sha.update(block)
                size += len(block)
        if (size, sha.hexdigest()) != (entry.size, entry.sha256):
            raise LocalFault(
                f"{path.rpartition('/')[2]} at {self.address.shown} is not what was written there",
                "look at that place; the copy does not count, and older ones stay",
            )

    def _tidied(self, new: Whole, keep: int) -> Whole:
        """Remove the copies that are not needed beside ``new``, and return ``new`` with the
        outcome."""
        try:
            self._tidy(new, keep)
        except LocalFault as e:
            return replace(new, untidy=e.what)
        except Exception as e:  # noqa: BLE001
            return replace(new, untidy=self._fault(e).what)
        return new

    def _tidy(self, new: Whole, keep: int) -> None:
        """Remove the whole copies of this peer beyond ``keep`` that were made first, never the new
        one; and the page with which the new one began."""
        if BEGUN in self._files.names(new.directory):
            self._files.remove(f"{new.directory}/{BEGUN}")
        found = self._wholes(new.stage, self.me)
        others = [w for w in found if w.epoch != new.epoch]
        others.sort(key=lambda w: (-w.number, -w.epoch))
        for whole in others[max(0, keep - 1) :]:
            self._clear(whole.directory)

    def _clear(self, here: str) -> None:
        """Remove the files that this peer has written into a directory, and the directory if that
        leaves it empty. A directory without a page of this peer stays as it is."""
        named: set[str] = set()
        for file in (WHOLE, BEGUN):
            page = self._page(here, file)
            if page is not None and page.peer == self.me:
                named |= {file, *(name for name in page.files if name in FILES)}
        if BEGUN in named:
            named.add(WHOLE)  # perhaps torn, if the attempt ended while it was written
        if not named:
            return
        there = set(self._files.names(here))
        # First the page that makes it whole, last the page that names its peer.
        for name in sorted(named & there, key=lambda n: (n != WHOLE, n == BEGUN)):
            self._files.remove(f"{here}/{name}")
        if not self._files.names(here):
            with contextlib.suppress(OSError):
                self._files.remove_directory(here)

    # ----------------------------------------------------------- reading

    def copies(self, stage: int | None = None) -> list[Whole]:
        """Whole copies of the run, of one stage or of all, by whichever peer, newest first. Own
        ones come before others of the same epoch. In a place with many directories, only this
        peer's and :data:`LOOKED` others are searched. Raises LocalFault if the place cannot be
        read."""
        found: list[Whole] = []
        left = LOOKED
        try:
            self._files.forget()
            for name in self._files.names(self._root):
                match = _STAGE.fullmatch(name)
                if match is None or (stage is not None and int(match[1]) != stage):
                    continue
                peers = self._files.names(f"{self._root}/{name}")
                for peer in sorted(peers, key=lambda p: (p != self.me, p)):
                    if left <= 0 and peer != self.me:
                        break
                    left -= 1
                    found += self._wholes(int(match[1]), peer)
        except LocalFault:
            raise
        except Exception as e:  # noqa: BLE001
            raise self._fault(e) from None
        return sorted(found, key=lambda w: (-w.epoch, w.peer != self.me, w.peer))

    def fetch(self, whole: Whole, into: str, goes_on: GoesOn = lambda: True) -> None:
        """Copy the files of a whole checkpoint into a new directory of this machine. Raises Refused
        if a file differs from ``whole.json``, OutOfResources if this disk is full, and LocalFault
        for faults of the place."""
        os.makedirs(into, mode=0o700)
        try:
            for name, entry in whole.files.items():
                self._get(f"{whole.directory}/{name}", os.path.join(into, name), entry, goes_on)
        except LocalFault:
            raise
        except Exception as e:  # noqa: BLE001
            raise self._fault(e) from None

    def _get(self, path: str, target: str, entry: FileEntry, goes_on: GoesOn) -> None:
        sha = hashlib.sha256()
        size = 0
        with self._files.reading(path) as file, open(target, "xb") as out:
            while size <= entry.size and (block := file.read(BLOCK)):
                if not goes_on():
                    raise Interrupted()
                sha.update(block)
                size += len(block)
                out.write(block)
        if (size, sha.hexdigest()) != (entry.size, entry.sha256):
            raise Refused(
                f"{path.rpartition('/')[2]} at {self.address.shown} is damaged",
                "restore an older copy, or from another place",
            )

    # ----------------------------------------------------------- parts

    def _own(self, stage: int) -> str:
        return f"{self._root}/stage-{stage}/{self.me}"

    def _wholes(self, stage: int, peer: str) -> list[Whole]:
        """Whole checkpoints in the directory of one peer."""
        own = f"{self._root}/stage-{stage}/{peer}"
        matches = [_EPOCH.fullmatch(name) for name in self._files.names(own)]
        epochs = sorted((int(match[1]) for match in matches if match), reverse=True)
        if peer != self.me:
            epochs = epochs[:COPIES]
        found = [self._whole(f"{own}/epoch-{n}", stage, n, peer) for n in epochs]
        return [whole for whole in found if whole is not None]

    def _whole(self, here: str, stage: int, epoch: int, peer: str) -> Whole | None:
        """The whole checkpoint in a directory; None if it is not of this run, stage, epoch and
        peer."""
        page = self._page(here, WHOLE)
        if page is None:
            return None
        if (page.run, page.stage, page.epoch, page.peer) != (self._run_id, stage, epoch, peer):
            return None
        if set(page.files) != set(FILES) or page.files[MANIFEST].size > MANIFEST_LIMIT:
            return None
        return Whole(stage, epoch, page.peer, here, page.files, page.lineage, page.number)

    def _page(self, here: str, name: str) -> CopyRecord | None:
        """The content of ``begun.json`` or ``whole.json``; None if the file is missing, torn or
        garbled."""
        try:
            with self._files.reading(f"{here}/{name}") as file:
                raw = file.read(PAGE_LIMIT + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, Refused):
            return None
        try:
            return CopyRecord.parse(raw)
        except Refused:
            return None

    def _fault(self, error: Exception) -> LocalFault:
        """The fault that reports an error of the place, without secrets in its text."""
        said = self.address.clean(error) or type(error).__name__
        if getattr(error, "errno", None) in DISK_FULL:
            return OutOfResources(
                f"{self.address.shown} is full: {said}",
                "make room there, or keep fewer with  checkpoint.to_keep",
            )
        return LocalFault(
            f"{self.address.shown} cannot be used: {type(error).__name__}: {said}",
            "check that it is there, and that this user may write and read there",
        )


@contextlib.contextmanager
def _sources(
    store: CheckpointStore, stage: int, epoch: int
) -> Iterator[tuple[dict[str, tuple[BinaryIO, FileEntry]], FileEntry, str]]:
    """The open files of a checkpoint of ``store``, each with its size and hash, the entry of its
    manifest, and the lineage of its version. They stay readable when the store removes the
    checkpoint meanwhile. Raises Refused if it cannot be read."""
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(directory(store.path(stage, epoch)))
            opened = {name: stack.enter_context(reading(name, fd)) for name in FILES}
        except OSError as e:
            raise Refused(
                f"the checkpoint of epoch {epoch} cannot be read: {e.strerror or e}",
                "the next one is copied",
            ) from e
        file, size = opened[MANIFEST]
        if size > MANIFEST_LIMIT:
            raise Refused(f"a manifest of {size} bytes is over the limit of {MANIFEST_LIMIT}")
        page = os.pread(file, size, 0)
        manifest = CheckpointManifest.parse(page)
        entries = dict(manifest.files)
        entries[MANIFEST] = FileEntry(len(page), hashlib.sha256(page).hexdigest())
        sources: dict[str, tuple[BinaryIO, FileEntry]] = {}
        for name in FILES:
            if name not in entries:
                raise Refused(f"the manifest of epoch {epoch} does not name {name}")
            number, _ = opened[name]
            stream = stack.enter_context(open(number, "rb", buffering=0, closefd=False))
            stream.seek(0)
            sources[name] = stream, entries[name]
        yield sources, entries[MANIFEST], _lineage(manifest)


def _lineage(manifest: CheckpointManifest) -> str:
    """The lineage of a checkpoint's version; empty if its manifest has none."""
    try:
        return lineage(manifest.meta.get("lineage", ""))
    except WireError:
        return ""


def _hash(body: Any) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
