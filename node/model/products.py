"""fp32 matrix products on a CPU: by torch's usual library, or by oneDNN where that is as exact and
faster on this processor.

torch's usual library is Intel's MKL. On processors of AMD with AVX-512 it does less than half of
what oneDNN does (220 and 480 GFLOP/s on two cores of a Zen 4). torch has a public switch that hands
fp32 products to oneDNN and lets it round factors to bf16. oneDNN rounds them only where a processor
has tiles for that (AMX), so whether it does is measured too.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ((256, 512, 512), (64, 96, 192), (8, 512, 1024))
"""Rows, inputs and outputs of the products that are tried."""
TRIES = 7
GAIN = 1.15
"""Least speed over the usual library's at which oneDNN is taken."""
AS_EXACT = 2.0
"""Largest error over the usual library's. Rounding to bf16 makes it a thousand times larger."""

_USUAL, _ONEDNN = "none", "bf16"


_chosen: dict[int, bool] = {}
"""True for oneDNN, by number of threads."""


def prefer_faster(threads: int) -> bool:
    """Choose the library for all fp32 products of this process on its CPU, where torch has
    ``threads`` threads: by some 40 ms of measurements, once for each number. Return True if it is
    oneDNN."""
    if threads not in _chosen:
        _chosen[threads] = _onednn_is_better()
    settings = _settings()
    settings.fp32_precision = _USUAL
    if _chosen[threads]:
        settings.fp32_precision = _ONEDNN
    return _chosen[threads]


def _onednn_is_better() -> bool:
    """Try both libraries; the choice of one is the caller's."""
    if not torch.backends.mkldnn.is_available():
        return False
    settings = _settings()
    draw = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(rows, inputs, generator=draw), torch.randn(outputs, inputs, generator=draw))
        for rows, inputs, outputs in SHAPES
    ]
    truth = [x.double() @ w.double().t() for x, w in pairs]
    seconds: dict[str, list[float]] = {_USUAL: [], _ONEDNN: []}
    errors: dict[str, float] = {}
    for _ in range(TRIES):
        for library, took in seconds.items():
            settings.fp32_precision = library
            began = time.perf_counter()
            products = [F.linear(x, w) for x, w in pairs]
            took.append(time.perf_counter() - began)
            errors[library] = _error(products, truth)
    exact = errors[_ONEDNN] <= AS_EXACT * errors[_USUAL]
    return exact and median(seconds[_USUAL]) >= GAIN * median(seconds[_ONEDNN])


def by_onednn() -> bool:
    """Return True if oneDNN computes fp32 products on the CPU."""
    return _settings().fp32_precision == _ONEDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., inputs] to [..., outputs]. A single row outside of training is left to the
    usual library, which is as fast there: the memory is the limit."""
    alone = x.numel() == x.shape[-1] and not torch.is_grad_enabled()
    if not alone or not _in_fp32(x, weight) or not by_onednn():
        return F.linear(x, weight, bias)
    row = torch.mv(weight, x.reshape(-1))
    if bias is not None:
        row += bias
    return row.reshape(*x.shape[:-1], -1)


def _in_fp32(x: Tensor, weight: Tensor) -> bool:
    """Return True if a product on the CPU is computed in fp32."""
    kinds = (x.dtype, weight.dtype)
    fp32 = kinds == (torch.float32, torch.float32) and not torch.is_autocast_enabled("cpu")
    return fp32 and x.device.type == "cpu"


def _settings() -> Any:
    """torch's settings of products by oneDNN, which its type hints leave out."""
    return cast(Any, torch.backends.mkldnn).matmul


def _error(products: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Largest error of some products, over the largest number in each."""
    return max(
        float((p - t).abs().max() / t.abs().max()) for p, t in zip(products, truth, strict=True)
    )
