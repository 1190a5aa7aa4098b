"""What a peer says about itself in the directory: compact JSON, checked field by field when it
comes from outside; and what the rest of the daemon needs from the directory."""

import contextlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from node.core.errors import WireError
from node.core.ids import PeerId, is_cell
from node.core.version import Protocols
from node.dht.topics import PEERS
from node.identity.admission import MAX_ADMISSION
from node.identity.keys import public_key_of

MAX_BODY = 2048
"""Bytes of a packed body."""
MAX_MADDRS = 16
MAX_MADDR = 256
MAX_RELAYS = 4
MAX_PAUSED = 48
"""Characters of the reason of a pause."""
_WORD = re.compile(r"[a-z][a-z-]{0,15}")
_MADDR = re.compile(r"/[!-~]+")


_LENGTH = struct.Struct(">H")


def wrap(admission: bytes, packed: bytes) -> bytes:
    """What is sealed into a record: the writer's admission token with its length (u16, big endian),
    then the packed body.

    No body is a withdrawal. Raises WireError for a token that others would refuse unseen.
    """
    if len(admission) > MAX_ADMISSION:
        raise WireError(f"an admission token of {len(admission)} bytes is too long")
    return _LENGTH.pack(len(admission)) + admission + packed


def unwrap(sealed: bytes) -> tuple[bytes, bytes]:
    """The inverse of :func:`wrap`. Raises WireError."""
    if len(sealed) < _LENGTH.size:
        raise WireError("a record without room for an admission token")
    length = _LENGTH.unpack_from(sealed)[0]
    body = _LENGTH.size + length
    if length > MAX_ADMISSION or body > len(sealed):
        raise WireError("a record that ends inside its admission token")
    return sealed[_LENGTH.size : body], sealed[body:]


_ADDED: dict[str, Any] = {
    "reach": "unknown",
    "relays": [],
    "room": 0,
    "rate": 0.0,
    "follows": "",
    "protocols": [1, 1],
    "cell": "",
    "paused": "",
}
"""Fields that older software does not write."""


@dataclass(frozen=True, slots=True)
class PeerBody:
    """One peer's account of itself.

    ``stage`` is 0 for the ends and 1..S for block stages; ``role`` is "ends", "stage" or
    "rendezvous"; ``state`` one lower-case word such as "joining", "ready", "training", "draining".
    ``epoch`` is the version of the parameters it holds, ``tokens_per_s`` and ``speed``
    (micro-batches per second) are its own claims, ``maddrs`` the libp2p addresses to dial it at,
    best first, ``started`` the Unix time its daemon started, ``leads`` whether it leads the epochs,
    ``follows`` whose plan it follows (empty: nobody's yet). ``reach`` is "open" when other peers
    have dialled it, "closed" when they tried and could not, "unknown" before; ``relays`` are peers
    it can be reached through, ``room`` is for how many more peers it would relay, ``rate`` the
    bytes a second that one more of them could have (0: no limit), ``protocols`` the oldest and the
    newest protocol version it speaks.

    While ``state`` is "choosing" it has no stage, and ``role`` may be "auto". ``open_to``: which
    other stages it would host, "auto" for any, "stage" for block stages, "" for none. Not
    ``settled``: it has claimed its stage a moment ago and may give way to others who did. ``cell``:
    the cell it belongs to; empty in a run of one cell, and of a peer that belongs to none.
    ``paused``: why it holds no stage for now, in a few words; empty for a peer that is not paused.
    Its ``state`` is "paused" and its ``role`` "rendezvous" then.
    """

    stage: int
    role: str
    state: str
    epoch: int
    name: str
    version: str
    tokens_per_s: float = 0.0
    speed: float = 0.0
    maddrs: tuple[str, ...] = field(default=())
    started: float = 0.0
    leads: bool = False
    reach: str = "unknown"
    relays: tuple[str, ...] = ()
    room: int = 0
    rate: float = 0.0
    open_to: str = ""
    settled: bool = True
    follows: str = ""
    protocols: tuple[int, int] = (1, 1)
    cell: str = ""
    paused: str = ""

    def pack(self) -> bytes:
        """At most ``MAX_BODY`` bytes of JSON, with as many addresses as fit.

        Raises WireError when other peers would refuse what is left.
        """
        body = replace(self, maddrs=tuple(self.maddrs[:MAX_MADDRS]))
        while True:
            raw = json.dumps(asdict(body), separators=(",", ":"), ensure_ascii=False).encode(
                "utf-8", "replace"
            )
            if len(raw) <= MAX_BODY or not body.maddrs:
                break
            body = replace(body, maddrs=body.maddrs[:-1])
        PeerBody.parse(raw)
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> "PeerBody":
        """The inverse of :meth:`pack`. Raises WireError for anything that is not a whole and
        plausible body."""
        body = {**_ADDED, **json_object(raw, MAX_BODY, "a peer's record")}
        return cls(
            stage=_natural(body, "stage", 2**16),
            role=_word(body, "role"),
            state=_word(body, "state"),
            epoch=_natural(body, "epoch", 2**53),
            name=_label(body, "name", 64),
            version=_label(body, "version", 32),
            tokens_per_s=_amount(body, "tokens_per_s"),
            speed=_amount(body, "speed"),
            maddrs=parse_maddrs(body.get("maddrs"), MAX_MADDRS),
            started=_amount(body, "started"),
            leads=body.get("leads") is True,
            reach=_word(body, "reach"),
            relays=_peers(body),
            room=_natural(body, "room", 2**16),
            rate=_amount(body, "rate"),
            open_to=body["open_to"] if body.get("open_to") in ("auto", "stage") else "",
            settled=body.get("settled") is not False,
            follows=_peer(body, "follows") if body["follows"] else "",
            protocols=_window(body),
            cell=_field(body, "cell", lambda v: isinstance(v, str) and is_cell(v), "a cell"),
            paused=_label(body, "paused", MAX_PAUSED),
        )


B = TypeVar("B", PeerBody, bytes)


@dataclass(frozen=True, slots=True)
class DirectoryEntry(Generic[B]):
    """A verified record: ``body`` was signed by ``peer`` and holds until ``not_after`` (Unix
    seconds, its clock)."""

    peer: PeerId
    body: B
    seq: int
    not_after: float

    @property
    def refreshed(self) -> float:
        """When its writer signed it, Unix seconds by the writer's clock: sequence numbers are
        milliseconds."""
        return self.seq / 1000.0


PeerEntry = DirectoryEntry[PeerBody]
Posting = DirectoryEntry[bytes]
"""What a peer posted under a topic."""


class DirectoryPort(Protocol):
    """Post the own record, read everybody's. No call raises for a network that is down: the board
    is what was heard."""

    async def publish(self, body: PeerBody, times: float = 1.0, topic: str = PEERS) -> bool:
        """Post ``body`` and keep it posted until :meth:`withdraw`, ``times`` as rarely as the
        settings say; it lives so many times as long. ``topic``: ``peers`` or that of a cell; what
        was published under another one is withdrawn. False: no storage took it this time."""
        ...

    @property
    def neighbours(self) -> int:
        """Peers this node can ask; another number means that somebody has come or gone."""
        ...

    async def withdraw(self) -> None:
        """Take the own record down; others stop seeing it with their next reading."""
        ...

    async def read(self, topic: str = PEERS) -> dict[PeerId, PeerEntry]:
        """The verified, unexpired record of everybody who published under ``topic`` in PeerId
        order, the own one included."""
        ...

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        """Post ``body``, 1 to 2,048 bytes, under a topic (:mod:`node.dht.topics`) for ``life_s``
        seconds; it is not posted again. False: no storage took it this time. Raises WireError for
        what others would refuse."""
        ...

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        """Everybody's verified, unexpired posting under a topic in PeerId order, the own one
        included. Raises WireError for what is no topic."""
        ...

    async def close(self) -> None:
        """Stop refreshing. Does not withdraw: a record left behind expires by itself."""
        ...


def peers_among(postings: Mapping[PeerId, Posting]) -> dict[PeerId, PeerEntry]:
    """Of what is posted under the topic of a cell, the records of peers; the rest is dropped."""
    found: dict[PeerId, PeerEntry] = {}
    for peer, p in postings.items():
        with contextlib.suppress(WireError):
            found[peer] = DirectoryEntry(peer, PeerBody.parse(p.body), p.seq, p.not_after)
    return found


def json_object(raw: bytes, most: int, what: str) -> dict[str, Any]:
    """The JSON object of at most ``most`` bytes that ``what`` is. Raises WireError."""
    if len(raw) > most:
        raise WireError(f"{what} has at most {most} bytes, not {len(raw)}")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise WireError(f"{what} is not JSON") from e
    if not isinstance(body, dict):
        raise WireError(f"{what} is not an object")
    return body


def _field(body: dict[str, Any], name: str, good: Callable[[Any], bool], what: str) -> Any:
    """The value of a field. Raises WireError, which says that it is not ``what``."""
    value = body.get(name)
    if not good(value):
        raise WireError(f"{name} in a peer's record is not {what}")
    return value


def _natural(body: dict[str, Any], name: str, below: int) -> int:
    what = f"a number from 0 to {below - 1}"
    return _field(body, name, lambda v: type(v) is int and 0 <= v < below, what)


def _amount(body: dict[str, Any], name: str) -> float:
    what = "a finite number that is not negative"
    # false for NaN as well
    return float(_field(body, name, lambda v: type(v) in (int, float) and 0 <= v < 1e15, what))


def _word(body: dict[str, Any], name: str) -> str:
    return _field(body, name, lambda v: isinstance(v, str) and bool(_WORD.fullmatch(v)), "a word")


def _label(body: dict[str, Any], name: str, longest: int) -> str:
    # Printable only: these end up on terminals, where a control character could rewrite the screen.
    return _field(
        body, name, lambda v: _short(v, longest) and v.isprintable(), "a short printable text"
    )


def _peer(body: dict[str, Any], name: str) -> str:
    value = _field(body, name, lambda v: _short(v, 64), "a peer")
    public_key_of(value)
    return value


def _window(body: dict[str, Any]) -> tuple[int, int]:
    value = _field(
        body,
        "protocols",
        lambda v: isinstance(v, list) and len(v) == 2 and all(type(n) is int for n in v),
        "a pair of numbers",
    )
    found = Protocols.said(*value)
    return found.oldest, found.newest


def _peers(body: dict[str, Any]) -> tuple[str, ...]:
    value = _field(
        body,
        "relays",
        lambda v: _listed(v, MAX_RELAYS) and all(_short(p, 64) for p in v),
        f"a list of at most {MAX_RELAYS} peers",
    )
    for peer in value:
        public_key_of(peer)
    return tuple(value)


def parse_maddrs(value: Any, most: int) -> tuple[str, ...]:
    """Up to ``most`` multiaddrs as others write them. Raises WireError."""
    if not _listed(value, most):
        raise WireError(f"maddrs in a peer's record is not a list of at most {most}")
    if not all(_short(v, MAX_MADDR) and _MADDR.fullmatch(v) for v in value):
        raise WireError("an address in a peer's record is not a multiaddr")
    return tuple(value)


def _short(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _listed(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most
