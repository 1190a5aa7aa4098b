"""Kernels of a stage's layers and of its loss: torch's own, the fused ones of Liger, or compiled
layers.

Enters  tensors of a layer or of the loss. Leaves: what torch's own operations give, except for
        rounding.
Never   the choice between them: node/kernels measures it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.model.documents import NO_TARGET

KernelName = Literal["eager", "compile", "liger"]
Backend = str | Callable[..., Any]
"""A backend of ``torch.compile``: the name of one, or a function that gets the graph."""


class LossModule(Protocol):
    """The part of the ends that computes the loss of a piece."""

    def cross_entropy(self, h_ND: Tensor, targets_N: Tensor) -> Tensor: ...


class LayerPass(Protocol):
    """The computation of a whole layer."""

    def __call__(self, layer: nn.Module, h_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """Operations that a library may fuse, and functions that compute a whole layer or loss in
    compiled form.

    ``rms_norm``: of numbers, weight and epsilon. ``rotate``: queries and keys [B, T, heads, W] with
    the tables of :class:`~node.model.stages.Rope`. ``swiglu``: silu(gate) * up.
    ``cross_entropy``: the sum over tokens with a target. ``layer``: a layer with hidden states and
    tables of its positions, None to call the layer itself; ``loss``: the ends with hidden states
    and targets, in the same way.
    """

    name: KernelName
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    layer: LayerPass | None = None
    loss: Callable[[LossModule, Tensor, Tensor], Tensor] | None = None


class GivenTables(NamedTuple):
    """Tables of the rotary embedding for a length that is known, in the place of a
    :class:`~node.model.stages.Rope`."""

    cos: Tensor
    sin: Tensor

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) for ``length`` positions, in the number format of ``like``."""
        return self.cos[:length].to(like.dtype), self.sin[:length].to(like.dtype)


def use(module: nn.Module, kernels: Kernels) -> None:
    """Let a stage compute by ``kernels`` from its next layer on."""
    for part in module.modules():
        if hasattr(part, "kernels"):
            part.kernels = kernels  # pyright: ignore


# ------------------------------------------------------------ torch's own


def rotate(x_BTHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of every head; same shape."""
    return torch.addcmul(x_BTHW * cos, x_BTHW.roll(x_BTHW.shape[-1] // 2, -1), sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rotate_both(q_BTHW: Tensor, k_BTKW: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q_BTHW, cos, sin), rotate(k_BTKW, cos, sin)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=NO_TARGET)


EAGER = Kernels("eager", _rms_norm, _rotate_both, _swiglu, _cross_entropy)


# ------------------------------------------------------------ compiled


def _layer(layer: nn.Module, h_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return layer(h_BTD, GivenTables(cos, sin), ())


def _loss(ends: LossModule, h_ND: Tensor, targets_N: Tensor) -> Tensor:
    return ends.cross_entropy(h_ND, targets_N)


def compiled(backend: Backend = "inductor") -> Kernels:
    """Layers and loss by ``torch.compile``: nothing is compiled before the first call. A graph
    holds for one shape, and all layers of a stage share it."""
    make = {"fullgraph": True, "dynamic": False, "backend": backend}
    return replace(
        EAGER,
        name="compile",
        layer=torch.compile(_layer, **make),
        loss=torch.compile(_loss, **make),
    )


def keep_compiled() -> None:
    """From now on nothing more is compiled in this process: another shape, or a pass without
    gradients, is computed by torch's own operations. To compile takes seconds, for which a
    micro-batch would wait."""
    torch.compiler.set_stance("eager_on_recompile")


def allow_compiling() -> None:
    """Let compiled functions compile again for what they meet first. The first call loads torch's
    compiler, which takes seconds."""
    torch.compiler.set_stance("default")


# ------------------------------------------------------------ Liger


def liger() -> Kernels:
    """The fused operations of the package liger-kernel, which needs triton. Raises ImportError
    without it.

    Their backward overwrites what forward has saved, so a graph has one backward: they are not for
    fp16, whose backward is repeated after an overflow.
    """
    fused = importlib.import_module("liger_kernel.transformers.functional")

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused.liger_rms_norm(x, weight, eps, in_place=False)

    def rotate_both(
        q_BTHW: Tensor, k_BTKW: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Half of a table is enough for Liger; the sign of our sine's first half is not its own.
        half = cos.shape[-1] // 2
        q, k = fused.liger_rope(
            q_BTHW.transpose(1, 2),
            k_BTKW.transpose(1, 2),
            cos[None, :, 0, half:],
            sin[None, :, 0, half:],
            rotary_dim=2 * half,
        )
        return q.transpose(1, 2), k.transpose(1, 2)

    def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return fused.liger_cross_entropy(
            logits_NV, targets_N, ignore_index=NO_TARGET, reduction="sum"
        )

    return Kernels("liger", rms_norm, rotate_both, fused.liger_swiglu, cross_entropy)
