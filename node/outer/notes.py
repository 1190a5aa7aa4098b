"""Notes between leaders of cells, to and from the wire, and the bytes that a leader signs when it
accepts. Pure. A note that does not parse raises WireError."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from node.averaging.strategies.outer import MOST_MEMBERS, MOST_STAGES
from node.core.errors import WireError
from node.core.ids import CellId, PeerId
from node.core.journey import Host
from node.core.numbers import cell_name
from node.dht.topics import outer_topic
from node.identity.keys import SIGNATURE_BYTES, Signer, is_signed
from node.outer.postings import PEER, CellFacts, Hosts, checked_hosts, cut
from protos import cells_pb2 as pb

MAX_STAGES = MOST_STAGES + 1
MAX_PEERS = 8
"""Peers that a cell names for a stage."""
MAX_MADDRS = 4
"""Addresses of each of these peers."""
MAX_HOSTS = 96 << 10
"""Bytes of the hosts of one cell."""
MAX_NOTE = MOST_MEMBERS * MAX_HOSTS + (64 << 10)
"""Bytes of the largest note that is read; gRPC refuses notes that are much larger."""
MAX_WINDOW = 1 << 53


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The statement of ``leader`` that ``cell`` takes part in the group of one caller."""

    cell: CellId
    leader: PeerId
    hosts: Hosts
    signature: bytes


class Accepting:
    """Signs and checks acceptances of one run. ``signer`` signs for this peer."""

    def __init__(self, signer: Signer, run_id: str) -> None:
        self._signer = signer
        self._domain = f"tutti/cells/1/{run_id}"

    def accept(self, about: CellFacts, window: int, key: str, caller: CellId) -> Acceptance:
        """Sign that the cell of ``about``, which this peer leads, takes part in a group of
        ``caller``."""
        said = _said(window, key, caller, about.cell, about.hosts)
        signature = self._signer.sign(said, self._domain)
        return Acceptance(about.cell, self._signer.peer_id, about.hosts, signature)

    def check(self, shown: Acceptance, window: int, key: str, caller: CellId) -> None:
        """Raise WireError unless the leader it names signed it for this window, key and caller."""
        said = _said(window, key, caller, shown.cell, shown.hosts)
        if not is_signed(self._signer, shown.leader, said, shown.signature, self._domain):
            raise WireError(f"an acceptance of cell {shown.cell} whose signature is wrong")


def _said(window: int, key: str, caller: CellId, cell: CellId, hosts: Hosts) -> bytes:
    """The bytes that are signed: JSON, with a hash in place of the hosts."""
    rows = [[s, [[h.peer, h.maddrs] for h in each]] for s, each in sorted(hosts.items())]
    told = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    return json.dumps([window, key, caller, cell, told], separators=(",", ":")).encode()


def fitted(hosts: Hosts) -> Hosts:
    """The hosts, cut step by step to fewer peers and addresses of each stage until they fit a note.
    Every stage that has a peer keeps one."""
    some: Hosts = {}
    for some in cut(hosts, (MAX_PEERS, MAX_MADDRS), (4, 4), (2, 4), (1, 4), (1, 1)):
        if sum(row.ByteSize() for row in _rows(some)) <= MAX_HOSTS:
            break
    return some


def offer_note(window: int, key: str, caller: CellId) -> pb.CellsNote:
    """ "Average with us?\""""
    return pb.CellsNote(window=window, key=key, caller=caller, offer=pb.OfferNote())


def group_note(
    window: int, key: str, caller: CellId, members: Iterable[Acceptance]
) -> pb.CellsNote:
    """ "These are the group.\""""
    named = pb.GroupNote(members=[acceptance_note(a) for a in members])
    return pb.CellsNote(window=window, key=key, caller=caller, named=named)


def release_note(window: int, caller: CellId) -> pb.CellsNote:
    """ "The group is full without you.\""""
    return pb.CellsNote(window=window, caller=caller, released=pb.ReleaseNote())


def acceptance_note(a: Acceptance) -> pb.AcceptanceNote:
    return pb.AcceptanceNote(
        cell=a.cell, leader=a.leader, hosts=_rows(a.hosts), signature=a.signature
    )


def _rows(hosts: Hosts) -> list[pb.StageHosts]:
    return [
        pb.StageHosts(stage=stage, peers=[pb.StageHost(peer=h.peer, maddrs=h.maddrs) for h in each])
        for stage, each in sorted(hosts.items())
    ]


def parse_note(note: pb.CellsNote) -> Mapping[CellId, Acceptance]:
    """Check a leader's note, its size before anything else. Returns the acceptances of the group
    that it names, not verified yet; empty if it names none. Raises WireError."""
    if (size := note.ByteSize()) > MAX_NOTE:
        raise WireError(f"a note of {size} bytes between cells, at most {MAX_NOTE} are read")
    if note.window > MAX_WINDOW:
        raise WireError("the number of a window is above the limit")
    if (say := note.WhichOneof("say")) is None:
        raise WireError("a note between cells that says nothing known")
    cell_name(note.caller)
    if say != "released":
        outer_topic(0, note.key)
    return _members(note.named)


def _members(note: pb.GroupNote) -> Mapping[CellId, Acceptance]:
    if len(note.members) > MOST_MEMBERS:
        raise WireError(f"a group of {len(note.members)} cells, at most {MOST_MEMBERS} are one")
    members = {a.cell: a for a in map(parse_acceptance, note.members)}
    if len(members) != len(note.members):
        raise WireError("a group that names a cell twice")
    return members


def parse_acceptance(note: pb.AcceptanceNote) -> Acceptance:
    """The acceptance in a note; the caller checks the signature. Raises WireError."""
    if not 0 < len(note.signature) <= SIGNATURE_BYTES:
        raise WireError(f"a signature has at most {SIGNATURE_BYTES} bytes")
    if not PEER.fullmatch(note.leader):
        raise WireError("the leader of a cell is no peer")
    cell = cell_name(note.cell)
    leader = PeerId(note.leader)
    return Acceptance(cell, leader, _hosts(note.hosts), note.signature)


def _hosts(rows: Sequence[pb.StageHosts]) -> Hosts:
    if not 1 <= len(rows) <= MAX_STAGES:
        raise WireError(f"hosts of {len(rows)} stages, 1 to {MAX_STAGES} are told")
    if sum(row.ByteSize() for row in rows) > MAX_HOSTS:
        raise WireError(f"the hosts of a cell have at most {MAX_HOSTS} bytes")
    stages = [row.stage for row in rows]
    if sorted(set(stages)) != stages:
        raise WireError("the stages of a cell do not grow")
    told = {
        row.stage: tuple(Host(PeerId(h.peer), tuple(h.maddrs)) for h in row.peers) for row in rows
    }
    return checked_hosts(told, MAX_PEERS, MAX_MADDRS)
