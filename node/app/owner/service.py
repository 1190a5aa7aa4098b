"""``tutti service``: the daemon of a home as a systemd service of its user. Enters: the words that
``tutti start`` would take, as settings. Leaves: a unit file, calls of systemctl, lines. Never: a
secret in a unit, whose words every user of the machine can read."""

import dataclasses
import hashlib
import os
import pwd
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.app.launch import PATIENCE_S, PROGRAM, as_flags
from node.app.owner.systemd import (
    CALL_S,
    NoServiceManager,
    Systemd,
    SystemdUnit,
    booted,
    in_wsl,
    lingers,
    unit_path,
)
from node.checkpoint.archive.address import Address
from node.config import NodeConfig, config_document, sizes_of, write_atomically
from node.control.pledges import Pledges
from node.control.sockets import clear_stale
from node.core.errors import ExitCode, LocalFault, UsageFault, writing
from node.core.home import expanded, user_dir
from node.identity.invites import is_invite

STOP_S = 2 * PATIENCE_S
"""Seconds that a daemon has to end: it writes its own checkpoint, then waits for its children."""
_PATHS = ("data", "tokenizer", "weights", "record", "tensorboard", "swarm")
"""Settings that are paths, relative to the directory of the shell."""
_XDG = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "MainPID",
    "NRestarts",
    "Result",
    "ExecMainStatus",
    "ActiveEnterTimestamp",
)
_PERCENT = re.compile(r"[1-9][0-9]?%|100%")


@dataclass(frozen=True)
class Wanted:
    """The service that the user asked for.

    ``what``: a swarm.toml, "" for the swarm used last; ``home``: as given with --home, "" for the
    usual one; ``config``: as given with --config; ``writable``: directories outside of the home
    that the daemon may write; ``memory_max``: a size or a share, "" for no limit.
    """

    what: str = ""
    home: str = ""
    config: str = ""
    writable: tuple[str, ...] = ()
    memory_max: str = ""
    confined: bool = True


def unit_name(ours: NodeConfig) -> str:
    """Name of the unit of a home: tutti.service for the usual home, else with a mark of the home
    in it."""
    if not ours.home_flag:
        return "tutti.service"
    mark = hashlib.sha256(os.fsencode(ours.home)).hexdigest()[:8]
    return f"tutti-{mark}.service"


def unit_of(
    ours: NodeConfig, wanted: Wanted, version: int = 0, environ: Mapping[str, str] | None = None
) -> SystemdUnit:
    """The unit that starts this home's daemon with these settings. ``version``: systemd's, 0 for an
    old one. Raises UsageFault for what cannot be in a unit."""
    env = environ
    if env is None:
        env = os.environ
    settings = _settings(ours)
    words = [sys.executable, PROGRAM]
    if wanted.home or env.get("TUTTI_HOME"):
        words += ["--home", str(ours.home)]
    words.append("start")
    if wanted.what:
        words.append(_manifest(wanted.what))
    if file := wanted.config or env.get("TUTTI_CONFIG", ""):
        words += ["--config", _absolute(file)]
    words += as_flags(settings)
    for word in words:
        if any(not c.isprintable() for c in word):
            raise UsageFault(f"{word!r} has a character that no unit can hold", "rename the file")
    writable = [_directory(path) for path in wanted.writable]
    if ours.node.record:
        writable.append(os.path.dirname(_absolute(ours.node.record)))
    if ours.node.tensorboard:
        writable.append(_absolute(ours.node.tensorboard))
    writable += [str(user_dir("cache")), *_socket_directory(ours)]
    readable = [str(Path(PROGRAM).parent), sys.prefix, sys.base_prefix]
    readable += [_absolute(word) for word in words if word.startswith("/")]
    readable += [_absolute(path) for name in _PATHS if (path := getattr(ours.node, name))]
    name = ours.node.name or ours.home.name
    return SystemdUnit(
        description=f"tutti, a peer that trains a language model with others ({name})",
        command=tuple(words),
        home=ours.home,
        stop_s=STOP_S,
        readable=tuple(dict.fromkeys(readable)),
        writable=tuple(dict.fromkeys(writable)),
        shared=(str(Pledges(ours.home).folder),),
        environment={name: env[name] for name in _XDG if env.get(name, "").strip()},
        memory_max=_memory_max(ours, wanted.memory_max),
        confined=wanted.confined,
        version=version,
    )


def install(ours: NodeConfig, wanted: Wanted, *, now: bool) -> list[str]:
    """Write the unit, and have it started at each login or boot; with ``now`` at once, too. Returns
    lines for people. Raises NoServiceManager, UsageFault, LocalFault."""
    systemd = Systemd()
    name = unit_name(ours)
    unit = unit_of(ours, wanted, systemd.version)
    if wanted.confined:
        systemd.check_confines()
    runs = systemd.properties(name, ["ActiveState"]).get("ActiveState") == "active"
    if now and not runs:
        clear_stale(ours.control_socket)  # refuses a second daemon
    path = unit_path(name)
    replaced = path.exists()
    with writing(path, "make that directory writable"):
        for place in (ours.home, *map(Path, unit.writable)):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, unit.text().encode())
    Pledges(ours.home).others()  # makes their directory, which the service is to share
    systemd.call("daemon-reload")
    systemd.call("enable", name)
    verb = "replaced" if replaced else "wrote"
    lines = [f"{verb:8} {path}"]
    if now:
        _call_that_stops(systemd, "restart", name, runs=runs)
        lines.append(f"started  {name}")
    elif runs:
        lines.append(f"running  with the unit before; now:  systemctl --user restart {name}")
    else:
        lines.append(f"start    systemctl --user start {name}  , or at the next login")
    lines.append(f"see      tutti{ours.home_flag} service status ,  tutti{ours.home_flag} status")
    if wanted.confined:
        lines.append(
            f"writes   {ours.home} and nothing else of yours; for  tutti export DIR  install it "
            "again with  --writable DIR"
        )
    if not lingers(_user()):
        lines += _linger_lines()
    return lines


def uninstall(ours: NodeConfig) -> list[str]:
    """Stop the service and remove its unit. The home stays. Raises NoServiceManager, UsageFault,
    LocalFault."""
    systemd = Systemd()
    name = unit_name(ours)
    path = unit_path(name)
    if not path.exists():
        raise UsageFault(
            f"there is no service of this home: {path} is missing",
            f"install one with  tutti{ours.home_flag} service install",
        )
    runs = systemd.properties(name, ["ActiveState"]).get("ActiveState") == "active"
    _call_that_stops(systemd, "disable", "--now", name, runs=runs)
    with writing(path, f"remove it:  rm {path}"):
        path.unlink()
    systemd.call("daemon-reload")
    return [f"stopped and removed  {path}", f"kept     {ours.home} with key and checkpoints"]


@dataclass(frozen=True)
class ServiceState:
    """State of a home's service. ``active`` and ``step``: systemd's words for it, "not-installed"
    without a unit; ``restarts``: starts after failures; ``exit_code``: of the last process;
    ``lingers``: it runs while its user is not logged in; ``missing``: a file that the unit starts
    and that is gone."""

    unit: str
    path: str
    active: str
    step: str
    enabled: bool
    pid: int
    restarts: int
    since: str
    result: str
    exit_code: int
    lingers: bool
    missing: str

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        return dataclasses.asdict(self)

    @property
    def code(self) -> ExitCode:
        """Exit code of ``tutti service status``."""
        if self.active == "active":
            return ExitCode.OK
        return ExitCode.NOT_RUNNING

    def lines(self, home_flag: str) -> list[str]:
        """Lines for people."""
        if self.active == "not-installed":
            step = f"install it with  tutti{home_flag} service install"
            return ["service  not installed", f"         {step}"]
        lines = [f"service  {self.unit}: {self.active}"]
        if self.active == "active":
            lines[0] += f", pid {self.pid}, since {self.since}"
        elif self.active == "activating":
            lines[0] += f" ({self.step})"
        else:
            lines.append(f"start    systemctl --user start {self.unit}")
        if self.restarts:
            lines.append(f"restarts {self.restarts} after failures")
        if self.exit_code or self.result not in ("", "success"):
            lines.append(f"ended    {self.result or 'failed'}, exit code {self.exit_code}")
            lines.append(f"log      journalctl --user -u {self.unit} -n 50")
        if self.missing:
            lines.append(f"missing  {self.missing}: install it again")
        if not self.enabled:
            lines.append(f"at boot  no: systemctl --user enable {self.unit}")
        if not self.lingers:
            lines += _linger_lines()
        return lines


def state(ours: NodeConfig) -> ServiceState:
    """Ask systemd for the state of this home's service. Raises NoServiceManager."""
    systemd = Systemd()
    name = unit_name(ours)
    path = unit_path(name)
    said = systemd.properties(name, _PROPERTIES)
    active = said.get("ActiveState", "")
    if said.get("LoadState") == "not-found" or not path.exists():
        active = "not-installed"
    return ServiceState(
        unit=name,
        path=str(path),
        active=active,
        step=said.get("SubState", ""),
        enabled=said.get("UnitFileState") == "enabled",
        pid=_number(said.get("MainPID", "")),
        restarts=_number(said.get("NRestarts", "")),
        since=said.get("ActiveEnterTimestamp", ""),
        result=said.get("Result", ""),
        exit_code=_number(said.get("ExecMainStatus", "")),
        lingers=lingers(_user()),
        missing=_gone(path),
    )


def runs_as(ours: NodeConfig, pid: int) -> bool:
    """Return True if ``pid`` is the process of this home's service."""
    name = unit_name(ours)
    if not unit_path(name).exists():
        return False
    try:
        found = Systemd().properties(name, ["MainPID"])
    except LocalFault:
        return False
    return pid > 0 and _number(found.get("MainPID", "")) == pid


def restart(ours: NodeConfig) -> None:
    """Have the service of this home stopped and started. Raises LocalFault."""
    _call_that_stops(Systemd(), "restart", unit_name(ours), runs=True)


def _call_that_stops(systemd: Systemd, *words: str, runs: bool) -> None:
    """A call of systemctl that returns when the daemon has ended in order, as late as its unit
    allows. ``runs``: there is a daemon, and a line on stderr tells of the wait."""
    if runs:
        print(
            f"waiting for the daemon to end, which may take up to {STOP_S:.0f} s; a Ctrl-C leaves "
            "that to systemd",
            file=sys.stderr,
        )
    systemd.call(*words, wait_s=STOP_S + CALL_S)


def checked(ours: NodeConfig) -> tuple[str, str]:
    """(state, next step or "") of the service of this home, for ``tutti doctor``."""
    if sys.platform != "linux" or not (booted() or in_wsl()):
        return "no systemd here, so no service", ""
    try:
        found = state(ours)
    except NoServiceManager as e:
        return e.what, e.next_step.partition("\n")[0]
    if found.active == "not-installed":
        return "none is installed; tutti service install  makes one", ""
    if found.missing:
        step = f"tutti{ours.home_flag} service install  writes it anew, with its options"
        return f"{found.unit} starts {found.missing}, which is gone", step
    if not found.lingers:
        return f"{found.unit} ends when you log out", f"loginctl enable-linger {_user()}"
    if found.active == "failed":
        step = f"journalctl --user -u {found.unit} -n 50"
        return f"{found.unit} failed with exit code {found.exit_code}", step
    if not found.enabled:
        return f"{found.unit} does not start at boot", f"systemctl --user enable {found.unit}"
    return f"{found.unit} is {found.active}, and starts at boot", ""


def _settings(ours: NodeConfig) -> dict[str, Any]:
    """Explicit settings of the command line and the environment, paths absolute. Those of files
    stay in their files. Raises UsageFault for secrets."""
    found: dict[str, Any] = {}
    for name, one in config_document(ours).items():
        if one["source"].startswith(("--", "TUTTI_")) and one["value"] not in ((), ""):
            found[name] = one["value"]
    where = "in config.toml:  tutti config set admission TOKEN"
    if "admission" in found:
        raise UsageFault("others can read a service's command, so it has no admission token", where)
    for name in ("checkpoint.to", "restore"):
        if name in found and Address(str(found[name])).has_secrets:
            raise UsageFault(
                f"others can read a service's command, so {name} holds no user and no password",
                f"in config.toml:  tutti config set {name} ADDRESS",
            )
    if any(is_invite(one) for one in found.get("join", ())):
        raise UsageFault(
            "others can read a service's command, so it has no invite", "give addresses with --join"
        )
    for name in _PATHS:
        if found.get(name):
            found[name] = _absolute(found[name])
    return found


def _manifest(what: str) -> str:
    if is_invite(what) and not os.path.isfile(what):
        raise UsageFault(
            "others can read a service's command, so it starts a remembered swarm and no invite",
            "tutti join INVITE --no-start , then  tutti service install",
        )
    if not os.path.isfile(expanded(what)):
        raise UsageFault(f"there is no {what}", "name a swarm.toml, or nothing")
    return _absolute(what)


def _memory_max(ours: NodeConfig, text: str) -> str:
    """The limit in bytes, or a share as it is. Raises UsageFault."""
    if not text or _PERCENT.fullmatch(text):
        return text
    nbytes, *more = sizes_of(text)
    if more:
        raise UsageFault(f"--memory-max {text}", "write one size, such as  16GiB , or  80%")
    plans = ours.node.memory
    if "memory" in ours.sources and not plans.endswith("%") and nbytes <= ours.memory_limit(nbytes):
        raise UsageFault(
            f"--memory-max {text} leaves nothing beside memory = {plans!r}",
            "leave room for the process itself: 1 GiB for each daemon or more",
        )
    return str(nbytes)


def _socket_directory(ours: NodeConfig) -> list[str]:
    """The directory in which the control socket's is made, if that is not the home. Raises
    UsageFault if it would be /tmp, which a service has for itself."""
    socket = ours.control_socket
    if socket.parent == ours.home:
        return []
    if not os.environ.get("XDG_RUNTIME_DIR") or str(socket).startswith("/tmp/"):
        raise UsageFault(
            f"no command would find the socket of a service of {ours.home}",
            "choose a --home with a shorter name and without a comma",
        )
    return [os.environ["XDG_RUNTIME_DIR"]]


def _directory(path: str) -> str:
    found = _absolute(path)
    if os.path.exists(found) and not os.path.isdir(found):
        raise UsageFault(f"--writable {path}: it is no directory", "name a directory")
    return found


def _absolute(path: str) -> str:
    return os.path.abspath(expanded(path))


def _gone(unit: Path) -> str:
    """The first file of the unit's command that does not exist, "" for none."""
    try:
        text = unit.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    found = re.search(r'^ExecStart="([^"]+)" "([^"]+)"', text, re.MULTILINE)
    if found is None:
        return ""
    words = [word.replace("%%", "%").replace("$$", "$") for word in found.groups()]
    return next((word for word in words if not os.path.exists(word)), "")


def _linger_lines() -> list[str]:
    return [
        "logout   a service of a user ends when the user logs out, and starts at the next login.",
        f"         To run from boot on, without a login:  loginctl enable-linger {_user()}",
    ]


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _number(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    return 0
