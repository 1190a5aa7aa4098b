"""The systemd side of a service: the text of a unit, the calls of systemctl, and the reasons for
which a machine has no user services. Enters: words, paths. Never: a setting of a peer."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.core.errors import ExitCode, LocalFault, UsageFault
from node.core.home import expanded

CALL_S = 30.0
"""Longest wait for an answer of systemctl or loginctl, in seconds."""
STEPS_VERSION = 254
"""First version of systemd that can lengthen the pause between two starts."""
FIRST_PAUSE_S = 5
LONGEST_PAUSE_S = 300
STEADY_PAUSE_S = 30
"""Pause between two starts where systemd cannot lengthen it, in seconds."""
NO_USE = (ExitCode.USAGE, ExitCode.REFUSED, ExitCode.PROTOCOL)
"""Exit codes after which another start gives the same: a person must act first."""
WSL_FIX = (
    "write into /etc/wsl.conf  [boot]  and below it  systemd=true  , then in Windows:  "
    "wsl --shutdown"
)
_RUNNING = Path("/run/systemd/system")
"""Directory that exists where systemd is the system's first process; see sd_booted(3)."""
_KERNEL = Path("/proc/version")
_LINGER = Path("/var/lib/systemd/linger")
_HARDENED = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
KeyringMode=private
UMask=0077"""
# Not here: MemoryDenyWriteExecute, because torch writes kernels at run time; PrivateDevices and
# ProtectClock, because they leave few devices, and GPUs are devices.
_CONFINED = """\
PrivateUsers=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
CapabilityBoundingSet="""
"""Lines that need a name space of users. Without PrivateUsers=yes a user manager before version 254
ignores most of them without a word."""
_PROBE = ("PrivateUsers=yes", "ProtectSystem=strict", "PrivateTmp=yes", "CapabilityBoundingSet=")


class NoServiceManager(LocalFault):
    """This machine, or this session, has no systemd that runs services of users."""

    code = ExitCode.SERVICE_UNFIT


@dataclass(frozen=True)
class SystemdUnit:
    """A service of a user.

    ``command``: words of the process; ``readable``: files and directories that it needs; ``home``:
    its working directory, which it may write; ``writable``: further such directories; ``shared``:
    directories in /tmp that are shared with
    other processes, if they exist; ``memory_max``: a limit as systemd takes it, "" for none;
    ``stop_s``: seconds from the request to end until it is killed; ``confined``: in a file system
    of its own, which is read-only but for these directories; ``version``: systemd's.
    """

    description: str
    command: tuple[str, ...]
    home: Path
    stop_s: float
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_max: str = ""
    confined: bool = True
    version: int = 0

    def text(self) -> str:
        """Content of the unit file. Raises UsageFault for a path that it cannot hold."""
        lines = [
            "# Written by  tutti service install , which replaces it.",
            "[Unit]",
            f"Description={_specified(self.description)}",
            "Documentation=man:systemd.service(5)",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(_quoted_argument(word) for word in self.command)}",
            f"WorkingDirectory={_specified(str(self.home))}",
            "Environment=PYTHONUNBUFFERED=1",
        ]
        for name, value in sorted(self.environment.items()):
            lines.append(f"Environment={_quoted(f'{name}={value}')}")
        lines += [*self._endings(), "", *_HARDENED.splitlines()]
        if self.confined:
            lines += self._places()
        if self.memory_max:
            lines.append(f"MemoryMax={self.memory_max}")
        return "\n".join([*lines, "", "[Install]", "WantedBy=default.target", ""])

    def _endings(self) -> list[str]:
        """Lines on stops and new starts."""
        lines = [
            # The daemon asks its children and p2pd to end when it has no more use for them.
            "KillMode=mixed",
            f"TimeoutStopSec={self.stop_s:.0f}",
            "Restart=on-failure",
            f"SuccessExitStatus={ExitCode.INTERRUPTED:d}",
            f"RestartPreventExitStatus={' '.join(str(int(code)) for code in NO_USE)}",
        ]
        if self.version >= STEPS_VERSION:
            lines += [
                f"RestartSec={FIRST_PAUSE_S}",
                "RestartSteps=6",
                f"RestartMaxDelaySec={LONGEST_PAUSE_S}",
            ]
        else:
            lines.append(f"RestartSec={STEADY_PAUSE_S}")
        return lines

    def _places(self) -> list[str]:
        """Lines on the file system."""
        lines: list[str] = [*_CONFINED.splitlines()]
        # Those that are missing are left out; without the dash the service would not start.
        optional = [f"-{path}" for path in self.writable]
        for path in (str(self.home), *optional):
            # A bind makes a path in /tmp visible to a service that has a /tmp of its own.
            if _in_tmp(path):
                lines.append(f"BindPaths={_bound(path)}")
            else:
                lines.append(f"ReadWritePaths={_quoted(path)}")
        lines += [f"BindPaths={_bound('-' + path)}" for path in self.shared]
        hidden = [path for path in self.readable if _in_tmp(path)]
        lines += [f"BindReadOnlyPaths={_bound('-' + path)}" for path in hidden]
        return lines


def _in_tmp(path: str) -> bool:
    """Return True for a path, perhaps behind a dash, that a /tmp of one's own hides."""
    return path.removeprefix("-").startswith(("/tmp/", "/var/tmp/"))


def _specified(text: str) -> str:
    """A text that systemd searches for specifiers, such as %h, and for nothing else."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """A word of a list, in quotes."""
    escaped = _specified(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'


def _bound(path: str) -> str:
    """A path of a bind, in quotes. A colon would part it from another path."""
    if ":" in path:
        raise UsageFault(
            f"{path} has a colon, which no unit can hold for a path in /tmp",
            "rename that directory",
        )
    return _quoted(path)


def _quoted_argument(text: str) -> str:
    """A word of a command, in which systemd also searches for variables."""
    return _quoted(text).replace("$", "$$")


class Systemd:
    """The user's service manager, asked through systemctl. Making one raises NoServiceManager if
    none answers."""

    def __init__(self) -> None:
        tool = shutil.which("systemctl")
        if tool is None or sys.platform != "linux":
            raise missing()
        self._tool = tool
        answer = self._run("show", "--property=Version", "--value")
        if answer.returncode != 0:
            raise missing(answer.stderr)
        found = re.search(r"[0-9]+", answer.stdout)
        self.version = int(found[0]) if found else 0

    def call(self, *words: str, wait_s: float = CALL_S) -> None:
        """Have something done within ``wait_s`` seconds. Raises LocalFault with systemctl's own
        words if it was not."""
        answer = self._run(*words, wait_s=wait_s)
        if answer.returncode != 0:
            said = answer.stderr.strip() or f"it ended with code {answer.returncode}"
            raise LocalFault(
                f"systemctl --user {' '.join(words)}: {said}",
                "journalctl --user -n 50  has more",
            )

    def check_confines(self) -> None:
        """Try whether this machine lets a service of a user have a file system of its own. Raises
        NoServiceManager if it does not: a name space of users is switched off in some systems and
        in most containers."""
        tool = shutil.which("systemd-run")
        if tool is None:
            return
        wanted = [f"--property={one}" for one in _PROBE]
        command = [tool, "--user", "--wait", "--collect", "--quiet", *wanted, "/bin/true"]
        answer = _called(command)
        if answer.returncode != 0:
            raise NoServiceManager(
                "this system gives services of users no file system of their own (it ended with "
                f"code {answer.returncode}; 217 and 226 are name spaces of users that are off)",
                "allow them (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu), or "
                "go without:  --no-sandbox",
            )

    def properties(self, unit: str, names: Sequence[str]) -> dict[str, str]:
        """Properties of a unit by name; of a unit that is not installed LoadState is
        "not-found"."""
        answer = self._run("show", unit, f"--property={','.join(names)}")
        pairs = (line.partition("=") for line in answer.stdout.splitlines())
        return {name: value for name, _, value in pairs}

    def _run(self, *words: str, wait_s: float = CALL_S) -> subprocess.CompletedProcess[str]:
        return _called([self._tool, "--user", *words], wait_s)


def _called(command: Sequence[str], wait_s: float = CALL_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises LocalFault if it cannot be run or takes longer than
    ``wait_s`` seconds."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=wait_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LocalFault(f"{' '.join(command)}: {e}", "see  systemctl --user status") from e


def missing(said: str = "") -> NoServiceManager:
    """The fault of a machine without user services, with its reason. ``said``: systemctl's
    words."""
    here = "a daemon can still be started in the background:  tutti start -d"
    if sys.platform != "linux":
        return NoServiceManager(f"there is no systemd on {sys.platform}", here)
    if in_wsl() and not booted():
        return NoServiceManager("this WSL runs without systemd", f"{WSL_FIX}\n{here}")
    if not booted():
        return NoServiceManager("systemd does not run this machine or this container", here)
    if "XDG_RUNTIME_DIR" not in os.environ:
        return NoServiceManager(
            "this session knows no service manager: XDG_RUNTIME_DIR is not set, as after  su  or  "
            "sudo",
            f"log in as this user itself, or  export XDG_RUNTIME_DIR=/run/user/{os.getuid()}",
        )
    why = " ".join(said.split()) or "systemctl is not installed"
    return NoServiceManager(
        f"the service manager of this user does not answer: {why}",
        f"install the package of the user session (Debian: dbus-user-session), or log in anew\n"
        f"{here}",
    )


def booted() -> bool:
    """Return True if systemd runs this machine."""
    return _RUNNING.is_dir()


def in_wsl() -> bool:
    """Return True inside the Windows Subsystem for Linux."""
    try:
        return "microsoft" in _KERNEL.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def lingers(user: str) -> bool:
    """Return True if the user's services run while the user is not logged in."""
    return (_LINGER / user).exists()


def unit_path(unit: str) -> Path:
    """File of a unit of this user."""
    config = os.environ.get("XDG_CONFIG_HOME", "").strip() or "~/.config"
    return expanded(config) / "systemd" / "user" / unit
