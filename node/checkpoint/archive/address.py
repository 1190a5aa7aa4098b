"""The address of an archive. Enters: the operator's text. Leaves: a file system of fsspec, and
the address without its secrets. Never: a secret in a message."""

import re
from pathlib import Path
from typing import Any

from node.core.errors import UsageFault

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_USER = re.compile(r"(?<=://)[^/\s'\"]*@")
_REST = re.compile(r"[?#][^\s'\"]*")
SAID = 300
"""Characters of an error of a file system that are shown."""


class Address:
    """A place for checkpoints: ``/mnt/backup``, ``~/backup``, ``s3://bucket/run``. ``shown`` is the
    address without user, password, query and fragment, for people and logs. Raises UsageFault for
    a text that is no such place."""

    def __init__(self, text: str) -> None:
        self._text = text
        found = _URL.fullmatch(text)
        if "::" in text:
            raise UsageFault(
                "an address of several file systems in a chain (a::b) cannot hold checkpoints",
                "name one place, such as  s3://bucket/run  or  /mnt/backup",
            )
        if found is None and not text.startswith(("/", "~")):
            raise UsageFault(
                "checkpoints go to a whole path or to an address",
                "write such as  /mnt/backup  or  s3://bucket/run",
            )
        self.scheme = ""
        if found is not None:
            self.scheme = found[1].lower()
        self.shown = masked(text)
        self._secrets = _secrets_of(text)

    @property
    def has_secrets(self) -> bool:
        """True if the text holds a user, a password, a query or a fragment."""
        return self.shown != self._text

    def clean(self, error: object) -> str:
        """The text of an error without this address's secrets, on one line."""
        text = " ".join(str(error).split()).replace(self._text, self.shown)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return masked(text)[:SAID]

    def check(self) -> None:
        """Look for the package that reads and writes such addresses, and call nobody. Raises
        UsageFault for a scheme that nobody knows, and for one whose package is not installed, which
        it names."""
        # Loading fsspec takes as long as a command may take to start.
        from fsspec import get_filesystem_class

        try:
            get_filesystem_class(self.scheme or "file")
        except ImportError as e:
            package = _package_of(self.scheme)
            raise UsageFault(
                f"{self.scheme}:// needs a package that is not installed: {self.clean(e)}",
                f"pip install {package}",
            ) from None
        except ValueError as e:
            raise UsageFault(
                f"{self.shown} cannot hold checkpoints: {self.clean(e)}",
                "name a directory, or an address that fsspec knows (s3, gs, abfs, sftp, ...)",
            ) from None

    def open(self) -> tuple[Any, str]:
        """The file system (:class:`fsspec.AbstractFileSystem`) and the path in it. Blocks: some
        call the other machine. Raises as :meth:`check`, and whatever the package raises."""
        from fsspec.core import url_to_fs

        self.check()
        place = self._text
        if not self.scheme:
            place = str(Path(self._text).expanduser())
        files, path = url_to_fs(place)
        return files, str(path).rstrip("/")


def masked(text: str) -> str:
    """A text whose addresses have neither user nor query: "s3://***@host/run?***"."""
    if "://" not in text:
        return text
    return _REST.sub(lambda m: f"{m[0][0]}***", _USER.sub("***@", text))


def _secrets_of(text: str) -> list[str]:
    """Parts of an address that no message may hold, the longest first."""
    found: list[str] = []
    for user in _USER.findall(text):
        found.append(user)
        found += [part for part in user.rstrip("@").split(":") if len(part) > 2]
    for rest in _REST.findall(text):
        found.append(rest)
        found += [value for value in re.split(r"[?#&=]", rest) if len(value) > 5]
    return sorted(found, key=len, reverse=True)


def _package_of(scheme: str) -> str:
    """The name of the package that a file system of fsspec is in, as pip knows it."""
    from fsspec.registry import known_implementations

    about = known_implementations.get(scheme, {})
    module = str(about.get("class", "")).partition(".")[0]
    if module and module != "fsspec":
        return module
    needed = re.findall(r'"([\w-]+)"', str(about.get("err", "")))
    return " ".join(needed) or f"what fsspec needs for {scheme}://"
