"""Packages that a daemon loads beside torch and numpy, and their wheels for a machine without a
package index.

Enters: the versions of constraints.txt, the digests of hashes.txt. Leaves: a folder of wheels, of
one version each. Never: a compiler: a package without a wheel is plain Python.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT
from node.core.errors import LocalFault, UsageFault

MODULES = {
    "anyio": "anyio",
    "base58": "base58",
    "blake3": "blake3",
    "certifi": "certifi",
    "cffi": "_cffi_backend",
    "click": "click",
    "cryptography": "cryptography.hazmat.primitives.asymmetric.ed25519",
    "grpcio": "grpc.aio",
    "h11": "h11",
    "hivemind": "node.core.bare",
    "httpcore2": "httpcore2",
    "httpx2": "httpx2",
    "idna": "idna",
    "ifaddr": "ifaddr",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "miniupnpc": "miniupnpc",
    "mmh3": "mmh3",
    "msgpack": "msgpack",
    "netaddr": "netaddr",
    "packaging": "packaging.requirements",
    "prometheus_client": "prometheus_client",
    "protobuf": "google.protobuf.message",
    "psutil": "psutil",
    "py-multihash": "multihash",
    "Pygments": "pygments",
    "rich": "rich.console",
    "safetensors": "safetensors.torch",
    "sortedcontainers": "sortedcontainers",
    "tokenizers": "tokenizers",
    "tomlkit": "tomlkit",
    "truststore": "truststore",
    "typing_extensions": "typing_extensions",
    "uvloop": "uvloop",
    "varint": "varint",
    "zeroconf": "zeroconf.asyncio",
}
"""Package to the module of it that a daemon imports."""
THERE = ("torch", "numpy")
"""Packages that are not carried: too large, and made for the machine."""
PYTHON = "3.12"
GLIBC = (5, 12, 17, 24, 27, 28, 31, 34)
"""Minor numbers of glibc 2 in the tags of wheels. pip compares them for equality."""
OLD = (1, 2010, 2014)
"""Older names for some of these tags."""
SOURCE = ("varint",)
"""Packages without a wheel on the index. They are plain Python, so a wheel built here fits."""
ENDINGS = ("x86_64.whl", "-any.whl")
MOST = 60 << 20
"""Limit of the sum of all wheels, in bytes."""


def pins(names: tuple[str, ...] = tuple(MODULES)) -> dict[str, str]:
    """The version of each package, as constraints.txt has it. Raises UsageFault for a package that
    is not in it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    known = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    if missing := [name for name in names if name not in known]:
        raise UsageFault(f"constraints.txt has no {missing[0]}", "name what it has")
    return {name: known[name] for name in names}


def digests(names: tuple[str, ...]) -> str:
    """Requirements file with the versions of these packages and the digests of their files, as
    hashes.txt has them. Raises UsageFault for a package that is not in it."""
    entries = re.findall(r"^[^#].*(?:\n +--hash=.*)+\n", (ROOT / "hashes.txt").read_text(), re.M)
    known = {_canonical(entry.partition("==")[0]): entry for entry in entries}
    if missing := [name for name in names if _canonical(name) not in known]:
        raise UsageFault(f"hashes.txt has no {missing[0]}", "run  make hashes")
    return "".join(known[_canonical(name)] for name in names)


def fetch(folder: Path, python: str = PYTHON) -> list[Path]:
    """Download the wheels for Linux on x86-64 into ``folder`` and return them, largest first. A
    package in ``SOURCE`` is built. Raises LocalFault where a package has no such wheel, where a
    file is not one of hashes.txt, and where the folder has other files."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = tuple(name for name in MODULES if name not in SOURCE)
    platforms = [word for n in GLIBC for word in ("--platform", f"manylinux_2_{n}_x86_64")]
    platforms += [word for n in OLD for word in ("--platform", f"manylinux{n}_x86_64")]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    _pip(["download", *target, *platforms, "--dest", str(folder)], wheels)
    _pip(["wheel", "--no-build-isolation", "--wheel-dir", str(folder)], SOURCE)
    found = sorted(folder.iterdir(), key=lambda path: -path.stat().st_size)
    here = {_canonical(path.name.partition("-")[0]) for path in found}
    others = here ^ {_canonical(name) for name in MODULES}
    if others or len(found) != len(MODULES):
        what = ", ".join(sorted(others)) or "two versions of a package"
        raise LocalFault(f"{folder} has files of another list: {what}", "name an empty folder")
    if unfit := [path.name for path in found if not path.name.endswith(ENDINGS)]:
        raise LocalFault(f"{unfit[0]} is for another machine", "take its name from SOURCE")
    return found


def _pip(words: list[str], names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", words[0], "--quiet", "--no-deps", *words[1:]]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(digests(names))
        wanted.flush()
        command += ["--require-hashes", "-r", wanted.name]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["pip failed"]
        raise LocalFault(f"the wheels cannot be had: {said[-1]}", "see what pip says of it")


def listed(wheels: list[Path]) -> str:
    """A line for each wheel and one for all, sizes in MiB."""
    sizes = [(path.stat().st_size, path.name) for path in wheels]
    total = sum(size for size, _ in sizes)
    lines = [f"{size / 2**20:8.2f}  {name}" for size, name in sizes]
    return "\n".join([*lines, f"{total / 2**20:8.2f}  MiB, {len(sizes)} wheels"])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
