"""The Dockerfile without an engine: a linter reads it, and its steps run in new roots.

The roots are a minimal Debian 12 with its own CPython 3.11, in place of the image python:3.11-slim,
which no package registry has. There are no layers and no cgroups. Everything else is as an engine
does it: each stage begins with a new root, RUN sees the files of its stage alone, COPY takes what
.dockerignore lets through, and the daemon runs as the image's user on a root that it cannot write,
in a network of its own.
"""

import json
import os
import shlex
import shutil
import string
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.installed.setting import ITEM, Done, clone, folder, ran, tools
from benchmarks.report import Report

HEALTHY_S = 180.0
"""Longest time until the health check of a started container passes, in seconds."""
PACKAGES = "python3,python3-venv,ca-certificates"
MIRROR = "http://deb.debian.org/debian"
PARSE = """
import json, sys
from dockerfile_parse import DockerfileParser
print(json.dumps(DockerfileParser(path=sys.argv[1]).structure))
"""
IDLE = {"EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "VOLUME", "ENTRYPOINT", "CMD"}
"""Instructions that change no file."""


@dataclass
class Stage:
    """A stage of the Dockerfile, as far as its steps have run. ``root``: its files;
    ``directory``: WORKDIR; ``said``: the last value of each instruction, such as ENTRYPOINT."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0:0"
    said: dict[str, str] = field(default_factory=dict)


def rows(report: Report, root: Path) -> None:
    """Rows of the linter, of the steps, and of the daemon that they give."""
    _lint(report)
    if shutil.which("debootstrap") is None or os.geteuid():
        name = f"{ITEM} image: steps of the Dockerfile run"
        report.unmeasured(name, "all", "no root or debootstrap here")
        return
    build = Build(root, instructions(clone()), context(clone(), root / "context"), base())
    stage = build.run()
    steps = f"the last: {build.last[:80]}"
    total = len(build.instructions)
    report.add(
        f"{ITEM} image: steps of the Dockerfile run",
        build.count,
        "steps",
        steps,
        f"{total}",
        build.count == total,
    )
    size = ran(["du", "-sm", stage.root], root).good().out.split()[0]
    report.add(f"{ITEM} image: size of its files", int(size), "MB", "the base among them")
    _start(report, stage, root)


def _lint(report: Report) -> None:
    hadolint = tools() / "hadolint"
    done = ran([hadolint, "--format", "json", "Dockerfile"], clone())
    found = json.loads(done.out or "[]")
    said = "; ".join(f"{one['code']} line {one['line']}: {one['message']}" for one in found)
    version = ran([hadolint, "--version"], clone()).out.strip()
    report.add(
        f"{ITEM} image: complaints of hadolint",
        len(found),
        "",
        f"{version} {said}"[:300],
        "0",
        not found and not done.code,
    )


class Build:
    """A build in ``root`` of ``instructions``, with the files of a ``context``; every stage begins
    with a copy of ``base``. ``count``: steps that ran; ``last``: the newest of them."""

    def __init__(
        self, root: Path, instructions: Sequence[tuple[str, str]], context: Path, base: Path
    ) -> None:
        self.root = root
        self.instructions = instructions
        self.context = context
        self.base = base
        self.count = 0
        self.last = ""
        self.stages: dict[str, Stage] = {}
        self._now = Stage(root)

    def run(self) -> Stage:
        """Run every step. Returns the last stage; raises RuntimeError for one that fails."""
        steps: Mapping[str, Callable[[str], None]] = {
            "FROM": self._from,
            "RUN": self._run,
            "COPY": self._copy,
            "ENV": self._env,
            "ARG": self._arg,
            "WORKDIR": self._workdir,
            "USER": self._user,
        }
        for instruction, value in self.instructions:
            self.last = f"{instruction} {value}"
            if instruction in steps:
                steps[instruction](value)
            elif instruction not in IDLE:
                raise RuntimeError(f"no step for {instruction}")
            self._now.said[instruction] = value
            self.count += 1
        return self._now

    def _from(self, value: str) -> None:
        _, _, name = value.partition(" AS ")
        root = self.root / f"stage-{len(self.stages)}"
        ran(["cp", "-a", self.base, root], self.root).good()
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._now = Stage(root, {"PATH": path})
        self.stages[name] = self._now

    def _run(self, value: str) -> None:
        network = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        stage = self._now
        in_root(stage, ["/bin/sh", "-c", value], network | stage.environment).good()

    def _copy(self, value: str) -> None:
        words = value.split()
        source = self.context
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        to = self._now.root / os.path.join(self._now.directory, target).lstrip("/")
        for name in names:
            one = source / name.lstrip("/")
            if one.is_dir():
                to.mkdir(parents=True, exist_ok=True)
                ran(["cp", "-a", f"{one}/.", to], self.root).good()
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(one, to)

    def _env(self, value: str) -> None:
        for pair in shlex.split(value):
            name, _, text = pair.partition("=")
            known = self._now.environment
            known[name] = string.Template(text).safe_substitute(known)

    def _arg(self, value: str) -> None:
        name, _, text = value.partition("=")
        self._now.environment.setdefault(name, text)

    def _workdir(self, value: str) -> None:
        self._now.directory = value
        (self._now.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, value: str) -> None:
        self._now.user = value


def instructions(folder: Path) -> list[tuple[str, str]]:
    """Instructions of the Dockerfile in a folder and their values, without comments."""
    structure = json.loads(ran([tools() / "python", "-c", PARSE, folder], folder).good().out)
    return [
        (one["instruction"], one["value"]) for one in structure if one["instruction"] != "COMMENT"
    ]


def context(source: Path, where: Path) -> Path:
    """Copy the files that .dockerignore lets through. It must refuse all and name exceptions;
    raises RuntimeError for another kind."""
    first, *lines = (source / ".dockerignore").read_text().splitlines()
    if first != "*":
        raise RuntimeError(".dockerignore does not begin with *")
    where.mkdir()
    for name in [line[1:] for line in lines if line.startswith("!")]:
        ran(["cp", "-a", source / name, where], where).good()
    return where


def base() -> Path:
    """A root with a minimal Debian and its Python; made once."""
    where = folder() / "base"
    if not where.exists():
        words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm"]
        ran([*words, where, MIRROR], folder()).good()
        (where / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        # Registries may be reached through a certificate of this machine alone.
        for name in ("etc/ssl/certs/ca-certificates.crt", "etc/resolv.conf", "etc/pip.conf"):
            if (Path("/") / name).exists():
                shutil.copy(Path("/") / name, where / name)
    return where


def prepared(stage: Stage, *, sealed: bool) -> str:
    """Script that mounts what a container has, in a name space of mounts of its own. ``sealed``:
    only /state and /tmp can be written, and the network is the loopback alone."""
    root = shlex.quote(str(stage.root))
    lines = [
        "set -e",
        f"mount --bind {root} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
    ]
    for place in filter(None, os.environ.get("PIP_FIND_LINKS", "").split()):
        inside = f"{root}{shlex.quote(place)}"
        lines += [f"mkdir -p {inside}", f"mount --bind {shlex.quote(place)} {inside}"]
    if sealed:
        lines += [
            "ip link set lo up",
            f"mount -t tmpfs -o mode=0700,uid=10001,gid=10001 tmpfs {root}/state",
            f"mount -o remount,bind,ro {root}",
        ]
    return "\n".join(lines)


def entering(stage: Stage, words: Sequence[str]) -> str:
    """Command that runs ``words`` in the stage's root, directory and user, without privileges."""
    inner = f"cd {shlex.quote(stage.directory)} && exec {shlex.join(words)}"
    user = shlex.quote(stage.user)
    return (
        f"chroot --userspec={user} {shlex.quote(str(stage.root))} /bin/sh -c {shlex.quote(inner)}"
    )


def in_root(stage: Stage, words: Sequence[str], environment: Mapping[str, str]) -> Done:
    """Run a command in the root of a stage, with the network of this machine."""
    script = f"{prepared(stage, sealed=False)}\nexec {entering(stage, words)}"
    space = ["unshare", "--mount", "--pid", "--fork", "env", "-i"]
    given = [f"{k}={v}" for k, v in {"HOME": "/root", **environment}.items()]
    return ran([*space, *given, "/bin/sh", "-c", script], stage.root)


def _start(report: Report, stage: Stage, root: Path) -> None:
    """Start the container's command, wait until its health check passes, and stop it."""
    command = [*json.loads(stage.said["ENTRYPOINT"]), *json.loads(stage.said["CMD"])]
    check = json.loads(stage.said["HEALTHCHECK"].partition("CMD ")[2])
    given = [f"{k}={v}" for k, v in stage.environment.items()]
    who = entering(stage, ["sh", "-c", "id -u; touch /x 2>&1 || true; tutti --version"])
    watch = entering(stage, check)
    # The health check runs beside the daemon, in its name spaces, as an engine runs it.
    script = "\n".join(
        [
            prepared(stage, sealed=True),
            who,
            f"{entering(stage, command)} >&2 &",
            "daemon=$!",
            "began=$(date +%s)",
            f"while [ $(($(date +%s) - began)) -lt {HEALTHY_S:.0f} ]; do",
            f"  if {watch} >/dev/null 2>&1; then echo healthy $(($(date +%s) - began)); break; fi",
            "  kill -0 $daemon || break; sleep 1",
            "done",
            "kill -TERM $daemon; code=0; wait $daemon || code=$?; echo ended $code",
        ]
    )
    space = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "env", "-i"]
    began = time.monotonic()
    with subprocess.Popen(
        [*space, *given, "/bin/sh", "-c", script],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as container:
        try:
            out, err = container.communicate(timeout=HEALTHY_S + 120)
        except subprocess.TimeoutExpired:
            container.kill()
            out, err = container.communicate()
    lines = out.splitlines()
    sealed = any("Read-only file system" in line or "Permission denied" in line for line in lines)
    version = next((line for line in lines if line.startswith("tutti ")), "")
    report.add(
        f"{ITEM} image: user of its process",
        lines[0] if lines else "",
        "",
        version,
        stage.user.partition(":")[0],
        bool(lines) and lines[0] == stage.user.partition(":")[0] and sealed and bool(version),
    )
    healthy = next((float(s.split()[1]) for s in lines if s.startswith("healthy ")), None)
    ended = next((s for s in lines if s.startswith("ended ")), "")
    said = f"{ended}, {time.monotonic() - began:.0f} s in all"
    if healthy is None:
        said = f"{said}: {err[-300:]}"
    report.add(
        f"{ITEM} image: health check passes after the start",
        healthy,
        "s",
        said,
        f"<= {HEALTHY_S:g}",
        healthy is not None and ended == "ended 0",
    )
