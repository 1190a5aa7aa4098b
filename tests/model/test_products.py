"""The library of fp32 products on a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from node.model import products
from node.model.products import SHAPES, by_onednn, linear, prefer_faster

SETTINGS: Any = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def usual_library() -> Iterator[None]:
    before = SETTINGS.fp32_precision
    chosen = dict(products._chosen)
    products._chosen.clear()
    yield
    products._chosen.clear()
    products._chosen.update(chosen)
    SETTINGS.fp32_precision = before


class Clock:
    """Products take `times` as long by the usual library as by oneDNN."""

    def __init__(self, times: float) -> None:
        self._times = times
        self._now = 0.0

    def perf_counter(self) -> float:
        self._now += 1.0 if by_onednn() else self._times
        return self._now


@pytest.mark.parametrize(("times", "chosen"), [(2.0, True), (1.1, False), (0.5, False)])
def test_onednn_is_chosen_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, times: float, chosen: bool
) -> None:
    monkeypatch.setattr(products, "time", Clock(times))
    monkeypatch.setattr(products, "_error", lambda made, truth: 1e-7)
    assert prefer_faster(1) is chosen
    assert by_onednn() is chosen


def test_onednn_is_not_chosen_where_it_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "time", Clock(9.0))
    monkeypatch.setattr(products, "_error", lambda made, truth: 1e-3 if by_onednn() else 1e-7)
    assert not prefer_faster(1)
    assert not by_onednn()


def test_the_chosen_library_is_as_exact() -> None:
    """Rounding to bf16 would be off by more than a thousandth."""
    prefer_faster(1)
    for rows, inputs, outputs in SHAPES:
        x = torch.randn(rows, inputs)
        w = torch.randn(outputs, inputs)
        truth = x.double() @ w.double().t()
        torch.testing.assert_close(F.linear(x, w).double(), truth, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5), (2, 5), (2, 1, 5)])
@pytest.mark.parametrize("chosen", ["none", "bf16"])
def test_a_row_alone_gives_what_it_gives_beside_others(shape: tuple[int, ...], chosen: str) -> None:
    SETTINGS.fp32_precision = chosen
    x = torch.randn(shape)
    w = torch.randn(3, 5)
    b = torch.randn(3)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b))
        torch.testing.assert_close(linear(x, w), F.linear(x, w))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_row_alone_has_the_format_that_it_has_beside_others(
    kind: torch.dtype, autocast: bool
) -> None:
    SETTINGS.fp32_precision = "bf16"
    w = torch.randn(3, 5, dtype=kind)
    x = torch.randn(2, 5, dtype=kind)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        both = linear(x, w)
        alone = linear(x[:1], w)
    assert alone.dtype is both.dtype
    torch.testing.assert_close(alone, both[:1], rtol=1e-2, atol=1e-2)


def test_a_row_in_fp32_beside_weights_in_bf16_is_computed_under_autocast() -> None:
    SETTINGS.fp32_precision = "bf16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(1, 5), torch.randn(3, 5, dtype=torch.bfloat16)).shape == (1, 3)


def test_a_row_alone_has_a_gradient() -> None:
    SETTINGS.fp32_precision = "bf16"
    w = torch.randn(3, 5, requires_grad=True)
    linear(torch.ones(1, 5), w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.ones(3, 5))
