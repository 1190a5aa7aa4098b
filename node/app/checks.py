"""Checks of this machine and this home before they take part, one a subject: versions, device,
disk, clock, data.

A check looks, reports cause, effect and fix of every fault with an exit code of its own, and offers
to mend the fault if the program may do that itself. Mending removes only files that are made again,
and changes no setting or key. Never hivemind: these run in the command line, beside py-libp2p.
"""

import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from node.app.capacity import MainMemory, check_memory, hosted, parts_of_stages, room_on
from node.app.joining import opened, who
from node.app.owner.service import checked
from node.config import NodeConfig
from node.control.client import ControlClient
from node.control.diagnose import Diagnosis, clock_of, wrong_clock
from node.control.doctor import Checkup
from node.control.pledges import Pledges
from node.control.sockets import listener
from node.control.text import incompatible_peers, wrapped
from node.control.words import GONE, ahead_or_behind, clean, span
from node.core.clock import CLOCK_S
from node.core.errors import DISK_FULL, ExitCode, LocalFault
from node.core.ids import ENDS
from node.core.memory import resident
from node.core.numbers import human, several
from node.core.version import PROTOCOLS, VERSION
from node.manifest import Manifest
from node.telemetry.resources import memory_total

BEHIND_S = 60.0
"""Seconds that this clock may be behind a file written here; a file server may have written it."""
MIN_FREE = 256 << 20
"""Bytes of disk that every peer needs, for its log and the system's own files."""
_FAULTS = {
    "versions": (
        ExitCode.VERSIONS_UNFIT,
        "a daemon does not start here, or works with others only by chance",
    ),
    "device": (ExitCode.DEVICE_UNFIT, "this machine cannot hold a stage of the run"),
    "disk": (
        ExitCode.DISK_UNFIT,
        "what was trained here is lost when the daemon ends, or it does not start",
    ),
    "data": (
        ExitCode.DATA_UNFIT,
        "this machine cannot hold the ends of the run; a block stage needs no data",
    ),
    "service": (
        ExitCode.SERVICE_UNFIT,
        "the daemon does not come back after a logout or a start of the machine",
    ),
}
"""Exit code and effect of a fault, by the check that finds it."""
Mend = tuple[Callable[[], object], str]
"""Function that mends a fault, and the sentence that reports the repair."""


@dataclass(frozen=True)
class DoctorCheck:
    """One finding of a check. The check's name is the finding's layer. ``mend`` is None where a
    person must mend it; ``mended``: the sentence that reports the repair."""

    finding: Diagnosis
    mend: Mend | None = None
    mended: str = ""
    details: tuple[str, ...] = ()
    """More lines for an operator who asks for them."""

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        f = self.finding
        return {
            "check": f.layer,
            "ok": f.ok,
            "cause": f.cause,
            "effect": f.effect,
            "fix": f.fix,
            "code": int(f.code),
            "can_mend": self.mend is not None,
            "mended": self.mended,
            "details": list(self.details),
        }


def passed(name: str, said: str, details: Sequence[str] = ()) -> DoctorCheck:
    """Result of a check that found no fault."""
    return DoctorCheck(Diagnosis("", name, True, said), details=tuple(details))


def fault(
    name: str, cause: str, fix: str, mend: Mend | None = None, *, warning: bool = False
) -> DoctorCheck:
    """Something is; ``warning``: this peer can take part all the same."""
    code, effect = _FAULTS[name]
    finding = Diagnosis("", name, warning, clean(cause, 500), effect, clean(fix, 500), code)
    return DoctorCheck(finding, mend)


def blocked(name: str, why: LocalFault) -> DoctorCheck:
    """Result of the check ``name`` where the fault ``why`` keeps it from looking."""
    return DoctorCheck(
        Diagnosis("", name, False, why.what, "it could not be looked at", why.next_step, why.code),
    )


def run(
    name: str, ours: NodeConfig, *, fix: bool, checkup: Checkup | None = None
) -> list[DoctorCheck]:
    """Findings of one check. With ``fix`` every fault that has a ``mend`` is mended, and the check
    runs again; ``mended`` then reports the repair. ``checkup``: the swarm's answers, for the
    clock."""
    look = {
        "versions": versions,
        "device": device,
        "disk": disk,
        "data": data,
        "service": service,
        "clock": partial(clock, checkup=checkup),
    }[name]
    found = look(ours)
    mends = [one.mend for one in found if fix and one.mend is not None and not one.finding.ok]
    if not mends:
        return found
    done = []
    for mend, said in mends:
        try:
            mend()
            done.append(said)
        except (OSError, LocalFault, subprocess.SubprocessError) as e:
            done.append(f"could not be mended: {e}")
    again = look(ours)
    return [replace(again[0], mended="; ".join(done)), *again[1:]]


# ------------------------------------------------------------ versions


def versions(ours: NodeConfig) -> list[DoctorCheck]:
    """Python and libraries as the project asks for them, the p2p daemon, the daemon that runs here,
    the run's protocol."""
    found: list[DoctorCheck] = []
    for wanted, there in unfit_packages():
        state = "it is not installed"
        if there:
            state = f"{there} is here"
        what = f"{wanted} is needed, {state}"
        found.append(fault("versions", what, f'pip install "{wanted}"'))
    binary = p2p_daemon()
    if binary is None:
        found.append(
            fault(
                "versions",
                "hivemind has no p2pd beside it",
                "pip install --force-reinstall hivemind",
            )
        )
    elif not os.access(binary, os.X_OK):
        mode = binary.stat().st_mode | 0o111
        found.append(
            fault(
                "versions",
                f"{binary} is not executable",
                f"chmod +x {binary}",
                (partial(binary.chmod, mode), f"made {binary} executable"),
            )
        )
    try:
        ours.remembered()
    except LocalFault as e:
        found.append(
            fault(
                "versions",
                f"the swarm used last cannot be read: {e.what}",
                e.next_step or "install its tutti",
            )
        )
    # Where none runs, or it does not answer, that is for  tutti status  to say.
    with suppress(LocalFault), ControlClient(ours.control_socket, home=ours.home) as client:
        running = client.status().version
        if running != VERSION:
            cause = f"the daemon that runs here is tutti {running}, this is {VERSION}"
            found.append(fault("versions", cause, "tutti restart", warning=True))
        answer = client.peers()
        apart = incompatible_peers(answer)
        live = [p for p in answer.peers if p.path != "self" and p.state not in GONE]
        for theirs, peers in apart.items():
            verb = "speaks" if len(peers) == 1 else "speak"
            who = f"{len(peers)} of {several(len(live), 'other peer')}"
            cause = f"{who} {verb} {theirs}, this tutti {PROTOCOLS}"
            alone = len(live) == sum(map(len, apart.values()))
            found.append(fault("versions", cause, PROTOCOLS.advice(theirs), warning=not alone))
    torch = _installed("torch") or "?"
    said = f"tutti {VERSION}, {PROTOCOLS}, python {sys.version.split()[0]}, torch {torch}"
    if any(not one.finding.ok for one in found):
        return found
    return [passed("versions", said), *found]


def unfit_packages() -> Iterator[tuple[str, str]]:
    """(requirement of tutti, version that is here, "" for none) of every library that is missing or
    has another version."""
    from packaging.requirements import Requirement

    try:
        asked = metadata.requires("tutti") or []
        about = metadata.metadata("tutti")
    except metadata.PackageNotFoundError:
        return  # it runs from a checkout that nobody installed: its requirements are not known
    needs = about["Requires-Python"] if "Requires-Python" in about else ""
    if needs and not Requirement(f"python{needs}").specifier.contains(
        sys.version.split()[0], prereleases=True
    ):
        yield f"python {needs}", sys.version.split()[0]
    for one in map(Requirement, asked):
        wanted = one.marker is None or one.marker.evaluate({"extra": ""})
        there = _installed(one.name)
        if wanted and not (there and one.specifier.contains(there, prereleases=True)):
            yield f"{one.name}{one.specifier}", there


def _installed(name: str) -> str:
    """The version of a package that is here, "" for none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def p2p_daemon() -> Path | None:
    """The program p2pd that hivemind brings, found without importing hivemind."""
    try:
        files = metadata.files("hivemind") or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == "p2pd")
    return next((path for path in paths if path.is_file()), None)


# ------------------------------------------------------------ device


def device(ours: NodeConfig) -> list[DoctorCheck]:
    """Check that the device is there, and list the stages of the last swarm that fit into it."""
    from node.model.device import Device, gpus, has_kernels, refusal, set_threads

    set_threads(ours.node.threads)
    try:
        chosen = Device.pick(ours.node.device)
        devices = [chosen]
        if chosen.is_cuda and ours.node.local_devices > 1:
            from node.local.stage import device_names

            names = device_names(str(chosen.device), ours.node.local_devices)
            devices = [*map(Device.pick, names)]
    except LocalFault as e:
        return [fault("device", e.what, e.next_step)]
    unused = [refusal(card) for card in range(gpus()) if not has_kernels(card)]
    others = [fault("device", why, "nothing, to go without it", warning=True) for why in unused]
    manifest = _manifest(ours)
    said = chosen.describe()
    if manifest is None:
        return [passed("device", said), *others]
    # This program has loaded torch, as a daemon has.
    taken = MainMemory(Pledges(ours.home).others(), resident(os.getpid()))
    limit, words = room_on(ours, devices, _held(ours), taken=taken)
    main = 0
    if chosen.is_cuda:
        main = max(1, memory_total() - taken.others - taken.process)
    verdicts = [
        check_memory(ours, manifest, stage, limit, main, words, older=chosen.older)
        for stage in hosted(ours, manifest, limit)
    ]
    bad = [v for v in verdicts if not v.ok]
    if bad and len(bad) == len(verdicts):
        return [fault("device", f"{said}: {bad[-1].text}", bad[-1].next_step)]
    found = [passed("device", said), *others]
    found += [passed("device", v.text, v.parts) for v in verdicts if v.ok]
    if bad:
        next_step = "nothing, if somebody else holds that stage; else " + bad[0].next_step
        found.append(fault("device", bad[0].text, next_step, warning=True))
    return found


def _held(ours: NodeConfig) -> int:
    """Bytes of the device that the daemon of this home has, which a start in its place would find
    free; 0 when none runs."""
    with suppress(LocalFault), ControlClient(ours.control_socket, home=ours.home) as client:
        return client.status().memory_used
    return 0


# ------------------------------------------------------------ disk


def disk(ours: NodeConfig) -> list[DoctorCheck]:
    """Check that this home can be written, has room for checkpoints, and holds a sound key and
    sound checkpoints."""
    home = ours.home
    trouble = _writing_fails(home)
    full = trouble is not None and trouble.errno in DISK_FULL
    if trouble is not None and not full:
        return [_unwritable(home, trouble)]
    found = [*_key(ours), *_room_on_disk(ours, full), *_checkpoints(ours)]
    said = f"{home}: {human(shutil.disk_usage(_existing(home)).free)} free"
    if any(not one.finding.ok for one in found):
        return found
    return [passed("disk", said), *found]


def _writing_fails(home: Path) -> OSError | None:
    """The error of writing a file in ``home``, or in the directory in which it would be made; None
    if there is none."""
    place = _existing(home)
    probe = place / f".tutti-probe-{os.getpid()}"
    if not place.is_dir():
        return OSError(errno.ENOTDIR, f"{place} is not a directory")
    if place == home and not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        return OSError(errno.EACCES, "it may not be read and written")
    try:
        probe.write_bytes(b"\0" * 4096)
    except OSError as e:
        return e
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def _unwritable(home: Path, why: OSError) -> DoctorCheck:
    """The fault of a home in which nothing can be written although there is space. Only missing
    rights can be mended here."""
    cause = f"{home}: {why.strerror or why}"
    if why.errno == errno.EROFS:
        step = (
            "it lies on a read-only file system: mount that for writing, or choose another --home"
        )
        return fault("disk", cause, step)
    if why.errno not in (errno.EACCES, errno.EPERM):
        return fault("disk", cause, "look at that disk, or choose another  --home")
    foreign = home.is_dir() and home.stat().st_uid != os.getuid()
    mend: Mend | None = None
    if not foreign:
        mend = partial(_make_writable, home), f"made {home} a directory that you may read and write"
    step = f"make it a directory you may write:  chmod u+rwx {home}"
    return fault("disk", cause, step, mend)


def _existing(home: Path) -> Path:
    """``home``, or its nearest parent directory that exists."""
    return next((place for place in (home, *home.parents) if place.exists()), home)


def _make_writable(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.chmod(0o700)


def _key(ours: NodeConfig) -> list[DoctorCheck]:
    path = ours.identity_path
    try:
        who(ours)
    except LocalFault as e:
        status = path.stat()
        mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        mend: Mend | None = None
        if mine and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            mend = partial(path.chmod, 0o600), f"took the rights of others from {path}"
        return [fault("disk", e.what, e.next_step, mend)]
    return []


def _room_on_disk(ours: NodeConfig, full: bool) -> list[DoctorCheck]:
    """Check the room for the checkpoints of the largest stage of the swarm used last, beside those
    that are kept. ``full``: a file could not be written for lack of space, which a quota causes
    too."""
    home = ours.home
    manifest = _manifest(ours)
    place = _existing(home)
    free = shutil.disk_usage(place).free
    need = MIN_FREE
    if manifest is not None:
        stages = parts_of_stages(manifest).values()
        largest = max(sum(part.bytes + part.state for part in parts) for parts in stages)
        there = _bytes(ours.checkpoint_dir(manifest.run_id))
        wanted = (ours.checkpoint.keep + 1) * largest
        if ours.checkpoint.max_disk:
            wanted = min(wanted, ours.checkpoint.max_disk)
        need += max(0, wanted - there)
    if free >= need and not full:
        return []
    # A start, or the next export, makes or fetches these again: tokenised text, pieces of a state
    # that was coming.
    spare = [
        *home.glob("data/*"),
        *home.glob("swarms/*/incoming/*"),
        *home.glob("swarms/*/export/*"),
    ]
    gain = sum(map(_bytes, spare))
    cause = f"{place} has {human(free)} free, checkpoints and logs need {human(need)}"
    if full:
        cause = f"{place} is full: {human(free)} are free, and {human(need)} are needed"
    step = "free some space, or choose a --home on a larger disk"
    rests = listener(ours.control_socket) is None
    if gain:
        when = ""
        if not rests:
            when = "after  tutti stop  "
        step += f"; {when}--fix removes {human(gain)} that is made again"
    mend: Mend | None = None
    if gain and rests:
        names = ", ".join(str(p.relative_to(home)) for p in spare[:4])
        mend = partial(_remove, spare), f"removed {human(gain)} that is made again: {names}"
    return [fault("disk", cause, step, mend)]


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _bytes(place: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    return sum(f.stat().st_size for f in (place, *place.rglob("*")) if f.is_file())


def _checkpoints(ours: NodeConfig) -> Iterator[DoctorCheck]:
    """A fault for each stage that has unusable checkpoints."""
    from node.checkpoint.store import CheckpointStore

    manifest = _manifest(ours)
    if manifest is None:
        return
    root = ours.checkpoint_dir(manifest.run_id)
    aside = ours.home / "damaged"
    store = CheckpointStore(root, ours.checkpoint, manifest.run_id)
    rests = listener(ours.control_socket) is None
    stop = ""
    if not rests:
        stop = "tutti stop , then  "
    for stage in range(manifest.pipeline.stages + 1):
        folder = root / f"stage-{stage}"
        bad = dict(store.problems(stage))
        for epoch in reversed(store.epochs(stage)):
            try:
                store.load(stage, epoch)
                break
            except LocalFault as e:
                bad[store.path(stage, epoch).name] = e.what
        if bad:
            name, why = next(iter(bad.items()))
            more = ""
            if len(bad) > 1:
                more = f" and {len(bad) - 1} more"
            mend: Mend | None = None
            if rests:
                mend = (
                    partial(_set_aside, folder, bad, aside),
                    f"moved {len(bad)} damaged from {folder} to {aside}",
                )
            yield fault(
                "disk",
                f"the checkpoint {folder.name}/{name}{more} cannot be used: {why}",
                "nothing, for older ones and other peers are asked; to have it out of the way:  "
                f"{stop}tutti doctor disk --fix  (to {aside})",
                mend,
            )


def _set_aside(folder: Path, bad: Collection[str], aside: Path) -> None:
    aside.mkdir(mode=0o700, exist_ok=True)
    for one in bad:
        if (folder / one).exists():
            name = f"{folder.parent.parent.name}-{folder.name}-{one}-{time.time_ns()}"
            os.replace(folder / one, aside / name)


# ------------------------------------------------------------ data


def data(ours: NodeConfig) -> list[DoctorCheck]:
    """Check that the data and the tokenizer of the swarm used last can be opened and are the
    run's."""
    manifest = _manifest(ours)
    if manifest is None:
        return [passed("data", "no swarm is remembered here, so none is needed")]
    d = manifest.data
    if ours.node.role in ("stage", "rendezvous") or (ours.stage or ENDS) != ENDS:
        return [passed("data", "a block stage needs none")]
    try:
        found, _ = opened(ours, manifest, ours.places_of(manifest))
    except LocalFault as e:
        needed = ours.node.role == "ends" or _founded(ours, manifest)
        return [fault("data", e.what, e.next_step, warning=not needed)]
    told = "the run asks for no hash"
    if d.sha256:
        told = "as the run asks"
    return [passed("data", f"{d.source}: {found.said}, sha256 {found.sha256[:12]}, {told}")]


def _founded(ours: NodeConfig, manifest: Manifest) -> bool:
    # A key that cannot be read is for the check of the disk to report.
    with suppress(LocalFault):
        return who(ours) == manifest.swarm.owner
    return False


# ------------------------------------------------------------ service


def service(ours: NodeConfig) -> list[DoctorCheck]:
    """Look whether this machine can run a daemon as a service, and at the service of this home.
    Only a warning: a daemon needs no service."""
    cause, fix = checked(ours)
    if fix:
        return [fault("service", cause, fix, warning=True)]
    return [passed("service", cause)]


# ------------------------------------------------------------ clock


def clock(ours: NodeConfig, checkup: Checkup | None) -> list[DoctorCheck]:
    """Compare this clock with the clocks of the peers that answered, and with the times of files in
    this home."""
    ahead, peers = clock_of(checkup.findings if checkup is not None else ())
    if ahead is not None and abs(ahead) > CLOCK_S:
        return [DoctorCheck(wrong_clock(ahead, peers), _synchronise())]
    if ahead is not None:
        way = ahead_or_behind(ahead)
        return [passed("clock", f"{abs(ahead):.1f} s {way} those that answered")]
    # Files that this machine has written, with its own clock: the program's and this home's.
    written = (Path(__file__), ours.identity_path, ours.events_path, ours.home / "ports")
    behind = max((f.stat().st_mtime for f in written if f.is_file()), default=0.0) - time.time()
    if behind > BEHIND_S:
        finding = wrong_clock(-behind, 0)
        cause = (
            f"the clock of this machine is {span(behind)} behind a file that this program has "
            "written"
        )
        return [DoctorCheck(replace(finding, cause=cause), _synchronise())]
    return [
        passed("clock", "nobody answered to compare with; it is not behind what is written here")
    ]


def _synchronise() -> Mend | None:
    tool = shutil.which("timedatectl")
    if tool is None or os.geteuid() != 0:
        return None

    command = [tool, "set-ntp", "true"]
    tell = partial(subprocess.run, command, check=True, capture_output=True, timeout=10)
    return tell, "told the system to set its clock by NTP; it takes a moment"


# ------------------------------------------------------------ for people


def lines(checks: Sequence[DoctorCheck], width: int = 80, verbose: bool = False) -> list[str]:
    """Lines for people, wrapped at words: one for each check, and for a fault its effect, its fix
    and its repair. ``verbose``: with the details."""
    found = []
    for one in checks:
        f = one.finding
        found += wrapped(f"{_mark(f):6}{f.layer:10}{f.cause}", width, 16)
        for label, text in (("effect", f.effect), ("fix", f.fix), ("mended", one.mended)):
            if text:
                found += wrapped(f"{'':6}{label:10}{text}", width, 16)
        if verbose:
            for text in one.details:
                found += wrapped(f"{'':16}{text}", width, 18)
    return found


def _mark(finding: Diagnosis) -> str:
    """The first word of a check's line."""
    if not finding.ok:
        return "fault"
    if finding.code is not ExitCode.OK:
        return "warn"
    return "ok"


def _manifest(ours: NodeConfig) -> Manifest | None:
    """Manifest of the swarm used last, None if none can be read: the check of versions reports a
    damaged one."""
    try:
        known = ours.remembered()
    except LocalFault:
        return None
    if not known:
        return None
    return known[0]
