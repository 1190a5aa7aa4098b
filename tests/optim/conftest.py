"""Matrix products that are the same to the bit, whatever library makes them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from node.optim import gram

torch.set_num_threads(1)


@contextmanager
def matrix_by_matrix() -> Iterator[None]:
    """Compute products of a stack one matrix after the other. No library promises a stack the bits
    that each of its matrices has by itself (most processors' libraries do give them), so that any
    remaining difference is our own doing."""
    whole = gram.multiply

    def each(
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        plus: torch.Tensor | None = None,
        beta: float = 1,
        alpha: float = 1,
    ) -> None:
        if left.ndim == 2:
            whole(left, right, out, plus, beta, alpha)
            return
        for i in range(len(left)):
            whole(left[i], right[i], out[i], None if plus is None else plus[i], beta, alpha)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram, "multiply", each)
        yield


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference divided by the norm of `expected`."""
    apart = torch.linalg.vector_norm(found.double() - expected.double())
    return float(apart / torch.linalg.vector_norm(expected.double()))
