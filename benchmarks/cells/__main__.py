"""Cells that lead themselves: their independence, their speed of agreement, and live ones.

    python -m benchmarks.cells --json -          # everything
    python -m benchmarks.cells --only 4 --cells 100,300 --grid 8,8,8
    python -m benchmarks.cells --only 5 --swarms 10,200

Rows are named after their question: 2 live cells over a wide-area network, and the loss of cells
beside one cell, 3 independence of cells, 4 rounds of Moshpit until cells agree, 5 costs that grow
with the number of cells (simulated for an hour), 6 members and guests that mean harm, 7 the ages of
pushes without a barrier, 8 bytes of an outer step and their price in loss, 9 faults between cells,
10 code of the last commit without cells that is left. ``benchmarks.codebase`` measures one cell
beside an earlier commit, ``benchmarks.firsthour`` strangers in an open run.
"""

import sys
from typing import Any

from benchmarks.report import Report, chosen, command_line
from benchmarks.shared.parts import run_parts
from node.sim.averaging import axes

PARTS = {
    "2": ("live", "loss"),
    "3": ("independence",),
    "4": ("rounds",),
    "5": ("scale",),
    "6": ("guest", "revoked", "hostile_cells"),
    "7": ("ages",),
    "8": ("bytes",),
    "9": ("faults",),
    "10": ("old_way",),
}
"""Number to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="some of the numbers above")
    parser.add_argument("--cells", default="512,1024", help="4: how many, separated by commas")
    parser.add_argument("--grid", default="", help="4: the axes; as simulate's without them")
    parser.add_argument("--seeds", type=int, default=20, help="4: of every size")
    parser.add_argument("--swarms", default="10,1000", help="5: cells of the swarms compared")
    asked = parser.parse_args()
    report = Report()
    parts = chosen(parser, asked.only, PARTS)
    sizes = [int(size) for size in asked.cells.split(",")]
    more: dict[str, dict[str, Any]] = {
        "4": {"sizes": sizes, "grid": axes(asked.grid), "seeds": asked.seeds},
        "5": {"sizes": [int(cells) for cells in asked.swarms.split(",")]},
    }
    run_parts(report, "benchmarks.cells", PARTS, parts, more)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
