"""Costs of work and connections: the speed of a peer, its measurements, and the costs that a leader
derives from the reports of all peers. Pure.

Enters: Measured of every peer. Leaves: Costs. Never: a number by which one peer could spoil a plan;
a cost without a measurement is the median of its kind, so that it is neither avoided nor preferred.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from node.core.errors import WireError
from node.core.ids import PeerId

K = TypeVar("K")

SMALLEST_S = 1e-6
"""Smallest reported time, in seconds; times are reported as whole steps of a logarithmic scale."""
STEPS = 40
"""Steps of that scale to a factor of ten; each is 6 %."""
MOST_CODE = 1 + 10 * STEPS
"""10,000 s."""
MOST_SLOTS = 4096
BEYOND = 20.0
"""A claim counts for at most ``BEYOND`` times the median of its kind, and for at least the median
divided by it."""
STEADY = 0.5
"""Standard deviations added to a mean: of two peers that are equally fast on average the steady one
is preferred."""
BACKWARD = (0.5, 2.0, 4.0)
"""A backward over a forward: at least, if nothing is known, at most."""


@dataclass
class SecondsPerUnit:
    """Exponential moving average of seconds per unit of work.

    The average is over time per unit, not units per time: a stall of ten seconds must weigh ten
    seconds. ``alpha`` is the weight of a new measurement; early ones weigh more, so that the first
    is taken as it is (bias correction as in Kingma and Ba, arXiv 1412.6980).
    """

    alpha: float = 0.1
    count: int = 0
    seconds_per_unit: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """``units`` of work took ``seconds``. Raises ValueError unless both are positive and
        finite."""
        if not (0 < units < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"{units} units in {seconds} s is no measurement")
        self.count += 1
        weight = min(1.0, self.alpha / (1.0 - (1.0 - self.alpha) ** self.count))
        self.seconds_per_unit += weight * (seconds / units - self.seconds_per_unit)

    @property
    def per_second(self) -> float:
        """Units per second; 0 when nothing was measured."""
        if not self.count:
            return 0.0
        return 1.0 / self.seconds_per_unit


def quantise(speed: float, previous: float = 0.0, per_octave: int = 4) -> float:
    """Round a speed to a coarse logarithmic grid with ``per_octave`` points per factor of two.

    Plans and ownership are computed from the rounded value, so that they do not change with every
    wobble of a measurement: ``previous``, the value used until now, is kept while the speed is
    within one whole grid step of it. 0 stays 0 (unknown), and so does anything negative or not
    finite.
    """
    if not (0 < speed < math.inf):
        return 0.0
    place = math.log2(speed) * per_octave
    if 0 < previous < math.inf and abs(place - math.log2(previous) * per_octave) < 1.0:
        return previous
    return 2.0 ** (round(place) / per_octave)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Cost of the connection from the peer that measured to another peer. ``tensor_s``: seconds
    until the other peer held a tensor of a micro-batch; ``trip_s``: seconds of a small message
    there and back; 0 if not known. ``rate``: bytes a second that a relay in between has left; 0
    without a relay or a limit."""

    tensor_s: float = 0.0
    trip_s: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one peer. ``forward_s``, ``backward_s``, ``loss_s``: seconds of device time
    for a micro-batch in each direction and for a loss (at the ends), each a mean with
    :data:`STEADY` deviations, 0 if not known; ``slots``: micro-batches that its stash or window
    holds, 0 if not known; ``ways``: its connections; ``up`` and ``down``: the bytes of tensors a
    second that its operator lets it send and receive in all, 0 for no cap; ``tera_s``: seconds of
    10^12 operations in steps of the optimizer, before the first step in a plain product;
    ``product_s``: the same in a plain product, as measured at the start, 0 if not known."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    loss_s: float = 0.0
    slots: int = 0
    ways: tuple[tuple[PeerId, LinkCost], ...] = ()
    up: float = 0.0
    down: float = 0.0
    tera_s: float = 0.0
    product_s: float = 0.0

    @property
    def line(self) -> float:
        """The lower of its caps, 0 for none."""
        return least(self.up, self.down)

    @property
    def body_s(self) -> float:
        """Seconds of a tensor's bytes over its fastest measured connection: the time of a tensor
        less that of a small message; 0 if none carried tensors, or if the bytes take no time."""
        return min(
            (max(0.0, way.tensor_s - way.trip_s) for _, way in self.ways if way.tensor_s > 0),
            default=0.0,
        )


NOTHING = Measured()


def least(*rates: float) -> float:
    """The lowest of some limits, of which 0 is none; 0 when none is."""
    return min((rate for rate in rates if rate > 0), default=0.0)


def capped(speed: float, line: float, tensor: int) -> float:
    """Micro-batches a second of a peer that computes ``speed`` and moves ``line`` bytes a second
    each way: of every micro-batch it sends two tensors, one forward and one backward, and receives
    two. 0 for an unknown ``speed``; a ``line`` of 0 is no cap."""
    if line and tensor:
        return min(speed, line / (2 * tensor))
    return speed


def code(seconds: float) -> int:
    """Seconds as heartbeats carry them: a step of the logarithmic scale, 0 for unknown."""
    if not 0 < seconds < math.inf:
        return 0
    return min(MOST_CODE, 1 + max(0, round(STEPS * math.log10(seconds / SMALLEST_S))))


def decoded(number: int) -> float:
    """The inverse of :func:`code`. Raises WireError for a number outside its range."""
    if not 0 <= number <= MOST_CODE:
        raise WireError("a time beyond the scale of costs")
    if number == 0:
        return 0.0
    return SMALLEST_S * 10 ** ((number - 1) / STEPS)


@dataclass(frozen=True)
class Costs:
    """The costs that a leader plans with, in seconds. A peer or connection that is not listed is
    unknown. ``compute``: forward and backward of a micro-batch together; ``backward``: ratio of a
    backward to a forward; ``loss``: loss of a micro-batch at the ends peers. ``ways``: delay of a
    tensor from one peer to another; ``delay_s``: delay of an unmeasured connection; ``body_s``: the
    seconds by which a tensor usually exceeds half a small round trip. ``lines``: for peers with a
    cap the lower of both caps, bytes a second. ``device``: as ``compute``, without the time that a
    cap adds. ``bodies``: seconds of a tensor's bytes in the run's format, from one peer to
    another."""

    compute: Mapping[PeerId, float] = field(default_factory=dict)
    loss: Mapping[PeerId, float] = field(default_factory=dict)
    slots: Mapping[PeerId, int] = field(default_factory=dict)
    ways: Mapping[tuple[PeerId, PeerId], float] = field(default_factory=dict)
    backward: float = BACKWARD[1]
    delay_s: float = 0.0
    body_s: float = 0.0
    lines: Mapping[PeerId, float] = field(default_factory=dict)
    device: Mapping[PeerId, float] = field(default_factory=dict)
    bodies: Mapping[tuple[PeerId, PeerId], float] = field(default_factory=dict)

    def body(self, a: PeerId, b: PeerId) -> float:
        """Seconds of a tensor's bytes from a to b in the run's format, 0 if not measured in either
        direction."""
        known = self.bodies.get((a, b))
        if known is not None:
            return known
        return self.bodies.get((b, a), 0.0)

    def delay(self, a: PeerId, b: PeerId) -> float:
        """Seconds of a tensor from a to b. A connection that was measured in the other direction
        only counts as equally long; one that was not measured at all has the usual delay."""
        known = self.ways.get((a, b))
        if known is not None:
            return known
        return self.ways.get((b, a), self.delay_s)


def believe(
    said: Mapping[PeerId, Measured],
    ends: Collection[PeerId],
    doubts: Mapping[PeerId, float] | None = None,
    tensor: int = 0,
    coarsest: float = 1.0,
) -> Costs:
    """The costs to plan with, from what the peers ``said``. ``doubts[peer]``: by which factor its
    neighbours find it slower than it says (1 and more). ``tensor``: bytes of a micro-batch on its
    way; over a relay it takes no less than the relay has left for it, at a peer with a cap no less
    than the cap does. ``coarsest``: share of these bytes that it has in the coarsest format which a
    plan may choose; delays and the times of capped peers are those of this format.

    Every claim is limited to :data:`BEYOND` times the median of its kind. A one-way delay is the
    time of a tensor less half a small round trip, since the receipt comes back over the same line.
    """
    doubts = doubts or {}
    ratios = [
        m.backward_s / m.forward_s
        for p, m in said.items()
        if p not in ends and m.forward_s > 0 and m.backward_s > 0
    ]
    ratio = BACKWARD[1]
    if ratios:
        ratio = min(max(median(ratios), BACKWARD[0]), BACKWARD[2])
    both = {
        p: (m.forward_s + m.backward_s) * max(1.0, doubts.get(p, 1.0))
        for p, m in said.items()
        if m.forward_s and m.backward_s
    }
    # A tensor keeps a narrow connection busy as work keeps the device busy: the longer of both
    # times is the cost of a micro-batch there.
    lines = {p: m.line for p, m in said.items() if m.line}
    device = _within_kind(both, ends)
    moved = round(tensor * coarsest)
    both = {p: 1 / capped(1 / s, lines.get(p, 0.0), moved) for p, s in both.items()}
    compute = _within_kind(both, ends)
    loss = _within({p: m.loss_s for p, m in said.items() if p in ends and m.loss_s > 0})
    ways, usual, body, bodies = _ways(said, tensor, coarsest)
    slots = {p: min(m.slots, MOST_SLOTS) for p, m in said.items() if m.slots > 0}
    return Costs(compute, loss, slots, ways, ratio, usual, body, lines, device, bodies)


def _within_kind(both: Mapping[PeerId, float], ends: Collection[PeerId]) -> dict[PeerId, float]:
    """The claims of block stages and those of the ends, each limited by the median of its kind."""
    return {
        **_within({p: s for p, s in both.items() if p not in ends}),
        **_within({p: s for p, s in both.items() if p in ends}),
    }


def _ways(
    said: Mapping[PeerId, Measured], tensor: int, coarsest: float
) -> tuple[dict[tuple[PeerId, PeerId], float], float, float, dict[tuple[PeerId, PeerId], float]]:
    """(delays, usual delay, usual seconds of a tensor's bytes, seconds of a tensor's bytes), by
    direction. The last two are of the run's format, the delays of the coarsest."""
    ways = {(a, b): way for a, m in said.items() for b, way in m.ways if b != a and b in said}
    trips = _within({ends: way.trip_s for ends, way in ways.items() if way.trip_s > 0})
    tensors = _within({ends: way.tensor_s for ends, way in ways.items() if way.tensor_s > 0})
    # The receipt comes back over the same line: half of a round trip is not the tensor's.
    both = {(a, b): trips.get((a, b), trips.get((b, a), 0.0)) for a, b in tensors}
    bodies = {way: max(0.0, s - both[way]) for way, s in tensors.items()}
    known = {way: coarsest * body + both[way] / 2 for way, body in bodies.items()}
    body = _median(bodies.values())
    for (a, b), trip in trips.items():
        if (a, b) not in known and (b, a) not in known:
            known[a, b] = trip / 2 + coarsest * body
    longest = BEYOND * _median(known.values())
    for (a, b), way in ways.items():
        if (rate := least(way.rate, said[a].up, said[b].down)) and (a, b) in known:
            slow = trips.get((a, b), 0.0) / 2 + coarsest * tensor / rate
            known[a, b] = max(known[a, b], min(longest, slow))
            if (a, b) in bodies:
                bodies[a, b] = max(bodies[a, b], min(longest, tensor / rate))
    return known, _median(known.values()), body, bodies


def _within(claims: Mapping[K, float]) -> dict[K, float]:
    middle = _median(claims.values())
    return {k: min(max(x, middle / BEYOND), middle * BEYOND) for k, x in claims.items()}


def _median(numbers: Iterable[float]) -> float:
    found = list(numbers)
    if not found:
        return 0.0
    return median(found)
