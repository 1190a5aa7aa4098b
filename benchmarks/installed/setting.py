"""A wheel from a clean clone and an environment that has it. Made once for all parts of a run, in
one folder that is removed at its end.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.report import ROOT

ITEM = "5"
TORCH = "torch==2.13.0"
LONGEST_S = 900.0
"""Bound of one command of an installation, in seconds."""


@dataclass(frozen=True)
class Done:
    """A command that ended. ``seconds``: from its start to its end."""

    code: int
    out: str
    err: str
    seconds: float

    def good(self) -> "Done":
        """Return this; raises RuntimeError with the end of what it said if it failed."""
        if self.code:
            said = (self.err or self.out)[-600:]
            raise RuntimeError(f"a command ended with code {self.code}: {said}")
        return self


@dataclass(frozen=True)
class Installed:
    """An environment with tutti. ``made_s``: seconds of making the environment; ``torch_s``: of
    torch by pip; ``wheel_s``: of the wheel and all that it needs, downloads included. ``origin``:
    where pip found torch."""

    environment: Path
    wheel: Path
    made_s: float
    torch_s: float
    wheel_s: float
    origin: str

    @property
    def program(self) -> Path:
        """The command ``tutti``."""
        return self.environment / "bin" / "tutti"

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return self.environment / "bin" / "python"


def ran(words: Sequence[object], where: Path, environment: Mapping[str, str] | None = None) -> Done:
    """Run a command in a directory, as a shell of a person would who never saw the repository.
    ``environment``: variables beside those of this process. Raises RuntimeError if the command is
    not there, or takes longer than LONGEST_S."""
    began = time.monotonic()
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command,
            cwd=where,
            env=clean() | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as e:
        raise RuntimeError(f"{' '.join(command[:4])} has not ended in {LONGEST_S:g} s") from e
    except FileNotFoundError as e:
        raise RuntimeError(f"{command[0]} is not there") from e
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def clean() -> dict[str, str]:
    """The environment of this process without what leads to the repository."""
    here = (str(ROOT), str(Path(sys.prefix)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = [p for p in kept.get("PATH", "").split(os.pathsep) if not p.startswith(here)]
    return kept | {"PATH": os.pathsep.join(path), "NO_COLOR": "1"}


def links() -> list[str]:
    """Options by which uv looks where pip looks for files on this machine."""
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    return [word for place in places for word in ("--find-links", place)]


def base_python() -> str:
    """The interpreter from which the environment of this process was made."""
    return os.path.realpath(sys.executable)


@cache
def folder() -> Path:
    """The folder of this run, outside of the repository."""
    made = Path(tempfile.mkdtemp(prefix="tutti-installed-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def clone() -> Path:
    """A clean clone of the commit that is checked out."""
    where = folder() / "clone"
    ran(["git", "clone", "--quiet", f"file://{ROOT}", where], folder()).good()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    ran(["git", "checkout", "--quiet", "--detach", commit], where).good()
    return where


@cache
def tools() -> Path:
    """Programs of an environment with the tools of a release, and others that people use."""
    where = folder() / "tools"
    ran([base_python(), "-m", "venv", where], folder()).good()
    pip = [where / "bin/python", "-m", "pip", "install"]
    ran([*pip, "--no-deps", "-r", clone() / "tools/requirements-release.txt"], folder()).good()
    ran([*pip, "-r", clone() / "benchmarks/installed/requirements.txt"], folder()).good()
    return where / "bin"


@cache
def release() -> Path:
    """Wheel, sdist and pins of a release, built by its own script."""
    out = folder() / "dist"
    words = [tools() / "python", "-m", "tools.release", "wheel", "pins", "--out", out]
    ran(words, clone()).good()
    return out


def wheel() -> Path:
    """The wheel of the release."""
    [found] = release().glob("*.whl")
    return found


@cache
def installed() -> Installed:
    """A new environment with torch and the wheel, both by pip, the other packages in the versions
    of constraints.txt. fastecdsa is left to the resolver (deploy/overrides.txt says why)."""
    file = wheel()
    where = folder() / "environment"
    made = ran([base_python(), "-m", "venv", where], folder()).good()
    pip = [where / "bin/python", "-m", "pip", "install"]
    said = folder() / "torch.json"
    torch = ran([*pip, "--report", said, TORCH], folder()).good()
    pins = folder() / "constraints.txt"
    pins.write_text(without_overridden((release() / "constraints.txt").read_text()))
    rest = ran([*pip, "--constraint", pins, file], folder()).good()
    origin = _origin(json.loads(said.read_text()))
    return Installed(where, file, made.seconds, torch.seconds, rest.seconds, origin)


def _origin(report: dict[str, Any]) -> str:
    """Host from which pip had torch, by its own report; "this disk" for a file."""
    urls = [one["download_info"]["url"] for one in report["install"]]
    url = next(url for url in urls if "/torch-" in url)
    return urlsplit(url).hostname or "this disk"


def without_overridden(pins: str) -> str:
    """Lines of constraints.txt that pip's resolver can follow."""
    overrides = (release() / "overrides.txt").read_text().splitlines()
    names = tuple(line.partition("==")[0] + "==" for line in overrides if "==" in line)
    return "".join(f"{line}\n" for line in pins.splitlines() if not line.startswith(names))
