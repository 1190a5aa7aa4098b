"""Other versions of CPython: whether the pins resolve to binaries, and whether the program runs."""

from pathlib import Path

from benchmarks.installed.setting import ITEM, folder, ran, release, tools, wheel
from benchmarks.report import Report

VERSIONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_28"
SOURCE = ("prefetch-generator", "python-baseconv", "varint")
"""Packages without a wheel. They are pure Python and need no compiler."""
COMMANDS = (("--version",), ("--help",), ("id", "show"), ("config", "get", "limits.max_up"))
"""Commands that load no torch."""


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
    done = ran([*words, asked], folder(), UV_CACHE_DIR=str(folder() / "uv-cache"))
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
    """Everything but torch is installed, and commands that need no torch run."""
    name = f"{ITEM} pythons: CPython {version} runs it"
    python = _interpreter(version)
    if python is None:
        report.add(name, "no such interpreter here: not run", "")
        return
    where = root / version
    uv = [tools() / "uv", "--quiet", "--no-config"]
    cache = {"UV_CACHE_DIR": str(folder() / "uv-cache")}
    ran([*uv, "venv", "--python", python, where], root, **cache).good()
    overrides = root / "overrides.txt"
    kept = (release() / "overrides.txt").read_text()
    overrides.write_text(f"{kept}torch; sys_platform == 'none'\n")
    install = [*uv, "pip", "install", "--python", where / "bin/python"]
    install += ["--constraints", release() / "constraints.txt", "--overrides", overrides, wheel()]
    ran(install, root, **cache).good()
    environment = {"TUTTI_HOME": str(where / "home")}
    done = [ran([where / "bin/tutti", *words], root, **environment) for words in COMMANDS]
    failed = [" ".join(words) for words, one in zip(COMMANDS, done, strict=True) if one.code]
    said = f"without torch; {ran([python, '-V'], root).out.strip()}"
    said += "".join(f"; {one.err.strip()[-150:]}" for one in done if one.code)
    ran_well = len(COMMANDS) - len(failed)
    report.add(name, ran_well, "commands", said, f"{len(COMMANDS)}", not failed)


def _interpreter(version: str) -> Path | None:
    """An interpreter of this version on this machine, also where no PATH leads to it."""
    done = ran([tools() / "uv", "python", "find", "--no-config", version], folder())
    if not done.code:
        return Path(done.out.strip())
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return found[-1] if found else None
