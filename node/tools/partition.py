"""``tutti partition``: matrices and ranks from a JSON file, a plan for programs or a table for
people.

Every field is checked before anything is planned; a faulty one ends in a UsageFault with the next
step.
"""

from collections.abc import Mapping
from typing import Any

from node.core.errors import UsageFault, refuse
from node.core.numbers import human
from node.partition.matrices import COUNTED, METHODS, Matrix, Rates, equal_splits, units_of
from node.partition.plan import OwnershipPlan, make_plan
from node.scheduler.planning.problem import truth, whole
from node.tools.document import read as read_document

MOST_BYTES = 64 << 20
MOST_MATRICES = 200_000
MOST_RANKS = 16_384
MOST_SIDE = 1 << 31
MOST_WORK = 100_000_000
"""Units times ranks of the largest problem that is planned, in reasonable time."""
KNOWN = (
    *("matrices", "ranks", "tensor_parallel", "speeds", "previous", "method", "memory", "rates"),
    "masters",
)
BAR = 32
LINES = 48


def read(path: str) -> Any:
    """The document in a file, or on stdin for ``-``. Raises UsageFault."""
    return read_document(
        path,
        MOST_BYTES,
        "describe fewer matrices",
        'write {"matrices": [{"name": "w", "rows": 64, "cols": 64}], "ranks": 2}',
    )


def planned(document: Any) -> OwnershipPlan:
    """Check every field, and plan. Raises UsageFault (what, why, next step) and OutOfResources as
    :func:`make_plan` does."""
    refuse(
        (
            not isinstance(document, dict),
            "the document is not an object",
            'write {"matrices": [...], "ranks": N}',
        )
    )
    method = document.get("method", "muon")
    refuse(
        *(
            (key not in document, f"{key} is missing", f"give {key}")
            for key in ("matrices", "ranks")
        ),
        (
            method not in METHODS,
            f"no method is called {str(method)[:40]!r}",
            f"choose one of {', '.join(METHODS)}",
        ),
    )
    ranks = whole(document["ranks"], "ranks", 1, MOST_RANKS)
    tensor = document.get("tensor_parallel")
    matrices = _matrices(document["matrices"])
    units = sum(len(m.shapes) for m in matrices)
    refuse(
        (
            units * ranks > MOST_WORK,
            f"{units} matrices on {ranks} ranks are too many to plan",
            f"keep their product below {MOST_WORK}",
        )
    )
    speeds = _speeds(document.get("speeds"), ranks)
    masters = truth(document.get("masters", False), "masters")
    return make_plan(
        units_of(matrices, method, _rates(document.get("rates")), masters=masters),
        speeds,
        method,
        _previous(document.get("previous"), matrices),
        _memory(document.get("memory"), ranks),
        1 if tensor is None else whole(tensor, "tensor_parallel", 1, ranks),
    )


def unknown(document: Any) -> list[str]:
    """Fields of the document that nobody reads, in order."""
    return sorted(str(key)[:40] for key in document if key not in KNOWN)


def document(plan: OwnershipPlan) -> dict[str, Any]:
    """Plan for programs. A matrix with splits is there once for each, as ``name[label]``."""
    return {
        "owner": plan.owner,
        "makespan_over_ideal": plan.over_ideal,
        "floor_over_ideal": plan.floor_over_ideal,
        "bytes_moved": plan.moved,
        "hash": plan.hash,
    }


def picture(plan: OwnershipPlan, asked: Mapping[str, Any]) -> list[str]:
    """Lines for people: a line and a bar for each rank, the slowest ranks only if not all fit, and
    the plan's quality. ``asked``: the document of the plan."""
    tensor = asked.get("tensor_parallel") or 1
    count = [0] * len(plan.speeds)
    held = [0] * len(plan.speeds)
    for u in plan.units:
        count[plan.owner[u.name]] += 1
        held[plan.owner[u.name]] += u.bytes
    times = [load / s / plan.ideal for load, s in zip(plan.loads, plan.speeds, strict=True)]
    order = sorted(range(len(times)), key=lambda r: (-times[r], r))
    shown = sorted(order[:LINES])
    scale = BAR / max(times)
    lines = [f"{'rank':>5}  {'speed':>8}  {'units':>5}  {'state':>9}  time/ideal"]
    for r in shown:
        bar = "█" * max(round(times[r] * scale), 1 if count[r] else 0)
        where = f"{r:>5}"
        if tensor != 1:
            where = f"{r // tensor}.{r % tensor}".rjust(5)
        lines.append(
            f"{where}  {plan.speeds[r]:>8.3g}  {count[r]:>5}  {human(held[r]):>9}  "
            f"{times[r]:>7.3f}  {bar}"
        )
    if len(order) > LINES:
        lines.append(
            f"  and {len(order) - LINES} ranks that are done no later than "
            f"{times[order[LINES]]:.3f}"
        )
    moved = f"moved     {human(plan.moved)} of state"
    if asked.get("previous"):
        moved += f"; any plan at the floor moves about {human(plan.least)}"
    lines += [
        "",
        f"{len(plan.units)} units of {len(asked['matrices'])} matrices on "
        f"{len(plan.speeds)} ranks, {asked.get('method', 'muon')}",
        f"makespan  {plan.over_ideal:.4f} × ideal",
        f"floor     {plan.floor_over_ideal:.4f} × ideal: no plan of whole units is shorter",
        moved,
        f"hash      {plan.hash}",
    ]
    if idle := count.count(0):
        lines.append(f"{idle} ranks have nothing to do: split matrices, or use fewer ranks")
    return lines


def _matrices(rows: Any) -> tuple[Matrix, ...]:
    refuse(
        (
            not isinstance(rows, list) or not rows,
            "matrices is not a list with something in it",
            'give [{"name": "w", "rows": 64, "cols": 64}]',
        )
    )
    if len(rows) > MOST_MATRICES:
        raise UsageFault(f"{len(rows)} matrices are too many", f"give at most {MOST_MATRICES}")
    made: list[Matrix] = []
    names: set[str] = set()
    for i, row in enumerate(rows):
        name = None
        if isinstance(row, dict):
            name = row.get("name")
        if not isinstance(name, str) or not name or len(name) > 500:
            raise UsageFault(
                f"matrix {i} has no name", 'give {"name": "w", "rows": 64, "cols": 64}'
            )
        sides = [
            whole(row.get(side), f"{side} of {name[:80]}", 1, MOST_SIDE)
            for side in ("rows", "cols")
        ]
        matrix = Matrix(name, sides[0], sides[1], _splits(name, sides[0], row.get("splits")))
        for key in {name, *(unit for unit, _, _ in matrix.shapes)}:
            if key in names:
                raise UsageFault(f"{key[:80]} is there twice", "name every matrix once")
            names.add(key)
        made.append(matrix)
    return tuple(made)


def _splits(name: str, rows: int, given: Any) -> tuple[tuple[str, int], ...]:
    what = f"splits of {name[:80]}"
    if given is None or given == []:
        return ()
    if isinstance(given, int) and not isinstance(given, bool):
        return equal_splits(name, rows, whole(given, what, 1, rows))
    if isinstance(given, list):
        return tuple((str(i), whole(part, what, 1, rows)) for i, part in enumerate(given))
    if isinstance(given, dict):
        return tuple((label[:80], whole(part, what, 1, rows)) for label, part in given.items())
    raise UsageFault(
        f"{what} is {str(given)[:40]!r}",
        "give a number of equal blocks of rows, or the rows of each: [4096, 1024, 1024]",
    )


def _speeds(given: Any, ranks: int) -> tuple[float, ...]:
    if given is None:
        return (1.0,) * ranks
    if isinstance(given, dict):
        if len(given) == ranks:
            given = [given.get(str(rank)) for rank in range(ranks)]
        else:
            given = list(given)
    count = "no"
    if isinstance(given, list):
        count = len(given)
    refuse(
        (
            count != ranks,
            f"there are {count} speeds for {ranks} ranks",
            "give one speed for each rank, or none at all",
        )
    )
    for rank, speed in enumerate(given):
        if (
            isinstance(speed, bool)
            or not isinstance(speed, int | float)
            or not 1e-9 <= speed <= 1e15
        ):
            raise UsageFault(
                f"rank {rank} has speed {str(speed)[:40]}",
                "give every rank a finite speed above 0 (1e-9 to 1e15); leave out ranks that are "
                "gone",
            )
    return tuple(float(speed) for speed in given)


def _previous(given: Any, matrices: tuple[Matrix, ...]) -> dict[str, int | None]:
    """By unit; a whole matrix that is split now had all its splits at one rank. Names of no matrix
    are left out."""
    if given is None:
        return {}
    refuse(
        (
            not isinstance(given, dict),
            "previous is not an object",
            'give {"w": 0}: the rank that owned each matrix',
        )
    )
    for name, rank in given.items():
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
            raise UsageFault(
                f"the previous owner of {name[:80]} is {str(rank)[:40]!r}",
                "give its rank; null or any other rank: gone",
            )
    whole = {unit: given[m.name] for m in matrices if m.name in given for unit, _, _ in m.shapes}
    return whole | {unit: given[unit] for m in matrices for unit, _, _ in m.shapes if unit in given}


def _memory(given: Any, ranks: int) -> tuple[int, ...] | None:
    if given is None:
        return None
    figures = given
    if not isinstance(given, list):
        figures = [given] * ranks
    refuse(
        (
            len(figures) != ranks,
            f"memory of {len(figures)} ranks is given, there are {ranks}",
            "give one figure in bytes, or one for each rank",
        )
    )
    return tuple(whole(x, "memory", 1, 1 << 62) for x in figures)


def _rates(given: Any) -> Rates:
    if given is None:
        return COUNTED
    good = isinstance(given, list) and all(
        isinstance(r, list)
        and len(r) == 3
        and all(isinstance(x, int | float) and not isinstance(x, bool) for x in r)
        for r in given
    )
    refuse((not good, "rates is not a list of measurements", "give [[rows, cols, gflops], ...]"))
    return Rates(
        (
            whole(rows, "rows of a rate", 1, MOST_SIDE),
            whole(cols, "cols of a rate", 1, MOST_SIDE),
            gflops,
        )
        for rows, cols, gflops in given
    )
