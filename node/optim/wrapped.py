"""Any ``torch.optim.Optimizer`` with a per-tensor update, as a function: parameter, gradient and
state in, fresh ones out.

An optimizer is made for one step of one matrix, given the state, stepped once and read out, so
nothing is changed in place and a step that is repeated gives the same bits. State is named fp32
tensors of declared shapes; the step count is one of them, and numbers that follow from the settings
are not state. Tensors are made contiguous: strides choose the kernel, and with it the last bits,
and state that has travelled must step as state that has not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from node.core.errors import OutOfResources, StepFault
from node.optim.muon import State
from node.optim.settings import OptimSettings

Make = Callable[[torch.nn.Parameter, OptimSettings, float, int], torch.optim.Optimizer]
"""(parameter, settings, learning rate, steps made so far) -> an optimizer of this one parameter."""


@dataclass(frozen=True)
class Wrapped:
    """Layout of an optimizer's state of one matrix, beside plain tensors. ``sides``: keys that hold
    a list, an entry for each side, empty where there is none: entry i of ``GG`` is the tensor
    ``gg_i``. ``objects``: keys that hold an object, and its attributes that hold such lists, or
    stacks; ``init_group`` makes it. ``numbers``: numbers that follow from the settings."""

    make: Make
    sides: tuple[str, ...] = ()
    objects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Callable[[OptimSettings], dict[str, Any]] = lambda _: {}

    def step(
        self,
        settings: OptimSettings,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        lr: float,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[torch.Tensor, State]:
        """(fresh parameter, new state); empty ``state``: the first step. Works in fp32 on the
        parameter's device.

        Raises StepFault when the optimizer finds no decomposition, when its state is not of the
        declared ``shapes``, and when the fresh parameter is not finite.
        """
        p = torch.nn.Parameter(_own(parameter))
        p.grad = _own(gradient.to(parameter.device))
        steps = 0
        if state:
            steps = int(state["steps"].item())
        # Some draw a start vector: the same in every attempt, and other random generators stay
        # untouched.
        with torch.random.fork_rng([p.device] if p.is_cuda else []):
            torch.manual_seed(steps)
            optimizer = self.make(p, settings, lr, steps)
            # torch's optimizers count in the state of the parameter, others in its group.
            optimizer.param_groups[0]["step"] = steps
            if state:
                self._fill(optimizer, p, state, settings)
            try:
                optimizer.step()
            except torch.linalg.LinAlgError as e:  # pyright: ignore[reportPrivateImportUsage]
                raise StepFault(
                    f"a {tuple(p.shape)} matrix cannot be stepped: {e}",
                    "take a smaller learning rate",
                ) from e
        made = self._read(optimizer.state[p]) | {"steps": torch.full((1,), float(steps + 1))}
        if {name: tuple(t.shape) for name, t in made.items()} != dict(shapes):
            raise StepFault(
                f"{type(optimizer).__name__} keeps {sorted(made)} of a matrix, not "
                f"{sorted(shapes)}",
                "install the version that constraints.txt names",
            )
        if not bool(torch.isfinite(p.detach().sum(dtype=torch.float64))):
            raise StepFault(
                f"the fresh {tuple(p.shape)} matrix is not finite", "take a smaller learning rate"
            )
        return p.detach(), made

    def _fill(
        self,
        optimizer: Any,
        p: torch.nn.Parameter,
        state: Mapping[str, torch.Tensor],
        settings: OptimSettings,
    ) -> None:
        if self.objects:
            optimizer.init_group(optimizer.param_groups[0])
        held = {name: _own(t.to(p.device)) for name, t in state.items() if name != "steps"}
        into = optimizer.state[p]
        into |= {"step": state["steps"].reshape(()).clone()} | self.numbers(settings)
        for key in self.sides:
            into[key] = [held.pop(f"{key.lower()}_{i}", []) for i in range(p.ndim)]
        for key, attributes in self.objects.items():
            for attribute in attributes:
                kept = getattr(into[key], attribute)
                for i in range(len(kept)):
                    kept[i] = held.pop(f"{attribute}_{i}")
        into |= held

    def _read(self, state: Mapping[str, Any]) -> State:
        flat: State = {}
        for key, value in state.items():
            lists = {key: value}
            if key not in self.sides:
                lists = {a: getattr(value, a) for a in self.objects.get(key, ())}
            for name, kept in lists.items():
                flat |= {
                    f"{name.lower()}_{i}": _own(t)
                    for i, t in enumerate(kept)
                    if isinstance(t, torch.Tensor)
                }
            if isinstance(value, torch.Tensor) and key != "step":
                flat[key] = _own(value)
        return flat


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)


def _library() -> Any:
    """pytorch-optimizer. Imported when a run wants it: it takes a second."""
    try:
        import pytorch_optimizer
    except ImportError as e:
        raise OutOfResources(
            f"this run's optimizer is of pytorch-optimizer, which cannot be imported: {e}",
            "install it with  make setup",
        ) from e
    return pytorch_optimizer


def _soap(p: torch.nn.Parameter, s: OptimSettings, lr: float, steps: int) -> torch.optim.Optimizer:
    return _library().SOAP(
        [p],
        lr=lr,
        betas=(s.momentum, s.adam_beta2),
        weight_decay=s.weight_decay,
        eps=s.adam_eps,
        precondition_frequency=s.precondition_every,
        max_precondition_dim=s.precondition_side,
    )


def _shampoo(
    p: torch.nn.Parameter, s: OptimSettings, lr: float, steps: int
) -> torch.optim.Optimizer:
    # One block a side; the update is as long as a sign step (SQRTN), so a step of lr changes a
    # number by lr.
    return _library().ScalableShampoo(
        [p],
        lr=lr,
        betas=(s.momentum, s.adam_beta2),
        moving_average_for_momentum=True,
        weight_decay=s.weight_decay,
        decoupled_weight_decay=True,
        start_preconditioning_step=1,
        preconditioning_compute_steps=s.precondition_every,
        block_size=max(p.shape),
        no_preconditioning_for_layers_with_dim_gt=max(p.shape),
        shape_interpretation=False,
        graft_type=4,
    )


WRAPPED: dict[str, Wrapped] = {
    "soap": Wrapped(
        _soap,
        sides=("GG", "Q"),
        numbers=lambda s: {
            "precondition_frequency": s.precondition_every,
            "shampoo_beta": s.adam_beta2,
        },
    ),
    "shampoo": Wrapped(_shampoo, objects={"pre_conditioner": ("statistics", "pre_conditioners")}),
}


def require(name: str) -> None:
    """Load what the optimizer of a run needs, now rather than in its first step. Raises
    OutOfResources."""
    if name in WRAPPED:
        _library()
