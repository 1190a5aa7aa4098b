import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from node.core.errors import OutOfResources
from node.core.ids import ENDS
from node.core.numbers import human
from node.model.cost import (
    RECOMPUTE,
    RoundBytes,
    cast_bytes,
    fits,
    fits_beside,
    flops_per_token,
    graph_bytes,
    stage_bytes,
    stash_bytes,
)
from node.model.settings import ModelSettings
from node.model.shapes import all_shapes, count, layer_shapes
from node.model.stages import Blocks, build
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from testbed.models.visits import read, visit
from testbed.reference.unsplit import Unsplit

HALF = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
"""The context of a GPU, on the CPU."""


@pytest.mark.parametrize(
    "change", [{}, {"qk_norm": True}, {"kv_heads": 4}, {"d_model": 64, "d_ff": 512}]
)
def test_stash_is_what_autograd_keeps(change):
    settings = ModelSettings(seq_len=32, **change)
    block = Blocks(settings, range(2))
    tables = block.rope.tables(32, torch.zeros(1))
    ours = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *tables)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(torch.randn(3, 32, settings.d_model, requires_grad=True))
    assert sum(size for size, _ in kept.values()) + y.nbytes == stash_bytes(settings, 3, 1, 3)


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("ends_layers", [0, 1, 2])
def test_the_stash_of_the_ends_is_what_they_keep(ends_layers, mode):
    settings = ModelSettings(seq_len=32, layers=5, ends_layers=ends_layers)
    math = StageMath(build(settings, 1, ENDS), "fp32", recompute=mode)
    tokens = torch.randint(0, settings.vocab, (3, 32))
    x = torch.empty(3, 32, settings.d_model)
    first = {n for n, _ in math.module.named_parameters() if ".layers.0." in n or ".embed" in n}
    for _ in range(2):  # tables of the rotary embedding are made in the first one
        work = VisitBuffers(float("inf"), (3, 32, settings.d_model), batch=lambda: (tokens, tokens))
        math.graph_bytes.clear()
        math.embed(work)
        work.gradient = read(x.fill_(0.1))
        math.embed_backward(work)
    assert first <= set(work.share or {})
    beside = tokens.nbytes + 2 * x.nbytes  # targets, output and its gradient
    tables = 2 * 4 * 32 * 32 if ends_layers and mode == "off" else 0
    graph = math.graph_bytes[tuple(x.shape)] - tables
    kept = graph if mode != "stage" else tokens.nbytes
    planned = stash_bytes(settings, 1, ENDS, 3, mode)
    assert kept + beside == planned


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ends_layers", [0, 1])
def test_flops_are_those_torch_counts(tied, ends_layers):
    settings = ModelSettings(seq_len=32, layers=4, ends_layers=ends_layers, tied=tied)
    model = Unsplit(settings)
    tokens = torch.randint(0, settings.vocab, (2, 32))
    with FlopCounterMode(display=False) as counter:
        loss, _ = model.loss(tokens, tokens)
        loss.backward()
    ours = 64 * sum(flops_per_token(settings, 2, s) for s in range(3))
    # torch counts uncausal attention, and recomputed scores
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_scores_grow_with_the_width_of_all_heads():
    def scores(width: int) -> int:
        one, two = (ModelSettings(head_width=width, seq_len=length) for length in (32, 64))
        return flops_per_token(two, 2, 1) - flops_per_token(one, 2, 1)

    assert scores(64) == 2 * scores(32) > 0


@pytest.mark.parametrize("ends_layers", [0, 1])
def test_stage_bytes_add_up_over_the_model(ends_layers):
    settings = ModelSettings(ends_layers=ends_layers)
    stages = [stage_bytes(settings, 3, s) for s in range(4)]
    assert sum(b.parameters for b in stages) == 4 * count(all_shapes(settings))
    assert all(b.gradients == b.parameters for b in stages)


def test_memory_is_the_larger_of_micro_batches_and_rounds() -> None:
    """The stash is empty in a round: stash and round share the larger one's memory."""
    settings = ModelSettings(layers=2, d_model=64, heads=2, kv_heads=2, d_ff=256, seq_len=64)
    rounds = RoundBytes(optimizer=100, staged=50, exchange=7 << 20, step=30, shelf=20, outer=4)
    idle = stage_bytes(settings, 1, 1, micro_batch=1, in_flight=1, rounds=rounds)
    assert idle.kept == idle.parameters + idle.gradients + 100 + 20 + 4
    assert idle.total == idle.kept + idle.before + 50 + (7 << 20) + 10
    whens = dict.fromkeys(row.when for row in idle.table)
    always, *others = (sum(r.nbytes for r in idle.table if r.when == when) for when in whens)
    assert always + max(others) == idle.total
    busy = stage_bytes(settings, 1, 1, micro_batch=1, in_flight=999, rounds=rounds)
    assert busy.total == busy.kept + busy.stash + busy.shares + busy.work
    assert busy.kept == idle.kept


def test_gradients_wait_until_their_micro_batch_counts() -> None:
    """The peak holds a share of the stage's gradients for each micro-batch on its way home, in the
    memory of earlier activations."""
    settings = ModelSettings(layers=8, d_model=128, heads=2, kv_heads=2, d_ff=512, seq_len=8)
    first, last, ends = (
        stage_bytes(settings, 4, stage, micro_batch=1, in_flight=6) for stage in (1, 4, ENDS)
    )
    assert (first.uncounted, last.uncounted, ends.uncounted) == (2, 4, 4)
    for found in (first, last):
        assert found.shares == found.uncounted * found.gradients
        assert found.stash == (6 + 1 - found.uncounted) * stash_bytes(settings, 4, 1, 1)
    assert stage_bytes(settings, 4, 4, micro_batch=1, in_flight=1).uncounted == 1


def test_state_that_is_left_room_for_fits_twice() -> None:
    """The optimizer state of a peer is in memory twice in a round: the leader learns how much of it
    fits."""
    settings = ModelSettings(layers=2, d_model=256, heads=2, kv_heads=2, d_ff=512, seq_len=8)
    size = {"micro_batch": 1, "in_flight": 1}
    available = 2 * stage_bytes(settings, 1, 1, **size).total
    spare = fits(settings, 1, 1, available, **size).spare
    assert spare > 0
    assert fits(settings, 1, 1, available, **size, rounds=RoundBytes(spare, spare)).ok
    more = spare + 2
    assert not fits(settings, 1, 1, available, **size, rounds=RoundBytes(more, more)).ok


def test_a_model_too_large_is_refused_with_numbers():
    settings = ModelSettings(
        layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab=128256, seq_len=4096
    )
    verdict = fits(settings, 4, 2, 24 << 30, micro_batch=1, in_flight=2)
    assert not verdict.ok
    assert "24.0 GiB" in verdict.text
    assert human(verdict.needed) in verdict.text
    with pytest.raises(OutOfResources) as caught:
        verdict.require()
    assert caught.value.next_step
    fits(settings, 4, 2, verdict.needed * 2, micro_batch=1, in_flight=2).require()


def test_what_is_advised_where_a_stage_does_not_fit_would_fit():
    settings = ModelSettings(
        layers=8, d_model=256, heads=4, kv_heads=4, d_ff=1024, vocab=259, seq_len=128
    )
    small = stage_bytes(settings, 2, 1, micro_batch=4, in_flight=3).total
    verdict = fits(settings, 2, 1, int(small / 0.89), micro_batch=4, in_flight=8)
    assert "limits.in_flight=3" in verdict.next_step
    cut = int(re.search(r"pipeline.stages = (\d+)", verdict.next_step)[1])
    assert fits(settings, cut, 1, int(small / 0.89), micro_batch=4, in_flight=8).ok
    assert not fits(settings, cut - 1, 1, int(small / 0.89), micro_batch=4, in_flight=8).ok
    batch = int(re.search(r"pipeline.micro_batch = (\d+)", verdict.next_step)[1])
    assert fits(settings, 2, 1, int(small / 0.89), micro_batch=batch, in_flight=8).ok


def test_more_stages_are_not_advised_where_they_cannot_help():
    wide = ModelSettings(
        layers=8, d_model=256, heads=4, kv_heads=4, d_ff=1024, vocab=1 << 18, seq_len=128
    )
    for stages in (2, 8):
        ends = fits(wide, stages, ENDS, 64 << 20)
        assert not ends.ok
        assert "stages" not in ends.next_step.replace("--role stage", "")
        assert "model.vocab" in ends.next_step
    assert "stages" not in fits(wide, 8, 3, 1 << 20).next_step
    assert "stages" not in fits_beside(ENDS, 2, 100, 50, windows=False).next_step
    block = fits_beside(1, 2, 100, 50, windows=False)
    assert "more stages" in block.next_step
    assert "outer" not in block.next_step
    assert "outer.carries" in fits_beside(1, 2, 100, 50, windows=True).next_step


def test_a_tenth_is_kept_free():
    settings = ModelSettings()
    need = stage_bytes(settings, 3, 1).total
    assert not fits(settings, 3, 1, need).ok
    assert fits(settings, 3, 1, int(need / 0.89)).ok


def test_bytes_are_written_with_their_unit():
    assert [human(n) for n in (12, 2048, 10 << 30, 5 << 50)] == [
        "12 B",
        "2.0 KiB",
        "10.0 GiB",
        "5120.0 TiB",
    ]


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize(
    "change",
    [{"qkv_bias": True}, {"qk_norm": True}, {"d_model": 256, "d_ff": 1024, "seq_len": 8}],
    ids=["biases", "norms", "few tokens"],
)
def test_the_stash_has_room_for_what_autocast_keeps(change, mode):
    settings = ModelSettings(**{"seq_len": 32, "layers": 2, **change})
    module = build(settings, 1, 1)
    module.keep_copies()
    math = StageMath(module, "fp32", HALF, recompute=mode)
    x = torch.randn(2, settings.seq_len, settings.d_model)
    visit(math, x, torch.randn_like(x))
    kept = math.graph_bytes[tuple(x.shape)]
    planned, plain = (stash_bytes(settings, 1, 1, 2, mode, cast=cast) for cast in (True, False))
    assert kept <= planned
    if mode == "off":
        assert planned <= 1.2 * kept
        assert kept < plain
    else:
        assert planned == plain
    if "d_model" in change:
        assert cast_bytes(settings, 1, 1) > 2 * plain, "copies of weights would be most of it"


def test_ends_with_layers_need_more_and_say_what_helps():
    settings = ModelSettings(layers=6, ends_layers=2)
    deep, plain = (stage_bytes(s, 2, ENDS) for s in (settings, replace(settings, ends_layers=0)))
    layer = 4 * count(layer_shapes(settings, 0))
    assert deep.parameters - plain.parameters == 2 * layer
    assert deep.stash > plain.stash
    modes = [stage_bytes(settings, 2, ENDS, recompute=mode) for mode in RECOMPUTE]
    assert modes[0].total > modes[1].total
    assert modes[0].stash > modes[1].stash > modes[2].stash
    verdict = fits(settings, 2, ENDS, deep.total // 2)
    assert not verdict.ok
    assert "smaller model.ends_layers" in verdict.next_step


def test_copies_of_weights_are_kept_once():
    settings = ModelSettings(qk_norm=True)
    tokens = 16 * settings.seq_len
    kept, again, ends = (
        [stage_bytes(settings, 3, s, recompute=mode, cast=cast) for cast in (False, True)]
        for s, mode in ((1, "off"), (1, "layers"), (ENDS, "off"))
    )
    copies = cast_bytes(settings, 3, 1)
    head = 2 * settings.vocab * settings.d_model
    for plain, cast in (kept, again):
        assert (plain.copies, cast.copies) == (0, copies)
        assert cast.kept - plain.kept == copies
    layer = [graph_bytes(settings, tokens, cast=cast) for cast in (False, True)]
    assert kept[1].stash == kept[1].stashed * stash_bytes(settings, 3, 1, 16, cast=True)
    assert kept[1].work == kept[0].work
    assert again[1].stash == again[0].stash
    assert again[1].work - again[0].work == layer[1] - layer[0]
    assert (ends[1].stash, ends[1].work) == (ends[0].stash, ends[0].work)
    assert (ends[0].copies, ends[1].copies) == (0, head)
