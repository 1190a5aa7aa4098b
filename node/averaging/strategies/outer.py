"""Settings of averaging between cells: its values, its period, its strategy; and the rules for
combining them. Enters: settings. Leaves: the reason why some settings do not go together; the
fragments of a stage. Never: torch.

A strategy is *partial* when a round leaves members with different values. It suits values that
rounds bring closer together: parameters. It does not suit gradients, nor differences from anchors
that are not the same everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from node.core.errors import refuse
from node.core.tables import setting
from node.wire.coding.formats import FORMATS

STRATEGIES: dict[str, str] = {
    "butterfly": "all members in one group, each reduces one part",
    "moshpit": "one axis of a grid a round; exact after as many rounds as it has axes when it is "
    "full",
    "gossip": "random pairs",
    "parameter-server": "all shares with one member, or a few; a push may be late by at most the "
    "bound",
    "hogwild": "as the parameter server, with neither barrier nor lock",
}
_INSTEAD = 'use "gossip" (random pairs), or "moshpit" with outer.grid'
REMOVED: dict[str, str] = {"ring": _INSTEAD, "push-sum": _INSTEAD}
"""Former strategies, and the advice on their replacements."""
MOST_STAGES = 255
"""Block stages for which a cell can name hosts in an answer."""
MOST_MEMBERS = 32
"""Cells of a group."""
PARTIAL = ("gossip", "moshpit")
"""Strategies that may leave members with different values after a round."""
CARRIES: dict[str, str] = {
    "parameters": "themselves, in fp32",
    "deltas": "anchor minus local parameters, the pseudo-gradient of DiLoCo; anchors are equal "
    "everywhere",
    "state": "parameters after a local outer step and its momentum, in fp32: DiLoCo where anchors "
    "differ",
}
OPTIMIZERS = ("none", "sgd", "nesterov")
WEIGHTS: dict[str, str] = {
    "equal": "every cell counts the same",
    "agreement": "a difference that goes against the others' counts less; copies share one weight",
}


@dataclass(frozen=True)
class OuterSettings:
    """How cells average with each other, in windows of the wall clock."""

    strategy: str = setting(
        "butterfly",
        "butterfly | moshpit | gossip | parameter-server | hogwild.",
        choices=tuple(STRATEGIES),
        removed=REMOVED,
    )
    carries: str = setting(
        "parameters",
        "parameters | deltas (DiLoCo) | state (DiLoCo over a partial strategy).",
        choices=tuple(CARRIES),
    )
    optimizer: str = setting("none", "Outer optimizer: none | sgd | nesterov.", choices=OPTIMIZERS)
    lr: float = setting(
        0.7,
        "Learning rate of the outer optimizer; its default and the momentum's come from DiLoCo "
        "(arXiv 2311.08105). Without a barrier it is shared by the cells: each push is a step of "
        "lr / cells.",
        least=0.0,
        most=1000.0,
    )
    momentum: float = setting(
        0.9, "Its momentum; pushes without a barrier have none.", least=0.0, most=0.9999
    )
    codec: str = setting(
        "fp32",
        "fp32 | bf16 | fp16 | int8 | int4 | top-k. Lossy ones are for deltas.",
        choices=tuple(FORMATS),
    )
    feedback: bool = setting(
        False, "Error feedback: what rounding lost is added to the next round."
    )
    grid: tuple[int, ...] = setting((), "Axes of the Moshpit grid.")
    shards: int = setting(1, "Cells that serve, each some of the stages.", least=1)
    staleness: int | None = setting(
        None,
        "Steps that a parameter server may be ahead of a push that it takes; None: a push is of "
        "the server's newest step, or is not taken. Always None for hogwild, which takes every "
        "push.",
    )
    fragments: int = setting(
        1, "Streaming: pieces of the model, of which each window carries one in its turn.", least=1
    )
    mixing: float = setting(
        0.0,
        "Share of the difference to the mean that is not applied, so that the same share of the "
        "local parameters stays.",
        least=0.0,
        most=1.0,
    )
    quorum: int = setting(
        0,
        "Contributions with which an outer step may be made where some do not come; 0: all.",
        least=0,
    )
    weights: str = setting(
        "equal",
        "equal | agreement: a difference that goes against the others' counts less, and copies of "
        "one share one weight.",
        choices=tuple(WEIGHTS),
    )
    window_s: float = setting(
        0.0,
        "Seconds between rounds, by the wall clock; 0: there is one cell, and there are none.",
        least=0.0,
        most=10**6,
    )

    @property
    def pushes(self) -> bool:
        """True for a strategy without a barrier: every push is applied by itself when it
        arrives."""
        return self.strategy == "hogwild" or (
            self.strategy == "parameter-server" and self.staleness is not None
        )

    @property
    def together(self) -> bool:
        """True if all cells must come to the same anchor, so that a window has one group of them
        and no second one."""
        return self.carries == "deltas" and not self.pushes

    @property
    def served(self) -> bool:
        """True if one cell of a group makes the mean of a stage for all."""
        return self.strategy in ("parameter-server", "hogwild")

    @property
    def windows(self) -> bool:
        """True if there may be several cells, each with a leader, that meet in windows of time."""
        return self.window_s > 0

    @property
    def says(self) -> str:
        """The settings in a few words, for people."""
        what = self.carries
        if self.fragments > 1:
            what = f"one of {self.fragments} fragments of {self.carries}"
        closes = ""
        if self.quorum:
            closes = f", closed by a quorum of {self.quorum}"
        weighs = ""
        if self.weights != "equal":
            weighs = f", weighed by {self.weights}"
        return f"{self.strategy} of {what} every {self.window_s:g} s{closes}{weighs}"


def check(s: OuterSettings) -> None:
    """Raises UsageFault, with the reason, for settings that cannot hold together. Each setting
    alone is within its range."""
    partial = s.strategy in PARTIAL
    steps = s.carries in ("deltas", "state")
    made = FORMATS[s.codec]
    refuse(
        # Settings that belong to one strategy.
        (
            s.strategy == "moshpit" and (not s.grid or any(axis < 2 for axis in s.grid)),
            f"outer.grid is {list(s.grid)}",
            "give the axes of the grid, each at least 2, as [32, 32]",
        ),
        (
            s.grid and s.strategy != "moshpit",
            f"outer.grid is for moshpit, not {s.strategy}",
            "leave it out",
        ),
        (
            s.shards > 1 and not s.served,
            f"outer.shards is for parameter-server and hogwild, not {s.strategy}",
            "leave it out",
        ),
        (
            s.staleness is not None and s.strategy != "parameter-server",
            f"outer.staleness is for parameter-server, not {s.strategy}",
            "leave it out",
        ),
        (
            s.staleness is not None and s.staleness < 0,
            f"outer.staleness is {s.staleness}",
            "give a number of pushes, 0 or more",
        ),
        # Combinations of the values carried with strategy, optimizer, codec, fragments and quorum.
        (s.lr == 0, "outer.lr is 0", "give a number above 0"),
        (
            s.carries == "deltas" and partial,
            f"after a round of {s.strategy} anchors differ, and differences from different anchors "
            "average to nothing",
            'use outer.carries = "state", which averages anchors and momentum too, or the '
            "butterfly",
        ),
        (
            steps and s.optimizer == "none",
            f"{s.carries} need an outer optimizer",
            'set outer.optimizer = "nesterov", or "sgd" with lr = 1',
        ),
        (
            not steps and s.optimizer != "none",
            f"an outer optimizer steps pseudo-gradients, not {s.carries}",
            'set outer.carries = "deltas"',
        ),
        (
            s.carries == "state" and not partial,
            f"{s.strategy} keeps anchors equal, so twice the bytes buy nothing",
            'set outer.carries = "deltas"',
        ),
        (
            s.pushes and s.carries == "parameters",
            f"{s.strategy} without a barrier adds what is pushed; parameters do not add up",
            'set outer.carries = "deltas"',
        ),
        (
            s.pushes and s.optimizer == "nesterov" and s.momentum > 0,
            f"{s.strategy} without a barrier applies every push by itself: momentum would count "
            "the members' common direction once for each",
            'set outer.optimizer = "sgd"',
        ),
        (
            made.lossy and s.carries in ("parameters", "state"),
            f"{s.codec} rounds, and {s.carries} would be rounded again in every round",
            'set outer.codec = "fp32", or carry "deltas"',
        ),
        (
            made.biased and not s.feedback,
            f"{s.codec} leaves most numbers out, always the same small ones",
            "set outer.feedback = true",
        ),
        (
            s.feedback and not made.lossy,
            f"{s.codec} loses nothing that could be fed back",
            "set outer.feedback = false",
        ),
        (
            (s.mixing or s.fragments > 1) and s.carries != "deltas",
            f"streaming sends fragments of deltas, not {s.carries}",
            'set outer.carries = "deltas"',
        ),
        (
            s.fragments > 1 and s.pushes,
            f"{s.strategy} without a barrier has no common window to send a fragment in",
            "set outer.fragments = 1",
        ),
        (
            s.quorum and s.carries != "deltas",
            f"who is late for a quorum must catch up, and {s.carries} cannot be taken late",
            'set outer.carries = "deltas"',
        ),
        (
            s.weights != "equal" and (s.carries != "deltas" or s.pushes),
            f"weights by {s.weights} compare differences from one anchor",
            'set outer.carries = "deltas", and a strategy with a barrier',
        ),
        (
            s.weights != "equal" and made.biased,
            f"{s.codec} sends other numbers of each cell, which say little about agreement",
            'set outer.codec = "int8", or outer.weights = "equal"',
        ),
        (
            s.quorum and s.pushes,
            f"the server of {s.strategy} without a barrier takes what has come in time",
            "set outer.quorum = 0",
        ),
    )


def carried(s: OuterSettings, cell: int, stages: int = 1) -> None:
    """Raises UsageFault, with the reason, for settings that hold together but that a live swarm
    with cells of ``cell`` replicas a stage (0: all in one) and ``stages`` block stages does not
    support."""
    if not s.windows:
        return refuse(
            (
                s != OuterSettings(),
                "outer.window_s is 0, so nothing else in [outer] has any effect",
                "set outer.window_s, or leave [outer] out",
            ),
            (
                cell,
                f"cells of {cell} that never average with each other train as many models as there "
                "are cells",
                'set outer.window_s and outer.strategy, or averaging.cell = "all"',
            ),
        )
    check(s)
    refuse(
        (
            not cell,
            "all replicas of a stage are one cell, so there are no others to average with",
            "set averaging.cell to a number",
        ),
        (
            max(s.grid, default=0) > MOST_MEMBERS,
            f"outer.grid is {list(s.grid)}",
            f"no axis longer than {MOST_MEMBERS}, because so many cells make one group",
        ),
        (
            stages > MOST_STAGES,
            f"pipeline.stages = {stages} while outer.strategy = {s.strategy!r}",
            f"at most {MOST_STAGES}, because what a cell tells others names a host of each",
        ),
        (
            s.pushes and s.feedback,
            f"{s.strategy} leaves out pushes that come too late, and what coding lost of them",
            'use "int8" without outer.feedback',
        ),
    )


def pieces(sizes: Mapping[str, int], count: int) -> list[frozenset[str]]:
    """The parts of a stage in ``count`` fragments of about equal bytes: largest first, each to the
    smallest. A stage of few parts has fragments without any."""
    found: list[set[str]] = [set() for _ in range(count)]
    held = [0] * count
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        i = min(range(count), key=lambda i: (held[i], i))
        found[i].add(name)
        held[i] += size
    return [frozenset(names) for names in found]
