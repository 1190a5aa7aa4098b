"""One command of uv and one of pipx, each into a place of its own."""

from pathlib import Path

from benchmarks.installed import setting
from benchmarks.installed.setting import ITEM, Done, folder, links, ran, release, wheel
from benchmarks.report import Report


def rows(report: Report, root: Path) -> None:
    """Install by each tool, and ask the installed command for its version and its update."""
    pins = release()
    extra = ("--constraints", pins / "constraints.txt", "--overrides", pins / "overrides.txt")
    uv = {
        "UV_TOOL_DIR": str(root / "uv"),
        "UV_TOOL_BIN_DIR": str(root / "uv-bin"),
        "UV_CACHE_DIR": str(folder() / "uv-cache"),
    }
    command = [setting.tools() / "uv", "tool", "install", "--no-config"]
    command += ["--python", setting.base_python(), *links(), *extra, wheel()]
    done = ran(command, root, uv)
    _row(report, "uv tool install", done, root / "uv-bin/tutti", "uv tool install --force ./")
    compiler = "fastecdsa 2.3.2 is compiled: needs gcc and GMP's headers"
    plain = {"PIPX_HOME": str(root / "pipx"), "PIPX_BIN_DIR": str(root / "pipx-bin")}
    done = ran([setting.tools() / "pipx", "install", wheel()], root, plain)
    _row(report, "pipx install", done, root / "pipx-bin/tutti", "pipx install --force ./", compiler)


def _row(report: Report, name: str, done: Done, program: Path, update: str, note: str = "") -> None:
    """The seconds; it holds if the program starts and names the tool for its update."""
    if done.code:
        report.add(f"{ITEM} tools: {name}", done.err[-300:], "", note, "installed", holds=False)
        return
    version = ran([program, "--version"], program.parent)
    advice = ran([program, "upgrade"], program.parent)
    fine = not version.code and update in advice.out
    said = f"{version.out.partition(chr(10))[0]}; {note}".rstrip("; ")
    report.add(f"{ITEM} tools: {name}", round(done.seconds, 1), "s", said, update, fine)
