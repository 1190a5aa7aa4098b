"""The plan: an owner for every unit, its makespan beside the ideal and the floor, the hash that
travels with a round, and the micro-groups in which it is carried out.

A rank is a peer's place in the list given; ``assign_units`` is the same for peers by PeerId. In
tensor-parallel groups of ``tensor`` ranks, rank = data · tensor + t. All ranks are one pool: a
reduce-scatter leaves the shards of a matrix with the ``tensor`` ranks of one data index, and any of
them can then be its host.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.core.errors import OutOfResources, UsageFault, refuse
from node.core.ids import PeerId
from node.partition.balance import WORK, balance
from node.partition.bounds import ideal
from node.partition.matrices import FP32, Method, Unit, in_order
from node.partition.repair import Repaired, repair
from node.partition.search import OwnershipProblem, SearchState

Group = tuple[tuple[Unit, ...], ...]
"""The units of each slot; the slot is the rank that hosts them."""
SPEED_STEPS = 8
"""Measured speeds are rounded to this many steps an octave before a plan is made of them."""

SLOWEST = 2.0**-20


@dataclass(frozen=True)
class OwnershipPlan:
    """``owner``: rank of each unit by name, sorted. ``makespan``, ``ideal``, ``floor``: in cost
    over speed; ``moved``: bytes of state that change hands, ``least``: bytes that any plan at the
    floor must move; ``loads``: cost of each rank."""

    units: tuple[Unit, ...]
    owner: dict[str, int]
    speeds: tuple[float, ...]
    makespan: float
    ideal: float
    floor: float
    moved: int
    least: int
    loads: tuple[int, ...]
    hash: str

    @property
    def over_ideal(self) -> float:
        """Makespan over ideal; 1 at best."""
        return self.makespan / self.ideal

    @property
    def floor_over_ideal(self) -> float:
        """Lower bound of any plan of whole units, over ideal."""
        return self.floor / self.ideal


def make_plan(
    units: Sequence[Unit],
    speeds: Sequence[float],
    method: Method,
    previous: Mapping[str, int | None] | None = None,
    room: Sequence[int] | None = None,
    tensor: int = 1,
    work: int = WORK,
) -> OwnershipPlan:
    """Plan for ranks of these ``speeds``. ``previous``: the rank each unit's state is at; of
    another or no rank: its owner is gone.

    ``room``: bytes of state each rank can hold. ``work``: comparisons that may be made for a better
    plan. Raises UsageFault for no units, no ranks, a speed that is not above 0 and finite, or
    tensor-parallel groups that do not divide the ranks; OutOfResources when state does not fit.
    """
    _check(units, speeds, room, tensor)
    ordered = in_order(units)
    problem = OwnershipProblem([u.cost for u in ordered], speeds, [u.bytes for u in ordered])
    before = None
    if previous:
        before = [_before(previous, u.name, len(speeds)) for u in ordered]
    done = _planned(problem, before, tensor, work)
    if room is not None and any(
        used > most for used, most in zip(SearchState(problem, done.owner).used, room, strict=True)
    ):
        # The best plan without limits is the best with them when it keeps them; the rest of the
        # search is narrower.
        if (big := max(ordered, key=lambda u: (u.bytes, u.name))).bytes > max(room):
            raise OutOfResources(
                f"{big.name} keeps {big.bytes} bytes of state, nobody has room for more than "
                f"{max(room)}",
                "split the matrix, or add a peer with more memory",
            )
        problem = OwnershipProblem(problem.costs, speeds, problem.sizes, room)
        done = _planned(problem, before, tensor, work)
    state = SearchState(problem, done.owner)
    owner = dict(sorted(zip((u.name for u in ordered), done.owner, strict=True)))
    best = ideal(problem.costs, speeds)
    end = state.makespan()
    name = plan_hash(method, ordered, {n: str(r) for n, r in owner.items()})
    return OwnershipPlan(
        tuple(ordered),
        owner,
        tuple(speeds),
        end,
        best,
        max(min(done.floor, end), best),
        done.moved,
        done.least,
        tuple(state.load),
        name,
    )


def assign_units(
    units: Sequence[Unit],
    members: Sequence[tuple[PeerId, float]],
    previous: Mapping[str, PeerId] | None = None,
    room: Mapping[PeerId, int] | None = None,
    work: int = WORK,
) -> dict[str, PeerId]:
    """Exactly one owner among ``members`` (peer, speed) for every unit; speed 0 is not known and
    counts as the mean.

    Speeds are :func:`quantised`, and none counts as less than a millionth of the largest. ``room``:
    bytes of state, of the members it is known of. The order of units and members does not matter.
    Raises UsageFault and OutOfResources as :func:`make_plan` does, and UsageFault for a member
    named twice.
    """
    ordered = sorted(members)
    peers = [peer for peer, _ in ordered]
    refuse((len(set(peers)) != len(peers), "a member is named twice", "name each peer once"))
    known = [speed for _, speed in ordered if speed > 0]
    typical = 1.0
    if known:
        typical = math.fsum(known) / len(known)
    speeds = [quantised(speed if speed != 0 else typical) for _, speed in ordered]
    scale = -math.frexp(max(speeds, default=1.0))[1]
    speeds = [max(math.ldexp(speed, scale), SLOWEST) for speed in speeds]
    rank = {peer: i for i, peer in enumerate(peers)}
    was = None
    if previous:
        was = {name: rank.get(peer, -1) for name, peer in previous.items()}
    most = sum(u.bytes for u in units)
    limits = None
    if room:
        limits = [min(most, room.get(peer, most)) for peer in peers]
    plan = make_plan(units, speeds, "muon", was, limits, work=work)
    return {name: peers[r] for name, r in plan.owner.items()}


def _planned(
    problem: OwnershipProblem, before: Sequence[int | None] | None, tensor: int, work: int
) -> Repaired:
    if before is not None:
        return repair(problem, before, work)
    owners, floor = balance(problem, work)
    if tensor > 1 and len(set(problem.speeds)) == 1 and problem.room is None:
        owners = spread_bytes(problem, owners, tensor)
    return Repaired(owners, 0, 0, floor)


def plan_hash(method: str, units: Sequence[Unit], owner: Mapping[str, str]) -> str:
    """Hex sha256 over method, and name, shape and owner of every unit, in any order of
    ``units``."""
    rows = sorted((u.name, u.rows, u.cols, owner[u.name]) for u in units)
    return hashlib.sha256(
        json.dumps(["plan 1", method, rows], separators=(",", ":")).encode()
    ).hexdigest()


def spread_bytes(problem: OwnershipProblem, owner: Sequence[int], tensor: int) -> list[int]:
    """Rename ranks of one speed so that the data-parallel groups hold near equal bytes: most bytes
    first, to the group with least that has a place. The makespan stays as it is."""
    state = SearchState(problem, owner)
    groups = len(problem.speeds) // tensor
    held = [0] * groups
    places = [0] * groups
    new = [0] * len(problem.speeds)
    for rank in sorted(range(len(new)), key=lambda p: (-state.used[p], p)):
        group = min((g for g in range(groups) if places[g] < tensor), key=lambda g: (held[g], g))
        new[rank] = group * tensor + places[group]
        places[group] += 1
        held[group] += state.used[rank]
    return [new[p] for p in owner]


def bounded_groups(
    units: Sequence[Unit], owner: Mapping[str, int], ranks: int, most_bytes: int
) -> list[Group]:
    """Micro-groups of a plan: units exchanged and stepped together, so that one group's exchange
    hides behind another's compute. In none does a rank hold more than ``most_bytes`` of matrices.

    As few groups as that allows. Groups are synchronous, so their time is the sum of each group's
    slowest slot. So every rank goes through its units, largest first, and puts the units of the
    g-th equal share of its time into the g-th group, so that the ranks leave each group together.
    Raises UsageFault for a matrix above C_max.
    """
    queues: list[list[Unit]] = [[] for _ in range(ranks)]
    for u in in_order(units):
        if FP32 * u.numel > most_bytes:
            raise UsageFault(
                f"{u.name} is {FP32 * u.numel} bytes, a micro-group takes {most_bytes}",
                "raise C_max, or split the matrix",
            )
        queues[owner[u.name]].append(u)
    count = max([1, *(-(-FP32 * sum(u.numel for u in q) // most_bytes) for q in queues)])
    while True:
        cut = [_cut(q, count, most_bytes) for q in queues]
        if all(c is not None for c in cut):
            return [tuple(tuple(c[g]) for c in cut if c is not None) for g in range(count)]
        count += 1


def _cut(queue: Sequence[Unit], count: int, most: int) -> list[list[Unit]] | None:
    """A queue in ``count`` groups by the middle of each unit's time; later if a group is full; None
    if they do not suffice."""
    total = max(1, sum(u.cost for u in queue))
    done = 0
    groups: list[list[Unit]] = [[] for _ in range(count)]
    used = [0] * count
    at = 0
    for u in queue:
        size = FP32 * u.numel
        at = max(at, min(count - 1, (2 * done + u.cost) * count // (2 * total)))
        while at < count and used[at] + size > most:
            at += 1
        if at == count:
            if count < len(queue):
                return None
            return [[v] for v in queue] + [[] for _ in range(count - len(queue))]
        groups[at].append(u)
        used[at] += size
        done += u.cost
    return groups


def quantised(speed: float) -> float:
    """A speed rounded down to one of ``SPEED_STEPS`` steps an octave, so that noise changes no
    plan. 0 stays 0.

    Steps are equal inside an octave: only exact operations, the same bits everywhere. Raises
    UsageFault below 0 or not finite.
    """
    refuse((not 0 <= speed < float("inf"), f"{speed} is not a speed", "measure again"))
    mantissa, exponent = math.frexp(speed)
    return math.ldexp(math.floor(mantissa * 2 * SPEED_STEPS) / (2 * SPEED_STEPS), exponent)


def _before(previous: Mapping[str, int | None], name: str, ranks: int) -> int | None:
    """The rank that holds a unit's state, -1 for one that is gone, None for a unit without
    state."""
    if name not in previous:
        return None
    rank = previous[name]
    if rank is None or not 0 <= rank < ranks:
        return -1
    return rank


def _check(
    units: Sequence[Unit], speeds: Sequence[float], room: Sequence[int] | None, tensor: int
) -> None:
    refuse(
        (not units, "there is nothing to own", "give at least one matrix"),
        (not speeds, "there is nobody to own anything", "give at least one rank"),
        *(
            (
                not 0 < speed < 1e18,
                f"rank {rank} has speed {speed}",
                "give every rank a finite speed above 0; leave out ranks that are gone",
            )
            for rank, speed in enumerate(speeds)
        ),
        (
            tensor < 1 or len(speeds) % tensor,
            f"{len(speeds)} ranks are not whole groups of {tensor}",
            "make ranks a multiple of tensor_parallel",
        ),
        (
            room is not None and len(room) != len(speeds),
            f"memory of {len(room or ())} ranks is given, there are {len(speeds)}",
            "give one figure for each rank",
        ),
    )
