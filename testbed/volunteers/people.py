"""Volunteers of a simulated day: when their machines are there, how they go, their regions and home
links. All chance comes from a seed.

The lengths of intervals follow fits of some 230,000 hosts of SETI@home (Javadi, Kondo, Vincent and
Anderson, "Discovering statistical models of availability in large distributed systems", IEEE TPDS
22(11), 2011; traces of the Failure Trace Archive), with the two distributions that the simulator
ComBoS uses for them (Alonso-Monsalve et al., Computer Networks, 2017): Weibull while a host is
there, log-normal while it is away. Time is compressed: a day takes an hour.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from node.availability.hours import DAY, Hours
from node.core.ids import PeerId
from node.sim.setup import LinkProfile
from node.sim.world.network import SimLinks

THERE_SHAPE, THERE_SCALE_H = 0.393, 2.964
"""Weibull distribution of the hours for which a host is there."""
AWAY_MU, AWAY_SIGMA = -0.586, 2.844
"""Log-normal distribution of the hours for which it is away."""
SMALL = 4096
"""Bytes up to which a message does not queue behind tensors: flows share a line."""
REGIONS = ("america", "europe", "asia", "south america")
SHARES = (0.4, 0.35, 0.15, 0.1)
"""Share of the volunteers in each region."""
CLOCKS_H = (-6.0, 1.0, 8.0, -3.0)
"""Hours of a region's clocks before Greenwich's."""
DELAYS_S = (
    (0.025, 0.055, 0.080, 0.070),
    (0.055, 0.020, 0.095, 0.100),
    (0.080, 0.095, 0.040, 0.150),
    (0.070, 0.100, 0.150, 0.035),
)
"""Seconds one way between homes of two regions, without jitter."""
UP_BITS, DOWN_TIMES = (10e6, 50e6), (4.0, 10.0)
"""Bounds of a home's upload in bits a second, and of its download as a multiple of that."""
HOURS = ("22-08", "18-09", "09-17")
HOURS_SHARE = 0.2
"""Share of the owners that set hours."""


class Going(Enum):
    """Ways in which a machine goes."""

    SLEEP = "sleep"
    """It stands still, with everything in memory, and goes on later."""
    PAUSE = "pause"
    """Its owner, or the owner's hours, pause the daemon: it leaves in order."""
    CUT = "cut"
    """Power or network is gone: the process ends without a word."""


GOING_SHARES = (0.35, 0.4, 0.25)
"""Share of each way, among intervals that end by themselves."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One interval in virtual seconds in which a machine is there. ``goes``: the way it ends."""

    begin: float
    end: float
    goes: Going


@dataclass(frozen=True, slots=True)
class Home:
    """A volunteer's home: its region, and the bits a second of its line. ``slowness``: of its
    machine, 1 for the fastest."""

    region: int
    up: float
    down: float
    slowness: float


@dataclass(frozen=True)
class Volunteer:
    """A volunteer: its home and the intervals of its machine, in order."""

    name: PeerId
    home: Home
    stays: tuple[Stay, ...]

    def seconds(self, until: float) -> float:
        """Seconds for which its machine is there before ``until``."""
        return sum(max(0.0, min(s.end, until) - s.begin) for s in self.stays)


def volunteers(
    count: int, seconds: float, seed: int, *, compression: float = 24.0, unequal: float = 2.0
) -> list[Volunteer]:
    """Draw this number of volunteers for ``seconds`` of virtual time. ``compression``: trace time
    over virtual time; ``unequal``: slowest over fastest machine."""
    return [
        _volunteer(number, seconds, random.Random(f"{seed} {number}"), compression, unequal)
        for number in range(count)
    ]


def _volunteer(
    number: int, seconds: float, dice: random.Random, compression: float, unequal: float
) -> Volunteer:
    region = dice.choices(range(len(REGIONS)), SHARES)[0]
    up = math.exp(dice.uniform(*map(math.log, UP_BITS)))
    down = up * dice.uniform(*DOWN_TIMES)
    home = Home(region, up, down, 1.0 + (unequal - 1.0) * dice.random())
    hours = None
    if dice.random() < HOURS_SHARE:
        hours = Hours.parse(dice.choice(HOURS))
    stays = _stays(seconds, dice, compression)
    if hours is not None:
        stays = _within(stays, hours, CLOCKS_H[region], seconds, compression)
    return Volunteer(PeerId(f"v-{number:05}"), home, tuple(stays))


def _stays(seconds: float, dice: random.Random, compression: float) -> list[Stay]:
    """Intervals from a moment of a host's life that is drawn evenly."""
    hour = 3600.0 / compression
    # The host has lived for long when the day begins.
    now = -dice.uniform(20.0, 30.0) * 24.0 * hour
    found: list[Stay] = []
    while now < seconds:
        end = now + dice.weibullvariate(THERE_SCALE_H, THERE_SHAPE) * hour
        goes = dice.choices(tuple(Going), GOING_SHARES)[0]
        if end > 0.0:
            found.append(Stay(max(0.0, now), end, goes))
        now = end + dice.lognormvariate(AWAY_MU, AWAY_SIGMA) * hour
    return found


def _within(
    stays: list[Stay], hours: Hours, clock_h: float, seconds: float, compression: float
) -> list[Stay]:
    """The parts of these intervals in which the owner's hours are open. The virtual day begins at
    noon in Greenwich."""
    minute = 60.0 / compression
    opens: list[tuple[float, float]] = []
    for day in range(-1, math.ceil(seconds / minute / DAY) + 2):
        for begin, end in hours.spans:
            first = day * DAY + begin - 12 * 60 - clock_h * 60
            length = (end - begin) % DAY
            opens.append((first * minute, (first + length) * minute))
    found: list[Stay] = []
    for stay in stays:
        for first, last in sorted(opens):
            begin = max(stay.begin, first)
            end = min(stay.end, last)
            if begin < min(end, seconds):
                goes = stay.goes
                if last < stay.end:
                    goes = Going.PAUSE
                found.append(Stay(begin, end, goes))
    return found


class HomeLinks(SimLinks):
    """Links between homes: the delay of their regions, and lines that all transfers of a home
    share, one after the other. ``homes`` may grow."""

    def __init__(
        self, rng: random.Random, profile: LinkProfile, homes: Mapping[PeerId, Home]
    ) -> None:
        super().__init__(rng, profile)
        self.limited = True
        self._homes = homes
        self._jitter = profile.jitter_s
        self._loss = profile.loss
        self._sent: dict[PeerId, float] = {}
        """Time at which the upload of each home is free."""
        self._received: dict[PeerId, float] = {}
        """The same for its download."""

    def travel(self, a: PeerId, b: PeerId, nbytes: int, now: float) -> float:
        here = self._homes[a]
        there = self._homes[b]
        delay = DELAYS_S[here.region][there.region]
        seconds = delay + self._jitter * self._rng.random()
        if self._loss and self._rng.random() < self._loss:
            seconds += 0.2 + 2 * delay
        if not nbytes:
            return seconds
        up_s = nbytes * 8 / here.up
        down_s = nbytes * 8 / there.down
        if nbytes <= SMALL:
            return seconds + max(up_s, down_s)
        sent = max(now, self._sent.get(a, 0.0)) + up_s
        self._sent[a] = sent
        received = max(sent, self._received.get(b, 0.0) + down_s)
        self._received[b] = received
        return seconds + received - now
