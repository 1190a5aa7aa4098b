"""Detection of replicas that send false tensors. Pure. Enters: the observations of each epoch.
Leaves: members whose tensors differed from the other replicas' in several epochs. Never: a
probation (:mod:`node.epoch.leader.conduct`).

After SENTINEL (arXiv 2603.03592), which keeps moving averages of the tensors that replicas send,
and counts votes of several receivers. Here the two neighbours of a peer say how its tensor relates
to the one that it was made from: that is nearly equal for all replicas of a stage and all devices,
and hardly depends on the text. The model changes it slowly, so each epoch is compared with the
other replicas of that epoch, and of two replicas the one is believed that is nearer to the usual.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from node.core.ids import PeerId
from node.core.newest import Newest
from node.epoch.peers.observations import Observation, Observed, TensorKind
from node.pipeline.events import Direction

FLOORS = (0.05, 0.05)
"""Deviation of a replica's mean likeness, and of its mean growth, that proves nothing."""
DEVIATIONS = 5.0
"""Standard errors beyond the floor that chance explains."""
FIRST_SPREADS = (0.15, 0.05)
"""Standard deviations between micro-batches of one peer before any are known."""
FIRST_FREEDOM = 4.0
"""Degrees of freedom of these first values: they weigh as much as this many measured ones."""
KEPT_FREEDOM = 0.9
"""Share of the measured degrees of freedom that an epoch leaves. A replica with two micro-batches
an epoch adds one, so a few epochs alone would give no usable standard deviation."""
WEIGHT = 0.5
"""Weight of the newest epoch in the usual mean: the model may change quickly."""
CLEARLY = 0.5
"""Largest ratio of the deviations of two replicas at which the larger one may be a lie."""
DIFFER = 3.0
"""Times the usual difference of replicas that proves nothing."""
SLOWLY = 0.05
"""Weight of the newest epoch in that difference."""
KNOWN = 3
"""Epochs after which the usual of a kind is believed."""
WINDOW = 8
"""Epochs of a peer's record that are judged together."""
LEAST = 3
"""Epochs of that record in which a liar deviates to the same side."""
OLD = 50
"""Epochs after which the usual of a kind is forgotten."""
KEPT = 4096
"""Kinds, and peers, that are remembered."""
FORGOTTEN = 64
"""Epochs without an observation after which a peer's record is deleted."""
UNLIKE = "sent tensors that do not fit those it received"
SIZED = "sent tensors of another size than the other replicas"
DENIED = "reports other tensors than its neighbours"
WHY = (UNLIKE, SIZED)


@dataclass(slots=True)
class Usual:
    """The usual value of one measure of one kind. ``first``: standard deviation between
    micro-batches of one peer before any is known; ``squares``: sum of the squared deviations of
    such micro-batches; ``freedom``: degrees of freedom of that sum."""

    first: float
    squares: float = 0.0
    freedom: float = 0.0
    mean: float = 0.0
    epochs: int = 0
    last: int = 0

    def learn(self, consensus: float, squares: float, freedom: int, epoch: int) -> None:
        """Take an epoch's consensus, and the deviations of its micro-batches."""
        self.epochs += 1
        self.last = epoch
        weight = max(1 / self.epochs, WEIGHT)
        self.mean += weight * (consensus - self.mean)
        self.squares = KEPT_FREEDOM * self.squares + squares
        self.freedom = KEPT_FREEDOM * self.freedom + freedom

    @property
    def spread(self) -> float:
        """Standard deviation between micro-batches of one peer."""
        squares = FIRST_FREEDOM * self.first**2 + self.squares
        return math.sqrt(squares / (FIRST_FREEDOM + self.freedom))

    def error(self, count: float) -> float:
        """Standard error of a mean of ``count`` micro-batches."""
        return self.spread / math.sqrt(count)

    def tolerance(self, floor: float, count: float, errors: float = DEVIATIONS) -> float:
        """Deviation of such a mean that proves nothing."""
        return floor + errors * self.error(count)


@dataclass(frozen=True, slots=True)
class Deviation:
    """One epoch of one peer, in one measure of one kind. ``by``: signed distance from the
    consensus; ``count``: as :func:`_compared_counts` has it; ``odd``: this epoch alone is beyond
    what chance explains; ``suspect``: several such epochs may be. ``senders`` and ``receivers``:
    the witnesses, if the peer itself does not report the same."""

    by: float
    count: float
    odd: bool
    suspect: bool
    senders: frozenset[PeerId] = frozenset()
    receivers: frozenset[PeerId] = frozenset()


@dataclass(slots=True)
class InspectionRecord:
    """The last epochs of one peer. ``deviations``: by kind and number of the measure;
    ``contradicted``: for each epoch the peers that it contradicted; ``absent``: epochs in a row in
    which nobody observed it."""

    deviations: dict[tuple[TensorKind, int], deque[Deviation]] = field(default_factory=dict)
    contradicted: deque[set[PeerId]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    absent: int = 0

    def add(self, kind: TensorKind, measure: int, deviation: Deviation) -> None:
        """One more epoch."""
        known = self.deviations.setdefault((kind, measure), deque(maxlen=WINDOW))
        known.append(deviation)

    def mean(self, about: tuple[TensorKind, int]) -> float:
        """Mean deviation over the epochs of one kind and measure."""
        epochs = self.deviations[about]
        return sum(d.by * d.count for d in epochs) / sum(d.count for d in epochs)

    def suspect(self, about: tuple[TensorKind, int]) -> list[Deviation]:
        """Epochs of one kind and measure that deviate as the mean does, and may be lies."""
        by = self.mean(about)
        return [d for d in self.deviations[about] if d.suspect and d.by * by > 0]

    def single_witnesses(self, about: tuple[TensorKind, int], me: PeerId) -> set[PeerId]:
        """The only sender and the only receiver that saw suspect deviations. What the peer does not
        report itself, two senders and two receivers or this leader (``me``) must have seen: a
        single witness may lie."""
        suspect = self.suspect(about)
        found = set[PeerId]()
        for witnesses in ([d.senders for d in suspect], [d.receivers for d in suspect]):
            everybody = frozenset[PeerId]().union(*witnesses)
            if len(everybody) == 1 and me not in everybody:
                found |= everybody
        return found


@dataclass(frozen=True, slots=True)
class Liar:
    """A peer that lied, and the reason to say so."""

    peer: PeerId
    why: str


Sample = list[Observation]
Samples = Mapping[TensorKind, Mapping[PeerId, Sample]]
Measure = Callable[[Observation], float]
MEASURES: tuple[Measure, ...] = (lambda o: o.likeness, lambda o: o.growth)


class Inspection:
    """The usual tensors of one cell, and the newest epochs of its members."""

    def __init__(self) -> None:
        self._usual: Newest[tuple[TensorKind, int], Usual] = Newest(KEPT)
        self._records: Newest[PeerId, InspectionRecord] = Newest(KEPT)
        self._apart: frozenset[frozenset[PeerId]] = frozenset()
        self._believed: Newest[PeerId, PeerId] = Newest(KEPT)
        """The peer against which the word of a single witness counted, by witness."""
        self._floors = list(FLOORS)
        """Tolerance of each measure: :data:`FLOORS`, plus the usual difference of replicas."""

    def judge(self, seen: Observed, epoch: int, me: PeerId) -> list[Liar]:
        """Take the observations of one epoch. Returns the liars that it proves, and deletes their
        records. ``me``: this leader, whose own reports are believed."""
        samples = _sampled(seen.observations)
        deviations = self._deviations(samples, epoch)
        odd = {
            (peer, kind.way)
            for (kind, _), of in deviations.items()
            for peer, d in of.items()
            if d.odd
        }
        if odd:
            samples = _sampled(_before_oddities(seen.observations, odd))
            deviations = self._deviations(samples, epoch)
        self._forget(samples, deviations)
        self._differ(deviations)
        for (kind, measure), found in deviations.items():
            self._learn(kind, measure, samples[kind], found, epoch)
            for peer, deviation in found.items():
                seen_by = _with_witnesses(deviation, samples[kind][peer])
                self._record(peer).add(kind, measure, seen_by)
        against: defaultdict[PeerId, set[PeerId]] = defaultdict(set)
        for one, other in map(sorted, seen.disputes):
            against[one].add(other)
            against[other].add(one)
        present = {o.peer for o in seen.observations} | against.keys()
        for peer in present | self._records.keys():
            record = self._record(peer)
            record.contradicted.append(against[peer])
            record.absent += 1
            if peer in present:
                record.absent = 0
            if record.absent >= FORGOTTEN:
                del self._records[peer]
        self._apart = self._contested()
        return self._liars(present - {me}, seen, me)

    def apart(self) -> frozenset[frozenset[PeerId]]:
        """Pairs of peers of which one lies: as neighbours of others they show which one it is."""
        return self._apart

    def _contested(self) -> frozenset[frozenset[PeerId]]:
        pairs: set[frozenset[PeerId]] = set()
        for peer, record in self._records.items():
            others = set[PeerId]().union(*record.contradicted)
            for epochs in record.deviations.values():
                for deviation in epochs:
                    if deviation.odd:
                        others |= deviation.senders | deviation.receivers
            pairs.update(frozenset((peer, other)) for other in others)
        return frozenset(pairs)

    def _forget(
        self, samples: Samples, found: Mapping[tuple[TensorKind, int], Mapping[PeerId, Deviation]]
    ) -> None:
        """Delete the usual values of kinds without a consensus: two replicas differ, and both are
        far from the usual value. The model has changed, and the old value could later be nearer to
        the wrong replica."""
        for kind, of in samples.items():
            for number in range(len(MEASURES)):
                if len(of) > 1 and (kind, number) not in found:
                    self._usual.pop((kind, number), None)

    def _differ(
        self, deviations: Mapping[tuple[TensorKind, int], Mapping[PeerId, Deviation]]
    ) -> None:
        """Learn by how much replicas differ: devices or texts may make them. The median over all
        stages, which no liar moves."""
        for number, floor in enumerate(FLOORS):
            beyond = [
                max(0.0, abs(d.by) - self._usual[kind, n].error(d.count))
                for (kind, n), found in deviations.items()
                if n == number and (kind, n) in self._usual
                for d in found.values()
            ]
            if beyond:
                wanted = floor + DIFFER * median(beyond)
                self._floors[number] += SLOWLY * (wanted - self._floors[number])

    # ----------------------------------------------------------- one epoch

    def _deviations(
        self, samples: Samples, epoch: int
    ) -> dict[tuple[TensorKind, int], dict[PeerId, Deviation]]:
        """Deviations of the replicas from their consensus, where there is one, by kind and
        measure."""
        found: dict[tuple[TensorKind, int], dict[PeerId, Deviation]] = {}
        young = all(usual.epochs < KNOWN for usual in self._usual.values())
        for number, measure in enumerate(MEASURES):
            means = {
                kind: {peer: fmean(map(measure, sample)) for peer, sample in of.items()}
                for kind, of in samples.items()
            }
            everywhere: dict[Direction, list[float]] = {}
            for kind, of in means.items():
                everywhere.setdefault(kind.way, []).extend(of.values())
            # Growths of the stages part as the model learns, and a copy looks like a stage that
            # does little. No lie makes tensors more alike but a copy, which is too much so.
            anchors = {
                way: median(row) if young or not number else math.inf
                for way, row in everywhere.items()
            }
            for kind, of in means.items():
                elsewhere = anchors[kind.way]
                usual = self._of(kind, number, epoch)
                counts = _compared_counts(samples[kind])
                consensus = _consensus(of, counts, usual, self._floors[number], elsewhere)
                if consensus is None:
                    continue
                found[kind, number] = {
                    peer: _deviation(mean - consensus, counts[peer], usual, self._floors[number])
                    for peer, mean in of.items()
                }
        return found

    def _of(self, kind: TensorKind, number: int, epoch: int) -> Usual:
        usual = self._usual.get((kind, number))
        if usual is None or epoch - usual.last > OLD:
            usual = Usual(FIRST_SPREADS[number])
        return usual

    def _learn(
        self,
        kind: TensorKind,
        number: int,
        samples: Mapping[PeerId, Sample],
        found: Mapping[PeerId, Deviation],
        epoch: int,
    ) -> None:
        """Update the usual mean and spread of a kind from the replicas that are not odd."""
        measure = MEASURES[number]
        usual = self._of(kind, number, epoch)
        accepted = [peer for peer, deviation in found.items() if not deviation.odd]
        if not accepted:
            return
        means = {peer: fmean(map(measure, samples[peer])) for peer in accepted}
        squares = sum(_squares(measure, samples[peer], means[peer]) for peer in accepted)
        freedom = sum(len(samples[peer]) - 1 for peer in accepted)
        if not freedom and usual.epochs:
            # One micro-batch each. The change of the model counts too, which errs to the safe side.
            squares = sum((mean - usual.mean) ** 2 for mean in means.values())
            freedom = len(means)
        one = accepted[0]
        consensus = means[one] - found[one].by
        usual.learn(consensus, squares, freedom, epoch)
        self._usual[kind, number] = usual

    # ----------------------------------------------------------- several epochs

    def _record(self, peer: PeerId) -> InspectionRecord:
        record = self._records.get(peer) or InspectionRecord()
        self._records[peer] = record
        return record

    def _liars(self, present: Collection[PeerId], seen: Observed, me: PeerId) -> list[Liar]:
        """Liars among the peers ``present`` in this epoch, by their records. Deletes the records of
        these liars, and of all replicas the deviations in the kinds that proved a lie."""
        found = dict.fromkeys(self._denying(present, seen, me), DENIED)
        kinds: dict[tuple[TensorKind, int], dict[PeerId, float]] = {}
        for peer in sorted(present):
            record = self._record(peer)
            for about in record.deviations:
                kinds.setdefault(about, {})[peer] = record.mean(about)
        for (kind, number), means in kinds.items():
            peer, *others = sorted(means, key=lambda p: -abs(means[p]))
            alone = others and all(abs(means[p]) <= CLEARLY * abs(means[peer]) for p in others)
            if not alone or not self._is_beyond_chance(self._record(peer), (kind, number)):
                continue
            single = self._record(peer).single_witnesses((kind, number), me)
            if not all(self._believes(witness, peer, seen) for witness in single):
                continue
            self._believed.update(dict.fromkeys(single, peer))
            found.setdefault(peer, WHY[number])
            for p in means:
                del self._record(p).deviations[kind, number]
        for peer in found:
            del self._records[peer]
            for record in self._records.values():
                for others in record.contradicted:
                    others.discard(peer)
        return [Liar(peer, why) for peer, why in sorted(found.items())]

    def _denying(self, present: Collection[PeerId], seen: Observed, me: PeerId) -> list[PeerId]:
        """Peers that contradict at least two others, and each of these fewer than they do; peers
        that contradict this leader; and peers that contradict only a witness that is believed
        alone. In several epochs. Two liars with equally many contradictions do not hide each
        other."""
        others = {peer: set[PeerId]().union(*self._record(peer).contradicted) for peer in present}
        found: list[PeerId] = []
        for peer, of in sorted(others.items()):
            epochs = sum(map(bool, self._record(peer).contradicted))
            if epochs < LEAST:
                continue
            alone = len(of) >= 2 and all(len(of) > len(others.get(p, ())) for p in of)
            (witness, *more) = of
            if alone or me in of:
                found.append(peer)
            elif not more and others.get(witness) == {peer} and self._believes(witness, peer, seen):
                self._believed[witness] = peer
                found.append(peer)
        return found

    def _believes(self, witness: PeerId, peer: PeerId, seen: Observed) -> bool:
        """Return True if the word of ``witness`` alone counts against ``peer``: nobody can be put
        in its place, another replica agrees with it, and its word alone has counted against nobody
        else. So one liar gets at most one honest peer out. Which of two lies that contradict each
        other after that is open: the first verdict may have been right or wrong."""
        return self._believed.get(witness, peer) == peer and seen.outvotes(witness, peer)

    def _is_beyond_chance(self, record: InspectionRecord, about: tuple[TensorKind, int]) -> bool:
        """Return True if the epochs of this peer together are beyond what chance explains."""
        usual = self._usual.get(about)
        if usual is None or len(record.suspect(about)) < LEAST:
            return False
        count = sum(d.count for d in record.deviations[about])
        return abs(record.mean(about)) > usual.tolerance(self._floors[about[1]], count)


def _compared_counts(samples: Mapping[PeerId, Sample]) -> dict[PeerId, float]:
    """Effective number of micro-batches behind the difference between a replica's mean and the
    mean of all others: n1 * n2 / (n1 + n2). For two replicas with two micro-batches each it is
    1."""
    total = sum(map(len, samples.values()))
    return {p: max(1.0, total - len(of)) * len(of) / total for p, of in samples.items()}


def _deviation(by: float, count: float, usual: Usual, floor: float) -> Deviation:
    odd = abs(by) > usual.tolerance(floor, count)
    suspect = abs(by) > usual.tolerance(floor, count, 1.0)
    return Deviation(by, count, odd, suspect)


def _consensus(
    means: Mapping[PeerId, float],
    counts: Mapping[PeerId, float],
    usual: Usual,
    floor: float,
    elsewhere: float,
) -> float | None:
    """The value that the replicas of a stage should have: the median of theirs, to which the usual
    one is added if their number is even. None if nobody can tell. ``elsewhere``: the median at all
    stages, by which two replicas are compared before anything is usual; infinite later."""
    values = sorted(means.values())
    if len(values) < 2:
        return None
    if len(values) % 2:
        return median(values)
    known = usual.epochs >= KNOWN
    if len(values) > 2:
        return median([*values, usual.mean] if known else values)
    least = min(counts.values())
    tolerance = usual.tolerance(floor, least)
    anchor = usual.mean if known else elsewhere
    near, far = sorted(values, key=lambda value: abs(value - anchor))
    if abs(near - anchor) <= tolerance:
        return median([near, far, anchor]) if known else near
    if abs(near - far) <= tolerance:
        return near if math.isinf(anchor) else median([near, far, anchor])  # they agree
    if known and abs(near - anchor) <= CLEARLY * abs(far - anchor):
        return near
    return None


def _with_witnesses(deviation: Deviation, sample: Sample) -> Deviation:
    """A deviation with its witnesses, unless the peer itself reports the same."""
    if all(o.confirmed for o in sample):
        return deviation
    senders = frozenset(o.sender for o in sample)
    return replace(deviation, senders=senders, receivers=frozenset(o.receiver for o in sample))


def _sampled(observations: Iterable[Observation]) -> dict[TensorKind, dict[PeerId, Sample]]:
    found: dict[TensorKind, dict[PeerId, Sample]] = {}
    for o in observations:
        found.setdefault(o.kind, {}).setdefault(o.peer, []).append(o)
    return found


def _squares(measure: Measure, sample: Sample, mean: float) -> float:
    """Sum of the squared deviations of a sample from its mean. The functions of :mod:`statistics`
    add fractions, ten times as slowly."""
    return sum((measure(o) - mean) ** 2 for o in sample)


def _before_oddities(
    observations: Iterable[Observation], odd: Collection[tuple[PeerId, object]]
) -> list[Observation]:
    """Observations without those that another odd peer came before in the same micro-batch: a false
    tensor makes what is computed from it unusual too."""
    spoiled: dict[int, int] = {}
    everything = list(observations)
    for o in everything:
        if (o.peer, o.kind.way) in odd:
            spoiled[o.index] = min(spoiled.get(o.index, o.place), o.place)
    return [o for o in everything if o.place <= spoiled.get(o.index, o.place)]
