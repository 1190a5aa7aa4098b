"""Orthogonalisation of matrices that are sharded over the ranks: each matrix is gathered at its
host, orthogonalised there, and its update scattered again.

The matrices go in micro-groups (groups.py): while a host works on one group, the next is gathered
and the update of the one before is scattered. Every rank makes the same calls. The groups are
scheduled as in Canzona (arXiv 2602.06079).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from node.local.groups import Group, Sharded, micro_groups
from node.local.rank import Rank, lost_is_a_fault
from node.optim.newton_schulz import newton_schulz_all

MOST_BYTES = 64 << 20
"""Most bytes of matrices that a rank hosts in one micro-group."""
Apply = Callable[[str, Tensor], None]
"""Gets the name of a matrix and this rank's shard of its update, fp32, a view that is good during
the call only."""


class TensorParallelStep:
    """The executor for one set of ``matrices``, the same at every rank; its plan and buffers are
    made once.

    Buffers: one for each group under way, of the shards this rank gives and the matrices it hosts
    in the largest group; ``overlap`` False takes one group at a time, with one buffer. Hosts see
    whole matrices, so that the results equal one process's, bit for bit where Newton–Schulz gets
    the same matrix in the same memory layout.
    """

    def __init__(
        self,
        here: Rank,
        matrices: Sequence[Sharded],
        steps: int,
        *,
        most_bytes: int = MOST_BYTES,
        stack: bool = False,
        coefficients: str = "simple",
        overlap: bool = True,
    ) -> None:
        self.groups = micro_groups(matrices, here.size, most_bytes, steps)
        self._here = here
        self._steps = steps
        self._stack = stack
        self._coefficients = coefficients
        self._overlap = overlap
        # Three groups: one is gathered, one computed, one scattered.
        most = 3
        if not overlap:
            most = 1
        count = min(most, len(self.groups))
        shards = max(
            (sum(m.part(here.rank) for slot in g for m in slot) for g in self.groups), default=0
        )
        hosted = max((sum(m.numel for m in g[here.rank]) for g in self.groups), default=0)
        where = here.device.device
        self._buffers = [
            (torch.empty(shards, device=where), torch.empty(hosted, device=where))
            for _ in range(count)
        ]

    @torch.no_grad()
    @lost_is_a_fault()
    def run(self, shards: Mapping[str, Tensor], apply: Apply) -> None:
        """Give this rank's shards, get the shards of the updates through ``apply``. Raises
        DeviceLost when a rank is gone or does not answer in time."""
        groups = self.groups
        depth = len(self._buffers)
        ahead = 0
        if self._overlap:
            ahead = 1
        gathers: dict[int, dist.Work] = {}
        scatters: dict[int, dist.Work] = {}
        for turn in range(-ahead, len(groups)):
            coming = turn + ahead
            if coming < len(groups):
                if coming >= depth:
                    self._land(
                        groups[coming - depth], coming % depth, scatters.pop(coming - depth), apply
                    )
                gathers[coming] = self._gather(groups[coming], coming % depth, shards)
            if turn >= 0:
                gathers.pop(turn).wait()
                self._work(groups[turn], turn % depth)
                scatters[turn] = self._exchange(groups[turn], turn % depth, back=True)
        for turn in sorted(scatters):
            self._land(groups[turn], turn % depth, scatters[turn], apply)

    def _gather(self, group: Group, slot: int, shards: Mapping[str, Tensor]) -> dist.Work:
        for m, view in self._mine(group, slot):
            view.copy_(shards[m.name])
        return self._exchange(group, slot, back=False)

    def _exchange(self, group: Group, slot: int, *, back: bool) -> dist.Work:
        """Send shards to their hosts, or with ``back`` from them. Numbers for each rank are
        contiguous in both buffers."""
        me = self._here.rank
        size = self._here.size
        cut = [sum(m.part(me) for m in hosted) for hosted in group]
        whole = [sum(m.part(rank) for m in group[me]) for rank in range(size)]
        given, got = (b[: sum(n)] for b, n in zip(self._buffers[slot], (cut, whole), strict=True))
        sides = (given, got, cut, whole) if back else (got, given, whole, cut)
        return cast(dist.Work, dist.all_to_all_single(*sides, async_op=True))

    def _work(self, group: Group, slot: int) -> None:
        """Replace the shards of every matrix hosted here by the shards of its update."""
        hosted = group[self._here.rank]
        ranks = range(self._here.size)
        pieces: dict[str, list[Tensor]] = {m.name: [] for m in hosted}
        for m, view in _views(self._buffers[slot][1], ((m, r) for r in ranks for m in hosted)):
            pieces[m.name].append(view)
        wholes = [
            torch.cat(pieces[m.name], m.dim) if len(pieces[m.name]) > 1 else pieces[m.name][0]
            for m in hosted
        ]
        updates = newton_schulz_all(
            wholes, self._steps, self._stack, coefficients=self._coefficients
        )
        for m, update in zip(hosted, updates, strict=True):
            cut = update.split([v.shape[m.dim] for v in pieces[m.name]], m.dim)
            for view, part in zip(pieces[m.name], cut, strict=True):
                view.copy_(part)

    def _land(self, group: Group, slot: int, scatter: dist.Work, apply: Apply) -> None:
        scatter.wait()
        for m, view in self._mine(group, slot):
            apply(m.name, view)

    def _mine(self, group: Group, slot: int) -> list[tuple[Sharded, Tensor]]:
        """This rank's shards of a group, as views of its buffer."""
        me = self._here.rank
        return _views(self._buffers[slot][0], ((m, me) for hosted in group for m in hosted))


def _views(buffer: Tensor, order: Iterable[tuple[Sharded, int]]) -> list[tuple[Sharded, Tensor]]:
    """Shards of (matrix, rank) in this order, as views of a buffer; empty ones left out."""
    found = []
    at = 0
    for m, rank in order:
        if size := m.part(rank):
            found.append((m, buffer[at : at + size].view(m.shape(rank))))
            at += size
    return found
