"""``tutti bugreport``: one archive with what a maintainer asks for first, redacted. Enters: a home.
Leaves: the archive, after its user has seen its content. Never: a byte to another machine; a file
of a run, a key, a text that somebody typed."""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from node.app.last import last_known
from node.app.launch import LOG, PROGRAM, end_of
from node.app.owner.known_secrets import secrets_of
from node.app.owner.redaction import Redactor
from node.app.owner.service import unit_name
from node.app.owner.systemd import booted, in_wsl, unit_path
from node.config import NodeConfig, config_document
from node.control.client import ControlClient
from node.core.errors import LocalFault, Refused, UsageFault, writing
from node.core.home import expanded
from node.core.interrupts import held
from node.core.version import OLDEST_PROTOCOL, PROTOCOL, VERSION

MOST_EVENTS = 2 << 20
"""Bytes at the end of the event file that are read."""
MOST_OUTPUT = 256 << 10
"""Bytes at the end of a daemon's output that are read."""
MOST_METRICS = 4 << 20
MOST_RECORDING = 256 << 20
DOCTOR_S = 90.0
"""Longest wait for the doctor, in seconds: it loads torch and hashes the data."""
CALL_S = 5.0
"""Longest wait for the daemon and for journalctl, in seconds."""
RECORDING = "recording"
"""Kind of the event with which a daemon names its recording."""
_LIBRARIES = (
    "torch",
    "hivemind",
    "libp2p",
    "grpcio",
    "protobuf",
    "numpy",
    "safetensors",
    "tokenizers",
    "cryptography",
    "uvloop",
)


@dataclass(frozen=True)
class ArchiveFile:
    """A file of the archive. ``about``: its content in a few words; ``redacted``: number of secrets
    that were replaced in it; ``source``: for a recording, the file that is copied as it is, and
    ``checked`` its first bytes, which were looked at: a daemon may write it still."""

    name: str
    about: str
    text: str = ""
    redacted: int = 0
    source: Path | None = None
    checked: int = 0

    @property
    def nbytes(self) -> int:
        if self.source is not None:
            return self.checked
        return len(self.text.encode())


@dataclass
class BugReport:
    """The content of an archive before it is written. ``left_out``: what is missing, with its
    reason."""

    entries: list[ArchiveFile] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The table of contents for people."""
        found = []
        for one in self.entries:
            marks = ""
            if one.redacted:
                marks = f", {one.redacted} redacted"
            found.append(f"  {one.name:16} {_size(one.nbytes):>8}   {one.about}{marks}")
        found += [f"  {name:16} {'-':>8}   not there: {why}" for name, why in self.left_out.items()]
        return found

    def document(self) -> dict[str, Any]:
        """JSON-ready values of the same."""
        files = [
            {"name": e.name, "bytes": e.nbytes, "about": e.about, "redacted": e.redacted}
            for e in self.entries
        ]
        return {"files": files, "left_out": self.left_out}

    def shown(self) -> Iterator[str]:
        """Everything that the archive will hold, file by file; of a recording its name alone."""
        for one in self.entries:
            yield f"==== {one.name}"
            yield one.text if one.source is None else f"(a copy of {one.source.name})"


@dataclass(frozen=True)
class JsonLines:
    """JSON-ready values, one in each line of a file."""

    documents: list[Any]


class Collector:
    """Gathers a report of one home. Every part is tried; one that fails is left out with its
    reason, after redaction, because a reason may name a path. ``doctor``: the command line of the
    doctor for this home, which prints JSON; ``recording``: None for the newest that is known."""

    def __init__(
        self, ours: NodeConfig, doctor: Sequence[str], recording: Path | None = None
    ) -> None:
        self._ours = ours
        self._doctor_words = doctor
        self._recording = recording
        known, kept = secrets_of(ours)
        self._redactor = Redactor(known, kept)
        self._failed: dict[str, str] = {}
        self._parts: list[tuple[str, str, Any]] = []
        self.report = BugReport()

    def collect(self, say: Callable[[str], None]) -> BugReport:
        """Gather all parts. ``say`` takes a line on each that takes a while."""
        with self._part("status.json"):
            self._daemon()
        self._add("versions.json", "tutti and its libraries", _versions())
        self._add("machine.json", "system, processor, memory, graphics", _machine(self._ours.home))
        self._add("settings.json", "settings, and where they come from", self._settings())
        with self._part("manifest.json"):
            self._manifest()
        with self._part("events.jsonl"):
            self._events()
        for name, path in (
            ("daemon.out", self._ours.home / LOG),
            ("crash.log", self._ours.home / "log" / "crash.log"),
            ("crash-cache.log", expanded("~/.cache/tutti/log/crash.log")),
        ):
            if path.is_file():
                with self._part(name):
                    self._add(name, "the end of its output", end_of(path, MOST_OUTPUT))
        with self._part("journal.txt"):
            self._journal()
        say("runs  tutti doctor --offline , a few seconds")
        with self._part("doctor.json"):
            self._doctor()
        self._redacted()
        with self._part("recording"):
            self._record()
        for name, why in self._failed.items():
            self.report.left_out[name] = self._redactor.text(why)
        self._check()
        return self.report

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, LocalFault, ValueError, subprocess.SubprocessError) as e:
            what = e.what if isinstance(e, LocalFault) else str(e) or type(e).__name__
            self._failed[name] = what

    def _add(self, name: str, about: str, content: Any) -> None:
        """Keep a part until all are there: one may name a host that another has an address of.
        ``content``: a text, :class:`JsonLines`, or JSON-ready values."""
        self._parts.append((name, about, content))

    def _redacted(self) -> None:
        """Make files of the parts."""
        self._redactor.learn(_text_of(content) for _, _, content in self._parts)
        for name, about, content in self._parts:
            before = self._redactor.found.total()
            if isinstance(content, str):
                text = self._redactor.text(content)
            elif isinstance(content, JsonLines):
                redacted = [self._redactor.value(one) for one in content.documents]
                text = "".join(f"{_line(one)}\n" for one in redacted)
            else:
                text = _text_of(self._redactor.value(content))
            count = self._redactor.found.total() - before
            self.report.entries.append(ArchiveFile(name, about, text, count))

    def _daemon(self) -> None:
        """State and metrics of the daemon that runs here, or the last words of the one before."""
        try:
            client = ControlClient(self._ours.control_socket, CALL_S, self._ours.home)
        except LocalFault:
            known = last_known(self._ours).document()
            self._add("status.json", "no daemon runs; what the last one left", {"last": known})
            return
        from node.control.commands import plain

        with client:
            snapshot = client.status()
            document = {
                "status": plain(snapshot),
                "peers": plain(client.peers(everybody=True)),
                "reach": plain(client.reach()),
            }
        self._add("status.json", "state, peers and ways of the daemon that runs", document)
        with self._part("metrics.txt"):
            text = _metrics(snapshot.metrics_url)
            self._add("metrics.txt", "numbers of the daemon", text)

    def _settings(self) -> dict[str, Any]:
        document = config_document(self._ours)
        for name, one in document.items():
            one.pop("meaning")
            if name in ("admission", "name") and one["value"]:
                one["value"] = self._redactor.mark(name, str(one["value"]))
        return document

    def _manifest(self) -> None:
        known = self._ours.remembered()
        if known is None:
            self.report.left_out["manifest.json"] = "no swarm is remembered here"
            return
        from node.manifest import SECTIONS

        manifest = known[0]
        parts = {name: dataclasses.asdict(getattr(manifest, name)) for name in SECTIONS}
        document = {"run": manifest.run_id[:12], "format": manifest.format, **parts}
        self._add("manifest.json", "the run used last", document)

    def _events(self) -> None:
        found: list[Any] = []
        for line in end_of(self._ours.events_path, MOST_EVENTS).splitlines():
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                found.append(line)  # a torn one
        self._add("events.jsonl", f"the newest {len(found)} events", JsonLines(found))

    def _journal(self) -> None:
        """The service's lines in the system's journal, where there is a service."""
        unit = unit_name(self._ours)
        if not unit_path(unit).exists():
            return
        words = ["journalctl", "--user", "-u", unit, "-n", "300", "--no-pager", "-o", "cat"]
        done = subprocess.run(words, capture_output=True, timeout=CALL_S, check=False)
        said = done.stdout.decode(errors="replace")
        if said.strip():
            self._add("journal.txt", "the newest lines of the service", said[-MOST_OUTPUT:])

    def _doctor(self) -> None:
        """In a process of its own: it loads torch, and a driver may crash it."""
        done = subprocess.run(
            [sys.executable, PROGRAM, *self._doctor_words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=DOCTOR_S,
            check=False,
        )
        try:
            document = json.loads(done.stdout)
        except ValueError:
            said = done.stderr.decode(errors="replace")[-MOST_OUTPUT:]
            document = {"exit_code": done.returncode, "stderr": said}
        self._add("doctor.json", "checks of this machine and this home", document)

    def _record(self) -> None:
        """The recording that ``tutti replay`` plays. Its lines are a chain of hashes, so nothing in
        it can be replaced: with a secret in it, it is left out."""
        path = self._recording or _recording(self._ours)
        if path is None:
            self.report.left_out["recording"] = "none was made (tutti start --record FILE)"
            return
        size = path.stat().st_size
        if size > MOST_RECORDING:
            self.report.left_out["recording"] = f"it has {_size(size)}, too much for a report"
            return
        checked = 0
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(1 << 20), b""):
                checked += len(line)
                if leaks := self._redactor.leaks(line.decode(errors="replace")):
                    why = f"it holds what is not given away: {', '.join(leaks)}"
                    self.report.left_out["recording"] = why
                    return
        about = "for  tutti replay : PeerIds, plans, votes; no text, no key"
        self.report.entries.append(ArchiveFile("machines.rec", about, source=path, checked=checked))

    def _check(self) -> None:
        """Leave out every file that still has a known secret in it, whatever the reason."""
        good = []
        for one in self.report.entries:
            if one.source is None and any(s in one.text for s in self._whole_secrets()):
                self.report.left_out[one.name] = "a secret was still in it after redaction"
            else:
                good.append(one)
        self.report.entries = good

    def _whole_secrets(self) -> list[str]:
        """Known secrets that are long enough to be no part of another word."""
        kinds = ("key", "token", "invite", "path", "data")
        return [s for s, kind in self._redactor.known.items() if kind in kinds and len(s) > 7]


def _text_of(content: Any) -> str:
    """A part as it stands in its file."""
    if isinstance(content, str):
        return content
    if isinstance(content, JsonLines):
        return "".join(f"{_line(one)}\n" for one in content.documents)
    return json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"


def _line(document: Any) -> str:
    if isinstance(document, str):
        return document
    return json.dumps(document, ensure_ascii=False, default=str)


def _versions() -> dict[str, Any]:
    found = {"tutti": VERSION, "protocol": PROTOCOL, "oldest_protocol": OLDEST_PROTOCOL}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"python": sys.version}


def _machine(home: Path) -> dict[str, Any]:
    import psutil

    found = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory()._asdict(),
        "swap": psutil.swap_memory().total,
        "open_files": list(_file_limits()),
        "systemd": booted(),
        "wsl": in_wsl(),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }
    with contextlib.suppress(OSError):
        found["load"] = os.getloadavg()
        found["home_disk"] = shutil.disk_usage(home)._asdict()
    for name, path in (
        ("release", "/etc/os-release"),
        ("nvidia", "/proc/driver/nvidia/version"),
        ("cgroup_memory", "/sys/fs/cgroup/memory.max"),
    ):
        with contextlib.suppress(OSError):
            found[name] = Path(path).read_text(encoding="utf-8", errors="replace")[:2000]
    return found


def _file_limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _metrics(url: str) -> str:
    """The daemon's page of metrics. Raises OSError or ValueError if it cannot be read."""
    from urllib.parse import urlsplit
    from urllib.request import ProxyHandler, build_opener

    if not url:
        raise ValueError("the daemon has no page of metrics (--metrics-port -1)")
    if urlsplit(url).scheme != "http" or urlsplit(url).hostname not in ("127.0.0.1", "::1"):
        raise ValueError("the page of metrics is not on loopback")
    with build_opener(ProxyHandler({})).open(url, timeout=CALL_S) as answer:
        return answer.read(MOST_METRICS).decode("utf-8", "replace")


def _recording(ours: NodeConfig) -> Path | None:
    """The newest recording of this home: of the setting, else the one its events name last."""
    found: list[Path] = []
    named = ours.node.record
    if named:
        path = expanded(named)
        found = [path, *path.parent.glob(f"{path.name}.[0-9]*")]
    else:
        with contextlib.suppress(OSError):
            for line in end_of(ours.events_path, MOST_EVENTS).splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("kind") == RECORDING:
                        found = [Path(str(event.get("text", "")).rpartition(" in ")[2])]
    there = [path for path in found if path.is_file()]
    return max(there, key=lambda path: path.stat().st_mtime, default=None)


def _size(nbytes: int) -> str:
    if nbytes < 10_000:
        return f"{nbytes} B"
    return f"{nbytes / 1000:.0f} kB"


def usual_file() -> Path:
    """Name of a report that is written now, in the working directory."""
    return Path(time.strftime("tutti-bugreport-%Y%m%d-%H%M%S.tar.gz"))


def check_file(file: Path, *, force: bool) -> None:
    """Raises Refused if ``file`` exists and may not be replaced, UsageFault if its directory does
    not."""
    target = expanded(file)
    if os.path.lexists(target) and not force:
        raise Refused(f"{file} exists already", "name another file, or replace it with  --force")
    if not target.absolute().parent.is_dir():
        raise UsageFault(f"there is no directory {target.parent}", "make it first")


def write(report: BugReport, file: Path) -> None:
    """Write the archive: mode 0600, whole or not at all. Raises LocalFault."""
    target = expanded(file).absolute()
    with writing(file, "name a file in a directory that you may write"), held():
        handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as out:
                _archive(report.entries, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, target)
        except BaseException:  # also a Ctrl-C: no draft stays
            Path(draft).unlink(missing_ok=True)
            raise


def _archive(entries: Iterable[ArchiveFile], out: io.BufferedWriter) -> None:
    """Write a tar file, packed. Its headers name neither the user nor the file's own name."""
    now = int(time.time())
    with gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=now) as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for one in entries:
                info = tarfile.TarInfo(f"tutti-bugreport/{one.name}")
                info.mtime = now
                info.mode = 0o600
                if one.source is None:
                    raw = one.text.encode()
                    info.size = len(raw)
                    tar.addfile(info, io.BytesIO(raw))
                else:
                    with one.source.open("rb") as file:
                        info.size = one.checked
                        tar.addfile(info, file)
