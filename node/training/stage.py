"""The parameters this peer holds: one version in place, and the one before it until the new one is settled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from node.wire.tensors import digest


class StageState:
    """A stage's module and its version number. Tensors are replaced, never written into, so a reader may keep them.

    ``epoch`` is -1 while the parameters are nobody's (a joiner that has not fetched yet).
    """

    def __init__(self, module: nn.Module, stage: int, epoch: int) -> None:
        self.module, self.stage, self.epoch = module, stage, epoch
        self._live = dict(module.named_parameters())
        self._before: dict[str, Tensor] | None = None
        self._before_digest = ""
        self.digest = digest(self.parameters())

    def parameters(self) -> dict[str, Tensor]:
        """Name to tensor of the version in place, on the module's device; do not write into them."""
        return {name: p.data for name, p in self._live.items()}

    def adopt(self, fresh: Mapping[str, Tensor], epoch: int) -> str:
        """Put a complete set of parameters in place as ``epoch``, keep the old ones, return the new digest.

        Raises KeyError when a parameter is missing and ValueError when a shape differs; then nothing has changed.
        """
        new = {}
        for name, p in self._live.items():
            tensor = fresh[name]
            if tensor.shape != p.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, this stage has {tuple(p.shape)}")
            new[name] = tensor.detach().to(device=p.device, dtype=p.dtype)
        self._before, self._before_digest = self.parameters(), self.digest
        self._place(new)
        self.epoch, self.digest = epoch, digest(new)
        return self.digest

    def roll_back(self, epoch: int) -> None:
        """Undo the last :meth:`adopt`. Raises ValueError when nothing is kept."""
        if self._before is None:
            raise ValueError("there is no earlier version to go back to")
        self._place(self._before)
        self.digest, self.epoch, self._before = self._before_digest, epoch, None

    def settle(self) -> None:
        """The version in place is final: forget the one before."""
        self._before = None

    @torch.no_grad()
    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, p in self._live.items():
            p.data = tensors[name]
