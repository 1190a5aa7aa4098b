"""A path problem: peers, stages, delays and the rules that a plan of an epoch must keep. Pure data,
checked when it is read.

Enters: a JSON document. Leaves: Problem. Never: a NaN, a negative time, a peer in two stages, a
plan that cannot exist. The model is SkipPipe's (arXiv 2502.19913): a micro-batch leaves an ends
peer (stage 0), visits ``length - 1`` of the block stages 1..S-1, comes home for its loss and goes
the same way back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from node.core.errors import UsageFault, refuse

MOST_PEERS = 4096
MOST_MICROBATCHES = 200_000
MOST_SECONDS = 1e9
MOST_COUNT = 1 << 20

Route = tuple[int, ...]
"""Route of a micro-batch: its origin, then the peers of its block stages in order of the forward
pass."""


@dataclass(frozen=True)
class PathProblem:
    """Numbers of a path problem, all times in seconds. ``delays[a][b]``: from a to b.
    ``compute[n]``: one forward at n; a backward takes ``backward`` times as long, a loss ``loss``
    times; ``gap``: idle after every task. ``stages[0]``: the ends peers. ``counts[o]``:
    micro-batches of each of them. ``slots[n]``: micro-batches peer n may hold, from forward to
    backward. ``owed``: (origin, stage) that some path must join, because earlier epochs did not.
    ``visits``: visits of every block stage, if they cannot be equal; empty for equal ones.

    For assignment only: ``slots_ends`` and ``block_slots[n]``, slots of peer n at the ends and
    elsewhere; ``may_host``: the stages of peers that cannot host all; ``sync_ratio``: weight of the
    worst link inside a stage beside the makespan.
    """

    name: str
    delays: tuple[tuple[float, ...], ...]
    compute: tuple[float, ...]
    stages: tuple[tuple[int, ...], ...]
    length: int
    slots: tuple[int, ...]
    counts: Mapping[int, int]
    backward: float = 2.0
    loss: float = 0.25
    gap: float = 0.0
    max_swaps: int = 0
    max_swap_distance: int = 1
    max_jump: int = MOST_COUNT
    equal_visits: bool = True
    owed: frozenset[tuple[int, int]] = frozenset()
    visits: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    reference: Mapping[str, float] = field(default_factory=dict)
    slots_ends: int = 0
    block_slots: tuple[int, ...] = ()
    may_host: Mapping[int, frozenset[int]] = field(default_factory=dict)
    sync_ratio: float = 1.0

    def may(self, n: int, stage: int) -> bool:
        """Return True if peer n can host the stage; its memory or its operator may forbid it."""
        return n not in self.may_host or stage in self.may_host[n]

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Peer -> stage. A peer that is not there has no work."""
        return {n: s for s, peers in enumerate(self.stages) for n in peers}

    @cached_property
    def hops(self) -> int:
        """Block stages that every path visits."""
        return self.length - 1

    @cached_property
    def total(self) -> int:
        """Micro-batches of the epoch."""
        return sum(self.counts.values())

    def launches(self, routes: Sequence[Route]) -> dict[int, list[int]]:
        """Indices of ``routes`` by ends peer, in launch order."""
        orders: dict[int, list[int]] = {o: [] for o in sorted(self.counts)}
        for i, route in enumerate(routes):
            orders[route[0]].append(i)
        return orders

    def with_slots(self, ends: int) -> "PathProblem":
        """The same problem with ``ends`` micro-batches in flight at every ends peer."""
        slots = (ends if self.stage_of.get(n) == 0 else s for n, s in enumerate(self.slots))
        return replace(self, slots=tuple(slots), slots_ends=ends)


def parse(document: Any) -> PathProblem:
    """Check every field of a document. Raises UsageFault: what, why, next step."""
    refuse(
        (
            not isinstance(document, dict),
            "the problem is not an object",
            "give an object with delays_s, compute_s, stages, path_length",
        )
    )
    refuse(
        *(
            (
                key not in document,
                f"{key} is missing",
                f"give {key}; `tutti schedule --help` shows the format",
            )
            for key in ("delays_s", "compute_s", "stages", "path_length", "microbatches_per_end")
        )
    )
    compute = _times(document["compute_s"], "compute_s", None)
    rows = document["delays_s"]
    peers = len(compute)
    refuse(
        (
            not 1 <= peers <= MOST_PEERS,
            f"compute_s has {peers} peers",
            f"give one time for each of 1 to {MOST_PEERS} peers",
        ),
        (
            not isinstance(rows, list) or len(rows) != peers,
            f"delays_s has {_size(rows)} rows for {peers} peers",
            f"give a square matrix of {peers} rows",
        ),
    )
    delays = tuple(_times(row, f"row {i} of delays_s", peers) for i, row in enumerate(rows))
    stages = _stages(document["stages"], peers)
    length = whole(document["path_length"], "path_length", 1, MOST_COUNT)
    ends = whole(document.get("slots_ends", 3), "slots_ends", 1, MOST_COUNT)
    each = _each(document.get("slots_stage", 3), "slots_stage", 1, range(peers))
    counts = _each(document["microbatches_per_end"], "microbatches_per_end", 0, stages[0])
    refuse(
        (
            length > len(stages),
            f"path_length {length} is more than the {len(stages)} stages, and no stage is visited "
            "twice",
            f"give path_length {len(stages)} or less",
        ),
        (
            not 1 <= sum(counts.values()) <= MOST_MICROBATCHES,
            f"there are {sum(counts.values())} micro-batches",
            f"give 1 to {MOST_MICROBATCHES} of them",
        ),
    )
    at_ends = set(stages[0])
    return PathProblem(
        name=str(document.get("name", "problem"))[:80],
        delays=delays,
        compute=compute,
        stages=stages,
        length=length,
        slots=tuple(ends if n in at_ends else s for n, s in each.items()),
        counts=counts,
        backward=seconds(document.get("backward_ratio", 2.0), "backward_ratio"),
        loss=seconds(document.get("loss_ratio", 0.25), "loss_ratio"),
        gap=seconds(document.get("gap_s", 0.0), "gap_s"),
        max_swaps=whole(document.get("max_swaps", 0), "max_swaps", 0, MOST_COUNT),
        max_swap_distance=whole(
            document.get("max_swap_distance", 1), "max_swap_distance", 0, MOST_COUNT
        ),
        max_jump=whole(document.get("max_jump", len(stages)), "max_jump", 1, MOST_COUNT),
        equal_visits=truth(document.get("equal_visits", True), "equal_visits"),
        owed=_residual(document.get("owed"), stages),
        labels=_labels(document.get("locations"), peers),
        reference=_reference(document.get("reference")),
        slots_ends=ends,
        block_slots=tuple(each.values()),
        may_host=_may_host(document.get("may_host"), len(stages), peers),
        sync_ratio=seconds(document.get("sync_ratio", 1.0), "sync_ratio"),
    )


def _labels(names: Any, peers: int) -> tuple[str, ...]:
    """A name for each peer, or none at all."""
    if not isinstance(names, list) or len(names) != peers:
        return ()
    return tuple(str(name)[:40] for name in names)


def _reference(found: Any) -> dict[str, float]:
    """Makespans of other planners, by their names."""
    if not isinstance(found, dict):
        return {}
    return {
        str(k)[:40]: seconds(v, f"reference {str(k)[:40]}")
        for k, v in found.items()
        if isinstance(v, int | float)
    }


def seconds(value: Any, what: str) -> float:
    """A finite number from 0 on. Raises UsageFault."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    _is(
        number and 0 <= value <= MOST_SECONDS, value, what, f"a number from 0 to {MOST_SECONDS:.0e}"
    )
    return float(value)


def whole(value: Any, what: str, least: int, most: int) -> int:
    """A whole number of a range. Raises UsageFault."""
    number = isinstance(value, int) and not isinstance(value, bool)
    _is(number and least <= value <= most, value, what, f"a whole number from {least} to {most}")
    return value


def truth(value: Any, what: str) -> bool:
    """A word of yes or no. Raises UsageFault."""
    _is(isinstance(value, bool), value, what, "true or false")
    return value


def _is(fine: bool, value: Any, what: str, wanted: str) -> None:
    refuse((not fine, f"{what} is {str(value)[:40]}", f"give {wanted}"))


def _size(rows: Any) -> int | str:
    if isinstance(rows, list):
        return len(rows)
    return "no"


def _times(row: Any, what: str, size: int | None) -> tuple[float, ...]:
    refuse(
        (
            not isinstance(row, list) or (size is not None and len(row) != size),
            f"{what} has {_size(row)} figures",
            f"give a list of {size or 'one for each peer'}",
        )
    )
    try:
        out = tuple(map(float, row))
    except (TypeError, ValueError, OverflowError) as e:
        raise UsageFault(
            f"{what} holds something else than numbers", "give seconds, such as 0.25"
        ) from e
    # One pass in C for the usual valid row; NaN fails both comparisons.
    if out and not (min(out) >= 0 and max(out) <= MOST_SECONDS and not math.isnan(sum(out))):
        bad = next(i for i, x in enumerate(out) if not 0 <= x <= MOST_SECONDS)
        raise UsageFault(
            f"{what} holds {row[bad]} at {bad}",
            f"give finite seconds from 0 to {MOST_SECONDS:.0e}; no NaN",
        )
    return out


def _stages(given: Any, peers: int) -> tuple[tuple[int, ...], ...]:
    refuse(
        (
            not isinstance(given, list)
            or not given
            or not all(isinstance(stage, list) for stage in given),
            "stages is not a list of lists of peers",
            "give [[0, 1], [2, 3], ...]; the first are the ends peers",
        )
    )
    seen: set[int] = set()
    for s, stage in enumerate(given):
        refuse(
            (
                not stage,
                f"stage {s} has no peer",
                "give every stage at least one peer, or leave the stage out",
            )
        )
        for n in stage:
            whole(n, f"a peer of stage {s}", 0, peers - 1)
            refuse((n in seen, f"peer {n} is in two stages", "name every peer once"))
            seen.add(n)
    return tuple(tuple(stage) for stage in given)


def _each(given: Any, what: str, least: int, peers: Sequence[int]) -> dict[int, int]:
    """A whole number for each of these peers, from one figure for all or from one figure for
    each."""
    figures = given
    if not isinstance(given, list):
        figures = [given] * len(peers)
    refuse(
        (
            len(figures) != len(peers),
            f"{what} has {len(figures)} figures for {len(peers)} peers",
            "give one figure, or one for each of them",
        )
    )
    return {n: whole(x, what, least, MOST_COUNT) for n, x in zip(peers, figures, strict=True)}


def _lists(given: Any, what: str, example: str) -> dict[str, list[Any]]:
    """An object of lists, nothing for none."""
    if given is None:
        given = {}
    fine = isinstance(given, dict) and all(isinstance(x, list) for x in given.values())
    refuse((not fine, f"{what} is not an object", f"give {example}"))
    return given


def _residual(given: Any, stages: tuple[tuple[int, ...], ...]) -> frozenset[tuple[int, int]]:
    if given == "all":
        return frozenset((o, s) for o in stages[0] for s in range(1, len(stages)))
    example = '{"0": [4, 5]}: stages that ends peer 0 must train, or "all"'
    found: set[tuple[int, int]] = set()
    for key, wanted in _lists(given, "owed", example).items():
        origin = next((o for o in stages[0] if str(o) == key), None)
        if origin is None:
            raise UsageFault(
                f"owed names {key[:40]}, which is no ends peer", "name peers of stages[0]"
            )
        found.update(
            (origin, whole(s, f"a stage owed to {key}", 1, len(stages) - 1)) for s in wanted
        )
    return frozenset(found)


def _may_host(given: Any, stages: int, peers: int) -> dict[int, frozenset[int]]:
    example = '{"7": [1, 2]}: the stages that peer 7 can host; others can host all'
    found: dict[int, frozenset[int]] = {}
    for key, able in _lists(given, "may_host", example).items():
        refuse(
            (
                not (key.isascii() and key.isdecimal() and len(key) < 8 and int(key) < peers),
                f"may_host names {key[:40]}, which is no peer",
                f"name peers from 0 to {peers - 1}",
            )
        )
        found[int(key)] = frozenset(
            whole(s, f"a stage that {key} may host", 0, stages - 1) for s in able
        )
    return found
