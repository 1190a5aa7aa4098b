"""Rule that chooses the way of multiplying a matrix: from its shape and crossover points, and the
crossover points from times measured on a machine.

Enters  rows, columns, a KernelRule; for a KernelRule the times of trials. Never the number of
        matrices of a shape: a matrix is worked the same way beside any others.
Leaves  a KernelChoice: number format, Gram iteration or not, symmetric products by panels or not,
        stacked with others of its shape or not.
Never   a clock or a tensor: trials.py measures, newton_schulz.py multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Precision = Literal["bf16", "fp32"]
Form = Literal["alone", "stack", "panels", "standard", "gram", "layer"]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Way of orthogonalising one matrix, or a stack of one shape."""

    precision: Precision
    gram: bool
    """True: iterate on the small Gram matrix, restarted; False: on the whole matrix."""
    panels: int
    """Elements of an operand from which a symmetric product is made as a lower triangle of panels;
    0: never."""
    stacked: bool
    """Multiplied together with others of its shape, if there are."""


@dataclass(frozen=True, slots=True)
class KernelRule:
    """Crossover points. ``side`` is a matrix's smaller side, ``aspect`` the ratio of its longer
    side to that.

    The defaults are for a processor without measurements; a wrong default costs time only.
    """

    bf16_from: int = 0
    """Elements from which a matrix is worked in bf16; 0: never."""
    stack_bf16_to: int = 768
    """Side up to which a stack is faster in bf16 than one after the other."""
    stack_fp32_to: int = 64
    """Side up to which a stack is faster in fp32 than one after the other."""
    panels_bf16: int = 1 << 21
    """Elements of an operand from which panels are faster in bf16; 0: never."""
    panels_fp32: int = 1 << 18
    """Elements of an operand from which panels are faster in fp32; 0: never."""
    gram_aspect: float = 1.75
    """Aspect from which the Gram iteration is faster. Not measured at the start, because operations
    decide it: fewer from 1.5 on. On a Xeon with AMX it was 0.93 (bf16) and 1.0 (fp32) times as fast
    at 1.5, at 2 1.1 and 1.15, at 3 1.4 and 1.35."""
    layers_bf16_from: int = 0
    """Width of the hidden states from which forward and backward of a stage are faster in bf16; 0:
    never."""
    gram_from: int = 64
    """Side from which the Gram iteration is faster, measured on GPUs. Below, calls cost more than
    products, and the Gram iteration has more calls."""


CPU = KernelRule()
CUDA = KernelRule(
    bf16_from=1,
    stack_bf16_to=1024,
    stack_fp32_to=0,
    panels_bf16=0,
    panels_fp32=0,
    gram_aspect=2.0,
    gram_from=2048,
)
"""Default for a GPU, from times of an H100 (part e of ``benchmarks.gpu``). A stack of 8 is 5.8
times as fast as one after the other at 128, 4.8 at 1024, 1.1 at 2048. The Gram iteration, which has
more calls, is 0.7 to 0.8 times as fast as the standard one up to a side of 1024 at every aspect; at
2048 it is 0.9 at an aspect of 1.5, 1.06 at 2, 1.3 at 4. Panels were not tried."""
STACK_FROM = 8
"""Side from which matrices are stacked: torch multiplies smaller ones by loops of its own when
stacked, with other last bits."""


def way(rows: int, cols: int, rule: KernelRule) -> KernelChoice:
    """The way to work on a matrix. Depends on nothing else."""
    side = min(rows, cols)
    long = max(rows, cols)
    precision: Precision = "fp32"
    panels = rule.panels_fp32
    stack_to = rule.stack_fp32_to
    if rule.bf16_from and side * long >= rule.bf16_from:
        precision = "bf16"
        panels = rule.panels_bf16
        stack_to = rule.stack_bf16_to
    whole = not panels or side * long < panels
    stacked = whole and STACK_FROM <= side <= stack_to
    gram = side >= rule.gram_from and long >= rule.gram_aspect * side
    return KernelChoice(precision, gram, panels, stacked)


def layer_format(width: int, rule: KernelRule) -> Precision:
    """The format of forward and backward of layers with hidden states of this width."""
    if rule.layers_bf16_from and width >= rule.layers_bf16_from:
        return "bf16"
    return "fp32"


# ------------------------------------------------------------ from times to a rule


class KernelTrial(NamedTuple):
    """Something that is timed, on one thread of a processor or on a GPU. A square of a menu: one
    step of the iteration on ``many`` matrices, as a stack or one after the other. An operand: its
    symmetric product, whole or by panels. "standard" or "gram": the whole iteration in that form. A
    "layer": forward and backward of a layer of width ``rows`` for ``cols`` tokens."""

    rows: int
    cols: int
    many: int
    precision: Precision
    form: Form


NEVER = 1 << 30
"""A side that no matrix has."""
NEVER_S = 1e9
"""Seconds of a trial that the device refuses."""


@dataclass(frozen=True)
class TrialMenu:
    """Trials for a kind of device. ``usual``: the rule where nothing was measured."""

    usual: KernelRule
    squares: Mapping[int, int]
    """Side of the squares on which formats and stacks are compared, and their number, by rising
    side. Smaller matrices are worked in fp32 on every processor: calls cost more than the
    arithmetic (16 of 32x64 on a Xeon with AMX: 0.9 ms in bf16, 0.7 in fp32)."""
    operands: tuple[tuple[int, int], ...]
    """Operands of symmetric products that are tried with panels and without, in the format of large
    matrices, by rising size."""
    grams: tuple[int, ...] = ()
    """Sides of the matrices of the aspect of ``usual`` that are tried in the Gram form and in the
    standard one, in the format of large matrices, rising; none: operations decide."""
    layers: tuple[int, ...] = ()
    """Widths of the layers that are tried in both formats."""


ON_CPU = TrialMenu(
    CPU,
    squares={64: 64, 128: 32, 256: 8, 512: 2, 768: 2},
    operands=((512, 512), (1024, 1024), (1024, 2048)),
    layers=(128, 256, 512),
)
ON_CUDA = TrialMenu(
    CUDA,
    squares={128: 8, 256: 8, 512: 8, 1024: 8, 2048: 4},
    operands=((2048, 2048), (4096, 4096)),
    grams=(512, 1024, 2048, 4096),
)
"""No layers: a GPU with units for bf16 computes layers in bf16, and another one is measured apart.
TF32 is not tried: a GPU that has it multiplies bf16 twice as fast, and torch's switch for it is one
for all products of the process."""
MEASURED_FROM = min(ON_CPU.squares) ** 2
"""Elements of the smallest matrix that a measured rule works in another way than :data:`CPU`, but
for the last bits of stacks."""
SMALLER = 32
"""Side up to which matrices are stacked whatever was measured."""
LAYER_TOKENS = 256
"""Tokens of one sequence that they get."""
GAIN = 1.15
"""Least ratio of fp32's time to bf16's at which bf16 is taken: a smaller gain does not pay for its
rounding."""
PANELS_GAIN = 1.2
"""Least gain of panels, in the same sense: a matrix that is worked by panels is not stacked."""
HOPELESS = 3.0
"""Ratio of bf16's time to fp32's beyond which bf16 is tried on nothing larger: emulated, that can
take minutes."""
Times = Mapping[KernelTrial, float]
"""Seconds of processor time of one thread."""


def following(times: Times, menu: TrialMenu = ON_CPU) -> list[KernelTrial]:
    """The trials to time next and to compare with each other; empty when a rule needs no more."""
    kinds: tuple[Precision, ...] = ("fp32", "bf16")
    for side, many in menu.squares.items():
        group = [
            KernelTrial(side, side, many, kind, form)
            for kind in kinds
            for form in ("alone", "stack")
        ]
        if any(trial not in times for trial in group):
            return group
        bf16, fp32 = (_best(side, many, kind, times) for kind in ("bf16", "fp32"))
        if len(kinds) > 1 and bf16 > HOPELESS * fp32:
            kinds = ("fp32",)
    kind = _large(times, menu)
    for rows, cols in menu.operands:
        group = [KernelTrial(rows, cols, 1, kind, form) for form in ("alone", "panels")]
        if any(trial not in times for trial in group):
            return group
    for side in menu.grams:
        group = [_whole(side, kind, form, menu) for form in ("standard", "gram")]
        if any(trial not in times for trial in group):
            return group
    # Emulated bf16 was not tried on the largest square, and is not worth a trial here.
    side = max(menu.squares)
    if KernelTrial(side, side, menu.squares[side], "bf16", "alone") not in times:
        return []
    for width in menu.layers:
        group = [_layer(width, kind) for kind in ("fp32", "bf16")]
        if any(trial not in times for trial in group):
            return group
    return []


def rule_from(times: Times, menu: TrialMenu = ON_CPU) -> KernelRule:
    """The crossover points that these times speak for, and the usual ones where there are none."""
    usual = menu.usual
    if not times:
        return usual
    return replace(
        usual,
        bf16_from=_bf16_from(times, menu),
        stack_bf16_to=_stack_to("bf16", times, menu, usual.stack_bf16_to),
        stack_fp32_to=_stack_to("fp32", times, menu, usual.stack_fp32_to),
        panels_bf16=_panels("bf16", times, menu, usual.panels_bf16),
        panels_fp32=_panels("fp32", times, menu, usual.panels_fp32),
        layers_bf16_from=_layers_bf16_from(times, menu),
        gram_from=_gram_from(times, menu),
    )


def _whole(side: int, kind: Precision, form: Form, menu: TrialMenu) -> KernelTrial:
    """The whole iteration on a matrix of the aspect from which the Gram form is taken."""
    return KernelTrial(side, int(menu.usual.gram_aspect * side), 1, kind, form)


def _layer(width: int, kind: Precision) -> KernelTrial:
    return KernelTrial(width, LAYER_TOKENS, 1, kind, "layer")


def _large(times: Times, menu: TrialMenu) -> Precision:
    """The format of large matrices."""
    if _bf16_from(times, menu):
        return "bf16"
    return "fp32"


def _layers_bf16_from(times: Times, menu: TrialMenu) -> int:
    """The smallest width from which bf16 is faster on all; 0 when it is not on the largest."""
    found = 0
    for width in reversed(menu.layers):
        bf16 = times.get(_layer(width, "bf16"), float("inf"))
        if bf16 == float("inf") or GAIN * bf16 > times.get(_layer(width, "fp32"), 0.0):
            break
        found = width
    return found


def _best(side: int, many: int, kind: Precision, times: Times) -> float:
    """The better time of both forms; infinite if it was not timed."""
    trials = (KernelTrial(side, side, many, kind, form) for form in ("alone", "stack"))
    return min(times.get(trial, float("inf")) for trial in trials)


def _bf16_from(times: Times, menu: TrialMenu) -> int:
    """Elements of the smallest square from which bf16 is faster on all; 0 when it is not on the
    largest."""
    found = 0
    for side, many in reversed([*menu.squares.items()]):
        bf16 = _best(side, many, "bf16", times)
        if bf16 == float("inf") or GAIN * bf16 > _best(side, many, "fp32", times):
            break
        found = side * side
    return found


def _stack_to(kind: Precision, times: Times, menu: TrialMenu, unknown: int) -> int:
    """The side up to which all stacks are at least as fast."""
    found = unknown
    for i, (side, many) in enumerate(menu.squares.items()):
        alone, stack = (
            times.get(KernelTrial(side, side, many, kind, form)) for form in ("alone", "stack")
        )
        if alone is None or stack is None:
            break
        if stack > alone:
            if i == 0:
                return SMALLER
            return found
        found = side
    return found


def _panels(kind: Precision, times: Times, menu: TrialMenu, unknown: int) -> int:
    """Elements of the smallest operand from which panels are faster on all; 0 when they are not on
    the largest."""
    found = 0
    for rows, cols in reversed(menu.operands):
        alone, panels = (
            times.get(KernelTrial(rows, cols, 1, kind, form)) for form in ("alone", "panels")
        )
        if alone is None or panels is None:
            return unknown
        if PANELS_GAIN * panels > alone:
            break
        found = rows * cols
    return found


def _gram_from(times: Times, menu: TrialMenu) -> int:
    """The smallest side from which the Gram form is faster on all; :data:`NEVER` when it is not on
    the largest."""
    kind = _large(times, menu)
    found = NEVER
    for side in reversed(menu.grams):
        standard, gram = (
            times.get(_whole(side, kind, form, menu)) for form in ("standard", "gram")
        )
        if standard is None or gram is None:
            return menu.usual.gram_from
        if gram >= standard:
            break
        found = side
    return found if menu.grams else menu.usual.gram_from
