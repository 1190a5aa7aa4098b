"""One rank's part of a stage. Every rank makes the same calls in the same order. Inputs and outputs
are whole and the same at all ranks; tensors held in between are cut. No command, no process: those
are elsewhere.

Legend: B sequences, T positions, D d_model, V vocab.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from node.core.ids import ENDS
from node.local.rank import Rank
from node.local.split import cut_of, per_head
from node.model.settings import ModelSettings
from node.model.shapes import parameter_shapes
from node.model.stages import Blocks, Ends, build


class CutEnds(Ends):
    """The ends with embedding and head cut by the vocabulary: no rank ever holds all logits of the
    loss."""

    here: Rank

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """As :meth:`Ends.rows`, whole at every rank."""
        # An unused result is never waited for, and torch keeps it for ever: a copy is a use, at the
        # other ranks the only one. Layers that follow need plain tensors, too.
        return super().rows(tokens_BT).clone()

    def logits(self, h_BTD: Tensor) -> Tensor:
        """[..., D] to fp32 logits [..., V], whole at every rank."""
        return self._cut_logits(h_BTD).full_tensor()

    def _piece(self, h_ND: Tensor, targets_N: Tensor) -> Tensor:
        return cast(
            DTensor,
            F.cross_entropy(self._cut_logits(h_ND), self._everywhere(targets_N), reduction="sum"),
        ).to_local()

    def _cut_logits(self, h: Tensor) -> DTensor:
        head = self.lm_head
        if head is None:
            head = self.model.embed_tokens
        weight = self.copies.of(head.weight)
        return cast(DTensor, F.linear(self._everywhere(self.model.norm(h)), weight).float())

    def _everywhere(self, tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, self.here.mesh, [Replicate()], run_check=False)


class Program:
    """The module of ``stage``, cut; initialised as the whole one is. ``shapes``: of the whole
    parameters, sorted by name."""

    def __init__(self, here: Rank, settings: ModelSettings, stages: int, stage: int) -> None:
        self.here = here
        self.shapes = dict(sorted(parameter_shapes(settings, stages, stage).items()))
        if stage == ENDS:
            module = CutEnds(settings)
        else:
            module = build(settings, stages, stage)
        self.module = _cut(module, here)
        self._copies = module.keep_copies()
        self.ends = cast(CutEnds, self.module)
        """The module of stage 0."""
        self.parameters = dict(self.module.named_parameters())

    def forward(self, x_BTD: Tensor, document_ends: Sequence[int]) -> Tensor:
        """A block stage: as :meth:`Blocks.forward`."""
        with self.here.device.autocast():
            return self.module(x_BTD, document_ends)

    def embed(self, tokens_BT: Tensor, document_ends: Sequence[int] = ()) -> Tensor:
        """Token ids to hidden states [B, T, D]."""
        with self.here.device.autocast():
            return self.ends.embed(tokens_BT, document_ends)

    def loss(self, h_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """The sum that :meth:`Ends.loss` gives."""
        with self.here.device.autocast(), loss_parallel():
            return self.ends.loss(h_BTD, targets_BT)[0]

    def logits(self, h_BTD: Tensor) -> Tensor:
        """As :meth:`Ends.logits`."""
        with self.here.device.autocast():
            return self.ends.logits(h_BTD)

    def gradients(
        self, output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[list[Tensor | None], dict[str, Tensor], bool]:
        """(gradients of ``inputs``, this rank's part of the parameters' by name, whether all ranks'
        are finite).

        Parameters the output does not depend on are left out. ``gradient`` None: the output is the
        loss.
        """
        seed = None
        if gradient is not None:
            seed = gradient.to(output.dtype)
        with loss_parallel():
            found = torch.autograd.grad(
                output, [*inputs, *self.parameters.values()], seed, allow_unused=True
            )
        share = {
            n: self._local(n, g)
            for n, g in zip(self.parameters, found[len(inputs) :], strict=True)
            if g is not None
        }
        return list(found[: len(inputs)]), share, self._finite(list(share.values()))

    def load(self, whole: Mapping[str, Tensor] | None) -> None:
        """Put parameters in place. Rank 0 gives them whole, the others give None.

        They are new tensors: a graph made before keeps the tensors it has saved, and knows nothing
        of the new ones.
        """
        for name, shape in self.shapes.items():
            given = None
            if whole is not None:
                given = whole[name]
            part = self.here.deal(name, shape, given)
            dim = cut_of(name)
            if dim is not None:
                part = DTensor.from_local(
                    part,
                    self.here.mesh,
                    [Shard(dim)],
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=(*shape[1:], 1),
                )
            parent, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(parent), leaf, nn.Parameter(part))
        self.parameters = dict(self.module.named_parameters())
        self._copies.forget_all()

    def whole(self, parts: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors that are cut as the parameters ``names`` are, whole, on the CPU at rank 0;
        nothing at the others."""
        found = {name: self.here.collect(name, self.shapes[name], parts[name]) for name in names}
        return {name: t for name, t in found.items() if t is not None}

    def _local(self, name: str, gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor):
            dim = cut_of(name)
            placement = Replicate()
            if dim is not None:
                placement = Shard(dim)
            return gradient.redistribute(placements=[placement]).to_local()
        if per_head(name):
            return self.here.total(gradient.contiguous())
        return gradient

    def _finite(self, share: list[Tensor]) -> bool:
        size = torch.zeros((), device=self.here.device.device)
        if share:
            size = torch.stack(torch._foreach_norm(share)).sum()  # pyright: ignore
        return bool(torch.isfinite(self.here.total(size.float().reshape(()))))


def _cut(module: Ends | Blocks, here: Rank) -> nn.Module:
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    both = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan: dict[str, ParallelStyle] = {}
    if isinstance(module, CutEnds):
        module.here = here
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        if module.lm_head is not None:
            plan["lm_head"] = ColwiseParallel()
    for layer in module.layers:
        at = f"model.layers.{layer}"
        # The input becomes one distributed tensor: its gradients from q, k and v are summed here
        # and reduced once.
        plan |= {f"{at}.self_attn": both, f"{at}.mlp": whole}
        plan |= {f"{at}.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"{at}.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {f"{at}.{n}": RowwiseParallel() for n in ("self_attn.o_proj", "mlp.down_proj")}
    module.to(here.device.device)
    return parallelize_module(module, here.mesh, plan, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, cut or not."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor
