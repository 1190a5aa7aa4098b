"""Versions of CPython: binaries of the pins, and the demo where there is an interpreter."""

import json
from pathlib import Path

from benchmarks.installed.setting import ITEM, folder, links, ran, release, tools, wheel
from benchmarks.report import Report

VERSIONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_28"
SOURCE = ("prefetch-generator", "python-baseconv", "varint")
"""Packages without a wheel. They are pure Python and need no compiler."""
DEMO = ("demo", "--stages", "1", "--epochs", "2", "--json")
"""Three daemons: one at the ends, two replicas of the block stage."""


def rows(report: Report, root: Path) -> None:
    """Two rows for each version."""
    for version in VERSIONS:
        _resolves(report, version)
        _runs(report, version, root)


def _resolves(report: Report, version: str) -> None:
    """The pins of the release, torch among them, have files for this version and this platform."""
    pins = release()
    words = [tools() / "uv", "pip", "compile", "--quiet", "--no-config", "--no-header"]
    words += ["--python-version", version, "--python-platform", PLATFORM]
    words += ["--only-binary", ":all:", *(w for name in SOURCE for w in ("--no-binary", name))]
    words += ["--constraints", pins / "constraints.txt", "--overrides", pins / "overrides.txt"]
    asked = folder() / "asked.txt"
    asked.write_text(f"tutti @ {wheel().as_uri()}\n")
    done = ran([*words, asked], folder(), {"UV_CACHE_DIR": str(folder() / "uv-cache")})
    count = sum("==" in line for line in done.out.splitlines())
    said = done.err.strip()[-200:]
    report.add(
        f"{ITEM} pythons: pins resolve for CPython {version}",
        count,
        "packages",
        said,
        "> 50",
        not done.code and count > 50,
    )


def _runs(report: Report, version: str, root: Path) -> None:
    """The wheel is installed with the pins, torch among them, and the demo trains two epochs."""
    name = f"{ITEM} pythons: CPython {version} runs the demo"
    python = _interpreter(version)
    if python is None:
        report.unmeasured(name, "2", "no such interpreter here")
        return
    where = root / version
    uv = [tools() / "uv", "--quiet", "--no-config"]
    cache = {"UV_CACHE_DIR": str(folder() / "uv-cache")}
    ran([*uv, "venv", "--python", python, where], root, cache).good()
    pins = release()
    install = [*uv, "pip", "install", "--python", where / "bin/python", *links()]
    install += ["--constraints", pins / "constraints.txt", "--overrides", pins / "overrides.txt"]
    ran([*install, wheel()], root, cache).good()
    home = where / "person"
    home.mkdir()
    done = ran([where / "bin/tutti", *DEMO], home, {"HOME": str(home), "TMPDIR": str(home)})
    if done.code:
        report.add(name, 0, "epochs", done.err[-300:], "2", holds=False)
        return
    found = json.loads(done.out)
    said = f"{ran([python, '-V'], root).out.strip()}, loss {found['loss_val']:.2f}"
    fine = found["epochs"] == 2 and found["digests_equal"] and not found["failures"]
    report.add(name, found["epochs"], "epochs", said, "2", fine)


def _interpreter(version: str) -> Path | None:
    """An interpreter of this version on this machine, also where no PATH leads to it."""
    done = ran([tools() / "uv", "python", "find", "--no-config", version], folder())
    if not done.code:
        return Path(done.out.strip())
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return found[-1] if found else None
