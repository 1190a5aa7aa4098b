"""The frozen values that cross packages: version, hop, path, member, plan. No library."""

import gc
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from node.core.errors import WireError
from node.core.ids import CELL_DIGITS, ENDS, NO_CELL, CellId, PeerId, is_cell
from node.core.numbers import cell_name, few, peer_name, short_text, whole
from node.core.samples import WHOLE, Cursor, parse_cursor, rows


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Parameters after ``epoch`` updates, and the history that led to them: two sides of a
    partitioned network make different versions of the same epoch.

    ``lineage`` is :func:`lineage_after` of the plan that made it, "" for the parameters a run
    begins with.
    """

    epoch: int
    lineage: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """One (stage, peer) of a path."""

    stage: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Path:
    """Route of one micro-batch.

    ``index`` is its number inside the epoch, ``origin`` the ends peer that starts it and computes
    its loss, ``samples`` the ids of the sequences it is made of, ``hops`` the block stages in
    visiting order. The full journey is ``origin → hops… → origin`` and back along the same hops.
    """

    index: int
    origin: PeerId
    samples: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def journey(self) -> tuple[Hop, ...]:
        """Every visit of the forward way, the origin's two included."""
        end = Hop(ENDS, self.origin)
        return (end, *self.hops, end)


@dataclass(frozen=True, slots=True)
class PlanMember:
    """A peer as a plan lists it.

    ``speed``: micro-batches per second its stage can do, quantised by the leader, 0 for unknown.
    ``current``: holds the parameters of the plan's base; a member that does not is a *listener*: it
    gets no micro-batch and owns nothing this epoch, but gathers every fresh part and is current
    afterwards.
    """

    peer: PeerId
    stage: int
    speed: float = 0.0
    current: bool = True


@dataclass(frozen=True, slots=True)
class Host:
    """A peer of another cell, and the multiaddrs to dial it at."""

    peer: PeerId
    maddrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partner:
    """A cell that another one averages with in one window: its leader, and the hosts of each
    stage."""

    cell: CellId
    leader: PeerId
    hosts: Mapping[int, tuple[Host, ...]]


@dataclass(frozen=True)
class Window:
    """The part of a plan about the rounds with other cells, where every cell has its own leader.

    ``number``: 0, or the window in which the cell gives the parameters that this plan starts from;
    ``partners``: then the other cells of its group; ``within_s``: seconds to wait for their
    parameters. ``means``: in an outer round (``outer`` is the window), the digest of the mean that
    the members put in place, by stage; a stage that is missing keeps its parameters. ``copies``:
    the cell gives nothing, because it lacks its partners' anchor; it takes the mean that they make.
    """

    number: int = 0
    partners: tuple[Partner, ...] = ()
    within_s: float = 0.0
    means: Mapping[int, str] = field(default_factory=dict)
    copies: bool = False


NO_WINDOW = Window()
_NO_SUMS: tuple[None, dict[str, Any]] = (None, {})
"""A field of every plan of a cell, which a strategy used that is no more. The hash of a plan, and
with it every lineage, covers it."""

MOST_PEERS = 2048
"""Peers that a plan names at most: twice the members of the largest cell that a directory shows."""
MOST_PARTS = 1 << 16
"""Parts that a plan names at most: the parameters of a model of 4,096 layers."""
MOST_PATHS = 1 << 18
"""Paths that a plan names at most: more than fit into 4 MiB."""
MOST_STAGES_TOLD = 4097
"""Stages that a plan names at most."""
MOST_PARTNERS = 64
"""Most partners in a window."""
MOST_HOSTS = 16
"""Most hosts of a stage, and most addresses of a host."""
MOST_LISTS = 3 * MOST_PATHS
"""Lists and objects in the JSON of a plan: a path has four and takes some 30 bytes. An empty list
takes 56 bytes in memory."""
MOST_LINKS = 1 << 14
"""Links whose format a plan names at most."""
MOST_WIRE = 8
"""Characters of the name of a format."""
MOST_CHANGE = 4096
"""Characters of the owner's change."""
ENTRIES = {
    "peers": MOST_PEERS,
    "members": MOST_PEERS,
    "owners": MOST_PARTS,
    "moved": MOST_PARTS,
    "stood": MOST_STAGES_TOLD,
}
"""The most entries of fields of a plan."""


@dataclass(frozen=True)
class Electorate:
    """The peers that vote on the version that a plan makes. ``voters``: voters of this plan, in the
    order in which they take over the lead; of two exact halves the one with the first voter
    decides. ``elders``: the voters of the plan before; a majority of them is needed too.
    ``orphan``: too few voters were left, and the others went on without a majority; a majority of
    ``elders`` ends that."""

    voters: tuple[PeerId, ...] = ()
    elders: tuple[PeerId, ...] = ()
    orphan: bool = False


NOBODY = Electorate()


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector rest: documents of JSON have no cycles, and looking for some in a
    plan of 4 MiB takes five times as long as reading it, with everything else standing still."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Losses:
    """A training loss and a held-out loss of the same parameters, nats per token; 0: not known."""

    training: float = 0.0
    held_out: float = 0.0

    @property
    def known(self) -> bool:
        """True if one of the two is known."""
        return self.training > 0 or self.held_out > 0

    @classmethod
    def parse(cls, row: Any) -> "Losses":
        """The inverse of :meth:`row`. Raises TypeError or ValueError for anything else."""
        training, held_out = row
        return cls(_finite(training), _finite(held_out))

    def row(self) -> list[float]:
        """Both as JSON."""
        return [self.training, self.held_out]


UNKNOWN = Losses()
WORSE = 1.002
"""Factor on the held-out loss before training from which on a loss counts as worse. Smaller
differences may come from another order of additions."""


def is_worse(held_out: float, reference: Losses, epoch: int, warmup: int) -> bool:
    """True if training has made the model worse: its held-out loss after the warm-up is above that
    before the first step, where both are known."""
    return epoch >= max(1, warmup) and held_out > WORSE * reference.held_out > 0


@dataclass(frozen=True)
class Plan:
    """The leader's decision for one epoch: members, paths and owners; named by ``(epoch, term)``
    and its hash. Its *base* is the version of the parameters that it starts from.

    ``epoch``, ``lineage``   the base; committing the plan makes a version of ``epoch + 1``
    ``owners``      for every parameter of every stage the peer that reduces and steps it
    ``moved``       for parts with another owner than before, the peer that has their state
    ``digests``     of the base, by stage
    ``cursor``      the sampler before this epoch takes its samples, over the cell's positions
    ``tokens``      counted in the whole history of the base
    ``stood``       stage to version: no peer had the stage in the epochs before the base, so its
                    parameters are still those of this older version; now it has members again, or
                    paths still go around it
    ``outer``       0, or the window with the mean that this epoch puts in place, without
                    micro-batches
    ``window``      the rounds with other cells, see :class:`Window`
    ``electorate``  the voters, see :class:`Electorate`
    ``change``      the owner's signed change to how cells average, "" for none
    ``cell_id``     this cell, where a run has several
    ``parent``      only in a plan that founds a cell: the cell of the leader that signs it; members
                    are the new cell's, owners the parent's, and nobody trains by it
    ``founds``      a cell founded from the same base; its members fetch optimizer state from here
    ``wires``       number format of the tensors that a member sends to another one, by (sender,
                    receiver), where it is not the run's (``pipeline.wire``)

    For operators: ``loss`` of the epoch before and ``loss_val`` of the last evaluation in nats per
    token (0: none yet), ``reference``: losses before the first step of the run, in runs that keep
    them (``training.reference``), ``forecast``: expected seconds of paths and of the round (0:
    unknown).
    """

    epoch: int
    term: int
    leader: PeerId
    members: tuple[PlanMember, ...]
    paths: tuple[Path, ...]
    owners: dict[str, PeerId]
    moved: dict[str, PeerId] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    deadline_s: float = 60.0
    cursor: Cursor = WHOLE
    loss: float = 0.0
    loss_val: float = 0.0
    tokens: int = 0
    lineage: str = ""
    forecast: tuple[float, float] = (0.0, 0.0)
    outer: int = 0
    stood: dict[int, Version] = field(default_factory=dict)
    change: str = ""
    cell_id: CellId = NO_CELL
    parent: CellId = NO_CELL
    founds: CellId = NO_CELL
    window: Window = NO_WINDOW
    electorate: Electorate = NOBODY
    reference: Losses = UNKNOWN
    wires: Mapping[tuple[PeerId, PeerId], str] = field(default_factory=dict)

    @property
    def base(self) -> Version:
        """The version this plan starts from."""
        return Version(self.epoch, self.lineage)

    @property
    def last(self) -> bool:
        """The run is complete: nobody trains or averages by this plan."""
        return not self.paths and not self.outer and not self.parent

    def stage(self, stage: int) -> tuple[PlanMember, ...]:
        """The replicas of a stage, listeners included, in PeerId order."""
        return tuple(sorted((m for m in self.members if m.stage == stage), key=lambda m: m.peer))

    def member(self, peer: PeerId) -> PlanMember | None:
        return next((m for m in self.members if m.peer == peer), None)

    @uncollected()
    def canonical(self) -> bytes:
        """The bytes that are hashed, signed and sent: JSON with sorted keys and peers as
        indices."""
        index = {m.peer: i for i, m in enumerate(self.members)}
        e = self.electorate
        others = {self.leader, *self.moved.values(), *self.owners.values()}
        others |= {*e.voters, *e.elders}
        outside = sorted(others - index.keys())
        names = [m.peer for m in self.members] + outside
        index.update({p: i for i, p in enumerate(names)})
        body: dict[str, Any] = {
            "epoch": self.epoch,
            "lineage": self.lineage,
            "term": self.term,
            "leader": index[self.leader],
            "peers": names,
            "members": [[m.stage, m.speed, m.current] for m in self.members],
            "paths": [
                [
                    p.index,
                    index[p.origin],
                    list(p.samples),
                    [[h.stage, index[h.peer]] for h in p.hops],
                ]
                for p in self.paths
            ],
            "owners": {k: index[v] for k, v in self.owners.items()},
            "moved": {k: index[v] for k, v in self.moved.items()},
            "digests": {str(stage): digest for stage, digest in self.digests.items()},
            "change": self.change,
            "deadline_s": self.deadline_s,
            "cursor": rows(self.cursor),
            "news": [self.loss, self.loss_val, self.tokens, *self.forecast],
            "outer": self.outer,
            "stood": {str(stage): [v.epoch, v.lineage] for stage, v in self.stood.items()},
            "votes": [[index[p] for p in e.voters], [index[p] for p in e.elders], e.orphan],
        }
        if self.reference.known:  # in other runs a plan is as it was before there were references
            body["reference"] = self.reference.row()
        if self.wires:  # in other runs a plan is as it was before links had formats
            body["wires"] = sorted(
                [index[a], index[b], wire] for (a, b), wire in self.wires.items()
            )
        if self.cell_id:  # in a run of one cell a plan is as it was before there were several
            body |= self._about_cells()
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    def _about_cells(self) -> dict[str, Any]:
        w = self.window
        partners = [
            [
                p.cell,
                p.leader,
                {
                    str(stage): [[h.peer, list(h.maddrs)] for h in of]
                    for stage, of in p.hosts.items()
                },
            ]
            for p in w.partners
        ]
        means = {str(stage): digest for stage, digest in w.means.items()}
        return {
            "cell": [self.cell_id, self.parent, self.founds],
            "window": [w.number, partners, w.within_s, means, w.copies],
            "sums": _NO_SUMS,
        }

    @cached_property
    def hash(self) -> str:
        """Hex sha256 of :meth:`canonical`; every message of the epoch carries it."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @classmethod
    @uncollected()
    def parse(cls, raw: bytes, most_paths: int = MOST_PATHS) -> "Plan":
        """The inverse of :meth:`canonical`. Raises WireError for anything that is not a plan, and,
        before its paths are built, for a plan with more than ``most_paths`` of them."""
        try:
            if raw.count(b"[") + raw.count(b"{") > MOST_LISTS:
                raise ValueError(f"more than {MOST_LISTS} lists")
            body = json.loads(raw)
            for field_name, most in (*ENTRIES.items(), ("paths", most_paths)):
                few(body[field_name], most, field_name)
            names = [peer_name(p) for p in body["peers"]]
            loss, loss_val, tokens, run_s, round_s = body["news"]
            cell, parent, founds = (
                short_text(name, CELL_DIGITS) for name in body.get("cell", ("", "", ""))
            )
            voters, elders, orphan = body["votes"]
            if not all(map(is_cell, (cell, parent, founds))):
                raise ValueError("a cell's name is 16 hex digits, or empty")

            def name(i: Any) -> PeerId:
                if type(i) is not int or not 0 <= i < len(names):
                    raise ValueError("peer index out of range")
                return names[i]

            def member(i: Any) -> PeerId:
                peer = name(i)
                if i >= len(body["members"]):
                    raise ValueError("a path, or a link, over somebody who is no member")
                return peer

            return cls(
                epoch=whole(body["epoch"]),
                lineage=lineage(body["lineage"]),
                term=whole(body["term"]),
                leader=name(body["leader"]),
                members=tuple(
                    PlanMember(names[i], whole(s), _finite(v), bool(c))
                    for i, (s, v, c) in enumerate(body["members"])
                ),
                paths=tuple(
                    Path(
                        whole(i),
                        member(o),
                        tuple(whole(s) for s in samples),
                        tuple(Hop(whole(s), member(p)) for s, p in hops),
                    )
                    for i, o, samples, hops in body["paths"]
                ),
                owners={_part(k): name(v) for k, v in body["owners"].items()},
                moved={_part(k): name(v) for k, v in body["moved"].items()},
                digests=_digests(body["digests"]),
                change=short_text(body["change"], MOST_CHANGE),
                deadline_s=_finite(body["deadline_s"]),
                cursor=parse_cursor(body["cursor"]),
                loss=_finite(loss),
                loss_val=_finite(loss_val),
                tokens=whole(tokens),
                forecast=(_finite(run_s), _finite(round_s)),
                outer=whole(body["outer"]),
                cell_id=CellId(cell),
                parent=CellId(parent),
                founds=CellId(founds),
                window=_window(body["window"]) if cell else NO_WINDOW,
                electorate=Electorate(
                    _once(map(name, few(voters, MOST_PEERS, "voters"))),
                    _once(map(name, few(elders, MOST_PEERS, "voters before"))),
                    bool(orphan),
                ),
                stood={
                    _stage(k): Version(whole(e), lineage(line))
                    for k, (e, line) in body["stood"].items()
                },
                reference=Losses.parse(body.get("reference", UNKNOWN.row())),
                wires=_wires(body.get("wires", []), member),
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise WireError(f"not a plan: {e}") from e


def lineage_after(plan: Plan, dropped: Collection[int]) -> str:
    """The lineage of the version that ``plan`` makes when these micro-batches do not count: 32 hex
    digits of a sha256."""
    closed = f"{plan.hash}/{','.join(map(str, sorted(dropped)))}"
    return hashlib.sha256(closed.encode()).hexdigest()[:_LINEAGE]


def lineage(value: Any) -> str:
    """A lineage as others write it. Raises WireError for anything else."""
    if type(value) is not str or (value and (len(value) != _LINEAGE or not set(value) <= _HEX)):
        raise WireError("a lineage is 32 hex digits, or empty")
    return value


_LINEAGE = 32
_HEX = frozenset("0123456789abcdef")


def _window(body: Any) -> Window:
    number, partners, within_s, means, copies = body
    return Window(
        whole(number),
        tuple(
            Partner(cell_name(cell), peer_name(leader), _hosts(hosts))
            for cell, leader, hosts in few(partners, MOST_PARTNERS, "partners")
        ),
        _finite(within_s),
        _digests(means),
        copies is True,
    )


def _wires(body: Any, member: Callable[[Any], PeerId]) -> dict[tuple[PeerId, PeerId], str]:
    """Number format by (sender, receiver)."""
    rows = few(body, MOST_LINKS, "links")
    found = {(member(a), member(b)): short_text(wire, MOST_WIRE) for a, b, wire in rows}
    if len(found) != len(rows) or any(a == b for a, b in found):
        raise ValueError("a link with two formats, or of a peer with itself")
    return found


def _hosts(body: Any) -> dict[int, tuple[Host, ...]]:
    return {
        _stage(stage): tuple(
            Host(peer_name(peer), tuple(map(_address, few(maddrs, MOST_HOSTS, "addresses"))))
            for peer, maddrs in few(of, MOST_HOSTS, "hosts of a stage")
        )
        for stage, of in few(body, MOST_STAGES_TOLD, "stages of a partner").items()
    }


def _digests(body: Any) -> dict[int, str]:
    """By stage."""
    few(body, MOST_STAGES_TOLD, "digests")
    return {_stage(stage): short_text(digest, 64) for stage, digest in body.items()}


def _stage(text: str) -> int:
    """The number of a stage as a key of JSON has it."""
    if len(text) > 5 or not text.isascii():
        raise ValueError("expected the number of a stage")
    return whole(int(text))


def _part(text: str) -> str:
    return short_text(text, 256)


def _address(text: Any) -> str:
    if type(text) is not str or not text.startswith("/") or len(text) > 256:
        raise ValueError("an address of a host is a multiaddr")
    if not (text.isascii() and text.isprintable()):
        raise ValueError("an address of a host is printable")
    return text


def _once(peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    found = tuple(peers)
    if len(set(found)) != len(found):
        raise ValueError("a voter is named twice")
    return found


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e18:
        raise ValueError("expected a finite number that is not negative")
    return float(value)
