"""One process's place among the devices of its box: rank, device, and how it exchanges tensors with
the others.

Collectives run on gloo for CPUs and on NCCL for GPUs, each with a timeout. The ranks meet in a file
of a private directory.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from node.core.errors import DeviceLost
from node.local.groups import Sharded
from node.local.split import cut_of
from node.model.device import Device

TIMEOUT_S = 120.0
"""Longest wait of one collective for the slowest rank: a micro-batch and a time-out of the
operating system."""
NEXT_STEP = "start the node again; if it happens again, start it with fewer local devices"


@dataclass(frozen=True)
class Rank:
    """``rank`` of ``size``, on ``device``. Every method is collective: all ranks call it, in one
    order."""

    rank: int
    size: int
    device: Device
    mesh: DeviceMesh

    @classmethod
    def meet(
        cls, rank: int, size: int, device: Device, store: Path, timeout_s: float = TIMEOUT_S
    ) -> "Rank":
        """Wait for the others. ``store`` is a file that nobody used before. Raises DeviceLost when
        they do not come in time."""
        where = device.device
        limit = timedelta(seconds=timeout_s)
        # By default gloo binds to the address of the machine's name, and NCCL to the addresses of
        # its networks, where strangers can reach them.
        loopback = "lo"
        if sys.platform == "darwin":
            loopback = "lo0"
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ["NCCL_SOCKET_IFNAME"] = loopback
        # 2: a collective that takes too long is ended, and not the process, which is a daemon.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        backend = "gloo"
        device_id = None
        if device.is_cuda:
            backend = "nccl"
            device_id = where
        with lost_is_a_fault():
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=limit,
                device_id=device_id,
            )
            return cls(rank, size, device, init_device_mesh(where.type, (size,)))

    @staticmethod
    def abandon() -> None:
        """End the collectives under way. Where a rank is gone, gloo's collectives fail by
        themselves, and NCCL's would wait for it."""
        world = dist.group.WORLD
        if world is not None and dist.get_backend() == "nccl":
            world.abort()

    @staticmethod
    def leave() -> None:
        """Forget the others; nothing collective is possible after it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def share(self, tensor: Tensor) -> Tensor:
        """Broadcast rank 0's numbers into every rank's ``tensor``, which is on the device."""
        dist.broadcast(tensor.detach(), 0)
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, into every rank's ``tensor``."""
        dist.all_reduce(tensor)
        return tensor

    def deal(self, name: str, shape: tuple[int, ...], whole: Tensor | None) -> Tensor:
        """Distribute a parameter, and return this rank's part on the device. Rank 0 gives the
        ``whole``, the other ranks None."""
        if cut_of(name) is not None:
            cut = Sharded.as_parameter(name, shape, self.size)
            if whole is not None:
                whole = whole.reshape(cut.rows, cut.cols)
            part = self.scatter(cut, whole)
            if len(shape) == 1:
                part = part.flatten()
            return part
        part = torch.empty(shape, device=self.device.device)
        if whole is not None:
            part.copy_(whole)
        return self.share(part)

    def collect(self, name: str, shape: tuple[int, ...], part: Tensor) -> Tensor | None:
        """Gather a tensor that is sharded as the parameter ``name`` is. Returns the whole on the
        CPU at rank 0, None at the other ranks."""
        if cut_of(name) is not None:
            cut = Sharded.as_parameter(name, shape, self.size)
            whole = self.gather(cut, part.reshape(cut.shape(self.rank)))
            if whole is not None:
                whole = whole.reshape(shape)
            return whole
        if self.rank:
            return None
        return part.cpu()

    def scatter(self, matrix: Sharded, whole: Tensor | None) -> Tensor:
        """Scatter a matrix, and return this rank's part on the device. Rank 0 gives the ``whole``,
        the other ranks None. Rank 0's part may be a view of the whole."""
        where = self.device.device
        if whole is None:
            part = torch.empty(matrix.shape(self.rank), device=where)
            if part.numel():
                dist.recv(part, 0)
            return part
        pieces = whole.split(list(matrix.sizes), matrix.dim)
        for rank in range(1, self.size):
            if matrix.part(rank):
                dist.send(pieces[rank].to(where).contiguous(), rank)
        return pieces[0].to(where).contiguous()

    def gather(self, matrix: Sharded, part: Tensor) -> Tensor | None:
        """Gather a matrix from the ``part`` of each rank. Returns the whole on the CPU at rank 0,
        None at the other ranks."""
        if self.rank:
            if part.numel():
                dist.send(part.contiguous(), 0)
            return None
        whole = torch.empty(matrix.rows, matrix.cols, dtype=part.dtype)
        pieces = whole.split(list(matrix.sizes), matrix.dim)
        if matrix.part(0):
            pieces[0].copy_(part)
        for rank in range(1, self.size):
            if not matrix.part(rank):
                continue
            if pieces[rank].is_contiguous() and not self.device.is_cuda:
                dist.recv(pieces[rank], rank)
                continue
            other = torch.empty(matrix.shape(rank), dtype=part.dtype, device=self.device.device)
            dist.recv(other, rank)
            pieces[rank].copy_(other)
        return whole


@contextmanager
def lost_is_a_fault() -> Iterator[None]:
    """Context in which torch's errors of a failed collective become DeviceLost."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as e:
        raise DeviceLost(
            f"the devices of this box lost each other: {str(e).splitlines()[0][:200]}", NEXT_STEP
        ) from e
