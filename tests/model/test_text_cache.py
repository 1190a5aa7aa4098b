"""Texts that grow with cached keys and values: the same numbers as a pass over the whole text."""

from dataclasses import replace

import pytest
import torch

from node.model.settings import ModelSettings
from node.model.stages import build
from node.model.text_cache import GROWTH, TextCache, Turn, bytes_per_token, text_bytes
from testbed.reference.unsplit import Unsplit

SMALL = ModelSettings(
    layers=4, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab=61, seq_len=16, init_std=0.1
)
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "all heads have keys": ("LlamaForCausalLM", {"kv_heads": 4}),
    "tied": ("LlamaForCausalLM", {"tied": True}),
    "llama 3": ("LlamaForCausalLM", {"rope_factor": 8.0, "rope_context": 16}),
    "qwen 2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen 3": ("Qwen3ForCausalLM", {"qk_norm": True, "head_width": 12}),
}


class Cached:
    """A model in stages; each stage has its caches of the texts by name."""

    def __init__(self, settings: ModelSettings, stages: int = 2) -> None:
        self.ends, *self.blocks = (build(settings, stages, s) for s in range(stages + 1))
        self.texts: dict[str, list[TextCache]] = {}

    @torch.no_grad()
    def logits(self, **new: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits [n, V] of each text's next tokens, from one pass over all texts."""
        for name in new:
            self.texts.setdefault(name, [TextCache() for _ in (self.ends, *self.blocks)])
        h = self.ends.rows(torch.cat([*new.values()]))
        for i, stage in enumerate((self.ends, *self.blocks)):
            turns = [Turn(self.texts[name][i], len(tokens)) for name, tokens in new.items()]
            h = stage.extend(h, turns)
        pieces = self.ends.logits(h).split([len(tokens) for tokens in new.values()])
        return dict(zip(new, pieces, strict=True))


def wake(module: torch.nn.Module) -> None:
    """Move biases and norms away from their first values, where a mistake would not show."""
    torch.manual_seed(7)
    for parameter in module.parameters():
        if parameter.dim() < 2:
            torch.nn.init.normal_(parameter, 1.0, 0.3)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    from node.model.export import config_of

    architecture, changes = FAMILIES[name]
    settings = replace(SMALL, **changes)
    ours = Cached(settings)
    whole = Unsplit(settings)
    wake(whole)
    for part in (ours.ends, *ours.blocks):
        part.load_state_dict({k: whole.get_parameter(k) for k in part.state_dict()})
    config = transformers.AutoConfig.for_model(**config_of(settings))
    config._attn_implementation = "eager"
    theirs = getattr(transformers, architecture)(config).eval()
    theirs.load_state_dict(whole.state_dict(), strict=False)
    prompt = torch.randint(0, settings.vocab, (11,))
    wanted = theirs.generate(
        prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0]
    ours.logits(text=prompt[:4])
    said = prompt.tolist()
    new = prompt[4:]
    for _ in range(20):
        said.append(int(ours.logits(text=new)["text"][-1].argmax()))
        new = torch.tensor(said[-1:])
    assert said == wanted.tolist()


@pytest.mark.parametrize("settings", [SMALL, replace(SMALL, layers=5, ends_layers=1, qk_norm=True)])
def test_texts_of_one_pass_know_nothing_of_each_other(settings):
    """One text begins, one goes on with several tokens and one with a single token."""
    ours = Cached(settings)
    whole = Unsplit(settings)
    a, b, c = (torch.randint(0, settings.vocab, (n,)) for n in (9, 12, 5))
    ours.logits(a=a[:8], b=b[:7])
    found = ours.logits(a=a[8:], b=b[7:], c=c)
    for name, tokens in (("a", a), ("b", b), ("c", c)):
        wanted = whole.logits(tokens[None])[0][-len(found[name]) :]
        torch.testing.assert_close(found[name], wanted.detach(), rtol=1e-4, atol=1e-5)


def test_a_pass_that_breaks_off_leaves_the_text_as_it_was():
    ours = Cached(SMALL)
    whole = Unsplit(SMALL)
    text = torch.randint(0, SMALL.vocab, (6,))
    ours.logits(text=text[:4])
    last = ours.blocks[-1].model.layers["3"]
    mlp = last.mlp
    last.mlp = None
    with pytest.raises(TypeError):
        ours.blocks[-1].extend(torch.zeros(1, 32), [Turn(ours.texts["text"][-1], 1)])
    last.mlp = mlp
    found = ours.logits(text=text[4:])["text"]
    wanted = whole.logits(text[None])[0][4:]
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_the_memory_of_a_text_is_what_was_planned():
    cache = TextCache()
    stage = build(SMALL, 2, 1)
    for count in (1, GROWTH - 1, 1):
        with torch.no_grad():
            stage.extend(torch.zeros(count, 32), [Turn(cache, count)])
        assert cache.nbytes == text_bytes(SMALL, 2, cache.length)
    assert cache.nbytes == 2 * GROWTH * bytes_per_token(SMALL, 2)


def test_bf16_halves_the_memory():
    cache = TextCache()
    stage = build(SMALL, 2, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stage.extend(torch.zeros(3, 32), [Turn(cache, 3)])
        stage.extend(torch.zeros(1, 32), [Turn(cache, 1)])
    assert cache.nbytes == text_bytes(SMALL, 2, 4, width=2)
