"""The attacks on live daemons, by their numbers."""

from dataclasses import dataclass

OPEN, PRIVATE = (2, 3, 3), (1, 1, 1)
"""Peers of the ends and of each block stage."""
WIDE = {
    "model__d_model": 384,
    "model__d_ff": 1536,
    "training__target_batch": 64,
}
"""A model with parameters that show in the memory of a process."""


@dataclass(frozen=True)
class Ground:
    """A swarm that is attacked: peers of the ends and of each stage, changes of its manifest.

    ``up``: bytes a second that a daemon sends at most. A swarm bounded by its network, as most are,
    leaves the attackers some of the processors: else the scheduler of this machine would decide.
    """

    nodes: tuple[int, ...]
    changes: tuple[tuple[str, object], ...] = ()
    up: str = "250KB"


GROUNDS = {
    "open": Ground(OPEN),
    "wide": Ground(OPEN, tuple(WIDE.items()), "8MB"),
    "private": Ground(PRIVATE, (("swarm__admission", "invite"), ("training__min_replicas", 1))),
}


@dataclass(frozen=True)
class Attack:
    """``number``: as in the table of the rows; ``what``: its name. ``ground``: see
    :data:`GROUNDS`.

    ``run``: "module:function" of this package, by ``keys`` strangers. ``bent``: instead of
    strangers, a member of this kind (:mod:`benchmarks.peers.bent`) at ``stage``. ``bans``: the
    attack cannot be an accident, so that somebody has to be banned.
    """

    number: str
    what: str
    run: str = ""
    keys: int = 20
    ground: str = "open"
    bent: str = ""
    stage: int = 0
    bans: bool = False


ATTACKS = (
    Attack("1", "notes of 4 MiB", "notes:large", keys=8, bans=True),
    Attack("1", "notes within their limits", "notes:within", keys=8),
    Attack("2", "bodies that never end", "calls:endless", keys=8),
    Attack("3", "connections without a token", "connections:silent", keys=2),
    Attack("4", "silent calls of 20 keys", "calls:silent"),
    Attack("10", "records of 512 keys", "records:flood"),
    Attack("11", "reservations and circuits", "relayed:hold"),
    Attack("14", "handshakes again and again", "handshakes:repeat"),
    Attack("15", "heads of 1 MiB", "calls:heads", keys=8, bans=True),
    Attack("8", "a member that never commits", bent="withholds", stage=1),
    Attack("9", "a reader of all snapshots", "readers:pins", keys=4, ground="wide"),
    Attack("7", "shares that nobody names", bent="unnamed", stage=0, ground="wide"),
    Attack("3", "connections to a private run", "connections:silent", keys=2, ground="private"),
)
