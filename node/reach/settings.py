"""Settings of this peer's reachability: measures so that others can reach it, and its help for
peers that nobody can dial."""

from dataclasses import dataclass

from node.core.tables import rate_setting, setting


@dataclass(frozen=True)
class ReachSettings:
    """Measures of this peer. A peer that listens on loopback takes none of them."""

    map_ports: bool = setting(True, "Ask the router to map this peer's ports (PCP, NAT-PMP, UPnP).")
    lan: bool = setting(
        True, "Announce an open run on the LAN by mDNS, and look for peers of the run there."
    )
    punch: bool = setting(
        True, "Try TCP hole punching with peers that are reached through a relay."
    )
    relayed: bool = setting(True, "Let other peers relay to this one while nobody can dial it.")
    relay: bool = setting(True, "Relay for others while everybody can dial this peer.")
    relay_rate: float = rate_setting(
        "Most bytes a second relayed for all others together, each byte counted once, on its way "
        "in; 0: no limit."
    )
    relay_clients: int = setting(
        64,
        "Strangers that may be reached through this one at a time. The same number of members of "
        "the run and peers that this one has worked with may be reached beside them.",
        least=0,
        most=10000,
    )
    relay_circuits: int = setting(
        256,
        "Relayed connections at a time that strangers opened. The others may open the same number.",
        least=0,
        most=100000,
    )
    relay_circuits_each: int = setting(
        16, "Relayed connections at a time that one peer may open.", least=1, most=10000
    )
