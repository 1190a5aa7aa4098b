"""Bytes of shards: of a web server, in ranges; of a disk; and whole shards kept on this disk below
a cap.

Every failure is raised; the caller decides whether to ask again.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import httpx2

from node.core.errors import NetworkFault, OutOfResources, UsageFault, refuse
from node.core.newest import Newest
from node.core.numbers import whole_number
from node.data.confined.process import Pool, explained
from node.data.kinds import FileKind
from node.data.library import check_installed
from node.data.places import open_regular
from node.data.streamed.fetching import CHANGED, FORBIDDEN, Forbidden, TurnedDown, asked

WHOLE = 64 << 20
"""Size in bytes up to which a shard is fetched whole, and its hash compared. Of a larger one only
the needed parts are fetched, if its format has parts."""
BLOCK = 1 << 20
"""Bytes that are fetched at once where a library reads here and there, and kept."""
FORBIDDEN_S = 600.0
"""Seconds for which a server that says 403 of a shard is asked again. Some say it of too many
requests, others of files that are not there."""
_PACKED_TAG = re.compile(r"(?:[-;](?:gzip|br|deflate|zstd))+(?=\"$)")
ABANDONED_S = 600.0
"""Seconds since the last write to an unfinished file, after which its writer is held to be gone."""
MOST_UNPACKED = 64
"""Limit on the text of a packed shard of more than :data:`WHOLE` bytes, as a multiple of its stored
size: a piece of the text is held in memory. Text is packed to a third, seldom to a twentieth."""


@dataclass(frozen=True, slots=True)
class Shard:
    """``name``: its URL or path; ``size`` in bytes as stored; ``sha256`` in hex, "" where nobody
    says it; ``pinned``: its URL names one version of it for ever."""

    name: str
    size: int
    sha256: str = ""
    pinned: bool = False

    @property
    def remote(self) -> bool:
        return self.name.startswith(("http://", "https://"))


MOST_TAG = 256
"""Characters of a tag; a longer one is not used."""


class Files:
    """All calls may block, and come from any thread."""

    def __init__(
        self, client: httpx2.Client, folder: Path, cap: int, parsers: Pool | None = None
    ) -> None:
        """``cap``: bytes that everything below ``folder`` may take. ``parsers``: processes that
        parse the received bytes."""
        self._client = client
        self.folder = folder
        self.cap = cap
        self._lock = threading.Lock()
        self._making = WeakValueDictionary[str, threading.Lock]()
        self._holding = dict[Path, int]()
        """Files that are written or read just now, and how many bytes they will have."""
        self._compared = set[Path]()
        self._tags = dict[str, str]()
        """Tags of shards that are read in parts, by their addresses."""
        self._forbidden = Newest[str, float](1000)
        """Time of the first 403 of a server, by the address."""
        self.received = 0
        """Bytes that came over the network."""
        self.parsers = parsers or Pool()
        self._closed = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.tmp"):
            # Not what another process, such as a daemon beside ``tutti doctor``, writes just now.
            if (s := _stat(left)) is not None and time.time() - s.st_mtime > ABANDONED_S:
                left.unlink(missing_ok=True)

    def stop(self) -> None:
        """Have every call end soon, with a NetworkFault where it would go on to read."""
        self._closed.set()
        self.parsers.interrupt()

    def close(self) -> None:
        self.stop()
        self.parsers.close()
        self._client.close()

    def read(self, shard: Shard, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of a shard, which end with it.

        Raises NetworkFault, and LocalFault for a shard that differs from its entry in the list, and
        where there is no space.
        """
        self.go_on()
        stop = min(stop, shard.size)
        if start >= stop:
            return b""
        if not shard.remote or shard.size <= WHOLE:
            path = self.whole(shard)
            with open(path, "rb") as file:
                file.seek(start)
                found = file.read(stop - start)
            if len(found) < stop - start:
                if path.parent == self.folder:
                    path.unlink(missing_ok=True)
                raise _other(shard, "it has been cut short")
            return found
        tag = self._tag(shard)
        try:
            try:
                return self._part(shard, start, stop, tag)
            except TurnedDown as e:
                # Some servers give a version another tag where they pack it, and know only one.
                if e.status != CHANGED or not tag:
                    raise
                return self._part(shard, start, stop, "", tag)
        except UsageFault:  # another version, perhaps, or only another tag of this one
            self._tags.pop(shard.name, None)
            raise

    def _part(self, shard: Shard, start: int, stop: int, tag: str, known: str = "") -> bytes:
        """Bytes of a shard at its server; with ``tag`` of that version alone. ``known``: the tag
        of the version that is wanted, compared here."""
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if tag:
            headers["If-Match"] = tag
        with self._asked(shard.name, headers) as answer:
            part = f"bytes {start}-{stop - 1}/"
            given = answer.headers.get("content-range", "")
            refuse(
                (
                    answer.status_code != 206 or given not in (f"{part}{shard.size}", f"{part}*"),
                    f"{shard.name}: the server gives no parts of {shard.size} bytes",
                    f"use another server, or shards of at most {WHOLE >> 20} MiB",
                ),
                (
                    is_packed(answer, shard.name),
                    f"{shard.name}: the server packs what it sends, though it was asked not to",
                    f"use another server, or shards of at most {WHOLE >> 20} MiB",
                ),
            )
            if known and _version(answer.headers.get("etag", "")) != _version(known):
                raise _other(shard, "its server has another version")
            return self._body(answer, stop - start)

    @contextlib.contextmanager
    def _asked(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """As :func:`asked`. Raises UsageFault instead of Forbidden where a server has said that
        for :data:`FORBIDDEN_S`."""
        try:
            with asked(url, self._client, "GET", headers) as answer:
                self._forbidden.pop(url, None)
                yield answer
        except Forbidden as e:
            since = self._forbidden.setdefault(url, time.monotonic())
            if time.monotonic() - since < FORBIDDEN_S:
                raise
            raise TurnedDown(url, FORBIDDEN) from e

    def _tag(self, shard: Shard) -> str:
        """The tag of a shard's version at its server, which is asked once, when the shard is first
        read in parts; "" where the shard's address names one version, or the server gives no tag.
        Raises as :meth:`read`."""
        if shard.pinned or not shard.remote or shard.size <= WHOLE:
            return ""
        if shard.name not in self._tags:
            size, tag = size_and_tag(shard.name, self._client)
            if size != shard.size:
                raise _other(shard, f"{size} bytes")
            self._tags[shard.name] = tag
        return self._tags[shard.name]

    def _body(self, answer: httpx2.Response, length: int) -> bytes:
        body = bytearray()
        for piece in self._coming(answer):
            body += piece
            if len(body) > length:
                break
        if len(body) != length:
            raise NetworkFault(
                f"{answer.url}: {len(body)} bytes came of {length}", "it is asked again"
            )
        return bytes(body)

    def _coming(self, answer: httpx2.Response) -> Iterator[bytes]:
        """A body as it comes. Raises NetworkFault after :meth:`stop`."""
        if is_packed(answer, str(answer.url.path)):
            pieces = answer.iter_bytes()
        else:
            pieces = answer.iter_raw()
        for piece in pieces:
            self.go_on()
            self.received += len(piece)
            yield piece

    def go_on(self) -> None:
        """Raises NetworkFault after :meth:`stop`."""
        if self._closed.is_set():
            raise NetworkFault("data is not read any more", "start the daemon again")

    def whole(self, shard: Shard) -> Path:
        """Path of a whole shard on this disk. Its hash is compared when it was fetched, or first
        read since the start, because a power cut may lose the last writes. Parts that came before a
        failure are not fetched again. Raises as :meth:`read` does."""
        if shard.remote:
            path = self._path(shard, "shard")
        else:
            path = Path(shard.name)
        with self._alone(path):
            if shard.remote and self.used(path) and path not in self._compared:
                try:
                    self._compare(shard, path)
                except UsageFault:
                    path.unlink(missing_ok=True)
            if shard.remote and not self.used(path):
                self._fetch(shard, path)
            elif not shard.remote and path.parent != self.folder and path not in self._compared:
                self._compare(shard, path)
            self._compared.add(path)
            return path

    def unpacked(self, shard: Shard, kind: FileKind, encoding: str = "utf-8") -> Shard:
        """The text of a shard that is packed, a table, or in another encoding, as a shard of this
        disk: text in UTF-8, or lines of JSON. Raises as :meth:`read` does, and OutOfResources when
        it does not fit below the cap."""
        way = ""
        if encoding != "utf-8" or kind.table:
            way = f"{kind.form}-{encoding}."
        path = self._path(shard, f"{way}text")
        with self._alone(path):
            if not self.used(path):
                stored = self.whole(shard)
                self._unpack(stored, shard, kind, encoding, path)
                if shard.remote:
                    stored.unlink(missing_ok=True)
            return Shard(str(path), path.stat().st_size)

    def block(self, shard: Shard, number: int) -> bytes:
        """The ``number``-th :data:`BLOCK` of a shard, kept. Raises as :meth:`read` does."""
        start = number * BLOCK
        if not shard.remote or shard.size <= WHOLE:
            return self.read(shard, start, start + BLOCK)
        path = self._path(shard, f"{number}.block")
        with self._alone(path):
            if self.used(path):
                return path.read_bytes()
            found = self.read(shard, start, start + BLOCK)
            self.put(path, found)
            return found

    def _path(self, shard: Shard, ending: str) -> Path:
        # Blocks of two versions make no file.
        version = shard.sha256
        if not version and ending.endswith("block"):
            version = self._tag(shard)
        key = hashlib.sha256(f"{shard.name}\n{shard.size}\n{version}".encode()).hexdigest()
        return self.folder / f"{key[:32]}.{ending}"

    def _alone(self, path: Path) -> threading.Lock:
        """Lock of the one thread that makes a file, so that no other makes it too."""
        with self._lock:
            return self._making.setdefault(path.name, threading.Lock())

    def _compare(self, shard: Shard, path: Path) -> None:
        """Raises UsageFault for a file that differs from the list's entry for the shard."""
        step = "check  --data PATH"
        with open_regular(path, step) as file:
            try:
                digest = ""
                if shard.sha256:
                    digest = self._digest(file)
                size = os.fstat(file.fileno()).st_size
            except OSError as e:
                raise UsageFault(f"cannot read {path}: {e.strerror}", step) from e
        if size != shard.size or digest != shard.sha256:
            raise _other(shard, f"{size} bytes, sha256 {digest[:16]}…")

    def _digest(self, file: BinaryIO) -> str:
        found = hashlib.sha256()
        while piece := file.read(1 << 22):
            self.go_on()
            found.update(piece)
        return found.hexdigest()

    def _unpack(
        self, stored: Path, shard: Shard, kind: FileKind, encoding: str, path: Path
    ) -> None:
        head = asdict(kind) | {"op": "unpack", "encoding": encoding, "name": shard.name}
        most = max(WHOLE, MOST_UNPACKED * shard.size)
        with self._held({stored: 0}), self._staged(path, 0) as (staged, grow):
            with open(staged, "wb") as file:
                for text in _unpacked(self.parsers, stored, head):
                    self.go_on()
                    if file.tell() + len(text) > most:
                        raise UsageFault(
                            f"{shard.name} has more than {most >> 20} MiB of text, which is more "
                            f"than {MOST_UNPACKED} times what is stored",
                            "pack it less, or not at all",
                        )
                    grow({staged: file.tell() + len(text)})
                    file.write(text)
            self._name(staged, path)

    def used(self, path: Path) -> bool:
        """Return True if a file is there; it is then the last to make room for others."""
        try:
            os.utime(path)
        except OSError:  # a disk that can only be read has it nevertheless
            return os.path.exists(path)
        return True

    def _fetch(self, shard: Shard, path: Path) -> None:
        with self._unfinished(path) as part, self._held({part: shard.size}):
            self._fetch_into(part, shard)
            try:
                self._compare(shard, part)
            except UsageFault:
                part.unlink()
                raise
            self._name(part, path)

    @contextlib.contextmanager
    def _unfinished(self, path: Path) -> Iterator[Path]:
        """Path at which the future file ``path`` is written, with the bytes that came before a
        failure. It is locked: a daemon and a command beside it write two files. Raises
        OutOfResources."""
        part = path.with_suffix(".part")
        lock = None
        try:
            lock = _locked(part)
            if lock is None:
                part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
                lock = _locked(part)
        except OSError as e:
            raise OutOfResources(
                f"cannot keep data in {self.folder}: {e.strerror}", "free some space"
            ) from e
        try:
            yield part
        finally:
            if lock is not None:
                os.close(lock)

    def _fetch_into(self, part: Path, shard: Shard) -> None:
        have = 0
        if self.used(part):
            have = part.stat().st_size
        if have < shard.size:
            headers = dict[str, str]()
            if have:
                headers["Range"] = f"bytes={have}-"
                if tag := self._tag(shard):
                    headers["If-Range"] = tag
            with self._asked(shard.name, headers) as answer:
                packed = is_packed(answer, shard.name)
                # A server that knows no ranges, or has another version now, sends all of it.
                rest = f"bytes {have}-{shard.size - 1}/"
                given = answer.headers.get("content-range", "")
                goes_on = have and given in (f"{rest}{shard.size}", f"{rest}*")
                if answer.status_code == 206 and not goes_on:
                    part.unlink(missing_ok=True)  # so that the next try asks for all of it
                    raise _other(shard, f"another part of it came, {given[:80]!r}")
                missing = str(shard.size)
                if goes_on:
                    missing = str(shard.size - have)
                comes = answer.headers.get("content-length", missing)
                if comes != missing and not packed:
                    raise _other(shard, f"{comes[:20]} bytes come, not {missing}")
                with open(part, "ab" if goes_on else "wb") as file:
                    for piece in self._coming(answer):
                        if file.tell() + len(piece) > shard.size:
                            part.unlink()
                            raise _other(shard, f"it has more than {shard.size} bytes")
                        file.write(piece)
        got = part.stat().st_size
        if got < shard.size:
            raise NetworkFault(
                f"{shard.name}: {got} bytes came of {shard.size}", "it is asked again"
            )

    def put(self, path: Path, content: bytes) -> None:
        """Write a file at once, with room made for it."""
        with self._staged(path, len(content)) as (staged, _):
            staged.write_bytes(content)
            self._name(staged, path)

    def _name(self, staged: Path, path: Path) -> None:
        """Give a file its name once the disk has it: else a name could outlive a power loss, and
        its bytes not."""
        with open(staged, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)

    @contextlib.contextmanager
    def _staged(
        self, path: Path, size: int
    ) -> Iterator[tuple[Path, Callable[[dict[Path, int]], None]]]:
        """Path to write the future file ``path`` at, with room as :meth:`_held` makes it; nothing
        is left there when that fails."""
        staged = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        with self._held({staged: size}) as grow:
            try:
                yield staged, grow
            finally:
                staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _held(self, sizes: dict[Path, int]) -> Iterator[Callable[[dict[Path, int]], None]]:
        """Context in which files are not deleted, with room made for their sizes. Yields a function
        that makes room for larger sizes. Raises OutOfResources where they do not fit, and where the
        disk does not take them."""
        self._make_room(sizes)
        try:
            yield self._make_room
        except OSError as e:
            raise OutOfResources(
                f"cannot keep data in {self.folder}: {e.strerror}", "free some space"
            ) from e
        finally:
            with self._lock:
                for path in sizes:
                    del self._holding[path]

    def _make_room(self, sizes: dict[Path, int]) -> None:
        """Delete the files used longest ago until files of these ``sizes`` in bytes fit below the
        cap, beside the files that others hold. Raises OutOfResources if they do not fit."""
        with self._lock:
            before = self._holding
            self._holding = self._holding | sizes
            there = {p: s for p in self.folder.iterdir() if (s := _stat(p)) is not None}
            held = {p: max(n, there[p].st_size if p in there else 0)
                    for p, n in self._holding.items() if p.parent == self.folder}  # fmt: skip
            rest = [p for p in there if p not in held and p.suffix != ".tmp"]
            total = sum(held.values()) + sum(s.st_size for p, s in there.items() if p not in held)
            for path in sorted(rest, key=lambda p: there[p].st_mtime_ns):
                if total <= self.cap:
                    break
                if path.suffix == ".part" and _is_locked(path):
                    continue
                path.unlink(missing_ok=True)
                total -= there[path].st_size
            if total > self.cap:
                self._holding = before
                raise OutOfResources(
                    f"{total} bytes of data that are read at once do not fit below data_disk = "
                    f"{self.cap}",
                    "give a larger  data_disk",
                )


def is_packed(answer: httpx2.Response, name: str) -> bool:
    """Return True for an answer that the server has packed on its way, which nobody asked for. Of a
    file that is stored packed some servers say the same."""
    way = answer.headers.get("content-encoding", "").strip().lower()
    return way not in ("", "identity") and not name.partition("?")[0].endswith((".gz", ".zst"))


def _version(tag: str) -> str:
    """A tag without the suffix that servers add where they pack the answer."""
    return _PACKED_TAG.sub("", tag)


def size_and_tag(url: str, client: httpx2.Client) -> tuple[int, str]:
    """Bytes that a server says a file has, and the strong tag of its version, "" for none. A server
    that does not answer HEAD, or answers with a size of something else, is asked for one byte.
    Raises NetworkFault and UsageFault."""
    size = None
    tag = ""
    with contextlib.suppress(TurnedDown, Forbidden), asked(url, client, "HEAD") as answer:
        tag = answer.headers.get("etag", "")
        if not is_packed(answer, url):
            size = whole_number(answer.headers.get("content-length", ""))
    if size is None:
        with asked(url, client, "GET", {"Range": "bytes=0-0"}) as answer:
            tag = answer.headers.get("etag", "")
            said = answer.headers.get("content-range", "").rpartition("/")[2]
            if answer.status_code != 206:
                said = answer.headers.get("content-length", "")
            size = None
            if not is_packed(answer, url):
                size = whole_number(said)
    if size is None:
        raise UsageFault(f"the server says no size of {url}", "use another server")
    # A weak tag (W/) says that two versions mean the same, not that their bytes do.
    if tag.startswith("W/") or len(tag) > MOST_TAG:
        tag = ""
    return size, tag


def _other(shard: Shard, why: str) -> UsageFault:
    return UsageFault(
        f"{shard.name} is not the shard of the list: {why}",
        "ask who owns the run; there may be a newer version",
    )


def _unpacked(parsers: Pool, stored: Path, head: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the text of a file in pieces. Raises UsageFault for a file that cannot be
    unpacked."""
    if head["packed"]:
        check_installed("pyarrow", "reading .zst and .gz")
    with open(stored, "rb") as file:

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        size = {"size": os.fstat(file.fileno()).st_size}
        found = parsers.call({**head, **size}, read=read)
        yield from explained(found, f"cannot unpack {head['name']}", "check that shard")


def _locked(path: Path) -> int | None:
    """A descriptor of the file at a path, made if it is absent, that locks it until it is closed;
    None if another process has locked it. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:  # where nothing can be locked, nobody else has done it
            return fd
        # Meanwhile it may have been finished and named, or deleted.
        if (there := _stat(path)) is not None and os.path.samestat(there, os.fstat(fd)):
            return fd
        os.close(fd)


def _is_locked(path: Path) -> bool:
    """Return True if another process writes this file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


class Ranges:
    """A shard that is read at any place, in blocks that are kept."""

    def __init__(self, files: Files, shard: Shard) -> None:
        self._files = files
        self._shard = shard

    def read(self, start: int, size: int) -> bytes:
        """All of ``size`` bytes unless the shard ends before. Raises as :meth:`Files.read`."""
        stop = min(start + size, self._shard.size)
        found = bytearray()
        while start < stop:
            number, inside = divmod(start, BLOCK)
            block = self._files.block(self._shard, number)
            got = block[inside : inside + stop - start]
            if not got:
                raise _other(self._shard, f"it ends at byte {start}")
            found += got
            start += len(got)
        return bytes(found)
