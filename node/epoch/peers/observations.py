"""Observations of tensors: each joins the input of a member and its output, as the two neighbours
report them. Pure. Enters: the sketches that the members of a plan report. Leaves: an observation
for each stage and direction of a micro-batch, and pairs of members that contradict each other.
Never: a verdict (:mod:`node.epoch.leader.inspection`).

A peer's residual stream makes its output resemble its input, and the gradient of its input that of
its output. Neither neighbour of a peer can see both, and the peer itself may lie, so an observation
joins the words of the two neighbours.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from node.core.ids import ENDS, PeerId
from node.core.journey import Path, Plan
from node.pipeline.events import Crossing, Direction, VisitSketches
from node.wire.sketch import SketchTable

INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = range(len(Crossing))
"""Columns of a table of sketches."""
OTHER_END = {
    OUTPUT: INPUT,
    INPUT: OUTPUT,
    OUTPUT_GRADIENT: INPUT_GRADIENT,
    INPUT_GRADIENT: OUTPUT_GRADIENT,
}
"""Column by which the peer at the other end of a link reports the same tensor."""
COARSE = "int4"
"""Name of the number format on the wire whose rounding changes a likeness."""
SAME = 1.5
"""Least likeness of two sketches of one tensor; int4 on the wire leaves 2.3."""
SAME_SIZE = 0.15
"""Largest difference of their sizes."""

ALL = 64
"""Micro-batches up to which all of a plan are inspected."""
FOR_EACH = 4
"""Inspected micro-batches for each member of a large plan."""
VISITS = 128
"""Largest number of inspected visits to block stages. They bound the leader's time: it inspects
between two epochs, on its event loop."""


class TensorKind(NamedTuple):
    """Tensors that are comparable: they left ``stage`` in one direction, after another stage
    (``after``) had sent its own."""

    stage: int
    way: Direction
    after: int


@dataclass(frozen=True, slots=True)
class Observation:
    """One tensor that ``peer`` sent, beside the one that it received. ``sender`` and ``receiver``
    are the witnesses. ``likeness``: of the two tensors; ``growth``: logarithm of the ratio of their
    sizes. ``place``: number of tensors that the micro-batch had crossed before. ``confirmed``: the
    peer itself reports the same."""

    peer: PeerId
    kind: TensorKind
    index: int
    place: int
    sender: PeerId
    receiver: PeerId
    likeness: float
    growth: float
    confirmed: bool


class Row(NamedTuple):
    """The report of one peer about one micro-batch; ``at``: its place in the table of sketches."""

    taker: PeerId
    giver: PeerId
    at: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The result of one epoch. ``disputes``: pairs of neighbours whose sketches of the same
    tensor differ; ``agreed``: pairs of neighbours with the same sketches everywhere; ``stages``:
    stages of the peers on the paths of the plan."""

    observations: tuple[Observation, ...]
    disputes: frozenset[frozenset[PeerId]]
    agreed: frozenset[frozenset[PeerId]] = frozenset()
    stages: Mapping[PeerId, int] = field(default_factory=dict)

    def outvotes(self, witness: PeerId, peer: PeerId) -> bool:
        """Return True if ``witness`` alone works for its stage, so that no plan can give ``peer``
        another neighbour there, and agrees with another replica of the stage of ``peer``."""
        at = self.stages.get(witness)
        stage = self.stages.get(peer)
        if at is None or stage is None or list(self.stages.values()).count(at) != 1:
            return False
        return any(
            self.stages.get(other) == stage
            for pair in self.agreed
            if witness in pair
            for other in pair - {witness, peer}
        )


def sampled(plan: Plan, seed: str) -> frozenset[int]:
    """Micro-batches of a plan that are inspected, and of which its members report sketches. The
    leader sends ``seed`` when it closes the epoch, so nobody knows them before."""
    most = max(ALL, FOR_EACH * len(plan.members))
    hops = max((len(path.hops) for path in plan.paths), default=0)
    most = max(1, min(most, VISITS // max(1, hops)))
    indices = [path.index for path in plan.paths]
    if len(indices) <= most:
        return frozenset(indices)
    raw = hashlib.shake_256(seed.encode()).digest(8 * len(indices))
    chosen = np.argsort(np.frombuffer(raw, "<u8"), kind="stable")[:most]
    return frozenset(indices[i] for i in chosen.tolist())


def observe(plan: Plan, seed: str, reports: Mapping[PeerId, Sequence[VisitSketches]]) -> Observed:
    """Compare the sketches that members of a plan reported. ``seed``: that of
    :func:`sampled`. Raises WireError for bytes that are no sketches."""
    stages = {m.peer: m.stage for m in plan.members}
    wanted = sampled(plan, seed)
    paths = {path.index: path for path in plan.paths if path.index in wanted}
    neighbours = {index: _neighbours(path) for index, path in paths.items()}
    rows: dict[int, dict[PeerId, Row]] = {index: {} for index in paths}
    encoded: list[bytes] = []
    for peer, visits in reports.items():
        for visit in visits:
            path = paths.get(visit.index)
            if path is None or not _fits(visit, peer, path, neighbours[visit.index], stages):
                continue
            rows[visit.index][peer] = Row(visit.taker, visit.giver, len(encoded))
            encoded.append(visit.encoded)
    table = SketchTable(encoded, len(Crossing))
    compared, disputes = _disputes(rows, table)
    observations: list[_Triple] = []
    for path in paths.values():
        if path.index in disputes:
            continue  # one of its tensors is false, and spoils those computed from it
        observations += _triples(path, rows[path.index], stages)
    pairs = frozenset(pair for found in disputes.values() for pair in found)
    coarse = {link for link, wire in plan.wires.items() if wire == COARSE}
    working = {path.origin: ENDS for path in plan.paths}
    working |= {hop.peer: hop.stage for path in plan.paths for hop in path.hops}
    found = tuple(_compared(observations, table, coarse))
    return Observed(found, pairs, compared - pairs, working)


def _neighbours(path: Path) -> dict[int, tuple[int, int]]:
    """By stage of a path the stages of its taker and of its giver. The origin takes from the last
    hop and gives to the first one."""
    stages = [hop.stage for hop in path.hops]
    ring = [ENDS, *stages, ENDS]
    found = {stage: (ring[at], ring[at + 2]) for at, stage in enumerate(stages)}
    if stages:
        found[ENDS] = stages[-1], stages[0]
    return found


def _fits(
    visit: VisitSketches,
    peer: PeerId,
    path: Path,
    neighbours: Mapping[int, tuple[int, int]],
    stages: Mapping[PeerId, int],
) -> bool:
    """Return True if the path can have led through this peer between the neighbours it names. A
    replica may replace a hop; nobody replaces the origin. A report that does not fit is left out:
    it could hide a tensor by naming wrong witnesses."""
    stage, taker, giver = (stages.get(p) for p in (peer, visit.taker, visit.giver))
    if stage is None or neighbours.get(stage) != (taker, giver):
        return False
    return all((stages[p] == ENDS) == (p == path.origin) for p in (peer, visit.taker, visit.giver))


def _disputes(
    rows: Mapping[int, Mapping[PeerId, Row]], table: SketchTable
) -> tuple[frozenset[frozenset[PeerId]], dict[int, set[frozenset[PeerId]]]]:
    """Pairs of neighbours that both report the tensors of one link; and those that report different
    ones, by index of the micro-batch."""
    links: list[tuple[int, PeerId, PeerId]] = []
    sent: list[tuple[int, int]] = []
    came: list[tuple[int, int]] = []
    for index, found in rows.items():
        for peer, row in found.items():
            behind = found.get(row.giver)
            if behind is None or behind.taker != peer:
                continue
            links += [(index, peer, row.giver)] * 2
            sent += [(row.at, OUTPUT), (behind.at, INPUT_GRADIENT)]
            came += [(behind.at, INPUT), (row.at, OUTPUT_GRADIENT)]
    disputes: dict[int, set[frozenset[PeerId]]] = {}
    for (index, *pair), likeness, growth in zip(links, *table.compare(sent, came), strict=True):
        # Two tensors of zeros are the same; a likeness that is no number is of one at least.
        same = likeness >= SAME or (math.isnan(likeness) and not growth)
        if not same or abs(growth) > SAME_SIZE:
            disputes.setdefault(index, set()).add(frozenset(pair))
    return frozenset(frozenset(pair) for _, *pair in links), disputes


@dataclass(frozen=True, slots=True)
class _Triple:
    """A peer on the route of one micro-batch, with its two neighbours. ``before`` is the row of the
    neighbour that sent its input, ``behind`` the row of the other; ``own``: its own row; ``last``:
    number of the last place."""

    index: int
    peer: PeerId
    stage: int
    place: int
    last: int
    taker: PeerId
    giver: PeerId
    stages: tuple[int, int]
    before: Row
    behind: Row
    own: Row | None

    def tensors(
        self, coarse: Collection[tuple[PeerId, PeerId]]
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Cells of the table, (row, column), of the tensor that the peer received and of the one
        that it sent: first forward, then backward. The neighbours' reports count. On a ``coarse``
        link the peer's own report counts, which agrees with the neighbour's: the rounding there
        would look like noise of the peer."""
        own = self.own
        for received, sender, sent, receiver in (
            ((self.before, OUTPUT), self.taker, (self.behind, INPUT), self.giver),
            (
                (self.behind, INPUT_GRADIENT),
                self.giver,
                (self.before, OUTPUT_GRADIENT),
                self.taker,
            ),
        ):
            came = received[0].at, received[1]
            gone = sent[0].at, sent[1]
            if own is not None and (sender, self.peer) in coarse:
                came = own.at, OTHER_END[received[1]]
            if own is not None and (self.peer, receiver) in coarse:
                gone = own.at, OTHER_END[sent[1]]
            yield came, gone


def _triples(
    path: Path, rows: Mapping[PeerId, Row], stages: Mapping[PeerId, int]
) -> Iterator[_Triple]:
    """The peers of block stages on the route of one micro-batch. ``rows``: reports about it."""
    # A replica that replaces a hop has the hop's place.
    places = {hop.stage: 1 + at for at, hop in enumerate(path.hops)}
    planned = {hop.peer for hop in path.journey}
    takers = _claims({peer: row.giver for peer, row in rows.items()}, planned)
    givers = _claims({peer: row.taker for peer, row in rows.items()}, planned)
    for peer in sorted(takers.keys() & givers.keys()):
        place = places.get(stages[peer])
        if place is None:
            continue
        taker = takers[peer]
        giver = givers[peer]
        yield _Triple(
            path.index,
            peer,
            stages[peer],
            place,
            2 * len(places) + 2,
            taker,
            giver,
            (stages[taker], stages[giver]),
            rows[taker],
            rows[giver],
            rows.get(peer),
        )


def _compared(
    triples: Sequence[_Triple],
    table: SketchTable,
    coarse: Collection[tuple[PeerId, PeerId]],
) -> Iterator[Observation]:
    """The observations of both directions; none of a tensor of zeros."""
    pairs = [pair for t in triples for pair in t.tensors(coarse)]
    likeness, growth = table.compare([came for came, _ in pairs], [sent for _, sent in pairs])
    for i, t in enumerate(triples):
        forward = TensorKind(t.stage, Direction.FORWARD, t.stages[0]), t.place, t.taker, t.giver
        backward = (
            TensorKind(t.stage, Direction.BACKWARD, t.stages[1]),
            t.last - t.place,
            t.giver,
            t.taker,
        )
        for at, (kind, place, sender, receiver) in enumerate((forward, backward), 2 * i):
            if not math.isnan(likeness[at]):
                yield Observation(
                    t.peer,
                    kind,
                    t.index,
                    place,
                    sender=sender,
                    receiver=receiver,
                    likeness=likeness[at],
                    growth=growth[at],
                    confirmed=t.own is not None,
                )


def _claims(named: Mapping[PeerId, PeerId], planned: Collection[PeerId]) -> dict[PeerId, PeerId]:
    """Neighbour of each peer, as that neighbour itself reports. ``named``: the peer that each
    reporter names. Of several reporters the ``planned`` one counts, else none: any replica can
    claim that a micro-batch led through it."""
    claims: dict[PeerId, list[PeerId]] = {}
    for by, peer in named.items():
        claims.setdefault(peer, []).append(by)
    found: dict[PeerId, PeerId] = {}
    for peer, by in claims.items():
        counting = by if len(by) == 1 else [p for p in by if p in planned]
        if len(counting) == 1:
            found[peer] = counting[0]
    return found
