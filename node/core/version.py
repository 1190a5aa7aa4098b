"""Which tutti this is, and which versions of the protocol it speaks."""

from dataclasses import dataclass

from node.core.errors import WireError

VERSION = "0.2.0"
"""Of the software; pyproject.toml says the same."""
OLDEST_PROTOCOL, PROTOCOL = 7, 7
"""Of what peers say to each other: the oldest and the newest version spoken here. In version 7 a
digest is a tree of BLAKE3 hashes, of which a piece of each MiB is fetched by itself; peers show
certificates to who asks for them, and proofs that somebody has voted twice; activations say where
documents end, in runs that keep them apart."""
_COMMANDS = "git pull && make setup  in its checkout, then  tutti drain; tutti start"
UPDATE = f"update this tutti:  {_COMMANDS}"
"""What helps who meets something newer."""
_UPDATE_THERE = f"whoever runs that one must update it:  {_COMMANDS}"


@dataclass(frozen=True, slots=True)
class Protocols:
    """The protocol versions that a peer speaks: ``oldest``, ``newest`` and all between."""

    oldest: int
    newest: int

    @classmethod
    def said(cls, oldest: int, newest: int) -> "Protocols":
        """What a peer said of itself. Software without windows says its one version, or, where it
        has no field for it, nothing: then it is version 1. Raises WireError for nonsense."""
        found = cls(oldest or 1, newest or oldest or 1)
        if not 1 <= found.oldest <= found.newest < 1 << 16:
            raise WireError(f"no window of protocol versions: {oldest} to {newest}")
        return found

    def common(self, other: "Protocols") -> int:
        """The newest version that both speak, 0 for none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else 0

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"protocol {self.newest}"
        return f"protocols {self.oldest} to {self.newest}"

    def advice(self, other: "Protocols") -> str:
        """What helps the operator of this one, when ``other`` has no version in common with it."""
        return UPDATE if other.oldest > self.newest else _UPDATE_THERE


PROTOCOLS = Protocols(OLDEST_PROTOCOL, PROTOCOL)
"""What this tutti speaks."""
