"""Activations in int8 and int4: what a reader makes of them, their measured error, and the bytes
that are refused."""

import pytest
import torch

from node.core.errors import WireError
from node.wire.coding import codecs, layouts
from node.wire.coding.formats import BLOCKWISE
from node.wire.coding.layouts import PIECE, STEP
from node.wire.tensors import TensorReader, expected_head, nbytes_of
from testbed.fakes.encoded import encode_measured

SHAPES = [(1, 1, 8), (3, 5, 24), (2, 700, 100)]
WORST = {"int8": 0.01, "int4": 0.15}
"""Bounds on the relative error of normally distributed numbers."""
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reader_of(shape: tuple[int, ...], wire: str) -> TensorReader:
    return TensorReader([expected_head("", shape, wire)], [("", shape)], wire)


def sent(x: torch.Tensor, wire: str) -> TensorReader:
    reader = reader_of(tuple(x.shape), wire)
    reader.feed(encode_measured(x, wire, measure=False)[0])
    return reader


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_reader_has_the_numbers_their_size_and_the_error_that_was_measured(
    wire: str, shape: tuple[int, ...]
) -> None:
    x = normal(*shape)
    data, error = encode_measured(x, wire, measure=True)
    assert len(data) == nbytes_of(shape, wire)
    reader = sent(x, wire)
    again = reader.numbers(CPU)
    assert (again.shape, again.dtype) == (x.shape, torch.float32)
    off = float(torch.norm(again - x) / torch.norm(x))
    assert error == pytest.approx(off, rel=1e-4)
    assert 0 < off < WORST[wire]
    size = float(torch.norm(again)) / x.numel() ** 0.5
    assert reader.rms() == pytest.approx(size, rel=1e-5)
    assert torch.equal(reader.finish()[0], again)


@pytest.mark.parametrize(("wire", "most"), [("bf16", 0.003), ("fp16", 0.0004)])
def test_the_error_of_half_floats_is_measured_too(wire: str, most: float) -> None:
    x = normal(3, 5, 24)
    data, error = encode_measured(x, wire, measure=True)
    again = sent(x, wire).numbers(CPU)
    assert error == pytest.approx(float(torch.norm(again - x) / torch.norm(x)), rel=1e-4)
    assert error is not None
    assert 0 < error < most
    assert data == encode_measured(x, wire, measure=False)[0]


@pytest.mark.parametrize("wire", BLOCKWISE)
def test_a_tensor_of_zeros_has_no_error(wire: str) -> None:
    _, error = encode_measured(torch.zeros(2, 3, 8), wire, measure=True)
    assert error == 0.0
    assert not sent(torch.zeros(2, 3, 8), wire).numbers(CPU).any()


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 3e38])
@pytest.mark.parametrize("block", [0, -1])
def test_a_scale_that_no_encoder_writes_is_refused_before_memory_is_taken(
    wire: str, scale: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(3, 5, 24)
    raw = torch.frombuffer(bytearray(encode_measured(x, wire, measure=False)[0]), dtype=torch.uint8)
    blocks = -(-x.numel() // (256 if wire == "int8" else 64))
    raw[: 4 * blocks].view(torch.float32)[block] = scale
    reader = reader_of(tuple(x.shape), wire)
    reader.feed(raw.numpy().data)
    monkeypatch.setattr(codecs.Coded, "whole", lambda _: pytest.fail("memory was taken"))
    for use in (reader.rms, lambda: reader.numbers(CPU), reader.finish):
        with pytest.raises(WireError, match="scale"):
            use()


def test_a_head_of_another_format_or_size_is_refused() -> None:
    shape = (3, 5, 24)
    for wire, other in (("int4", "int8"), ("int4", "bf16"), ("bf16", "int4")):
        with pytest.raises(WireError, match="format"):
            TensorReader([expected_head("", shape, other)], [("", shape)], wire)
    head = expected_head("", shape, "int4")
    head.nbytes += 1
    with pytest.raises(WireError, match="bytes"):
        TensorReader([head], [("", shape)], "int4")


def test_a_stream_that_ends_early_has_no_numbers() -> None:
    reader = reader_of((3, 5, 24), "int4")
    reader.feed(b"\0" * (reader.nbytes - 1))
    with pytest.raises(WireError, match="short"):
        reader.rms()


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_numbers_that_cannot_be_sent_are_not_encoded(wire: str, bad: float) -> None:
    x = normal(3, 5, 24)
    x[1, 2, 3] = bad
    with pytest.raises(ValueError, match="cannot be sent"):
        encode_measured(x, wire, measure=False)


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("count", [PIECE, STEP + PIECE + 77, 300])
def test_all_at_once_as_on_a_gpu_and_piece_by_piece_are_the_same(
    wire: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(count)
    pieces = codecs.quantise(x, wire)[0].done()
    again = codecs.dequantise(pieces, (count,), wire)
    for module in (layouts, codecs):
        monkeypatch.setattr(module, "at_once", lambda raw, numbers: numbers)
    whole = codecs.quantise(x, wire)[0].done()
    assert torch.equal(whole, pieces)
    into = torch.empty(count)
    codecs.Coded(whole, (count,), wire).open(0, into)
    assert torch.equal(into, again)
