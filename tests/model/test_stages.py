import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from node.model.settings import ModelSettings
from node.model.shapes import all_shapes, parameter_shapes
from node.model.stages import Blocks, Ends, build, initialise, repeat_keys
from testbed.reference.unsplit import Unsplit

SMALL = ModelSettings(
    layers=4, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab=61, seq_len=16, init_std=0.1
)


def tokens_of(settings, batch=3, length=None):
    drawn = torch.randint(0, settings.vocab, (batch, (length or settings.seq_len) + 1))
    return drawn[:, :-1], drawn[:, 1:]


DEEP = replace(SMALL, layers=5, ends_layers=1)


@pytest.mark.parametrize(
    "settings",
    [SMALL, replace(SMALL, qk_norm=True), replace(SMALL, tied=True), DEEP],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_every_cut_holds_the_bits_of_the_unsplit_model(settings, stages):
    whole = dict(Unsplit(settings).named_parameters())
    assert {name: tuple(p.shape) for name, p in whole.items()} == all_shapes(settings)
    seen = []
    for stage in range(stages + 1):
        module = build(settings, stages, stage)
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert shapes == parameter_shapes(settings, stages, stage)
        assert set(module.state_dict()) == set(shapes)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, whole[name])
            seen.append(name)
    assert sorted(seen) == sorted(whole), "each of them in one stage"


def test_initial_values_are_normal_and_equal_on_every_machine():
    settings = ModelSettings()
    whole = dict(Unsplit(settings).named_parameters())
    embedding = whole["model.embed_tokens.weight"]
    # The first numbers, written down: another machine or library version that draws others would
    # split a swarm.
    assert embedding[0, :4].tolist() == pytest.approx(FIRST, rel=0, abs=0)
    assert embedding.std().item() == pytest.approx(settings.init_std, rel=0.02)
    assert embedding.mean().item() == pytest.approx(0, abs=5e-4)
    assert (embedding.abs() < settings.init_std).float().mean().item() == pytest.approx(
        0.67, abs=0.02
    )
    down = whole["model.layers.0.mlp.down_proj.weight"].std().item()
    assert down == pytest.approx(settings.init_std / 12**0.5, rel=0.02)
    assert not torch.equal(
        whole["model.layers.0.mlp.up_proj.weight"], whole["model.layers.1.mlp.up_proj.weight"]
    )


FIRST = [0.013582918792963028, 0.02771661803126335, 0.0102290790528059, -0.045073069632053375]


def test_another_seed_is_another_model_and_initialise_repeats():
    a = Ends(SMALL)
    b = Ends(replace(SMALL, init_seed=1))
    assert not torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    initialise(b, SMALL)
    assert torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)


@pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        replace(SMALL, qk_norm=True),
        replace(SMALL, tied=True),
        DEEP,
        replace(DEEP, layers=7, ends_layers=2, tied=True),
    ],
)
def test_pipeline_by_hand_gives_the_bits_of_the_unsplit_model(settings):
    """Forward and backward with detached hidden states at every stage border, as they travel
    between peers."""
    tokens, targets = tokens_of(settings)
    whole = Unsplit(settings)
    expected, n = whole.loss(tokens, targets)
    expected.backward()
    assert n == tokens.numel()

    ends, *blocks = (build(settings, 3, s) for s in range(4))
    first = ends.embed(tokens)
    inputs = []
    outputs = []
    h = first
    for block in blocks:
        inputs.append(h.detach().requires_grad_())
        h = block(inputs[-1])
        outputs.append(h)
    last = h.detach().requires_grad_()
    loss, _ = ends.loss(last, targets)
    loss.backward()
    gradient = last.grad
    for x, y in zip(reversed(inputs), reversed(outputs), strict=True):
        y.backward(gradient)
        gradient = x.grad
    first.backward(gradient)

    assert torch.equal(loss, expected)
    for module in (ends, *blocks):
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name


def test_the_layers_of_the_ends_keep_documents_apart():
    whole = Unsplit(DEEP)
    ends, block = (build(DEEP, 1, s) for s in range(2))
    tokens = tokens_of(DEEP)[0]
    last = (4, 20, 31)
    with torch.no_grad():
        h = block(ends.embed(tokens, last), last)
        assert torch.equal(ends.logits(h), whole.logits(tokens, last))
        assert not torch.equal(ends.embed(tokens), ends.embed(tokens, last))


def test_loss_is_the_sum_over_tokens_in_nats():
    tokens, targets = tokens_of(SMALL)
    model = Unsplit(SMALL)
    loss, n = model.loss(tokens, targets)
    log_p = model.logits(tokens).log_softmax(-1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-log_p.sum().item(), rel=1e-5)
    assert (loss.dtype, n) == (torch.float32, 3 * SMALL.seq_len)


@pytest.mark.parametrize("at_once", [1, 61 * 7, 61 * 48 - 1])
def test_loss_in_pieces_is_the_loss(monkeypatch, at_once):
    tokens, targets = tokens_of(SMALL)
    whole = Unsplit(SMALL)
    pieces = Unsplit(SMALL)
    a, _ = whole.loss(tokens, targets)
    a.backward()
    pieces.ends.logits_at_once = at_once
    sizes = []
    real = F.cross_entropy
    monkeypatch.setattr(
        F, "cross_entropy", lambda x, *r, **k: (sizes.append(x.numel()), real(x, *r, **k))[1]
    )
    b, n = pieces.loss(tokens, targets)
    b.backward()
    assert n == tokens.numel()
    assert max(sizes) <= max(at_once, SMALL.vocab)
    torch.testing.assert_close(a, b)
    for p, q in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4)


def test_a_sequence_may_be_shorter_or_longer_than_seq_len():
    model = Unsplit(SMALL)
    tokens, _ = tokens_of(SMALL, length=40)
    with torch.no_grad():
        long = model.logits(tokens)
        short = model.logits(tokens[:, :5])
    torch.testing.assert_close(long[:, :5], short, atol=1e-5, rtol=1e-5)


def test_rotary_tables_follow_the_number_format():
    blocks = Blocks(SMALL, range(2))
    h = torch.randn(1, 8, SMALL.d_model)
    with torch.no_grad():
        single = blocks(h)
        double = blocks.to(torch.float64)(h.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, atol=1e-5, rtol=1e-5)
    tables = blocks.rope.tables(4, torch.zeros(1, dtype=torch.bfloat16))
    assert {t.dtype for t in tables} == {torch.bfloat16}


def test_a_stage_is_built_without_torchs_compiler():
    # In a process of its own: other tests may have loaded the module here.
    code = (
        "import sys; from node.model.settings import ModelSettings as M; "
        "from node.model.stages import build; "
        "[build(M(layers=1, qkv_bias=True), 1, stage) for stage in (0, 1)]; "
        "print(sorted({'sympy', 'torch._dynamo'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_norms_of_two_formats_are_computed_in_the_wider_one():
    settings = ModelSettings(layers=1, seq_len=8, qk_norm=True)
    block = Blocks(settings, range(1))
    x = torch.randn(2, 8, settings.d_model)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
            warnings.simplefilter("error")  # torch warns where it has no fused form
            y = block(x)
    finally:
        torch.set_warn_always(False)
    assert (y - block(x)).norm() <= 0.01 * block(x).norm()


@pytest.mark.parametrize("lengths", [(), (5, 11)])
def test_repeated_keys_give_the_results_of_shared_ones(lengths: tuple[int, ...]) -> None:
    """An older card's kernel, which keeps no scores, takes no shared keys."""
    settings = ModelSettings(layers=1, d_model=32, heads=4, kv_heads=2, d_ff=48, seq_len=16)
    plain = build(settings, 1, 1)
    older = build(settings, 1, 1)
    repeat_keys(older)
    x = torch.randn(1, 16, 32)
    shared: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        shared.append(options["enable_gqa"])
        return attend(*args, **options)

    found: list[list[torch.Tensor]] = []
    for module in (plain, older):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
            y = module(x, lengths)
        trained = [p for p in module.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.square().sum(), trained)])
    assert shared == [True] * (len(shared) // 2) + [False] * (len(shared) // 2)
    torch.testing.assert_close(found[1], found[0])
