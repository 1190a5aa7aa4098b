"""fp32 matrix products on a CPU: by torch's usual library, or by oneDNN where that is as exact and
faster on this processor. Chosen for all products, and apart from that for products of few rows.

torch's usual library is Intel's MKL. On processors of AMD with AVX-512 it does less than half of
what oneDNN does (220 and 480 GFLOP/s on two cores of a Zen 4). torch has a public switch that hands
fp32 products to oneDNN and lets it round factors to bf16. oneDNN rounds them only where a processor
has tiles for that (AMX), so whether it does is measured too.

A pass over texts that are being generated has a row for each text. There the memory is the limit,
and which library is faster follows from other things than for many rows. The switch is one for the
whole process, beside whose passes an optimizer may step, so products of few rows call a library by
an operator of its own. Training never does.

Such a pass is made of many short operations. libgomp lets the threads of an operation sleep before
the next one where the process has more threads than cores, and waking them takes 0.1 ms, so that
one thread alone can be as fast as all. It leaves the other cores to other texts and other daemons.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Way = Literal["common", "mkl", "onednn"]
"""A way of multiplying few rows: by the library that all products have, or by a named one."""
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

SHAPES = ((256, 512, 512), (64, 96, 192), (8, 512, 1024))
"""Rows, inputs and outputs of the products that are tried for all products."""
FEW = (1, 4, 16)
"""Numbers of rows that are tried for few rows; each decides for those down to the one before."""
FEW_SIDE = 1024
"""Inputs and outputs of the products that are tried for few rows."""
FEW_WEIGHTS = 4
"""Weights of these products: 16 MiB, more than a core's own cache holds."""
TRIES = 7
FEW_TRIES = 5
FEW_S = 0.05
"""Seconds after which no further try begins for one of :data:`FEW`, from the third on. On a busy
machine threads that wait for each other take a hundred times as long."""
GAIN = 1.15
"""Least speed over the usual library's at which oneDNN is taken for all products."""
FEW_GAIN = 1.05
"""Least speed over that of all products at which few rows get a library of their own."""
AS_EXACT = 2.0
"""Largest error over the usual library's. Rounding to bf16 makes it a thousand times larger."""
FEW_AS_EXACT = 16.0
"""The same for few rows, whose numbers oneDNN sums in another order: five times the error of MKL at
two rows, which is 1e-6 of the largest number."""

ROWS = (1, 8, 32)
"""Numbers of rows of a pass that are tried for the choice of its threads; each decides for those
down to the one before. A pass over more rows has all threads."""
ALL_GAIN = 1.3
"""Least speed of all threads over that of one thread for a choice of all threads."""

_USUAL, _ONEDNN = "none", "bf16"


@dataclass(frozen=True, slots=True)
class Libraries:
    """The libraries chosen for a number of threads. ``onednn``: True if it computes all products.
    ``few``: the way for each of :data:`FEW`."""

    onednn: bool
    few: Mapping[int, Way]


_chosen: dict[int, Libraries] = {}
"""By number of threads."""
_few: dict[int, Way] = {}
"""The ways of few rows that are in force."""
_of_texts: ContextVar[bool] = ContextVar("products_of_texts", default=False)


def prefer_faster(threads: int) -> bool:
    """Choose the libraries for the fp32 products of this process on its CPU, where torch has
    ``threads`` threads: by some 100 ms of measurements, once for each number. Return True if it is
    oneDNN for all products."""
    if threads not in _chosen:
        onednn = _onednn_is_better()
        follow(onednn)
        _chosen[threads] = Libraries(onednn, _ways_of_few())
    found = _chosen[threads]
    follow(found.onednn)
    # The same rows for every number of threads: a pass over texts may read the ways meanwhile.
    _few.update(found.few)
    return found.onednn


def follow(onednn: bool) -> None:
    """Use oneDNN for all fp32 products of this process on its CPU, or the usual library: the choice
    of another process, whose results should be the same to the bit."""
    _settings().fp32_precision = _ONEDNN if onednn else _USUAL


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


@torch.no_grad()
def _ways_of_few() -> dict[int, Way]:
    """The fastest way of multiplying each of :data:`FEW` that is exact."""
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(FEW_SIDE, FEW_SIDE, generator=draw)
    weights = [weight, *(weight.clone() for _ in range(FEW_WEIGHTS - 1))]
    xs = [torch.randn(rows, FEW_SIDE, generator=draw) for rows in FEW]
    return {len(x): _best_way(x, weights, x.double() @ weight.double().t()) for x in xs}


def _best_way(x: Tensor, weights: Sequence[Tensor], truth: Tensor) -> Way:
    """The fastest exact way for the rows of ``x``; "common" unless another one gains
    :data:`FEW_GAIN`."""
    seconds: dict[Way, list[float]] = {way: [] for way in _ways(len(x))}
    errors: dict[Way, float] = {}
    for turn in range(FEW_TRIES):
        if turn > 1 and sum(map(sum, seconds.values())) > FEW_S:
            break
        for way, took in seconds.items():
            product = _PRODUCTS[way]
            began = time.perf_counter()
            products = [product(x, weight, None) for weight in weights]
            took.append(time.perf_counter() - began)
            errors[way] = _error(products[:1], [truth])
    shortest: dict[Way, float] = {
        way: min(took)
        for way, took in seconds.items()
        if errors[way] <= FEW_AS_EXACT * errors["common"]
    }
    best = min(shortest, key=lambda way: shortest[way])
    if shortest["common"] >= FEW_GAIN * shortest[best]:
        return best
    return "common"


def _ways(rows: int) -> list[Way]:
    """The ways in which so many rows can be multiplied here."""
    found: list[Way] = ["common"]
    if rows == 1:
        found.append("mkl")
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found.append("onednn")
    return found


def by_onednn() -> bool:
    """Return True if oneDNN computes all fp32 products on the CPU."""
    return _settings().fp32_precision == _ONEDNN


@contextmanager
def of_texts() -> Iterator[None]:
    """The context of a pass over texts that are being generated: its products of few rows are made
    in the ways chosen for them."""
    before = _of_texts.set(True)
    try:
        yield
    finally:
        _of_texts.reset(before)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., inputs] to [..., outputs]."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _of_texts.get():
        return F.linear(x, weight, bias)
    if not _in_fp32(x, weight):
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    for most, way in _few.items():
        if rows <= most:
            return _PRODUCTS[way](x, weight, bias)
    return F.linear(x, weight, bias)


class PassThreads:
    """Choice of torch's threads for passes over few rows through a stage: one thread, or all of
    the calling thread, by a measurement of one layer at the first pass. ``layer(rows)`` computes
    the layer for so many rows. Measurement and passes need the same calling thread, because its
    pool of threads is what sleeps."""

    def __init__(self, layer: Callable[[int], object]) -> None:
        self._layer = layer
        self._alone: dict[int, bool] = {}
        """True for each of :data:`ROWS` with one thread; empty before the measurement."""

    @contextmanager
    def taken(self, rows: int) -> Iterator[None]:
        """The context of a pass over ``rows`` rows. The number of MKL's threads is one for the
        process, so products of other threads have one thread meanwhile too."""
        threads = torch.get_num_threads()
        if threads > 1 and not self._alone:
            self._alone = {few: self._is_better_alone(few, threads) for few in ROWS}
        alone = next((alone for few, alone in self._alone.items() if rows <= few), False)
        if alone:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _is_better_alone(self, rows: int, threads: int) -> bool:
        """Return True if ``threads`` threads gain less than :data:`ALL_GAIN` over one. Takes about
        :data:`FEW_S`, and at least two passes with each."""
        seconds: dict[int, list[float]] = {1: [], threads: []}
        try:
            for turn in range(FEW_TRIES):
                if turn > 1 and sum(map(sum, seconds.values())) > FEW_S:
                    break
                for number, took in seconds.items():
                    torch.set_num_threads(number)
                    began = time.perf_counter()
                    self._layer(rows)
                    took.append(time.perf_counter() - began)
        finally:
            torch.set_num_threads(threads)
        return min(seconds[1]) < ALL_GAIN * min(seconds[threads])


def _by_mkl(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a single row, which torch always leaves to MKL in this form."""
    row = torch.mv(weight, x.reshape(-1))
    if bias is not None:
        row += bias
    return row.reshape(*x.shape[:-1], -1)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by the operator that torch's compiler calls, which reads weights as they are. It
    has no gradient, and rounds nothing unless the switch allows it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_PRODUCTS: dict[Way, Product] = {"common": F.linear, "mkl": _by_mkl, "onednn": _by_onednn}


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
