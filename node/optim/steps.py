"""The arithmetic of an owner's step: parameters, mean gradients and state in, fresh parameters and
new state out. Nothing is kept and nothing is changed in place. Never: the decision to commit an
epoch, which ``owner.py`` carries out.

Where parameters are held in bf16, a step begins from the part's fp32 master, so that updates below
the resolution of bf16 add up. The parameter is the upper half of the master, and the lower half is
state. A part without state begins from its parameter. If the lower half belongs to another version
(an older copy, or a forged one), the step begins within half of the bf16 resolution of the
parameter.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from node.core.errors import StepFault
from node.optim.muon import State, adamw, muon, next_counts
from node.optim.newton_schulz import MatrixBatch, in_jobs
from node.optim.parts import AT_ONCE, LOW, method_of, state_shapes
from node.optim.settings import OptimSettings, learning_rate
from node.optim.step_limit import StepLimits
from node.optim.wrapped import WRAPPED
from node.wire.remote import HeldTensor

AGAIN = "begin the epoch anew"
HeldState: TypeAlias = Mapping[str, HeldTensor]
"""State of one part as an owner keeps it, by its names in the checkpoint; empty before the first
step."""
Stepped: TypeAlias = tuple[dict[str, Tensor], dict[str, HeldState]]
"""Fresh parameters by name, and the state after their steps."""


class Steps(Protocol):
    """Port for the arithmetic of steps, on one device or on several."""

    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        states: Mapping[str, HeldState],
        epoch: int,
    ) -> Stepped:
        """One step of each part in ``gradients``. Raises StepFault."""
        ...

    def keep(self, name: str, state: Mapping[str, Tensor]) -> HeldState:
        """Keep the state of a part that came from elsewhere and was checked, on the devices of its
        steps."""
        ...


class PartSteps:
    """Steps on the one device that has the parameters."""

    def __init__(self, settings: OptimSettings, total_epochs: int) -> None:
        self.settings = settings
        self._total = total_epochs
        self._limits = StepLimits(settings, total_epochs)

    def rate(self, method: str, epoch: int) -> float:
        """Learning rate of a method in this epoch."""
        return learning_rate(self.settings, method, epoch, self._total)

    def keep(self, name: str, state: Mapping[str, Tensor]) -> HeldState:
        """The same state."""
        return state

    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        states: Mapping[str, HeldState],
        epoch: int,
    ) -> Stepped:
        """One step of each part in ``gradients``. Raises StepFault."""
        fresh: dict[str, Tensor] = {}
        staged: dict[str, HeldState] = {}
        here = cast(Mapping[str, State], states)
        matrices: list[str] = []
        for name in sorted(gradients):
            method = method_of(name, tuple(parameters[name].shape), self.settings)
            if method == "muon":
                matrices.append(name)
                continue
            parameter = parameters[name].detach()
            gradient = gradients[name].detach().to(parameter.device, torch.float32)
            check_finite([name], torch.linalg.vector_norm(gradient).view(1))
            state = here.get(name, {})
            if method == "adamw":
                made = self.adamw(parameter, gradient, state, epoch)
            else:
                made = self.wrapped(name, parameter, gradient, state, epoch)
            fresh[name], staged[name] = made
        done = self._muon(matrices, parameters, gradients, here, self.rate("muon", epoch))
        for name, (new, state) in zip(matrices, done, strict=True):
            fresh[name], staged[name] = self._ends(new, state)
        return fresh, staged

    def wrapped(
        self, name: str, parameter: Tensor, gradient: Tensor, state: State, epoch: int
    ) -> tuple[Tensor, State]:
        """Step a whole matrix with an optimizer of a library. Raises StepFault."""
        shape = tuple(parameter.shape)
        method = method_of(name, shape, self.settings)
        shapes = state_shapes(name, shape, self.settings)
        shapes.pop(LOW, None)
        begins = join(parameter, state.get(LOW))
        new, after = WRAPPED[method].step(
            self.settings,
            begins,
            gradient,
            {key: t for key, t in state.items() if key != LOW},
            self.rate(method, epoch),
            shapes,
        )
        return self._ends(self._limits.cut(method, begins, new, epoch), after)

    def adamw(
        self, parameter: Tensor, gradient: Tensor, state: State, epoch: int
    ) -> tuple[Tensor, State]:
        """Step a part, or a piece of a part, with AdamW. It takes some rows at a time, so that an
        embedding needs little memory besides its result."""
        lr = self.rate("adamw", epoch)
        rows = max(1, AT_ONCE * len(parameter) // max(1, parameter.numel()))

        def step(piece: slice) -> tuple[Tensor, State]:
            its = {k: t if k == "steps" else t[piece] for k, t in state.items()}
            old = join(parameter[piece], its.pop(LOW, None))
            new, after = adamw(self.settings, old, gradient[piece], its, lr)
            # A piece of a large matrix has a shape that another method might step.
            return self._ends(self._limits.cut("adamw", old, new, epoch), after)

        if rows >= len(parameter):
            return step(slice(None))
        fresh = torch.empty_like(parameter)
        staged = dict[str, Tensor]()
        for start in range(0, len(parameter), rows):
            piece = slice(start, start + rows)
            fresh[piece], after = step(piece)
            for key, value in after.items():
                if key == "steps":
                    staged[key] = value
                    continue
                if key not in staged:
                    staged[key] = value.new_empty(parameter.shape)
                staged[key][piece] = value
        return fresh, staged

    def _ends(self, fresh: Tensor, state: State) -> tuple[Tensor, State]:
        """The fresh parameter in the run's format, and its state."""
        if not self.settings.masters:
            return fresh, state
        upper, low = split(fresh)
        return upper, state | {LOW: low}

    def _muon(
        self,
        names: Sequence[str],
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        held: Mapping[str, State],
        lr: float,
    ) -> list[tuple[Tensor, State]]:
        """Step matrices with Muon. Returns the fresh parameter and state of each. A job makes the
        whole step of some matrices, so that threads synchronise only once."""
        settings = self.settings
        states = [held.get(name, {}) for name in names]
        olds = [
            join(parameters[name], state.get(LOW))
            for name, state in zip(names, states, strict=True)
        ]
        means = [
            gradients[name].to(old.device, torch.float32)
            for name, old in zip(names, olds, strict=True)
        ]
        momenta = [
            s["momentum"].to(g.device) if s else torch.zeros_like(g)
            for g, s in zip(means, states, strict=True)
        ]

        def act(job: MatrixBatch) -> list[tuple[Tensor, Tensor]]:
            old, mean, momentum = (
                [each[i] for i in job.members] for each in (olds, means, momenta)
            )
            return muon(
                settings,
                old,
                mean,
                momentum,
                lr,
                job.way,
                partial(check_finite, [names[i] for i in job.members]),
            )

        done = in_jobs(means, act, settings.stack)
        counts = next_counts(states)
        return [
            (new, {"momentum": m, "steps": count})
            for (new, m), count in zip(done, counts, strict=True)
        ]


def check_finite(names: Sequence[str], norms: Tensor) -> None:
    """Raises StepFault for a norm that is not finite: the gradient is not finite, or its square
    overflows."""
    if not bool(torch.isfinite(norms).all()):
        name = next(
            name
            for name, norm in zip(names, norms.tolist(), strict=True)
            if not math.isfinite(norm)
        )
        raise StepFault(f"the gradient of {name} is not finite", AGAIN)


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 numbers into (bf16, int16): the number rounded to bf16, and the remainder.
    Together they give the number to the bit; any lower half goes with any upper one, and moves it
    by no more than half of the bf16 resolution.

    A number in the middle of two bf16 numbers is rounded away from zero, so that the lower half is
    a signed number of 16 bits.
    """
    bits = whole.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(upper: Tensor, lower: Tensor | None) -> Tensor:
    """The fp32 numbers that :func:`split` was given; without a lower half the numbers of
    ``upper``."""
    if lower is None:
        return upper.float()
    bits = upper.view(torch.int16).to(torch.int32) << 16
    return bits.add_(lower.to(upper.device)).view(torch.float32)
