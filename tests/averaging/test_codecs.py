"""Codecs of few bits: their errors, the bytes they refuse, and equal values at every member."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.averaging.reducers.reducer import means
from node.core.errors import StepFault, WireError
from node.core.ids import PeerId
from node.wire.coding.codecs import (
    Coded,
    Rounded,
    decode,
    encode,
    opened,
    settle,
    settled,
)
from node.wire.coding.formats import (
    FORMATS,
    INT4_BLOCK,
    INT8_BLOCK,
    TOP_BLOCK,
    kept,
    nbytes_of,
)
from node.wire.coding.layouts import PIECE, STEP

SIZES = [0, 1, 65, 256, 257, 4097, 65536, 140_001]


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize("count", SIZES)
def test_every_length_round_trips_in_the_announced_bytes(codec: str, count: int) -> None:
    tensor = normal(count)
    data = encode(tensor, codec)
    assert (data.dtype, data.numel()) == (torch.uint8, nbytes_of(count, codec))
    again = decode(data, count, codec)
    assert (again.dtype, again.shape) == (torch.float32, (count,))


@pytest.mark.parametrize(
    ("codec", "block", "top"), [("int8", INT8_BLOCK, 127), ("int4", INT4_BLOCK, 7)]
)
def test_a_number_is_off_by_at_most_half_a_step_of_its_block(
    codec: str, block: int, top: int
) -> None:
    tensor = normal(70_001) * torch.logspace(-6, 6, 70_001)
    again = decode(encode(tensor, codec), 70_001, codec)
    for before, after in zip(tensor.split(block), again.split(block), strict=True):
        step = float(before.abs().max()) / top
        assert float((before - after).abs().max()) <= step * 0.5001


@pytest.mark.parametrize(
    ("codec", "most"),
    [("fp32", 0), ("fp16", 3e-4), ("bf16", 2e-3), ("int8", 8e-3), ("int4", 0.115)],
)
def test_the_error_on_normal_numbers(codec: str, most: float) -> None:
    tensor = normal(1 << 17)
    assert (
        float((decode(encode(tensor, codec), 1 << 17, codec) - tensor).norm() / tensor.norm())
        <= most
    )


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300),
    st.sampled_from(["int8", "int4", "top-k"]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_finite_stays_finite_and_keeps_its_sign(
    numbers: list[float], codec: str
) -> None:
    # Magnitudes that would round to infinity are refused.
    tensor = torch.tensor(numbers, dtype=torch.float32).clamp(-2.9e38, 2.9e38)
    again = decode(encode(tensor, codec), len(numbers), codec)
    assert bool(torch.isfinite(again).all())
    assert not bool((again * tensor.sign() < 0).any())


@pytest.mark.parametrize("codec", FORMATS)
def test_a_wrong_byte_count_is_refused_before_allocation(codec: str) -> None:
    for count, size in (
        (1 << 50, 100),
        (100, nbytes_of(100, codec) - 1),
        (100, nbytes_of(100, codec) + 1),
        (0, 1),
    ):
        with pytest.raises(WireError, match="expected"):
            decode(torch.zeros(size, dtype=torch.uint8), count, codec)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 1e38])
def test_scales_that_nobody_writes_are_refused(codec: str, scale: float) -> None:
    data = encode(normal(1000), codec)
    data[4:8].view(torch.float32)[0] = scale
    with pytest.raises(WireError, match="scale"):
        decode(data, 1000, codec)


def test_top_k_keeps_the_largest_of_each_block_as_two_values() -> None:
    assert nbytes_of(1 << 20, "top-k") / (1 << 20) < 0.0362
    tensor = normal(3 * TOP_BLOCK + 77)
    again = decode(encode(tensor, "top-k"), tensor.numel(), "top-k")
    for before, after in zip(tensor.split(TOP_BLOCK), again.split(TOP_BLOCK), strict=True):
        largest_at = before.abs().topk(kept(before.numel())).indices
        assert set(after.nonzero().view(-1).tolist()) == set(largest_at.tolist())
        sent = after[after != 0]
        assert len(sent.abs().unique()) <= 2
        among = before[after != 0]
        assert torch.equal(among.sign(), sent.sign())
        largest = among.abs() >= among.abs().median()
        if len(among) > 8:
            assert float((sent[largest] - among[largest]).abs().mean()) < 0.2 * float(
                among.abs().mean()
            )


THREE = 2 * TOP_BLOCK + 200
"""Numbers in three blocks of top-k; the first 12 bytes of the code are the blocks' magnitudes."""
HIGH = 12 + 5 * kept(TOP_BLOCK) // 8


@pytest.mark.parametrize(
    ("at", "kind", "values", "why"),
    [
        (slice(0, 2), torch.bfloat16, [float("inf")], "magnitude"),
        (slice(2, 4), torch.bfloat16, [float("nan")], "magnitude"),
        (slice(4, 6), torch.bfloat16, [-1.0], "magnitude"),
        (slice(10, 12), torch.bfloat16, [-0.5], "magnitude"),
        (slice(0, 4), torch.bfloat16, [2.0, 1.0], "magnitude"),
        (slice(HIGH, HIGH + 4), torch.uint8, [255] * 4, "places"),
        (slice(12, HIGH), torch.uint8, [0] * (HIGH - 12), "rise"),  # equal in one bucket
    ],
)
def test_top_k_bytes_that_nobody_writes_are_refused(at, kind, values, why) -> None:
    bad = encode(normal(THREE), "top-k").clone()
    bad[at].view(kind)[:] = torch.tensor(values, dtype=kind)
    with pytest.raises(WireError, match=why):
        decode(bad, THREE, "top-k")


@pytest.mark.parametrize("codec", ["int8", "int4", "top-k"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3.4028234663852886e38])
@pytest.mark.parametrize("at", [0, 70_000])
def test_numbers_that_are_not_finite_are_not_sent(codec: str, bad: float, at: int) -> None:
    tensor = normal(70_001)
    tensor[at] = bad
    with pytest.raises(ValueError, match="finite"):
        encode(tensor, codec)


@pytest.mark.parametrize(
    "call", [partial(encode, torch.ones(3)), partial(decode, torch.empty(0), 0)]
)
def test_an_unknown_codec_is_refused(call: partial) -> None:
    with pytest.raises(ValueError, match="int2"):
        call("int2")


def test_bytes_may_lie_at_odd_addresses() -> None:
    data = encode(normal(1000), "int8")
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), data))[1:]
    assert torch.equal(decode(shifted, 1000, "int8"), decode(data, 1000, "int8"))


@pytest.mark.parametrize("numbers", [0, 1, 70, PIECE, STEP + PIECE + 4097])
@pytest.mark.parametrize("codec", FORMATS)
def test_coded_numbers_read_in_pieces_are_what_they_are_whole(codec: str, numbers: int) -> None:
    given = encode(normal(numbers), codec)
    coded = Coded(given, (numbers,), codec)
    whole = decode(given, numbers, codec)
    starts = range(0, numbers, STEP)
    pieces = [coded.read(at, torch.empty(min(STEP, numbers - at))) for at in starts]
    assert torch.equal(coded.whole(), whole)
    assert torch.equal(torch.cat([*pieces, torch.empty(0)]), whole)
    assert torch.equal(coded.read(0, torch.empty(numbers)), whole)
    assert coded.norm() == pytest.approx(float(whole.double().norm()), rel=1e-5)
    again, fine = opened(coded)
    assert fine
    assert torch.equal(again, whole)
    assert coded.lies == (codec == "fp32"), (
        "what came in few bytes is not opened before it is added up"
    )


def test_int4_keeps_the_first_half_of_a_block_in_the_low_bits() -> None:
    """The layout that peers of other releases read: of every 131,072 numbers, and of the rest, the
    first half is in the low four bits of the bytes, the second half in the high four."""
    codes = torch.randint(
        -7, 8, ((1 << 17) + 4096,), generator=torch.Generator().manual_seed(1), dtype=torch.int8
    )
    codes[::INT4_BLOCK] = 7  # so that every scale is 1
    whole, rest = codes.split((1 << 17, 4096))
    packed = [
        (part[: len(part) // 2] & 15) | (part[len(part) // 2 :] << 4) for part in (whole, rest)
    ]
    scales = torch.ones(len(codes) // INT4_BLOCK)
    expected = torch.cat((scales.view(torch.uint8), torch.cat(packed).view(torch.uint8)))
    assert torch.equal(encode(codes.float(), "int4"), expected)
    assert torch.equal(decode(expected, len(codes), "int4"), codes.float())


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("codec", [name for name, form in FORMATS.items() if not form.finite])
@pytest.mark.parametrize("at", [2, STEP + 2])
def test_decoding_reports_values_that_are_not_finite(codec: str, value: float, at: int) -> None:
    numbers = normal(STEP + 5)
    numbers[at] = value
    coded = Coded(encode(numbers, codec), (STEP + 5,), codec)
    assert not opened(coded)[1]
    assert not math.isfinite(coded.norm())


@pytest.mark.parametrize("numbers", [0, 1, 70, PIECE, STEP + PIECE + 4097])
@pytest.mark.parametrize("codec", FORMATS)
def test_a_lazily_computed_mean_has_the_bits_of_an_eager_one(codec: str, numbers: int) -> None:
    """A mean of our own contribution, rounded on demand, and of a received one, decoded on demand:
    computed piece by piece or in one go, it has the same bits."""
    a = PeerId("a")
    b = PeerId("b")
    ours = normal(numbers, 1)
    theirs = encode(normal(numbers, 2), codec)
    coded = Coded(theirs, (numbers,), codec)
    rounded = decode(encode(ours, codec), numbers, codec)
    assert torch.equal(Rounded(ours, codec).whole(), rounded)
    for tokens in (2, 3):  # a power of two is multiplied
        (lazy,) = means({a: [Rounded(ours, codec)], b: [coded]}, [a, b], tokens, {b: 0.5})
        plain = torch.div(torch.add(rounded, decode(theirs, numbers, codec), alpha=0.5), tokens)
        assert torch.equal(lazy.whole(), plain)
        data, expected = settle(plain, codec)
        for given_ in (lazy, Coded.of(plain)):
            fresh, sent = settled("it", given_, codec)
            assert torch.equal(fresh, expected)
            assert torch.equal(sent, data)


@pytest.mark.parametrize("value", [math.inf, math.nan, 3.4e38])
@pytest.mark.parametrize("codec", FORMATS)
def test_a_mean_that_cannot_be_encoded_is_refused(codec: str, value: float) -> None:
    numbers = normal(STEP + 5)
    numbers[STEP + 2] = value
    if math.isfinite(value) and codec == "fp32":
        assert torch.equal(settled("it", Coded.of(numbers), codec)[0], numbers)
        return
    lazy = means({PeerId("a"): [Coded.of(numbers)]}, [PeerId("a")], 1)[0]
    for given_ in (Coded.of(numbers), lazy):
        with pytest.raises(StepFault, match="not finite"):
            settled("it", given_, codec)


def test_shapes_are_kept_and_encoding_changes_nothing() -> None:
    tensor = normal(600).view(20, 30).t()
    before = tensor.clone()
    _, adopted = settle(tensor, "int8")
    assert adopted.shape == (30, 20)
    assert torch.equal(tensor, before)
    assert float((adopted - tensor).abs().max()) < 0.05
