"""An owner's optimizer: fresh parameters from mean gradients, state that changes only when an epoch
commits.

A step stages the new state under its epoch. A round may be attempted several times: stepping a part
again in the same epoch starts from the same committed state and gives the same bits. ``commit``
makes the staged state the state, once.
The arithmetic is in ``steps.py``.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from node.core.errors import StepFault
from node.model.device import free_cached, out_of_memory
from node.optim.gram import coefficients as chosen
from node.optim.parts import LOW, state_shapes
from node.optim.settings import OptimSettings
from node.optim.steps import AGAIN, HeldState, PartSteps, Stepped, Steps
from node.optim.wrapped import require
from node.wire.remote import HeldTensor, collected, on_cpu

SQUARES = ("exp_avg_sq", "gg_", "statistics_")
"""Beginnings of the names of state that holds sums of squares, as numbers or on the diagonal of a
matrix."""
MOST_STEPS = 1 << 24
"""Bound on the steps that a part's state counts: above it, fp32, in which they are counted, cannot
represent the next integer."""


class Owner:
    """Optimizer of the parts that one peer owns; others decide which parts. A part without state
    starts from zero. ``total_epochs``: length of the run for the schedule, 0 if unknown. ``steps``:
    the arithmetic, if it does not run on the device of the parameters. Raises OutOfResources if the
    package of the optimizer cannot be imported, UsageFault for coefficients that do not fit the
    number of steps.
    """

    def __init__(
        self, settings: OptimSettings, total_epochs: int, *, steps: Steps | None = None
    ) -> None:
        require(settings.name)
        chosen(settings.coefficients, settings.ns_steps)
        self._settings = settings
        self._steps = steps or PartSteps(settings, total_epochs)
        self.singly = 0
        """Number of steps that were made a part at a time because memory ran out."""
        self._state: dict[str, HeldState] = {}
        self._through: dict[str, int] = {}
        self._staged: dict[int, dict[str, HeldState]] = {}

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
                found = self._steps.step(parameters, mean_gradients, self._state, epoch)
            except (RuntimeError, MemoryError) as e:
                if not out_of_memory(e):
                    raise
            # Not in the handler: the exception keeps earlier tensors alive.
            fresh, staged = found or self._one_by_one(parameters, mean_gradients, epoch)
        self._staged.setdefault(epoch, {}).update(staged)
        return fresh

    def _one_by_one(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], epoch: int
    ) -> Stepped:
        """Step all parts one after another, in the memory of one part. Fresh parameters leave the
        device."""
        fresh = dict[str, Tensor]()
        staged = dict[str, HeldState]()
        self.singly += 1
        free_cached()
        for name in sorted(gradients):
            # CUDA's solvers need memory that torch still caches from the previous part.
            torch.cuda.empty_cache()
            new, state = self._steps.step(parameters, {name: gradients[name]}, self._state, epoch)
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
        """Stage the present state of these parts for ``epoch``, in which they make no step."""
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
        """Names of the parts with committed state, sorted."""
        return tuple(sorted(self._state))

    @property
    def nbytes(self) -> int:
        """Bytes of the committed state of all parts here."""
        return sum(t.nbytes for state in list(self._state.values()) for t in state.values())

    def state(self, name: str) -> dict[str, HeldTensor]:
        """Committed state of a part as CPU tensors, fp32 except ``LOW``, for a checkpoint or the
        next owner; empty if there is none. Tensors in other processes stay there."""
        return {key: on_cpu(value) for key, value in self._state.get(name, {}).items()}

    def through(self, name: str) -> int:
        """The last epoch in a part's committed state; -1 if there is no state, or its epoch is not
        known."""
        return self._through.get(name, -1)

    def staged(self, epoch: int) -> frozenset[str]:
        """Parts stepped in ``epoch`` and not committed yet."""
        return frozenset(self._staged.get(epoch, {}))

    def after(self, name: str, epoch: int) -> dict[str, HeldTensor]:
        """The state of a part after ``epoch``, committed or only staged, as :meth:`state` returns
        it; empty if there is none."""
        return {key: on_cpu(value) for key, value in self.held_after(name, epoch).items()}

    def keys_after(self, name: str, epoch: int) -> tuple[str, ...]:
        """The keys of :meth:`after`. Nothing is copied from the device."""
        return tuple(self.held_after(name, epoch))

    def held_after(self, name: str, epoch: int) -> HeldState:
        """As :meth:`after`, but the held tensors themselves, on their device. Later steps replace
        these tensors and do not write into them."""
        staged = self._staged.get(epoch, {}).get(name)
        if staged is not None:
            return staged
        here = epoch >= 0 and self.through(name) == epoch
        if not here:
            return {}
        return self._state.get(name, {})

    def load_state(
        self, name: str, shape: tuple[int, ...], state: HeldState, epoch: int = -1
    ) -> None:
        """Take over a part: :meth:`readied`, then :meth:`put`."""
        self.put(name, self.readied(name, shape, state), epoch)

    def put(self, name: str, state: HeldState, epoch: int = -1) -> None:
        """Make state that is :meth:`readied` a part's committed state. ``epoch`` is the last one
        behind it (-1: not known)."""
        self._state[name] = state
        self._through.pop(name, None)
        if epoch >= 0:
            self._through[name] = epoch

    def readied(self, name: str, shape: tuple[int, ...], state: HeldState) -> HeldState:
        """State of a part as another peer gave it, checked, where its steps will find it. May wait
        for local devices that step: not for the event loop.

        Raises StepFault for tensors of other names or shapes than
        :func:`state_shapes`, for numbers that are not finite, for a negative second moment, for a
        lower half that does not fit 16 bits, and for a count of steps that is not a whole number
        from 1 to below :data:`MOST_STEPS`.
        """
        state = {key: collected(value) for key, value in state.items()}
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
        copies = {
            key: value.detach().to(torch.int16 if key == LOW else torch.float32, copy=True)
            for key, value in state.items()
        }
        return self._steps.keep(name, copies)

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
