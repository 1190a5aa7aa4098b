"""An owner's optimizer: fresh parameters from mean gradients, state that changes only when an epoch
commits.

A step stages the new state under its epoch. A round may be attempted several times: stepping a part
again in the same epoch starts from the same committed state and gives the same bits. ``commit``
makes the staged state the state, once.

Where parameters are held in bf16, a step begins from the part's fp32 master, so that updates below
the resolution of bf16 add up. The parameter is the upper half of the master, and the lower half is
state. A part without state begins from its parameter. If the lower half belongs to another version
(an older copy, or a forged one), the step begins within half of the bf16 resolution of the
parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from node.core.errors import StepFault, UsageFault
from node.model.device import free_cached, out_of_memory
from node.optim.gram import coefficients as chosen
from node.optim.muon import State, adamw, muon, muon_direction, muon_fresh, next_counts
from node.optim.newton_schulz import MatrixBatch, in_jobs
from node.optim.parts import AT_ONCE, LOW, method_of, state_shapes
from node.optim.settings import OptimSettings, learning_rate
from node.optim.step_limit import StepLimits
from node.optim.wrapped import WRAPPED, require
from node.partition.matrices import METHODS

AGAIN = "begin the epoch anew"
SQUARES = ("exp_avg_sq", "gg_", "statistics_")
"""Names of sums of squares: of numbers, and on the diagonal of a matrix."""
MOST_STEPS = 1 << 24
"""Behind a part's state: fp32, in which they are counted, has no number that is one more."""
Orthogonalise = Callable[[Sequence[Tensor], int, bool], Sequence[Tensor]]
"""(matrices, steps, stack) to their orthogonalised forms, in order."""


class Owner:
    """Optimizer of the parts one peer owns; which those are is decided elsewhere, a part without
    state starts from zero.

    ``total_epochs``: length of the run for the schedule, 0 if unknown. ``orthogonalise``: replaces
    the function of this process, where several devices do it. Raises OutOfResources when the
    package an optimizer comes from cannot be imported, UsageFault for coefficients that do not go
    with the number of steps, or that ``orthogonalise`` does not know.
    """

    def __init__(
        self,
        settings: OptimSettings,
        total_epochs: int,
        *,
        orthogonalise: Orthogonalise | None = None,
    ) -> None:
        require(settings.name)
        chosen(settings.coefficients, settings.ns_steps)
        if orthogonalise is not None and settings.coefficients != OptimSettings.coefficients:
            raise UsageFault(
                f"several devices of a box know no {settings.coefficients} coefficients",
                "start with one device, or make a run with simple",
            )
        self._orthogonalise = orthogonalise
        self._settings = settings
        self._total = total_epochs
        self._limits = StepLimits(settings, total_epochs)
        self.singly = 0
        """Steps that were made a part at a time because memory ran out."""
        self._state: dict[str, State] = {}
        self._through: dict[str, int] = {}
        self._staged: dict[int, dict[str, State]] = {}

    def step(self, name: str, parameter: Tensor, mean_gradient: Tensor, epoch: int) -> Tensor:
        """The fresh parameter in the run's format, on the parameter's device; neither argument is
        changed. See :meth:`step_parts`."""
        return self.step_parts({name: parameter}, {name: mean_gradient}, epoch)[name]

    def step_parts(
        self, parameters: Mapping[str, Tensor], mean_gradients: Mapping[str, Tensor], epoch: int
    ) -> dict[str, Tensor]:
        """Fresh parameters for the names in ``mean_gradients``, their state staged for ``epoch``.

        Raises StepFault for a gradient of another shape or not finite, a step that fails, or an
        epoch already committed for the part, and then stages nothing.
        """
        for name, gradient in mean_gradients.items():
            if name not in parameters or gradient.shape != parameters[name].shape:
                shape = "of a parameter here"
                if name in parameters:
                    shape = str(tuple(parameters[name].shape))
                raise StepFault(
                    f"the gradient of {name} is {tuple(gradient.shape)}, not {shape}", AGAIN
                )
            if epoch <= self._through.get(name, -1):
                raise StepFault(
                    f"{name} is committed through epoch {self._through[name]}, it cannot be "
                    f"stepped in {epoch}",
                    AGAIN,
                )
        with torch.no_grad():
            found = None
            try:
                found = self._step(parameters, mean_gradients, epoch)
            except (RuntimeError, MemoryError) as e:
                if not out_of_memory(e):
                    raise
            # Only now: the exception kept earlier tensors alive.
            fresh, staged = found or self._one_by_one(parameters, mean_gradients, epoch)
        self._staged.setdefault(epoch, {}).update(staged)
        return fresh

    def _one_by_one(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], epoch: int
    ) -> tuple[dict[str, Tensor], dict[str, State]]:
        """As the step of all parts, in the memory that one part takes at a time. Fresh parameters
        leave the device."""
        fresh = dict[str, Tensor]()
        staged = dict[str, State]()
        self.singly += 1
        free_cached()
        for name in sorted(gradients):
            # Solvers of CUDA take memory beside what torch keeps of the part before.
            torch.cuda.empty_cache()
            new, state = self._step(parameters, {name: gradients[name]}, epoch)
            fresh[name] = new[name].cpu()
            staged[name] = state[name]
        return fresh, staged

    def commit(self, epoch: int, names: Iterable[str] | None = None) -> frozenset[str]:
        """Make the state staged for ``epoch`` the committed state, only for ``names`` if given, and
        drop everything staged up to it. Returns the names committed. A second call finds nothing
        and changes nothing."""
        staged = self._staged.pop(epoch, {})
        chosen = staged.keys() if names is None else staged.keys() & set(names)
        for name in chosen:
            self._state[name] = staged[name]
            self._through[name] = epoch
        for older in [e for e in self._staged if e < epoch]:
            del self._staged[older]
        return frozenset(chosen)

    def hold(self, names: Iterable[str], epoch: int) -> None:
        """Stage the present state of these parts for ``epoch``, which makes no step of them."""
        known = {
            name: self._state[name]
            for name in names
            if name in self._state and self.through(name) < epoch
        }
        self._staged.setdefault(epoch, {}).update(known)

    def abort(self, epoch: int) -> None:
        """Drop the state staged for ``epoch``; the parts can be stepped again."""
        self._staged.pop(epoch, None)

    def names(self) -> tuple[str, ...]:
        """Parts there is committed state of, sorted."""
        return tuple(sorted(self._state))

    @property
    def nbytes(self) -> int:
        """Bytes of the committed state of all parts here."""
        return sum(t.nbytes for state in list(self._state.values()) for t in state.values())

    def state(self, name: str) -> dict[str, Tensor]:
        """Committed state of a part as CPU tensors, fp32 but for ``LOW``, for a checkpoint or the
        next owner; empty if there is none."""
        return {key: value.detach().cpu() for key, value in self._state.get(name, {}).items()}

    def through(self, name: str) -> int:
        """The last epoch behind a part's committed state; -1 when there is no state, or it is not
        known."""
        return self._through.get(name, -1)

    def staged(self, epoch: int) -> frozenset[str]:
        """Parts stepped in ``epoch`` and not committed yet."""
        return frozenset(self._staged.get(epoch, {}))

    def after(self, name: str, epoch: int) -> dict[str, Tensor]:
        """The state that ``epoch`` leaves a part with, committed or only staged, as :meth:`state`
        gives it; empty without."""
        return {key: value.detach().cpu() for key, value in self.held_after(name, epoch).items()}

    def keys_after(self, name: str, epoch: int) -> tuple[str, ...]:
        """The keys of :meth:`after`, of which nothing is copied from the device."""
        return tuple(self.held_after(name, epoch))

    def held_after(self, name: str, epoch: int) -> State:
        """As :meth:`after`, with the tensors that are held, on the device that has them. Later
        steps replace these tensors and do not write into them."""
        staged = self._staged.get(epoch, {}).get(name)
        if staged is not None:
            return staged
        here = epoch >= 0 and self.through(name) == epoch
        if not here:
            return {}
        return self._state.get(name, {})

    def load_state(
        self, name: str, shape: tuple[int, ...], state: Mapping[str, Tensor], epoch: int = -1
    ) -> None:
        """Take over a part. ``epoch`` is the last one behind the state (-1: not known).

        Raises StepFault, and keeps the state it had, for tensors of other names or shapes than
        :func:`state_shapes`, for numbers that are not finite, for a negative second moment, for a
        lower half that does not fit 16 bits, and for a count of steps that is not a whole number
        from 1 to below :data:`MOST_STEPS`.
        """
        expected = state_shapes(name, tuple(shape), self._settings)
        other = "take it from another peer, or go on without"
        if {key: tuple(value.shape) for key, value in state.items()} != expected:
            raise StepFault(f"optimizer state of {name} should have {expected}", other)
        squares = [
            t if key == SQUARES[0] else t.diagonal()
            for key, t in state.items()
            if key.startswith(SQUARES)
        ]
        steps = float(state["steps"])
        low = state.get(LOW, torch.zeros(0))
        for wrong, why in (
            (not all(bool(torch.isfinite(t).all()) for t in state.values()), "is not finite"),
            (any(bool((t < 0).any()) for t in squares), "has a negative second moment"),
            (not steps.is_integer() or not 1 <= steps < MOST_STEPS, f"says {steps} steps"),
            (bool((low != low.to(torch.int16)).any()), "has a lower half of no 16 bits"),
        ):
            if wrong:
                raise StepFault(f"optimizer state of {name} {why}", other)
        self._state[name] = {
            key: value.detach().to(torch.int16 if key == LOW else torch.float32, copy=True)
            for key, value in state.items()
        }
        self._through.pop(name, None)
        if epoch >= 0:
            self._through[name] = epoch

    def drop(self, name: str) -> None:
        """Forget a part that has another owner now, with its staged state."""
        self._state.pop(name, None)
        self._through.pop(name, None)
        for staged in self._staged.values():
            staged.pop(name, None)

    def clear(self) -> None:
        """Forget every part, with all staged state."""
        self._state.clear()
        self._through.clear()
        self._staged.clear()

    def _step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], epoch: int
    ) -> tuple[dict[str, Tensor], dict[str, State]]:
        settings = self._settings
        fresh = {}
        staged = {}
        lr = {method: learning_rate(settings, method, epoch, self._total) for method in METHODS}
        matrices: list[str] = []
        for name in sorted(gradients):
            shape = tuple(parameters[name].shape)
            if (method := method_of(name, shape, settings)) == "muon":
                matrices.append(name)
                continue
            gradient = gradients[name].detach().to(parameters[name].device, torch.float32)
            _check_finite([name], torch.linalg.vector_norm(gradient).view(1))
            if method == "adamw":
                fresh[name], staged[name] = self._adamw(
                    name, parameters[name].detach(), gradient, lr["adamw"], epoch
                )
                continue
            shapes = state_shapes(name, shape, settings)
            shapes.pop(LOW, None)
            begins = self._begins(name, parameters[name].detach())
            new, state = WRAPPED[method].step(
                settings,
                begins,
                gradient,
                {k: t for k, t in self._state.get(name, {}).items() if k != LOW},
                lr[method],
                shapes,
            )
            fresh[name], staged[name] = self._ends(
                self._limits.cut(name, begins, new, epoch), state
            )
        for name, (new, state) in zip(
            matrices, self._muon(matrices, parameters, gradients, lr["muon"]), strict=True
        ):
            fresh[name], staged[name] = self._ends(new, state)
        return fresh, staged

    def _begins(self, name: str, parameter: Tensor) -> Tensor:
        """The fp32 values from which a step of ``parameter`` begins."""
        return join(parameter, self._state.get(name, {}).get(LOW))

    def _ends(self, fresh: Tensor, state: State) -> tuple[Tensor, State]:
        """The fresh parameter as all have it, and its state."""
        if not self._settings.masters:
            return fresh, state
        upper, low = split(fresh)
        return upper, state | {LOW: low}

    def _adamw(
        self, name: str, parameter: Tensor, gradient: Tensor, lr: float, epoch: int
    ) -> tuple[Tensor, State]:
        """Some rows at a time, so that an embedding takes little beside what the step leaves."""
        settings = self._settings
        state = self._state.get(name, {})
        rows = max(1, AT_ONCE * len(parameter) // max(1, parameter.numel()))

        def step(piece: slice) -> tuple[Tensor, State]:
            its = {k: t if k == "steps" else t[piece] for k, t in state.items()}
            old = join(parameter[piece], its.pop(LOW, None))
            new, after = adamw(settings, old, gradient[piece], its, lr)
            return self._ends(self._limits.cut(name, old, new, epoch), after)

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

    def _muon(
        self,
        names: Sequence[str],
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lr: float,
    ) -> list[tuple[Tensor, State]]:
        """Fresh parameter and state of each: jobs that are a whole step of some matrices, so that
        threads meet but once."""
        settings = self._settings
        states = [self._state.get(name, {}) for name in names]
        olds = [self._begins(name, parameters[name]) for name in names]
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
                partial(_check_finite, [names[i] for i in job.members]),
            )

        if self._orthogonalise is None:
            done = in_jobs(means, act, settings.stack)
        else:
            for name, gradient in zip(names, means, strict=True):
                _check_finite([name], torch.linalg.vector_norm(gradient).view(1))
            both = [
                muon_direction(settings, gradient, m)
                for gradient, m in zip(means, momenta, strict=True)
            ]
            updates = self._orthogonalise(
                [direction for direction, _ in both], settings.ns_steps, settings.stack
            )
            fresh = [
                muon_fresh(settings, old, update, lr)
                for old, update in zip(olds, updates, strict=True)
            ]
            done = [(new, m) for new, (_, m) in zip(fresh, both, strict=True)]
        counts = next_counts(states)
        return [
            (new, {"momentum": m, "steps": count})
            for (new, m), count in zip(done, counts, strict=True)
        ]


def _check_finite(names: Sequence[str], norms: Tensor) -> None:
    """Raises StepFault where a norm is not finite: a gradient is not, or is so large that its
    square is not."""
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
