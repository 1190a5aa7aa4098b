"""Text that other peers of a run can read in what an ends peer sends them: docs/protocol.md, "Who
can read the text". Each attack here is the simplest one that works."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from node.core.ids import ENDS
from node.manifest import Manifest, amended
from node.model.settings import ModelSettings
from node.model.stages import Ends, build
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.wire.tensors import dtype_of
from testbed.models.visits import read
from testbed.reference.swarm import Reference

EPOCHS = 30
SMALL = {
    "model.layers": 2,
    "model.d_model": 32,
    "model.heads": 2,
    "model.d_ff": 64,
    "model.seq_len": 32,
    "pipeline.stages": 1,
    "pipeline.micro_batch": 32,
    "training.target_batch": 32,
    "training.epochs": EPOCHS,
    "optimizer.warmup": 2,
    "data.source": "synthetic:1",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model after 30 epochs of 32 sequences of synthetic text."""
    torch.set_num_threads(1)
    made = Reference(amended(Manifest.default_demo(), SMALL), tmp_path_factory.mktemp("text"))
    assert len(list(made.train(EPOCHS))) == EPOCHS
    return made


def ends_of(model: ModelSettings, ends_layers: int, trained: Reference | None = None) -> Ends:
    """The ends of the model, with new parameters or the trained ones."""
    module = build(replace(model, ends_layers=ends_layers), 1, ENDS)
    assert isinstance(module, Ends)
    if trained is not None:
        known = trained.model.state_dict()
        module.load_state_dict({name: known[name] for name in module.state_dict()})
    return module


def sent(ends: Ends, tokens: Tensor, wire: str = "fp32") -> Tensor:
    """Hidden states [B, T, D] as block stage 1 receives them."""
    raw = StageMath(ends, wire).embed_only(tokens)
    found = torch.frombuffer(bytearray(raw), dtype=dtype_of(wire)).float()
    return found.view(*tokens.shape, -1)


def nearest(ends: Ends, h_BTD: Tensor) -> Tensor:
    """Id [B, T] of the token with the embedding row nearest to each hidden state."""
    rows = ends.model.embed_tokens.weight.detach()
    return torch.cdist(h_BTD.flatten(0, 1), rows).argmin(-1).view(h_BTD.shape[:2])


def share(guessed: Tensor, tokens: Tensor) -> float:
    """Share of tokens that were guessed."""
    return (guessed == tokens).float().mean().item()


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_stage_1_reads_every_token_where_the_ends_hold_no_layer(
    trained: Reference, wire: str
) -> None:
    tokens, _ = trained.text.held_out(0)
    ends = ends_of(trained.model.settings, 0, trained)
    assert torch.equal(nearest(ends, sent(ends, tokens, wire)), tokens)


def test_behind_a_trained_layer_the_nearest_row_is_another_token(trained: Reference) -> None:
    """Training defeats the look-up of embedding rows: new weights change the hidden states too
    little."""
    tokens, _ = trained.text.held_out(0)
    new, old = (ends_of(trained.model.settings, 1, known) for known in (None, trained))
    assert share(nearest(new, sent(new, tokens)), tokens) == 1.0
    assert share(nearest(old, sent(old, tokens)), tokens) < 0.5


def test_a_linear_map_reads_most_of_it_behind_a_trained_layer(trained: Reference) -> None:
    """The map is fitted by least squares on another text, which the reader sent through the same
    layer."""
    ends = ends_of(trained.model.settings, 1, trained)
    known, _ = trained.text.at(range(64))
    tokens, _ = trained.text.held_out(0)

    def features(h_BTD: Tensor) -> Tensor:
        return F.pad(h_BTD.flatten(0, 1), (0, 1), value=1.0).double()

    wanted = F.one_hot(known.flatten(), ends.settings.vocab).double()
    fitted = torch.linalg.lstsq(features(sent(ends, known)), wanted).solution
    guessed = (features(sent(ends, tokens)) @ fitted).argmax(-1).view(tokens.shape)
    assert share(guessed, tokens) > 0.8


def test_a_peer_that_has_the_layers_of_the_ends_reads_every_token(trained: Reference) -> None:
    """Position by position, the reader tries every token and takes the one that gives the received
    hidden state (arXiv 2510.15511)."""
    ends = ends_of(trained.model.settings, 1, trained)
    tokens = trained.text.held_out(0)[0][:1, :12]
    h_BTD = sent(ends, tokens)
    read_so_far = torch.empty(0, dtype=torch.int64)
    every = torch.arange(ends.settings.vocab)[:, None]
    for place in range(tokens.shape[1]):
        tried = torch.cat([read_so_far.expand(len(every), -1), every], 1)
        with torch.no_grad():
            off = (ends.embed(tried)[:, place] - h_BTD[0, place]).norm(dim=-1)
        read_so_far = torch.cat([read_so_far, off.argmin()[None]])
    assert torch.equal(read_so_far, tokens[0])


@pytest.mark.parametrize("ends_layers", [0, 1])
def test_the_last_stage_reads_every_target_in_the_gradient(
    trained: Reference, ends_layers: int
) -> None:
    """The last stage made the hidden state itself, and computes the gradient that each token would
    give."""
    ends = ends_of(trained.model.settings, ends_layers, trained)
    tokens, targets = (t[:2] for t in trained.text.held_out(0))
    with torch.no_grad():
        h_BTD = trained.model.blocks(trained.model.ends.embed(tokens))
    work = VisitBuffers(float("inf"), tuple(h_BTD.shape), targets=targets, input=read(h_BTD))
    StageMath(ends, "fp32").loss(work)
    came = torch.frombuffer(bytearray(work.upstream or b""), dtype=torch.float32)
    off = []
    for token in range(ends.settings.vocab):
        h = h_BTD.clone().requires_grad_()
        loss, _ = ends.loss(h, torch.full_like(targets, token))
        (gradient,) = torch.autograd.grad(loss, h)
        off.append((gradient - came.view(h.shape)).norm(dim=-1))
    assert torch.equal(torch.stack(off).argmin(0), targets)
