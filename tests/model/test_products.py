"""The library of fp32 products on a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from node.model import products
from node.model.products import (
    FEW,
    ROWS,
    SHAPES,
    PassThreads,
    Way,
    by_onednn,
    linear,
    of_texts,
    prefer_faster,
)

SETTINGS: Any = torch.backends.mkldnn.matmul
WAYS: tuple[Way, ...] = ("common", "onednn")


@pytest.fixture(autouse=True)
def usual_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = SETTINGS.fp32_precision
    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(products, "_few", {})
    yield
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


def of_few_rows(monkeypatch: pytest.MonkeyPatch, slowness: dict[Way, float]) -> dict[int, Way]:
    """The ways that are chosen for few rows where a product in each way takes so long, and all
    products stay with the usual library."""
    now = [0.0]
    clock = Clock(1.0)
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    monkeypatch.setattr(products, "time", clock)
    monkeypatch.setattr(products, "_onednn_is_better", lambda: False)

    def timed(way: Way, product: products.Product) -> products.Product:
        def multiply(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            now[0] += slowness.get(way, 9.0)
            return product(x, w, b)

        return multiply

    made = {way: timed(way, product) for way, product in products._PRODUCTS.items()}
    monkeypatch.setattr(products, "_PRODUCTS", made)
    prefer_faster(1)
    return dict(products._few)


def test_few_rows_are_multiplied_in_the_fastest_way_whatever_all_products_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = of_few_rows(monkeypatch, {"common": 1.25, "onednn": 1.0, "mkl": 0.5})
    assert not by_onednn()
    assert found == {1: "mkl", 4: "onednn", 16: "onednn"}


def test_few_rows_stay_with_the_common_library_for_a_small_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = of_few_rows(monkeypatch, {"common": 1.04, "onednn": 1.0})
    assert set(found.values()) == {"common"}


def test_a_way_that_rounds_is_not_chosen_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounding(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x.bfloat16(), w.bfloat16()).float()

    monkeypatch.setitem(products._PRODUCTS, "onednn", rounding)
    found = of_few_rows(monkeypatch, {"common": 9.0, "onednn": 1.0})
    assert set(found.values()) == {"common"}


def test_onednn_is_not_tried_for_few_rows_where_torch_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    found = of_few_rows(monkeypatch, {"common": 9.0, "onednn": 1.0})
    assert set(found.values()) == {"common"}


@pytest.mark.parametrize("way", [*WAYS, "mkl"])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5)])
def test_a_row_of_a_text_gives_what_it_gives_in_training(shape: tuple[int, ...], way: Way) -> None:
    compared(shape, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 5), (4, 5), (2, 1, 5), (16, 5), (17, 5)])
def test_rows_of_texts_give_what_they_give_in_training(shape: tuple[int, ...], way: Way) -> None:
    compared(shape, way)


def compared(shape: tuple[int, ...], way: Way) -> None:
    products._few.update(dict.fromkeys(FEW, way))
    x = torch.randn(shape)
    w = torch.randn(3, 5)
    b = torch.randn(3)
    with torch.no_grad(), of_texts():
        torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b))
        torch.testing.assert_close(linear(x, w), F.linear(x, w))


def test_only_passes_over_texts_have_ways_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, and all that computes without gradients beside texts, keeps its last bits."""
    asked: list[int] = []

    def product(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        asked.append(len(x))
        return F.linear(x, w, b)

    monkeypatch.setitem(products._PRODUCTS, "onednn", product)
    products._few.update({1: "common", 4: "onednn", 16: "common"})
    w = torch.randn(3, 5)
    with torch.no_grad():
        linear(torch.randn(3, 5), w)
        with of_texts():
            for rows in (1, 2, 4, 5, 17):
                linear(torch.randn(rows, 5), w)
        linear(torch.randn(3, 5), w)
    with of_texts():
        linear(torch.randn(3, 5), w)
    assert asked == [2, 4]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_few_rows_have_the_format_that_many_have(kind: torch.dtype, autocast: bool) -> None:
    products._few.update(dict.fromkeys(FEW, "onednn"))
    w = torch.randn(3, 5, dtype=kind)
    x = torch.randn(17, 5, dtype=kind)
    with torch.no_grad(), of_texts(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        many = linear(x, w)
        few = linear(x[:2], w)
    assert few.dtype is many.dtype
    torch.testing.assert_close(few, many[:2], rtol=1e-2, atol=1e-2)


def test_a_row_in_fp32_beside_weights_in_bf16_is_computed_under_autocast() -> None:
    products._few.update(dict.fromkeys(FEW, "onednn"))
    weight = torch.randn(3, 5, dtype=torch.bfloat16)
    with torch.no_grad(), of_texts(), torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(1, 5), weight).shape == (1, 3)


def test_few_rows_have_a_gradient() -> None:
    products._few.update(dict.fromkeys(FEW, "onednn"))
    w = torch.randn(3, 5, requires_grad=True)
    with of_texts():
        linear(torch.ones(1, 5), w).sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.ones(3, 5))


class Layer:
    """A layer with a time for each number of rows and of torch's threads, in seconds."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, dict[int, float]]
    ) -> None:
        self._seconds = seconds
        self._now = 0.0
        self.passes = 0
        monkeypatch.setattr(products, "time", self)

    def perf_counter(self) -> float:
        return self._now

    def __call__(self, rows: int) -> None:
        self.passes += 1
        self._now += self._seconds[rows][torch.get_num_threads()]


def threads_of(passes: PassThreads, rows: int) -> int:
    with passes.taken(rows):
        return torch.get_num_threads()


@pytest.mark.usefixtures("two_threads")
def test_a_pass_over_few_rows_has_one_thread_where_all_are_hardly_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Layer(monkeypatch, {1: {1: 1, 2: 2}, 8: {1: 1.2, 2: 1}, 32: {1: 1.4, 2: 1}})
    passes = PassThreads(layer)
    assert layer.passes == 0, "measured at the first pass"
    assert [threads_of(passes, rows) for rows in (1, 2, 8, 9, 32, 33)] == [1, 1, 1, 2, 2, 2]
    measured = layer.passes
    assert threads_of(passes, 1) == 1
    assert layer.passes == measured, "measured once"
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), passes.taken(1):
        _ = 1 / 0
    assert torch.get_num_threads() == 2, "also after an error"


@pytest.mark.usefixtures("two_threads")
def test_one_thread_has_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    layer = Layer(monkeypatch, {})
    assert threads_of(PassThreads(layer), 1) == 1
    assert layer.passes == 0


@pytest.mark.usefixtures("two_threads")
def test_a_slow_layer_is_measured_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {rows: {1: 60.0, 2: 20.0} for rows in ROWS}
    layer = Layer(monkeypatch, slow)
    assert threads_of(PassThreads(layer), 1) == 2
    assert layer.passes == 2 * 2 * len(ROWS)
