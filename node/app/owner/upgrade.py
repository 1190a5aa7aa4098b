"""``tutti upgrade --check``: a comparison of this version with the versions of a package index.
One request, and only when the user asks. Enters: the address of an index. Leaves: versions, and the
commands of an update. Never: an update, or a word to anybody without being asked.

Names in an index are given to whoever comes first, so a package of this name proves nothing. The
index lists the hash of each wheel's metadata (PEP 714). Both are of one project if the hash of this
version there is the hash of the installed metadata.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from node.core.errors import NetworkFault, Refused, UsageFault
from node.core.version import VERSION, installer

INDEX = "https://pypi.org/simple/"
"""Root of the package index, in the form of PEP 503."""
PACKAGE = "tutti"
DEADLINE_S = 8.0
"""Longest time for the whole answer, in seconds."""
MOST_BYTES = 8 << 20
"""Bytes of an answer that are read."""
_ACCEPT = "application/vnd.pypi.simple.v1+json"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NETWORK = "nothing depends on it: check the network, or the proxy in HTTPS_PROXY"
_ELSE = "see the project's changelog, or ask again later"


@dataclass(frozen=True)
class OfferedVersion:
    """The answer of an index. ``newest``: newest version that this Python can run, "" for none;
    ``blocked``: a newer one that it cannot, "" for none; ``proven``: the index has the version that
    is installed here, so it speaks of the same project."""

    here: str
    newest: str
    blocked: str = ""
    proven: bool = False

    @property
    def newer(self) -> bool:
        """The index has a newer version than this one."""
        return bool(self.newest) and Version(self.newest) > Version(self.here)

    def document(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self) | {"newer": self.newer, "update": update_commands(self.proven)}


def check(index: str = "", deadline_s: float = DEADLINE_S) -> OfferedVersion:
    """Ask an index for the versions of this package; without one :data:`INDEX`. Raises UsageFault
    for an address that is not https (http on loopback), NetworkFault if nobody answers in time or
    not as an index does, Refused if the usual index is not proven to have this project."""
    asked = index or INDEX
    url = f"{asked.rstrip('/')}/{PACKAGE}/"
    parts = urlsplit(url)
    loopback = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if not parts.hostname or not (parts.scheme == "https" or loopback):
        raise UsageFault(f"--index {index}", f"write an https address, such as  {INDEX}")
    raw = _fetched(url, deadline_s)
    try:
        document = json.loads(raw)
        files = document["files"]
        name = document["name"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise NetworkFault(f"{url} answers with no list of files", _ELSE) from e
    if name != PACKAGE or not isinstance(files, list):
        raise NetworkFault(f"{url} answers with another list", _ELSE)
    offered = _newest(files)
    if not (index or offered.proven):
        raise Refused(
            f"the package {PACKAGE} at {INDEX} is not known to be this project: the {VERSION} here "
            "was not installed from there",
            f"update it in the way it was installed:  {update_commands()[0]}",
        )
    return offered


def _fetched(url: str, deadline_s: float) -> bytes:
    """The body of an answer. Redirects are not followed: an index has its files where it says."""
    try:
        return asyncio.run(_get(url, deadline_s))
    except TimeoutError as e:
        raise NetworkFault(f"{url} has not answered within {deadline_s:g} s", _NETWORK) from e


async def _get(url: str, deadline_s: float) -> bytes:
    import httpx2

    headers = {"Accept": _ACCEPT, "User-Agent": PACKAGE}
    found = bytearray()
    try:
        async with asyncio.timeout(deadline_s), httpx2.AsyncClient(timeout=deadline_s) as client:
            async with client.stream("GET", url, headers=headers) as answer:
                if answer.status_code == 404:
                    raise NetworkFault(f"{url}: this index does not have {PACKAGE}", _ELSE)
                if answer.status_code != 200:
                    raise NetworkFault(f"{url} answers with status {answer.status_code}", _ELSE)
                async for piece in answer.aiter_bytes():
                    found += piece
                    if len(found) > MOST_BYTES:
                        raise NetworkFault(f"{url} answers with more than {MOST_BYTES} B", _ELSE)
    except TimeoutError:
        raise
    except httpx2.TimeoutException as e:
        raise TimeoutError from e
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as e:
        raise NetworkFault(f"cannot ask {url}: {str(e) or type(e).__name__}", _NETWORK) from e
    return bytes(found)


def _newest(files: list[Any]) -> OfferedVersion:
    """The newest version among files that are not yanked. Files that say nothing sound are left
    out. Prereleases count if this is one."""
    here = Version(VERSION)
    python = Version(".".join(map(str, sys.version_info[:3])))
    fits: list[Version] = []
    blocked: list[Version] = []
    for file in files:
        if not isinstance(file, dict) or file.get("yanked"):
            continue
        version = _version_of(str(file.get("filename", "")))
        if version is None or (version.is_prerelease and not here.is_prerelease):
            continue
        try:
            wanted = SpecifierSet(str(file.get("requires-python") or ""))
        except InvalidSpecifier:
            continue
        if wanted.contains(python, prereleases=True):
            fits.append(version)
        else:
            blocked.append(version)
    newest = max(fits, default=None)
    beyond = [one for one in blocked if one > (newest or here)]
    return OfferedVersion(VERSION, str(newest or ""), str(max(beyond, default="")), _proven(files))


def _proven(files: list[Any]) -> bool:
    """Return True if a wheel of the version here has the metadata that is installed here."""
    mine = _metadata_sha256()
    if not mine:
        return False
    for file in files:
        if isinstance(file, dict) and _version_of(str(file.get("filename"))) == Version(VERSION):
            said = file.get("core-metadata")
            if isinstance(said, dict) and said.get("sha256") == mine:
                return True
    return False


def _metadata_sha256() -> str:
    """Hash of the metadata that is installed here, "" for none."""
    raw = _installed("METADATA")
    return hashlib.sha256(raw).hexdigest() if raw else ""


def _installed(name: str) -> bytes:
    """Content of a file of the installed metadata, b"" for none."""
    with contextlib.suppress(PackageNotFoundError, OSError):
        for file in distribution(PACKAGE).files or ():
            if file.name == name:
                return Path(str(file.locate())).read_bytes()
    return b""


def _version_of(filename: str) -> Version | None:
    """Version in the name of a file, None for a file that is neither a wheel nor an sdist."""
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def update_commands(proven: bool = False) -> list[str]:
    """Commands that update this installation, in the way it was installed. An installation from a
    file is updated from a file; by its name it is only if it came from an index, or if the index is
    ``proven`` to have this project: elsewhere the name is another project's."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        place = shlex.quote(str(root))
        first = f"git -C {place} pull && make -C {place} setup"
    else:
        package = PACKAGE
        if not proven:
            package = _source() or PACKAGE
        first = _replacing(package)
    return [first, "tutti restart"]


def _replacing(package: str) -> str:
    """Command that replaces this installation by ``package``, a name or a file."""
    named = package == PACKAGE
    if "pipx" in Path(sys.prefix).parts:
        return f"pipx upgrade {PACKAGE}" if named else f"pipx install --force {package}"
    if os.path.isfile(os.path.join(sys.prefix, "uv-receipt.toml")):
        return f"uv tool upgrade {PACKAGE}" if named else f"uv tool install --force {package}"
    return f"{installer()} --upgrade {package}"


def _source() -> str:
    """File, directory or address from which this was installed, as a word for a shell; "" if it
    came from an index by its name. A wheel is named without its version, because the newer one has
    another (PEP 610 says what an installer keeps)."""
    try:
        url = str(json.loads(_installed("direct_url.json") or b"{}").get("url", ""))
    except (ValueError, AttributeError):
        return ""
    if url.endswith((".whl", ".tar.gz")):
        return f"./{PACKAGE}-VERSION-py3-none-any.whl"
    parts = urlsplit(url)
    if parts.scheme == "file":
        return shlex.quote(unquote(parts.path))
    return shlex.quote(url) if url else ""


def lines(offered: OfferedVersion | None) -> list[str]:
    """Lines for people. ``offered``: None if no index was asked."""
    said = [f"here     tutti {VERSION}"]
    if offered is not None:
        said.append(f"index    {offered.newest or 'has no version for this Python'}")
        if not offered.proven:
            said.append(
                "         not proven to be of this project: it may be another one's package"
            )
        if offered.blocked:
            said.append(f"         {offered.blocked} needs another Python")
    if offered is not None and not offered.newer:
        said.append("there is nothing newer to install")
        return said
    commands = update_commands(offered is not None and offered.proven)
    said.append(f"update   {commands[0]}")
    said += [f"         {command}" for command in commands[1:]]
    if offered is None:
        said.append("         tutti upgrade --check  asks the package index for the newest version")
    return said
