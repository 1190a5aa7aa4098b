"""``tutti simulate --averaging``: speed and cost in bytes at which the daemon's own strategies
bring thousands of values together. Enters: a strategy, the number of peers, their rate of absence.
Leaves: rounds to a variance, variance by round, bytes by peer. Never: a strategy of its own;
chance, except for absences and lost messages.

The experiment of Moshpit SGD (arXiv 2103.03239, section 4.1): every peer has a number from a
standard normal distribution; in every round each peer is absent with the same probability, keeps
its number, and is left out by the others; the variance over all peers measures the remaining error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from node.averaging.strategies.strategy import (
    Barrierless,
    Butterfly,
    Groups,
    Moshpit,
    Pairs,
    ParameterServer,
    Pushes,
    RandomGroups,
    Strategy,
    advance,
    first_keys,
    fit,
    meet_by_key,
)
from node.core.errors import UsageFault, refuse
from node.sim.names import AVERAGING as NAMES
from node.wire.coding.formats import nbytes_of

TARGETS = (1e-4, 1e-9)
"""Variances that count as agreement, as published."""
CAP = 50
"""Rounds after which a run is given up; it then counts as a run of this length, as published."""

OUTER = {"diloco": 1, "streaming": 2}
"""Number of fragments of the deltas that are averaged; each is sent every ``OUTER_EVERY`` steps."""
OUTER_EVERY = 50
Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class AveragingTrial:
    """Numbers of a simulated trial. ``parameters`` and ``codec``: the count and the format of the
    values that each peer averages."""

    peers: int = 512
    grid: tuple[int, ...] = ()
    failure: float = 0.0
    seeds: int = 20
    seed: int = 0
    cap: int = CAP
    parameters: int = 1_000_000
    codec: str = "fp32"

    def shape(self) -> tuple[int, ...]:
        """The grid: as given, else with lines of at most 32, or as long as two axes need."""
        return self.grid or fit(self.peers, max(32, int(np.ceil(self.peers**0.5))))


@dataclass(frozen=True)
class AveragingFinding:
    """Means over the seeds. ``rounds``: to each of TARGETS; ``variance``: before and after every
    round; ``sent``: bytes by the average peer in a round, ``busiest``: sent and received by the
    peer that has most to do; ``every``: training steps from one round to the next."""

    name: str
    rounds: tuple[float, ...]
    variance: tuple[float, ...]
    bias: float
    sent: float
    busiest: float
    every: int

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "strategy": self.name,
            "rounds_to_1e-4": round(self.rounds[0], 3),
            "rounds_to_1e-9": round(self.rounds[1], 3),
            "variance": [float(f"{v:.4g}") for v in self.variance],
            "bias": float(f"{self.bias:.3g}"),
            "bytes_per_peer_per_round": round(self.sent),
            "bytes_busiest_per_round": round(self.busiest),
            "bytes_per_peer_per_step": round(self.sent / self.every),
            "bytes_per_peer_to_1e-9": round(self.sent * self.rounds[-1]),
        }


def simulate(name: str, trial: AveragingTrial) -> AveragingFinding:
    """Run ``trial.seeds`` times. Raises UsageFault for an unknown strategy or numbers that do not
    fit together."""
    _check(name, trial)
    runs = [_run(name, trial, seed) for seed in range(trial.seed, trial.seed + trial.seeds)]
    histories = [history for history, _ in runs]
    rounds = tuple(
        float(np.mean([_reached(h, target, trial.cap) for h in histories])) for target in TARGETS
    )
    longest = max(map(len, histories))
    padded = np.array([h + [h[-1]] * (longest - len(h)) for h in histories])
    sent, busiest = _traffic(_strategy(name, trial).meet(trial.peers, 0, trial.seed), trial)
    bias = float(np.sqrt(np.mean(np.square([bias for _, bias in runs]))))
    pieces = OUTER.get(name, 1)
    every = 1
    if name in OUTER:
        every = max(1, OUTER_EVERY // OUTER[name])
    return AveragingFinding(
        name, rounds, tuple(padded.mean(0).tolist()), bias, sent / pieces, busiest / pieces, every
    )


def _check(name: str, t: AveragingTrial) -> None:
    room = np.prod([float(axis) for axis in t.grid])
    refuse(
        (
            name not in NAMES,
            f"there is no strategy {name!r} to simulate",
            f"use all, or one of {', '.join(NAMES)}",
        ),
        (
            t.peers < 2 or t.seeds < 1 or t.cap < 1 or t.parameters < 1,
            "peers, seeds, rounds and parameters are counted from 1",
            "give at least two peers and one of the rest",
        ),
        (
            not 0 <= t.failure < 1,
            f"failure {t.failure} is a chance",
            "give a number from 0 to below 1",
        ),
        (
            any(axis < 2 for axis in t.grid) or (t.grid and room < t.peers),
            f"{t.peers} peers do not fit a grid of {'x'.join(map(str, t.grid))}",
            "give axes of at least 2, with room for all",
        ),
        (room > 1e7, "the grid has more than ten million cells", "give shorter axes"),
    )
    try:
        nbytes_of(0, t.codec)
    except ValueError as e:
        raise UsageFault(str(e), "choose one of these") from e


def _strategy(name: str, t: AveragingTrial) -> Strategy:
    grid = t.shape()
    return {
        "all-reduce": Butterfly(whole=True),
        "butterfly": Butterfly(),
        "moshpit": Moshpit(grid),
        "moshpit-fixed": Moshpit(grid, packed=False),
        "moshpit-keys": Moshpit(grid),  # for its traffic; groups come from keys
        "random-groups": RandomGroups(min(grid[0], t.peers)),
        "gossip": Pairs(),
        "diloco": Butterfly(),
        "streaming": Butterfly(),
        "parameter-server": ParameterServer(),
        "sharded": ParameterServer(min(grid[0], t.peers)),
        "stale": Barrierless(t.peers),
        "hogwild": Barrierless(locked=False),
    }[name]


def axes(text: str) -> tuple[int, ...]:
    """The grid of a text such as "32,32"; empty for an empty text. Raises UsageFault for anything
    else."""
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as e:
        raise UsageFault(f"the grid is {text!r}", "give the axes as --grid 32,32") from e


def document(trial: AveragingTrial, found: Sequence[AveragingFinding]) -> dict[str, object]:
    """The document that ``--json`` prints."""
    return {
        "peers": trial.peers,
        "grid": list(trial.shape()),
        "failure": trial.failure,
        "seeds": trial.seeds,
        "seed": trial.seed,
        "cap": trial.cap,
        "parameters": trial.parameters,
        "codec": trial.codec,
        "strategies": [f.to_dict() for f in found],
    }


def report(trial: AveragingTrial, found: Sequence[AveragingFinding]) -> list[str]:
    """Lines for people."""
    grid = " x ".join(map(str, trial.shape()))
    lines = [
        f"{trial.peers} peers, grid {grid}, absent {trial.failure:g}, mean of {trial.seeds} runs, "
        f"at most {trial.cap} rounds",
        f"{'strategy':<17}{'to 1e-4':>8}{'to 1e-9':>8}{'sent, models':>14}{'busiest':>9}  variance "
        "after rounds 1, 2, 3, ..",
    ]
    whole = nbytes_of(trial.parameters, trial.codec)
    for f in found:
        history = " ".join(f"{v:.0e}" for v in f.variance[1:7])
        rounds = "".join(f"{n:>8.1f}" for n in f.rounds)
        lines.append(
            f"{f.name:<17}{rounds}{f.sent / whole:>14.2f}{f.busiest / whole:>9.1f}  {history}"
        )
    return lines


def _run(name: str, t: AveragingTrial, seed: int) -> tuple[list[float], float]:
    """(variance before and after every round, distance of the last mean from the first)."""
    # The generator of the published runs, drawn from in their order: the same numbers, the same
    # absences.
    world_dice = np.random.RandomState(seed)
    strategy = _strategy(name, t)
    # Shards fail by themselves, and unlocked pushes mix coordinate by coordinate: one number for
    # each.
    width = {"sharded": min(t.shape()[0], t.peers), "hogwild": 4, **OUTER}.get(name, 1)
    values = world_dice.normal(size=(t.peers, width))
    wanted = values.mean(0)
    world = _world(name, strategy, t, values, seed)
    history = [float(values.var(0).mean())]
    for number in range(t.cap):
        values = world.round(number, world_dice.uniform(size=t.peers) >= t.failure)
        history.append(float(values.var(0).mean()))
        if history[-1] < TARGETS[-1]:
            break
    return history, float(np.abs(values.mean(0) - wanted).max())


def _world(
    name: str,
    s: Strategy,
    t: AveragingTrial,
    values: Values,
    seed: int,
) -> "World":
    if name == "moshpit-keys":
        return Keyed(t.shape(), values, seed)
    if name in OUTER:
        return Outer(Butterfly(), values, seed, OUTER[name])
    if isinstance(s, Barrierless):
        return Pushed(s, values, seed)
    return Direct(s, values, seed)


def _reached(history: Sequence[float], target: float, cap: int) -> int:
    return next((i for i, v in enumerate(history) if v < target), cap)


def _traffic(meeting: Groups | Pushes, t: AveragingTrial) -> tuple[float, float]:
    """(bytes sent by the average peer, sent and received by the busiest) in a round without
    failures.

    In a butterfly of m every peer sends (m-1)/m to the owners and its own part to m-1 peers: 2
    (m-1)/m of the whole.
    """
    whole = float(nbytes_of(t.parameters, t.codec))
    if isinstance(meeting, Pushes) or meeting.owners:
        owners = len(meeting.owners)
        # Everybody else pushes and pulls all; an owner does so for the shares that are not its own.
        sent = whole * (2 * (t.peers - owners) + 2 * (owners - 1)) / t.peers
        return sent, 2 * whole * ((t.peers - 1) / owners + (owners - 1) / owners)
    sizes = np.bincount(meeting.labels)
    sizes = sizes[sizes > 0]
    return float(np.sum(2 * whole * (sizes - 1)) / t.peers), float(
        4 * whole * (1 - 1 / sizes.max())
    )


# ----------------------------------------------------------- the numbers of all peers


@dataclass
class Direct:
    """Groups: nothing is carried from round to round but the values."""

    strategy: Strategy
    values: Values
    seed: int

    def round(self, number: int, alive: Flags) -> Values:
        meeting = self.strategy.meet(len(alive), number, self.seed)
        if isinstance(meeting, Groups):
            self.values = grouped(meeting, self.values, alive)
        return self.values


@dataclass
class Keyed:
    """Moshpit without a view: keys move with the groups that met."""

    grid: tuple[int, ...]
    values: Values
    seed: int

    def __post_init__(self) -> None:
        self.keys = first_keys(len(self.values), self.grid, self.seed)

    def round(self, number: int, alive: Flags) -> Values:
        shape = Moshpit(self.grid).shape(len(self.values))
        # Indices come one axis after the other, the last one first.
        length = shape[(len(shape) - 1 - number) % len(shape)]
        groups = meet_by_key(self.keys, length)
        self.values = grouped(groups, self.values, alive)
        self.keys = advance(self.keys, groups, alive, length, number, self.seed)
        return self.values


class Pushed:
    """One running mean at the server. Each peer pushes its change since its last pull, divided by
    the number of peers, and pulls."""

    def __init__(self, strategy: Barrierless, values: Values, seed: int) -> None:
        self.strategy = strategy
        self.seed = seed
        self.values = values.copy()
        self.server = np.zeros(values.shape[1])
        self.base = np.zeros_like(values)
        self.version = 0
        self.seen = np.zeros(len(values), np.int64)

    def round(self, number: int, alive: Flags) -> Values:
        meeting = self.strategy.meet(len(alive), number, self.seed)
        if not alive[list(meeting.owners)].all():
            return self.values
        if meeting.locked:
            self._turns(meeting.order[alive[meeting.order]], meeting.bound, slice(None))
        else:
            # every coordinate sees the pushes in an order of its own
            for c in range(self.values.shape[1]):
                mixed = np.roll(meeting.order, c * len(alive) // self.values.shape[1])
                self._turns(mixed[alive[mixed]], None, slice(c, c + 1))
        return self.values

    def _turns(self, turns: NDArray[np.int64], bound: int | None, where: slice) -> None:
        changed = self.values[turns, where] - self.base[turns, where]
        taken = self._admitted(turns, bound)
        after = self.server[where] + np.cumsum(
            np.where(taken[:, None], changed / len(self.values), 0.0), axis=0
        )
        # A refused peer keeps its change, on top of the values that it pulls.
        self.base[turns, where] = after
        self.values[turns, where] = np.where(taken[:, None], after, after + changed)
        if len(turns):
            self.server[where] = after[-1]

    def _admitted(self, turns: NDArray[np.int64], bound: int | None) -> Flags:
        if bound is None:
            return np.ones(len(turns), bool)
        taken = np.zeros(len(turns), bool)
        for i, peer in enumerate(turns.tolist()):
            taken[i] = self.version - self.seen[peer] <= bound
            self.version += int(taken[i])
            self.seen[peer] = self.version
        return taken


class Outer:
    """DiLoCo over one group, outer rate 1 and no momentum: everybody is ``values`` away from a
    common anchor. A peer that was absent gives its difference when it is back, and takes the newest
    anchor. ``fragments``: columns, one of them a round."""

    def __init__(self, strategy: Butterfly, values: Values, seed: int, fragments: int) -> None:
        self.strategy = strategy
        self.seed = seed
        self.fragments = fragments
        self.values = values.copy()
        self.base = np.zeros_like(values)
        self.anchor = np.zeros(values.shape[1])

    def round(self, number: int, alive: Flags) -> Values:
        meeting = self.strategy.meet(len(alive), number, self.seed)
        if alive.any():
            column = slice(number % self.fragments, None, self.fragments)
            mean = grouped(meeting, self.values - self.base, alive)[np.argmax(alive)]
            self.anchor[column] += mean[column]
            self.values[alive, column] = self.base[alive, column] = self.anchor[column]
        return self.values


World = Direct | Keyed | Pushed | Outer
"""``round(number, alive)`` plays one round; the values [n, c] that the peers have then."""


def grouped(groups: Groups, values: Values, alive: Flags) -> Values:
    """Means within groups over the peers that are alive; the others keep their values [n, c]. An
    absent owner's shares are not averaged."""
    if groups.whole and not alive.all():
        broken = np.unique(groups.labels[~alive])
        alive = alive & ~np.isin(groups.labels, broken)
    labels = groups.labels[alive]
    sizes = np.bincount(labels)
    new = values.copy()
    for c in range(values.shape[1]):
        if groups.owners and not alive[groups.owners[c % len(groups.owners)]]:
            continue
        sums = np.bincount(labels, weights=values[alive, c])
        new[alive, c] = sums[labels] / sizes[labels]
    return new
