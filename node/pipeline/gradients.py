"""The sum of parameter gradients of one epoch, to which a micro-batch adds wholly or not at all."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.core.memory import let_go

Share = Mapping[str, Tensor]
"""Parameter gradients of one micro-batch, by name; parameters it did not touch are left out."""


class EpochSum:
    """The sum of one epoch: shares that were offered and not yet added, sums by parameter, and the
    number of tokens in them. ``number``: of the epochs of one :class:`GradientSum`, from 1 on.
    ``lock``: held while shares are added."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.offered: deque[tuple[deque[Share], int]] = deque()
        self.sums: dict[str, Tensor] = {}
        self.tokens = 0


class GradientSum:
    """Adds shares in the order in which micro-batches finish here.

    That order differs between runs, and so do the last bits of a fp32 sum. Replicas need no equal
    sums: they share the result of the round. :meth:`offer` and :meth:`reset` are cheap and may be
    called from the event loop; the additions run in :meth:`drain` on the device thread.
    :meth:`whole` finishes all offered shares, so that a share offered before it is in the result,
    whichever thread was late.
    """

    def __init__(self) -> None:
        self._epoch = EpochSum(1)
        self.micro_batches = 0
        """Micro-batches that were offered since the last :meth:`reset`."""

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Sums of the shares that were added so far, by parameter."""
        return self._epoch.sums

    def offer(self, shares: Sequence[Share], tokens: int) -> None:
        """Count one micro-batch; its shares are given away and must not be used afterwards."""
        self._epoch.offered.append((deque(shares), tokens))
        self.micro_batches += 1

    def drain(self) -> None:
        """Add everything offered so far. If the addition of a share fails, the error is raised;
        this share and those behind it are kept for the next call."""
        self._drained()

    def whole(self) -> tuple[Mapping[str, Tensor], int]:
        """The sums of all offered shares, and their number of tokens; none if the epoch began anew
        meanwhile. Not for the event loop, nor is reading a sum, which several devices first bring
        together. May be called again. Raises as :meth:`drain`."""
        epoch = self._drained()
        with epoch.lock:
            if epoch is not self._epoch:
                return {}, 0
            return dict(epoch.sums), epoch.tokens

    def reset(self) -> None:
        """Start an epoch: everything is forgotten. Does not wait for shares that are being added:
        they go into a sum that nobody reads."""
        held = [self._epoch]
        nbytes = sum(tensor.nbytes for tensor in [*held[0].sums.values()])
        self._epoch = EpochSum(held[0].number + 1)
        self.micro_batches = 0
        let_go(held, nbytes)

    def _drained(self) -> EpochSum:
        """Add everything offered so far, and return the sum of the epoch."""
        epoch = self._epoch
        with epoch.lock:
            while epoch.offered and epoch is self._epoch:
                shares, tokens = epoch.offered[0]
                while shares:
                    self._add(shares[0], epoch)
                    shares.popleft()
                epoch.tokens += tokens
                epoch.offered.popleft()
        return epoch

    @torch.no_grad()
    def _add(self, share: Share, epoch: EpochSum) -> None:
        # A copy, once an epoch: autograd may give one tensor to two parameters, or to a parameter
        # and the wire. All copies come first: where memory runs out, nothing is added.
        new = {
            name: share[name].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name in share.keys() - epoch.sums.keys()
        }
        known = [name for name in share if name in epoch.sums]
        if known:
            sums = [epoch.sums[n] for n in known]
            added = [share[n] for n in known]
            torch._foreach_add_(sums, added)  # pyright: ignore[reportPrivateImportUsage]
        epoch.sums.update(new)
