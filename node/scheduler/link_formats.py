"""Number format of each link of a plan, from the seconds that its bytes and the devices take. Pure.

Enters: paths, costs, bytes of a tensor by format. Leaves: formats of the links that get a coarser
one than the run's. Never: a coarser format for a link that was not measured, or that devices wait
for less than they compute.

A link gets the finest format in which its bytes, those that its sender sends to all, and those that
its receiver receives from all, take no longer than :data:`SHARE` of the work of the busiest device.
If there is none, it gets the coarsest. All links of a peer count together because they usually
share its line. Of more links than a plan can name, those with the slowest lines get their format.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from node.core.ids import PeerId
from node.core.journey import MOST_LINKS, Path
from node.scheduler.costs import Costs

Link = tuple[PeerId, PeerId]
"""(sender, receiver)"""

SHARE = 0.8
"""Seconds of a link's bytes over those of the busiest device, from which on the bytes are a limit:
a line and a device that are both busy all the time wait for each other."""
FINER = 0.5
"""This ratio in a finer format, below which a link goes back to it: measurements move, and a format
should not move with each of them."""


def links(paths: Sequence[Path]) -> Counter[Link]:
    """Tensors that each link carries in an epoch: an activation forward and a gradient back between
    any two neighbours on a path."""
    found = Counter[Link]()
    for path in paths:
        for a, b in pairwise(path.journey):
            found[a.peer, b.peer] += 1
            found[b.peer, a.peer] += 1
    return found


def link_formats(
    paths: Sequence[Path],
    costs: Costs,
    sizes: Mapping[str, int],
    before: Mapping[Link, str],
) -> dict[Link, str]:
    """Formats of the links that get another one than the run's, at most :data:`MOST_LINKS`.
    ``sizes``: bytes of a tensor in each allowed format, the run's first, falling; ``before``:
    formats of the plan before."""
    formats = list(sizes)
    if len(formats) < 2:
        return {}
    tensors = links(paths)
    device_s = _busiest(paths, costs)
    if not device_s:
        return {link: wire for link, wire in before.items() if link in tensors and wire in formats}
    sent = Counter[PeerId]()
    received = Counter[PeerId]()
    for (a, b), count in tensors.items():
        seconds = count * costs.body(a, b)
        sent[a] += seconds  # pyright: ignore[reportArgumentType] - seconds, not counts
        received[b] += seconds  # pyright: ignore[reportArgumentType]
    found: dict[Link, str] = {}
    ratios: dict[Link, float] = {}
    for a, b in tensors:
        if not costs.body(a, b):
            continue
        ratio = max(sent[a], received[b]) / device_s
        chosen = _finest(formats, sizes, ratio, SHARE)
        had = before.get((a, b), formats[0])
        if had in formats and formats.index(had) > formats.index(chosen):
            # It goes back to a finer format only by some distance, and not beyond the one it had.
            chosen = formats[
                min(
                    formats.index(had),
                    formats.index(_finest(formats, sizes, ratio, FINER)),
                )
            ]
        if chosen != formats[0]:
            found[a, b] = chosen
            ratios[a, b] = ratio
    slowest = sorted(found, key=lambda link: (-ratios[link], -costs.body(*link), link))
    return {link: found[link] for link in slowest[:MOST_LINKS]}


def _finest(formats: Sequence[str], sizes: Mapping[str, int], ratio: float, most: float) -> str:
    """The finest format in which a link's ``ratio`` of the run's format becomes at most ``most``,
    or the coarsest."""
    for wire in formats:
        if ratio * sizes[wire] / sizes[formats[0]] <= most:
            return wire
    return formats[-1]


def _busiest(paths: Sequence[Path], costs: Costs) -> float:
    """Seconds that the device with the most work takes for its visits; 0 if none was measured."""
    seconds = Counter[PeerId]()
    for path in paths:
        here = costs.device.get(path.origin, 0.0) + costs.loss.get(path.origin, 0.0)
        seconds[path.origin] += here  # pyright: ignore[reportArgumentType] - seconds, not counts
        for hop in path.hops:
            seconds[hop.peer] += costs.device.get(hop.peer, 0.0)  # pyright: ignore
    return max(seconds.values(), default=0.0)
