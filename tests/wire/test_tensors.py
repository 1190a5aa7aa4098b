"""Tensors there and back, and every other message that a hostile peer could send in their place."""

import struct
from functools import partial
from itertools import chain
from math import prod
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import WireError
from node.wire import tensors
from node.wire.tensors import (
    HASH,
    PIECE,
    TensorReader,
    chunks,
    compare,
    digest,
    digest_of,
    dtype_of,
    encode,
    expected_head,
    hashes_of,
    nbytes_of,
    pieces,
)
from protos import tensor_pb2

WIRES = ["fp32", "bf16", "fp16"]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
HEADS = st.builds(
    tensor_pb2.TensorHead,
    name=st.sampled_from(["t0", "t1", "", "x" * 1000]),
    shape=st.lists(st.integers(0, 4) | st.integers(0, 2**64 - 1), max_size=5),
    wire=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
    nbytes=st.integers(0, 100) | st.integers(0, 2**64 - 1),
)


def reader(given_tensors: list[torch.Tensor], wire: str) -> TensorReader:
    return TensorReader(
        [expected_head(f"t{i}", t.shape, wire) for i, t in enumerate(given_tensors)],
        [(f"t{i}", tuple(t.shape)) for i, t in enumerate(given_tensors)],
        wire,
    )


def numbers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(SHAPES, max_size=5), st.sampled_from(WIRES), st.integers(1, 40))
def test_what_is_sent_is_what_arrives(shapes: list[tuple[int, ...]], wire: str, size: int) -> None:
    sent = [numbers(shape, i) for i, shape in enumerate(shapes)]
    receiver = reader(sent, wire)
    assert receiver.nbytes == sum(nbytes_of(s, wire) for s in shapes)
    for chunk in chain.from_iterable(chunks(encode(s, wire), size) for s in sent):
        assert 0 < len(chunk) <= size
        receiver.feed(chunk)
    assert receiver.remaining == 0
    for before, after in zip(sent, receiver.finish(), strict=True):
        assert after.dtype == torch.float32
        assert torch.equal(after, before.to(dtype_of(wire)).float())


@given(
    st.binary(max_size=64), st.sampled_from(WIRES), SHAPES, st.lists(st.integers(0, 20), max_size=8)
)
def test_any_bytes_give_the_tensor_they_spell_or_a_wire_error(
    raw: bytes, wire: str, shape: tuple[int, ...], cuts: list[int]
) -> None:
    receiver = TensorReader([expected_head("t", shape, wire)], [("t", shape)], wire)
    pieces = []
    rest = raw
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    try:
        for piece in [*pieces, rest]:
            receiver.feed(piece)
        (tensor,) = receiver.finish()
    except WireError:
        assert len(raw) != nbytes_of(shape, wire)
        return
    assert (len(raw), tuple(tensor.shape)) == (nbytes_of(shape, wire), shape)
    if not tensor.isnan().any():
        assert bytes(encode(tensor, wire)) == raw


@given(
    st.lists(HEADS, max_size=3),
    st.lists(SHAPES, max_size=3),
    st.sampled_from(WIRES),
    st.binary(max_size=300),
)
def test_nothing_is_set_aside_beyond_what_is_expected(
    heads: list[tensor_pb2.TensorHead], shapes: list[tuple[int, ...]], wire: str, raw: bytes
) -> None:
    expected = [(f"t{i}", shape) for i, shape in enumerate(shapes)]
    made = Mock(wraps=torch.empty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors.torch, "empty", made)
        try:
            receiver = TensorReader(heads, expected, wire)
            assert not made.called
            receiver.feed(raw)
            receiver.finish()
        except WireError:
            pass
    sizes = [prod(c.args[0]) * c.kwargs["dtype"].itemsize for c in made.call_args_list]
    assert sum(sizes) <= sum(nbytes_of(s, wire) for s in shapes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "model.layers.1"}, "belongs"),
        ({"name": ""}, "belongs"),
        ({"name": "x" * 1000}, "belongs"),
        ({"shape": [3, 2]}, "shape"),
        ({"shape": [2, 3, 1]}, "shape"),
        ({"shape": [6]}, "shape"),
        ({"shape": [2**40, 2**40]}, "shape"),
        ({"wire": tensor_pb2.BF16}, "format"),
        ({"wire": 0}, "format"),
        ({"wire": 99}, "format"),
        ({"nbytes": 25}, "bytes"),
        ({"nbytes": 2**63}, "bytes"),
    ],
)
def test_each_lie_in_a_head_is_named(change: dict, says: str) -> None:
    honest = {"name": "model.layers.0", "shape": [2, 3], "wire": tensor_pb2.FP32, "nbytes": 24}
    wanted = expected_head("model.layers.0", (2, 3), "fp32")
    compare(tensor_pb2.TensorHead(**honest), wanted, "fp32")
    with pytest.raises(WireError, match=says) as caught:
        compare(tensor_pb2.TensorHead(**{**honest, **change}), wanted, "fp32")
    assert len(str(caught.value)) < 500, "however long the name it was told"


def test_heads_come_in_number_and_order() -> None:
    a = expected_head("a", (2,), "fp32")
    b = expected_head("b", (2,), "fp32")
    expected = [("a", (2,)), ("b", (2,))]
    TensorReader([a, b], expected, "fp32")
    for heads in ([a], [a, b, b], [b, a], []):
        with pytest.raises(WireError):
            TensorReader(heads, expected, "fp32")


def test_memory_waits_for_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    given_tensors = [torch.ones(3), torch.ones(4)]
    made = Mock(wraps=torch.empty)
    monkeypatch.setattr(tensors.torch, "empty", made)
    receiver = reader(given_tensors, "fp32")
    assert not made.called
    receiver.feed(b"\0" * 12)
    made.assert_called_once_with((3,), dtype=torch.float32)
    receiver.feed(b"\0")
    assert [call.args[0] for call in made.call_args_list] == [(3,), (4,)]


def test_memory_that_cannot_be_locked_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()
    real = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*shape, **more)

    monkeypatch.setattr(tensors.torch, "empty", empty)
    x = torch.arange(3.0)
    head = expected_head("", x.shape, "fp32")
    receiver = TensorReader([head], [("", x.shape)], "fp32", locked=True)
    receiver.feed(encode(x, "fp32"))
    assert torch.equal(receiver.raw()[0], x)
    assert asked == [True, False]


def test_too_much_is_refused_whole_and_too_little_at_the_end() -> None:
    receiver = reader([torch.ones(2)], "fp32")
    receiver.feed(b"\0" * 7)
    with pytest.raises(WireError, match="left"):
        receiver.feed(b"\1\1")
    with pytest.raises(WireError, match="1 bytes short"):
        receiver.finish()
    receiver.feed(b"\0")
    assert receiver.finish()[0].tolist() == [0.0, 0.0]
    with pytest.raises(WireError):
        receiver.feed(b"\0")


def test_contiguous_fp32_is_not_copied() -> None:
    tensor = torch.zeros(4, 4)
    view = encode(tensor, "fp32")
    assert np.frombuffer(view, np.uint8).ctypes.data == tensor.data_ptr()
    tensor[0, 0] = 1.0
    assert bytes(view[:4]) == struct.pack("<f", 1.0)


@pytest.mark.parametrize(
    ("wire", "spelt"), [("fp32", "0000803f000000c0"), ("bf16", "803f00c0"), ("fp16", "003c00c0")]
)
def test_the_bytes_are_little_endian(wire: str, spelt: str) -> None:
    assert bytes(encode(torch.tensor([1.0, -2.0]), wire)).hex() == spelt


def test_rows_come_first_whatever_the_strides() -> None:
    tensor = numbers((3, 5)).t()[1:, ::2]
    assert not tensor.is_contiguous()
    receiver = reader([tensor], "fp32")
    receiver.feed(encode(tensor, "fp32"))
    assert torch.equal(receiver.finish()[0], tensor)


def test_parameters_and_half_tensors_travel_and_integers_do_not() -> None:
    assert bytes(encode(torch.nn.Parameter(torch.ones(2)), "fp32")) == bytes(
        encode(torch.ones(2, dtype=torch.bfloat16), "fp32")
    )
    with pytest.raises(ValueError, match="floating-point"):
        encode(torch.ones(2, dtype=torch.int64), "fp32")


def test_fp16_overflow_is_infinite_and_bf16_is_not() -> None:
    big = torch.tensor([1e6])
    for wire, finite in [("fp16", False), ("bf16", True), ("fp32", True)]:
        receiver = reader([big], wire)
        receiver.feed(encode(big, wire))
        assert bool(receiver.finish()[0].isfinite()) is finite


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (partial(expected_head, "t", (2,), "fp8"), "fp8"),
        (partial(nbytes_of, (2, -1), "fp32"), "negative"),
    ],
)
def test_unknown_formats_sizes_and_shapes_are_our_own_mistakes(asked: partial, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        asked()


def test_digest_depends_on_names_shapes_and_values_only() -> None:
    a = numbers((2, 3), 1)
    b = numbers((3,), 2)
    base = digest({"a": a, "b": b})
    assert base == digest({"b": b, "a": a}) == digest({"a": a.t().contiguous().t(), "b": b.clone()})
    changed = a.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    others = [
        {"a": a, "c": b},
        {"a": a.reshape(3, 2), "b": b},
        {"a": a.reshape(6), "b": b},
        {"a": changed, "b": b},
        {"a": a},
    ]
    assert len({base, *(digest(other) for other in others)}) == len(others) + 1


def test_digest_is_pinned() -> None:
    # A changed digest would make every checkpoint and every peer of another version disagree.
    named = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([0.5])}
    by_hand = b"\1\0\0\0b" + struct.pack("<IQ", 1, 1) + blake3(struct.pack("<f", 0.5)).digest()
    by_hand += b"\1\0\0\0w" + struct.pack("<IQQ", 2, 2, 2)
    by_hand += blake3(struct.pack("<4f", 1, 2, 3, 4)).digest()
    assert digest(named) == blake3(by_hand).hexdigest()
    assert blake3(b"").hexdigest().startswith("af1349b9f5f9a1a6"), "the published test vector"


def test_each_piece_of_a_tensor_has_a_hash() -> None:
    large = numbers((2 * PIECE // 4 + 1,))
    view = encode(large, "fp32")
    assert pieces(len(view)) == [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 4)]
    hashes = hashes_of(view)
    assert [hashes[at : at + HASH] for at in range(0, len(hashes), HASH)] == [
        blake3(view[at : at + size]).digest() for at, size in pieces(len(view))
    ]
    assert digest({"w": large}) == digest_of({"w": (large.shape, hashes)})
    for at in (0, PIECE // 4, 2 * PIECE // 4):
        other = large.clone()
        other[at] += 1.0
        assert digest({"w": other}) != digest({"w": large})
    assert pieces(0) == []
    assert hashes_of(memoryview(b"")) == b""
