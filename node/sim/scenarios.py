"""Scenarios by name: each lays faults over a time line, drawn from the seed. Several may be given
at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from node.core.errors import UsageFault
from node.sim.faults import Fault, Schedule
from node.sim.lies import LIES
from node.sim.names import SCENARIOS
from node.sim.setup import Setup

Lay = Callable[[random.Random, float, Setup], list[Fault]]
"""``(dice, seconds the run takes undisturbed, setup) -> faults``"""


def _some(
    kind: str,
    count: int = 1,
    seconds: tuple[float, float] = (0.0, 0.0),
    size: tuple[float, float] = (0.0, 0.0),
) -> Lay:
    """``count`` faults of a kind at any time of the run."""

    def lay(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
        return [
            Fault(
                round(dice.uniform(0.1, 0.9) * span, 3),
                kind,
                dice.randrange(1 << 16),
                -1,
                round(dice.uniform(*seconds), 3),
                round(dice.uniform(*size), 3),
            )
            for _ in range(count)
        ]

    return lay


def _share(kind: str, share: float) -> Lay:
    """As many peers as make this share of the swarm, at one time."""

    def lay(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
        at = round(dice.uniform(0.3, 0.6) * span, 3)
        count = max(1, round(setup.peers * share))
        return [Fault(round(at + 0.01 * i, 3), kind, dice.randrange(1 << 16)) for i in range(count)]

    return lay


def _crowd(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    """Half as many peers as there are, in one second, to any stage where they are needed."""
    at = dice.uniform(0.2, 0.6) * span
    count = max(2, setup.peers // 2)
    times = sorted(at + dice.random() for _ in range(count))
    return [Fault(round(t, 3), "come", dice.randrange(1 << 16)) for t in times]


def _churn(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    """Every few epochs a peer dies and another comes; more of them in a bigger swarm."""
    every = max(span / setup.epochs * 3, 2.0)
    each = max(1, round(setup.peers / 50))
    times = [every * i for i in range(1, int(span * 0.9 / every) + 1)]
    return [
        Fault(round(t + dice.uniform(0, every / 2), 3), "replace", dice.randrange(1 << 16), -1, 1.0)
        for t in times
        for _ in range(each)
    ]


def _lies(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    return [
        Fault(
            round(dice.uniform(0.1, 0.7) * span, 3),
            "lie",
            dice.randrange(1 << 16),
            -1,
            6.0,
            float(dice.randrange(len(LIES))),
        )
    ]


MIX: tuple[tuple[str, float, tuple[float, float], tuple[float, float]], ...] = (
    ("kill", 2, (0, 0), (0, 0)),
    ("replace", 4, (0.5, 4), (0, 0)),
    ("restart", 3, (0.5, 8), (0, 0)),
    ("pause", 4, (0.3, 12), (0, 0)),
    ("partition", 3, (0.5, 15), (0.2, 0.8)),
    ("one-way", 2, (0.5, 12), (0, 1)),
    ("flap", 1, (2, 8), (0.3, 1.5)),
    ("slow-link", 2, (1, 10), (2, 40)),
    ("loss", 2, (1, 10), (0.05, 0.6)),
    ("slow-peer", 2, (1, 10), (2, 60)),
    ("skew", 1, (3, 20), (-8, 8)),
    ("corrupt", 1, (0, 0), (0, 0)),
    ("broken-step", 1, (0, 0), (0, 0)),
    ("lie", 1, (3, 10), (0, 100)),
    ("join", 2, (0, 0), (0, 0)),
    ("leave", 2, (0, 0), (0, 0)),
    ("kill-leader", 2, (0, 0), (0, 0)),
    ("kill-each", 1, (0, 0), (0, 0)),
    ("restart-all", 0.5, (1, 3), (0, 0)),
)
"""Kinds of :data:`random`, how likely, for how long, how much."""


def _random(dice: random.Random, span: float, setup: Setup) -> list[Fault]:
    faults = []
    for _ in range(dice.randint(1, 6)):
        kind, _, seconds, size = dice.choices(MIX, [m[1] for m in MIX])[0]
        faults += _some(kind, 1, seconds, size)(dice, span, setup)
    return faults


LAYS: dict[str, Lay] = {
    "quiet": lambda dice, span, setup: [],
    "kill": _some("kill"),
    "pause": _some("pause", 2, (1, 12)),
    "partition": _some("partition", 1, (3, 20), (0.2, 0.8)),
    "one-way": _some("one-way", 2, (2, 12), (0, 1)),
    "partial-partition": _some("partial-partition", 2, (2, 12)),
    "slow-link": _some("slow-link", 2, (3, 15), (5, 40)),
    "slow-peer": _some("slow-peer", 2, (3, 15), (5, 60)),
    "flapping": _some("flap", 2, (4, 12), (0.3, 1.5)),
    "loss": _some("loss", 2, (3, 15), (0.1, 0.6)),
    "skew": _some("skew", 3, (5, 30), (-10, 10)),
    "corrupt": _some("corrupt"),
    "broken-step": _some("broken-step", 2),
    "liar": _lies,
    "stranger": _some("stranger", 2, (5, 20)),
    "mass-join": _share("join", 0.5),
    "crowd": _crowd,
    "mass-leave": _share("leave", 0.34),
    "mass-kill": _share("kill", 0.25),
    "leader-kill": _some("kill-leader", 2),
    "each-stage": _some("kill-each"),
    "outage": _some("outage", 1, (4, 12)),
    "restart": _some("restart-all", 1, (1, 3)),
    "churn": _churn,
    "random": _random,
}
"""How each of :data:`node.sim.names.SCENARIOS` is laid."""


def lay(names: Sequence[str], setup: Setup, seed: int, span: float | None = None) -> Schedule:
    """The faults of these scenarios together. Raises UsageFault for a name that is none.

    ``span``: seconds the run takes undisturbed; estimated when None.
    """
    faults: list[Fault] = []
    for name in names:
        if name not in SCENARIOS:
            raise UsageFault(
                f"there is no scenario {name!r}", f"choose among {', '.join(SCENARIOS)}"
            )
        dice = random.Random(f"{name} {seed}")
        faults += LAYS[name](dice, estimate(setup) if span is None else span, setup)
    return Schedule(seed, tuple(sorted(faults, key=lambda f: f.at)))


def estimate(setup: Setup) -> float:
    """About how many seconds a quiet run takes."""
    way = setup.links.latency_s + setup.links.jitter_s / 2
    if setup.links.bandwidth:
        way += setup.activation * 8 / setup.links.bandwidth
    hops = setup.stages + 1
    first = 2 * hops * way + 3 * (setup.stages * setup.work.forward_s + 2 * setup.work.ends_s)
    slots = max(1, min(setup.replicas, setup.ends * setup.in_flight))
    work = setup.micro_batches / slots * 3 * setup.work.forward_s * (1 + setup.work.unequal) / 2
    parts = max(sum(p.bytes for p in ps) for ps in setup.parts.values())
    wire = 2 * parts * 8 / setup.links.bandwidth if setup.links.bandwidth else 0.0
    return 2.0 + setup.epochs * (first + work + 8 * way + wire + setup.work.step_s * 3)
