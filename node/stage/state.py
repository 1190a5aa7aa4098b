"""The parameters this peer holds: one version in place, and the one before it until the new one is
settled."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from node.core.journey import Version
from node.core.memory import let_go
from node.model.weight_copies import NO_COPIES, WeightCopies
from node.wire.tensors import digest


class Held(NamedTuple):
    """Parameters of a stage at one version, which stay as they are, and their digest."""

    version: Version
    parameters: dict[str, Tensor]
    digest: str


class StageState:
    """A stage's module and its version. Tensors are replaced, never written into, so a reader may
    keep them.

    ``frozen``: the weights beside which adapters are trained, None where there are none.
    ``empty``: these, or the parameters of the first version, are not here yet.
    ``placed`` is told of every set of parameters that is put in place, before the module has it.
    ``copies``: of the module's weights, forgotten when these change.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        placed: Callable[[Mapping[str, Tensor]], None] | None = None,
        empty: bool = False,
        frozen: Mapping[str, Tensor] | None = None,
        copies: WeightCopies = NO_COPIES,
    ) -> None:
        self.module = module
        self.stage = stage
        self._placed = placed
        self.empty = empty
        self.frozen = frozen
        self._copies = copies
        self._live = dict(module.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self._live.items()}
        """Shapes of the parameters, the same in every version."""
        first = {name: p.data for name, p in self._live.items()}
        self._here = Held(Version(0), first, digest(first))
        """The version in place. Other threads read it, so it is replaced as a whole."""
        self._before: Held | None = None
        """The version that the last :meth:`adopt` replaced."""
        self.settled = self.version
        """The final version: the one in place, or the one before while the one in place can still
        be undone."""

    @property
    def version(self) -> Version:
        """Version of the parameters in place."""
        return self._here.version

    @property
    def digest(self) -> str:
        """Digest of the parameters in place."""
        return self._here.digest

    @property
    def format(self) -> str:
        """The number format of the parameters, fp32 or bf16."""
        here = {p.dtype for p in self._live.values()}
        return "bf16" if torch.bfloat16 in here else "fp32"

    def parameters(self) -> dict[str, Tensor]:
        """Tensors of the version in place by name, on the module's device; do not write into
        them."""
        return dict(self._here.parameters)

    def _in_memory(self) -> list[Held]:
        """The version in place, then the one before it while that is kept."""
        versions = [self._here]
        before = self._before
        if before is not None:
            versions.append(before)
        return versions

    def at(self, version: Version) -> dict[str, Tensor]:
        """Parameters of the version in place or the one before it, as :meth:`parameters` gives
        them. Raises KeyError for any other version."""
        for held in self._in_memory():
            if held.version == version:
                return held.parameters
        raise KeyError(version)

    def held(self, epoch: int | None, lineage: str) -> Held | None:
        """The version in place (``epoch`` None), or the one of this epoch, which may be the version
        before while it is kept; None if it is not here. An empty ``lineage`` stands for any."""
        for held in self._in_memory():
            if epoch in (None, held.version.epoch) and lineage in ("", held.version.lineage):
                return held
        return None

    def adopt(self, fresh: Mapping[str, Tensor], version: Version) -> str:
        """Put a complete set of parameters in place as this version, keep the old ones, return the
        new digest.

        Raises KeyError when a parameter is missing and ValueError when a shape differs; then
        nothing has changed.
        """
        new = {}
        for name, p in self._live.items():
            tensor = fresh[name]
            if tensor.shape != p.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, this stage has {tuple(p.shape)}"
                )
            new[name] = tensor.detach().to(device=p.device, dtype=p.dtype)
        self._announce(new)
        # While the digest is computed, other threads read the version that is still in place.
        made = Held(version, new, digest(new))
        self._before = self._here
        self._here = made
        self._place(new)
        self.empty = self.empty and self.frozen is not None
        return made.digest

    @torch.no_grad()
    def begin(self, base: Mapping[str, Tensor]) -> None:
        """Put in place the base of the run: as parameters of the first version, or as the frozen
        weights. Raises as :meth:`adopt`."""
        if self.frozen is None:
            self.adopt(base, Version(0))
            self.settle()
            return
        for name, tensor in self.frozen.items():
            tensor.copy_(base[name])  # nobody reads them while they are not here
        self._copies.forget_all()
        self.empty = False

    def base(self) -> Mapping[str, Tensor] | None:
        """The base of the run, while it is here; else None."""
        if self.empty or (self.frozen is None and self.version != Version(0)):
            return None
        if self.frozen is None:
            return self.parameters()
        return self.frozen

    def roll_back(self) -> None:
        """Undo the last :meth:`adopt`. Raises ValueError when nothing is kept."""
        if self._before is None:
            raise ValueError("there is no earlier version to go back to")
        self._announce(self._before.parameters)
        self._here = self._before
        self._place(self._here.parameters)
        self.settle()

    def settle(self) -> None:
        """The version in place is final: forget the one before."""
        if self._before is not None:
            before = list(self._before.parameters.values())
            self._before = None
            let_go(before, sum(tensor.nbytes for tensor in before))
        self.settled = self.version

    def stand(self, version: Version) -> None:
        """Take the parameters in place as ``version`` too: nobody had this stage in the epochs
        between."""
        self._here = self._here._replace(version=version)
        self.settle()

    def _announce(self, tensors: Mapping[str, Tensor]) -> None:
        if self._placed is not None:
            self._placed(tensors)

    @torch.no_grad()
    def _place(self, tensors: Mapping[str, Tensor]) -> None:
        for name, p in self._live.items():
            p.data = tensors[name]
        self._copies.forget()
