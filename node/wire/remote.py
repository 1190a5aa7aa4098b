"""Tensors with numbers in other processes of this machine, fetched when they are read."""

import math
from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor


class RemoteTensor(ABC):
    """An fp32 tensor of ``shape`` that is not in this process's memory. It never changes."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self.dtype.itemsize * math.prod(self.shape)

    @abstractmethod
    def collect(self) -> Tensor:
        """All its numbers, on the CPU. Blocks: not for the event loop. Raises LocalFault."""

    @abstractmethod
    def off_device(self) -> "HeldTensor":
        """The same numbers, off the accelerator's memory. Blocks and raises as :meth:`collect`."""


HeldTensor: TypeAlias = Tensor | RemoteTensor


def collected(held: HeldTensor) -> Tensor:
    """The tensor itself, or the numbers of a remote tensor."""
    if isinstance(held, RemoteTensor):
        return held.collect()
    return held


def on_cpu(held: HeldTensor) -> HeldTensor:
    """Copy a tensor of this process to the CPU; a remote tensor is returned unchanged."""
    if isinstance(held, RemoteTensor):
        return held
    return held.detach().cpu()


def off_device(held: HeldTensor) -> HeldTensor:
    """Copy the numbers off the accelerator's memory. Blocks on the device that has them."""
    if isinstance(held, RemoteTensor):
        return held.off_device()
    return held.detach().cpu()
