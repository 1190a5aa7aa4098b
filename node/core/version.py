"""Version of this tutti, the versions of the protocol that it speaks, and commands by which this
installation is updated or extended."""

import importlib.util
import shlex
import sys
from dataclasses import dataclass

from node.core.errors import WireError

VERSION = "0.2.0"
"""Version of the software; pyproject.toml says the same."""
OLDEST_PROTOCOL = 7
"""Oldest version of the peers' protocol that this tutti speaks."""
PROTOCOL = 11
"""Newest version of the peers' protocol that this tutti speaks. In version 7 a digest is a tree of
BLAKE3 hashes, and each MiB of the content is fetched and checked by itself; peers show certificates
to peers that ask for them, and proofs that somebody has voted twice; activations say where
documents end, in runs that keep them apart. In version 8 activations may travel in int8 and int4,
and plans may say in which format, in runs whose manifest says so. In version 9 peers open TCP
connections past libp2p. In version 10 peers of one machine share memory. In version 11 a new leader
takes over the epoch under way."""
WIRES_SINCE = 8
"""Version from which on peers know int8 and int4 between stages, and formats of links in plans."""
BYPASS_SINCE = 9
"""Version from which on peers open TCP connections past libp2p."""
SHARED_SINCE = 10
"""Version from which on peers of one machine share memory."""
_COMMANDS = "tutti upgrade  prints the commands"
UPDATE = f"update this tutti:  {_COMMANDS}"
"""Advice to an operator whose software is older than a peer's."""
_UPDATE_THERE = f"whoever runs that one must update it:  {_COMMANDS}"


@dataclass(frozen=True, slots=True)
class Protocols:
    """The protocol versions that a peer speaks: ``oldest``, ``newest`` and all between."""

    oldest: int
    newest: int

    @classmethod
    def said(cls, oldest: int, newest: int) -> "Protocols":
        """Protocols that a peer reports. Software without windows reports its one version.
        Software without a field for it reports nothing, and counts as version 1. Raises WireError
        for nonsense."""
        found = cls(oldest or 1, newest or oldest or 1)
        if not 1 <= found.oldest <= found.newest < 1 << 16:
            raise WireError(f"no window of protocol versions: {oldest} to {newest}")
        return found

    def common(self, other: "Protocols") -> int:
        """The newest version that both speak, 0 for none."""
        newest = min(self.newest, other.newest)
        if newest < max(self.oldest, other.oldest):
            return 0
        return newest

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"protocol {self.newest}"
        return f"protocols {self.oldest} to {self.newest}"

    def advice(self, other: "Protocols") -> str:
        """Advice to the operator of this one, when ``other`` has no version in common with it."""
        return UPDATE if other.oldest > self.newest else _UPDATE_THERE


PROTOCOLS = Protocols(OLDEST_PROTOCOL, PROTOCOL)
"""Versions that this tutti speaks."""


def installer() -> str:
    """Beginning of a command that installs packages into the environment of this Python: pip, or uv
    where the environment has no pip."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def extra_command(extra: str) -> str:
    """Command that adds an optional part of tutti, such as ``data``, to this installation. It names
    this Python: in another environment the name ``tutti`` would mean another project's package."""
    return f"{installer()} 'tutti[{extra}]'"
