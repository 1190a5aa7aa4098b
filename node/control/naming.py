"""Names that an operator may give for a peer. Pure."""

from collections.abc import Mapping

from node.control.words import clean
from node.core.errors import UsageFault, WireError
from node.core.ids import PeerId
from node.identity.keys import public_key_of

LEAST = 4
"""Letters of a PeerId that are enough to name a peer; its short id has 6."""
SHOWN = 6


def resolve(text: str, known: Mapping[PeerId, str]) -> PeerId:
    """The peer that ``text`` names: by its PeerId, by its name, or by the last letters of its
    PeerId. ``known``: the name of each peer in sight; a whole PeerId may be another's.

    Raises UsageFault for a text that names no peer, or more than one.
    """
    if _is_peer_id(text):
        return PeerId(text)
    named = [peer for peer, name in known.items() if name == text]
    ending = [peer for peer in known if len(text) >= LEAST and peer.endswith(text)]
    found = named or ending
    if len(found) == 1:
        return found[0]
    if found:
        listed = "".join(f"\n  {peer}  {clean(known[peer], 40)}" for peer in found[:SHOWN])
        raise UsageFault(f"{len(found)} peers are called {text!r}", f"give one PeerId:{listed}")
    raise UsageFault(
        f"no peer in sight is called {clean(text, 80)!r}",
        f"give a name, or at least the last {LEAST} letters of a PeerId:  tutti peers -a -v\n"
        "shows them, and  tutti id show  on that machine",
    )


def called(peer: PeerId, known: Mapping[PeerId, str]) -> str:
    """A peer for a person who named it: its name, if it has one here, and the whole PeerId."""
    name = clean(known.get(peer, ""), 40)
    if name:
        return f"{name} ({peer})"
    return peer


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(text)
    except WireError:
        return False
    return True
