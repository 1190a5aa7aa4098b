"""How owned units lie in the exchanged buffers, chosen by predicted time.

*contiguous*: slices of the bucket in order, cut between parameters: in place, but order binds the
loads. *permuted*: the bucket re-ordered by owner and padded to equal shards: standard collectives,
more bytes. *parts*: each unit by itself to an owner of any choice: no padding, best balance, one
message each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from node.core.errors import UsageFault
from node.partition.balance import balance
from node.partition.matrices import Unit, in_order
from node.partition.search import OwnershipProblem
from testbed.reference.buckets import ALIGN, Bucket, alpha_cuts, owners_of_cuts, start_index

Kind = Literal["contiguous", "permuted", "parts"]
ALPHAS = (0.0, 0.5, 0.9, 1.0)
SLACKS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)
"""How far above an equal share a shard may grow, tried in turn."""


@dataclass(frozen=True)
class Wire:
    """``rate``: cost a rank does in a second; ``bytes_per_s`` of its link; ``message_s``: of one
    message; ``hidden``: the share of the exchange that other work covers; ``collectives``: whether
    equal shards go in one fused call a bucket."""

    rate: float
    bytes_per_s: float
    message_s: float = 20e-6
    hidden: float = 0.0
    collectives: bool = True
    element_bytes: int = 4


@dataclass(frozen=True)
class Layout:
    """``padding``: elements sent beyond those there are, over those there are; ``most``: elements
    of the fullest rank."""

    kind: Kind
    owner: dict[str, int]
    padding: float
    most: int
    compute_s: float
    exchange_s: float

    @property
    def seconds(self) -> float:
        """Predicted: compute, and what of the exchange is not hidden."""
        return self.compute_s + self.exchange_s


def choose_layout(
    units: Sequence[Unit], buckets: Sequence[Bucket], ranks: int, wire: Wire
) -> list[Layout]:
    """The best layout of each kind, the quickest first; ``buckets`` hold the units by name, spans
    in elements of a rank's shard.

    Every rank receives its slice from ranks - 1 others and sends it back: 2 (ranks - 1) · longest
    slice over the link, and messages. Raises UsageFault when a unit is in no bucket.
    """
    names = {name for b in buckets for name, _, _ in b.spans}
    missing = [u.name for u in units if u.name not in names]
    if missing:
        raise UsageFault(f"{missing[0]} is in no bucket", "lay out every unit")
    cost = {u.name: u.cost for u in units}
    wanted = [start_index(buckets, ranks)] + [
        owners_of_cuts(buckets, alpha_cuts(buckets, ranks, a)) for a in ALPHAS
    ]
    contiguous = [
        _made("contiguous", o, cost, buckets, ranks, wire, _slices(buckets, o, ranks), fused=False)
        for o in wanted
    ]
    permuted: list[Layout] = []
    for slack in SLACKS:
        owner, shards = permuted_shards(units, buckets, ranks, slack)
        permuted.append(
            _made(
                "permuted",
                owner,
                cost,
                buckets,
                ranks,
                wire,
                [[s] * ranks for s in shards],
                fused=True,
            )
        )
    order = in_order(units)
    found, _ = balance(
        OwnershipProblem([u.cost for u in order], [1.0] * ranks, [u.bytes for u in order])
    )
    free = {u.name: r for u, r in zip(order, found, strict=True)}
    parts = _made(
        "parts", free, cost, buckets, ranks, wire, _slices(buckets, free, ranks), fused=False
    )
    best = [min(kind, key=lambda made: made.seconds) for kind in (contiguous, permuted, [parts])]
    return sorted(best, key=lambda made: made.seconds)


def permuted_shards(
    units: Sequence[Unit], buckets: Sequence[Bucket], ranks: int, slack: float
) -> tuple[dict[str, int], list[int]]:
    """Return (owner, shard elements of each bucket). The largest cost goes first, to the rank with
    least cost so far among ranks with a shard within 1 + `slack` equal shares, otherwise to the
    emptiest shard; loads go on from bucket to bucket. Shards are padded to the longest."""
    by_name = {u.name: u for u in units}
    loads = [0] * ranks
    owner = {}
    shards = []
    for b in buckets:
        length = {name: end - start for name, start, end in b.spans}
        used = [0] * ranks
        cap = (1 + slack) * sum(length.values()) / ranks
        for u in in_order(by_name[name] for name in length):
            size = -(-length[u.name] // ALIGN) * ALIGN
            fits = [r for r in range(ranks) if used[r] + size <= cap]
            rank = (
                min(fits, key=lambda r: (loads[r], r))
                if fits
                else min(range(ranks), key=lambda r: (used[r], loads[r], r))
            )
            owner[u.name] = rank
            used[rank] += size
            loads[rank] += u.cost
        shards.append(max(used))
    return owner, shards


def _slices(buckets: Sequence[Bucket], owner: Mapping[str, int], ranks: int) -> list[list[int]]:
    made: list[list[int]] = []
    for b in buckets:
        sizes = [0] * ranks
        for name, start, end in b.spans:
            sizes[owner[name]] += end - start
        made.append(sizes)
    return made


def _made(
    kind: Kind,
    owner: Mapping[str, int],
    cost: Mapping[str, int],
    buckets: Sequence[Bucket],
    ranks: int,
    wire: Wire,
    slices: Sequence[Sequence[int]],
    fused: bool,
) -> Layout:
    loads = [0] * ranks
    held = [0] * ranks
    for name, rank in owner.items():
        loads[rank] += cost[name]
    for sizes in slices:
        for rank, size in enumerate(sizes):
            held[rank] += size
    real = sum(end - start for b in buckets for _, start, end in b.spans)
    messages = (
        2 * len(slices)
        if fused and wire.collectives
        else 2 * sum(sum(1 for x in sizes if x) for sizes in slices)
    )
    longest = max(held) if not fused else sum(max(sizes) for sizes in slices)
    exchange = (
        2 * (ranks - 1) * longest * wire.element_bytes / wire.bytes_per_s
        + messages * wire.message_s
    )
    return Layout(
        kind,
        dict(owner),
        (sum(map(sum, slices)) - real) / real,
        max(held),
        max(loads) / wire.rate,
        exchange * (1 - wire.hidden),
    )
