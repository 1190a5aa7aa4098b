"""The sum of parameter gradients of one epoch, to which a micro-batch adds wholly or not at all."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.core.memory import let_go

Share = Mapping[str, Tensor]
"""Parameter gradients of one micro-batch, by name; parameters it did not touch are left out."""


class GradientSum:
    """Adds shares in the order in which micro-batches finish here.

    That order differs between runs, and so do the last bits of a fp32 sum. Replicas need no equal
    sums: they share the result of the round. :meth:`offer` is cheap and may be called from the
    event loop; the additions run in :meth:`drain` on the device thread. :meth:`whole` finishes all
    offered shares, so that a share offered before it is in the result, whichever thread was late.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered: deque[tuple[deque[Share], int]] = deque()
        self._sums: dict[str, Tensor] = {}
        self._tokens = 0
        self.micro_batches = 0
        """Micro-batches that were offered since the last :meth:`reset`."""

    def offer(self, shares: Sequence[Share], tokens: int) -> None:
        """Count one micro-batch; its shares are given away and must not be used afterwards."""
        self._offered.append((deque(shares), tokens))
        self.micro_batches += 1

    def drain(self) -> None:
        """Add everything offered so far. If the addition of a share fails, the error is raised;
        this share and those behind it are kept for the next call."""
        with self._lock:
            while self._offered:
                shares, tokens = self._offered[0]
                while shares:
                    self._add(shares[0])
                    shares.popleft()
                self._tokens += tokens
                self._offered.popleft()

    def whole(self) -> tuple[Mapping[str, Tensor], int]:
        """The sums of all offered shares, and their number of tokens. Not for the event loop, nor
        is reading a sum, which several devices first bring together. May be called again. Raises
        as :meth:`drain`."""
        self.drain()
        return dict(self._sums), self._tokens

    def reset(self) -> None:
        """Start an epoch: everything is forgotten."""
        with self._lock:
            nbytes = sum(tensor.nbytes for tensor in self._sums.values())
            held = [*self._offered, self._sums]
            self._offered.clear()
            self._sums = {}
            self._tokens = 0
            self.micro_batches = 0
        let_go(held, nbytes)

    @torch.no_grad()
    def _add(self, share: Share) -> None:
        # A copy, once an epoch: autograd may give one tensor to two parameters, or to a parameter
        # and the wire. All copies come first: where memory runs out, nothing is added.
        new = {
            name: share[name].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name in share.keys() - self._sums.keys()
        }
        known = [name for name in share if name in self._sums]
        if known:
            sums = [self._sums[n] for n in known]
            added = [share[n] for n in known]
            torch._foreach_add_(sums, added)  # pyright: ignore[reportPrivateImportUsage]
        self._sums.update(new)
