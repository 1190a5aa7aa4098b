"""The model and its cut: ends (embedding, final norm, head, loss, and with ``ends_layers`` the
first layers) and blocks (a range of the others).

A pre-norm decoder as Hugging Face's Llama and Mistral, Qwen3 with ``qk_norm``, or Qwen2 with
``qkv_bias``: RMSNorm, rotary positions in the rotate-half convention, grouped-query attention,
SwiGLU, no other biases. A model that trains in one process is made of the same modules, and
computes the same numbers.

Legend: B sequences, T positions, D d_model, H query heads, K key/value heads, W head width, F d_ff,
V vocab.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.core.ids import ENDS
from node.model.cost import LOGITS_AT_ONCE
from node.model.device import brought
from node.model.documents import NO_TARGET, for_loss, lengths_of
from node.model.kernels import EAGER, Kernels, rotate
from node.model.products import linear
from node.model.recompute import recomputed
from node.model.rope import frequencies, regime
from node.model.settings import ModelSettings
from node.model.shapes import head_dim, layers_of, parameter_shapes
from node.model.text_cache import TextCache, Turn
from node.model.weight_copies import NO_COPIES, WeightCopies
from node.wire.tensors import dtype_of

ROWS = 128
"""Positions by which a table of the rotary embedding grows."""


class Positions(Protocol):
    """Tables of the rotary embedding by the length of a text."""

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]: ...


class Rope:
    """Tables of the rotary embedding (arXiv 2104.09864), kept per device and number format; no
    parameter, no buffer."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.positions = settings.seq_len
        self._regime = regime(settings, settings.seq_len)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [length, 1, W]: position, broadcast over heads, channel. The first half
        of ``sin`` is negated, so that rotate-half is ``x * cos + swap_halves(x) * sin``."""
        if (wanted := regime(self.settings, length)) != self._regime:
            self._regime = wanted
            self._tables.clear()
        key = (like.device, like.dtype)
        found = self._tables.get(key)
        if found is None or found[0].shape[0] < length:
            if length > self.positions:
                # A text that grows by a token does not make a table for each.
                self.positions = -(-length // ROWS) * ROWS
            angles_TW2 = torch.outer(
                torch.arange(self.positions).float(), frequencies(self.settings, length)
            )
            scale = self.settings.rope_scale
            cos = angles_TW2.cos() * scale
            sin = angles_TW2.sin() * scale
            pair = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
            found = self._tables[key] = cast(
                tuple[Tensor, Tensor],
                tuple(t[:, None, :].to(device=like.device, dtype=like.dtype) for t in pair),
            )
        return found[0][:length], found[1][:length]

    def beside(self, turns: Sequence[Turn], like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, W], at the positions of the next tokens of several texts. The
        length of each text says by which regime its positions are turned."""
        cos: list[Tensor] = []
        sin: list[Tensor] = []
        for turn in turns:
            start = turn.cache.length
            tables = self.tables(start + turn.count, like)
            cos.append(tables[0][start:])
            sin.append(tables[1][start:])
        return torch.cat(cos), torch.cat(sin)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467)."""

    kernels: Kernels = EAGER

    def forward(self, x: Tensor) -> Tensor:
        eps = cast(float, self.eps)
        # The narrower of input and weight is widened: torch has no fused form for two formats.
        if self.weight.dtype is torch.float32:
            return self.kernels.rms_norm(x.float(), self.weight, eps).to(x.dtype)
        return self.kernels.rms_norm(x, self.weight.to(x.dtype), eps)


class _Linear(nn.Linear):
    """A linear map without values: :func:`initialise` writes them.

    ``skip_init`` makes the module on the meta device first. That makes torch load its compiler and
    sympy: 1 to 3 s of processor time and 45 MiB in every daemon.
    """

    copies = NO_COPIES

    def reset_parameters(self) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.copies.of(self.weight), self.bias)


class _Embedding(nn.Embedding):
    """A table of rows without values, for the same reason."""

    def reset_parameters(self) -> None:
        pass


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return _Linear(inputs, outputs, bias=bias)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245)."""

    kernels: Kernels = EAGER

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.width = head_dim(settings)
        bias = settings.qkv_bias
        self.q_proj = _linear(settings.d_model, settings.heads * self.width, bias)
        self.k_proj = _linear(settings.d_model, settings.kv_heads * self.width, bias)
        self.v_proj = _linear(settings.d_model, settings.kv_heads * self.width, bias)
        self.o_proj = _linear(settings.heads * self.width, settings.d_model)
        if settings.qk_norm:
            self.q_norm = RMSNorm(self.width, settings.norm_eps)
            self.k_norm = RMSNorm(self.width, settings.norm_eps)
        else:
            self.q_norm = None
            self.k_norm = None
        self.grouped = settings.heads != settings.kv_heads
        self.repeats = False

    def forward(self, x_BTD: Tensor, rope: Positions, lengths: tuple[int, ...] = ()) -> Tensor:
        """``lengths``: of the documents in all sequences, one behind the other, which see and know
        nothing of each other; none: every sequence is one."""
        B, T, _ = x_BTD.shape
        q_BTHW, k_BTKW, v_BTKW = self._projected(x_BTD)
        if not lengths:
            out_BTHW = self._causal(q_BTHW, k_BTKW, v_BTKW, rope)
        else:
            documents = zip(
                *(x.flatten(0, 1).unsqueeze(0).split(lengths, 1) for x in (q_BTHW, k_BTKW, v_BTKW)),
                strict=True,
            )
            out_BTHW = torch.cat([self._causal(q, k, v, rope) for q, k, v in documents], 1)
        return self.o_proj(out_BTHW.reshape(B, T, -1))

    def extend(
        self, x_ND: Tensor, cos: Tensor, sin: Tensor, layer: int, turns: Sequence[Turn]
    ) -> Tensor:
        """Attention of the next tokens of several texts, one text behind the other, to their own
        texts so far. ``cos`` and ``sin``: the rotary tables at the positions of the tokens. The
        tokens' keys and values are put into the caches, under ``layer``."""
        q_NHW, k_NKW, v_NKW = self._projected(x_ND)
        cos = cos.to(q_NHW.dtype)
        sin = sin.to(q_NHW.dtype)
        q_NHW = rotate(q_NHW, cos, sin)
        k_NKW = rotate(k_NKW, cos, sin)
        counts = [turn.count for turn in turns]
        pieces = zip(
            turns, q_NHW.split(counts), k_NKW.split(counts), v_NKW.split(counts), strict=True
        )
        out = [self._beside_cache(turn, layer, q, k, v) for turn, q, k, v in pieces]
        return self.o_proj(torch.cat(out))

    def _beside_cache(
        self, turn: Turn, layer: int, q_nHW: Tensor, k_nKW: Tensor, v_nKW: Tensor
    ) -> Tensor:
        """The output [n, H * W] of the next tokens of one text, before the output projection."""
        keys_KLW, values_KLW = turn.cache.extend(layer, k_nKW, v_nKW)
        if turn.count == 1:
            # One query sees every key, so the heads that share keys are queries beside each other:
            # no mask, and no copy of the keys for each of them.
            q_KGW = q_nHW.reshape(keys_KLW.shape[0], -1, self.width)
            out = F.scaled_dot_product_attention(q_KGW[None], keys_KLW[None], values_KLW[None])
            return out.reshape(1, -1)
        mask = None
        if turn.cache.length:
            shape = turn.count, turn.cache.length + turn.count
            mask = torch.ones(shape, dtype=torch.bool, device=q_nHW.device).tril(turn.cache.length)
        out_1HnW = self._attend(q_nHW.transpose(0, 1)[None], keys_KLW[None], values_KLW[None], mask)
        return out_1HnW[0].transpose(0, 1).reshape(turn.count, -1)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [..., D], each [..., heads, W], before the rotation."""
        heads = (*x.shape[:-1], -1, self.width)
        q = self.q_proj(x).view(heads)
        k = self.k_proj(x).view(heads)
        v = self.v_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v

    def _causal(self, q_BTHW: Tensor, k_BTKW: Tensor, v_BTKW: Tensor, rope: Positions) -> Tensor:
        cos, sin = rope.tables(q_BTHW.shape[1], q_BTHW)
        q_BTHW, k_BTKW = self.kernels.rotate(q_BTHW, k_BTKW, cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHW, k_BTKW, v_BTKW))
        return self._attend(q, k, v).transpose(1, 2)

    def _attend(
        self, q_BHTW: Tensor, k_BKLW: Tensor, v_BKLW: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attention of queries to keys, to those before them where there is no ``mask``."""
        if self.repeats and self.grouped:
            each = q_BHTW.shape[1] // k_BKLW.shape[1]
            k_BKLW = k_BKLW.repeat_interleave(each, 1)
            v_BKLW = v_BKLW.repeat_interleave(each, 1)
        return F.scaled_dot_product_attention(
            q_BHTW,
            k_BKLW,
            v_BKLW,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.grouped and not self.repeats,
        )


def repeat_keys(module: nn.Module) -> None:
    """Let a module's attention repeat keys and values that queries share. A GPU without torch's
    flash attention has another kernel that keeps no scores, and it takes no shared keys."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.repeats = True


class Adapted(nn.Module):
    """x W^T + b + alpha / r (x A^T) B^T: a frozen matrix, and the adapter learned beside it (arXiv
    2106.09685). B begins as zero, A with the deviation of PEFT's A."""

    copies = NO_COPIES
    weight: Tensor
    bias: Tensor | None

    def __init__(self, matrix: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.register_buffer("weight", matrix.weight.data)
        self.register_buffer("bias", None if matrix.bias is None else matrix.bias.data)
        self.lora_A = _linear(matrix.in_features, rank)
        self.lora_B = _linear(rank, matrix.out_features)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        frozen = linear(x, self.copies.of(self.weight), self.bias)
        return frozen + self.lora_B(self.lora_A(x)) * self.scale


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    kernels: Kernels = EAGER

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate_proj = _linear(settings.d_model, settings.d_ff)
        self.up_proj = _linear(settings.d_model, settings.d_ff)
        self.down_proj = _linear(settings.d_ff, settings.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.kernels.swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One transformer block: h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(settings.d_model, settings.norm_eps)
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = RMSNorm(settings.d_model, settings.norm_eps)
        self.mlp = SwiGLU(settings)

    def forward(self, h_BTD: Tensor, rope: Positions, lengths: tuple[int, ...] = ()) -> Tensor:
        h_BTD = h_BTD + self.self_attn(self.input_layernorm(h_BTD), rope, lengths)
        return h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))

    def extend(
        self, h_ND: Tensor, cos: Tensor, sin: Tensor, layer: int, turns: Sequence[Turn]
    ) -> Tensor:
        """The next tokens of several texts; as :meth:`Attention.extend`."""
        normed = self.input_layernorm(h_ND)
        h_ND = h_ND + self.self_attn.extend(normed, cos, sin, layer, turns)
        return h_ND + self.mlp(self.post_attention_layernorm(h_ND))


class _Model(nn.Module):
    """Carries the prefix ``model.`` of the Hugging Face names; its children are set by the
    stages."""

    embed_tokens: nn.Embedding
    norm: RMSNorm
    layers: nn.ModuleDict


def go_on() -> None:
    """Do not pause."""


class _Stage(nn.Module):
    """A stage with its layers (``layers``, global numbers). With ``recompute`` the activations
    inside a layer are not kept for backward, but computed again. ``pause`` is called between two
    layers, in forward and in backward, so that short work need not wait for all of them."""

    kernels: Kernels = EAGER
    copies = NO_COPIES

    def __init__(self, settings: ModelSettings, layers: range) -> None:
        super().__init__()
        self.settings = settings
        self.layers = layers
        self.recompute = False
        self.pause: Callable[[], None] = go_on
        self.rope = Rope(settings)
        self.model = _Model()
        self.model.layers = nn.ModuleDict({str(i): Layer(settings) for i in layers})

    def keep_copies(self) -> WeightCopies:
        """Keep the 16-bit copies of weights between forwards, and return them, for the code that
        changes weights."""
        copies = WeightCopies()
        for inner in self.modules():
            if isinstance(inner, _Linear | Adapted | _Stage):
                inner.copies = copies
        return copies

    def through(self, h_BTD: Tensor, document_ends: Sequence[int] = ()) -> Tensor:
        """Hidden states [B, T, D] through the layers, in order. ``document_ends``: tokens after
        which another document begins, as :func:`ends_of` gives them. A token attends to tokens of
        its own document alone, and its position counts from the document's beginning, or the
        sequence's."""
        again = self.recompute and torch.is_grad_enabled()
        lengths = lengths_of(document_ends, *h_BTD.shape[:2])
        for layer in self.model.layers.values():
            self.pause()
            if h_BTD.requires_grad:
                h_BTD.register_hook(self._pause_backward)
            part = self._part(layer, h_BTD, lengths)
            if again:
                h_BTD = recomputed(part, h_BTD, layer.parameters())
            else:
                h_BTD = part(h_BTD)
        return h_BTD

    def _part(
        self, layer: nn.Module, h_BTD: Tensor, lengths: tuple[int, ...]
    ) -> Callable[[Tensor], Tensor]:
        """A layer as a function of hidden states like these. Where documents are kept apart, their
        number would be compiled in, so the layer itself is called."""
        compiled = self.kernels.layer
        if compiled is None or lengths:
            return partial(layer, rope=self.rope, lengths=lengths)
        cos, sin = self.rope.tables(h_BTD.shape[1], h_BTD)
        return partial(compiled, layer, cos=cos, sin=sin)

    def _pause_backward(self, gradient: Tensor) -> None:
        self.pause()

    def extend(self, h_ND: Tensor, turns: Sequence[Turn]) -> Tensor:
        """Hidden states [N, D] of the next tokens of several texts, one text behind the other,
        through the layers: each token sees its own text so far. Keys and values are cached, and the
        texts become longer when all layers are done. Without gradients."""
        if self.layers:
            cos, sin = self.rope.beside(turns, h_ND)
            for name, layer in self.model.layers.items():
                h_ND = cast(Layer, layer).extend(h_ND, cos, sin, int(name), turns)
        for turn in turns:
            turn.cache.advance(turn.count)
        return h_ND

    def extend_first_layer(self, count: int) -> Tensor:
        """Hidden states [count, D] of a new text of zeros behind the first layer. A measurement of
        a layer's time; the cache of the text is thrown away."""
        name, layer = next(iter(self.model.layers.items()))
        turns = [Turn(TextCache(), count)]
        h_ND = torch.zeros(count, self.settings.d_model)
        cos, sin = self.rope.beside(turns, h_ND)
        return cast(Layer, layer).extend(h_ND, cos, sin, int(name), turns)


class Ends(_Stage):
    """Stage 0: tokens in, hidden states out; hidden states back in, loss out. Initialised on
    construction."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings, range(settings.ends_layers))
        self.model.embed_tokens = _Embedding(settings.vocab, settings.d_model)
        self.model.norm = RMSNorm(settings.d_model, settings.norm_eps)
        if settings.tied:
            self.lm_head = None
        else:
            self.lm_head = _linear(settings.d_model, settings.vocab)
        self.logits_at_once = LOGITS_AT_ONCE
        """Logits (numbers, not bytes) that one piece of the loss may hold."""
        initialise(self, settings)
        adapt(self, settings)

    def embed(self, tokens_BT: Tensor, document_ends: Sequence[int] = ()) -> Tensor:
        """Token ids [B, T] int64 to hidden states [B, T, D] fp32, behind the layers of the ends. An
        id outside the vocabulary raises IndexError on CPU. ``document_ends`` as for
        :meth:`through`."""
        h_BTD = self.rows(tokens_BT)
        if self.layers:
            return self.through(h_BTD, document_ends)
        return h_BTD

    def rows(self, tokens_BT: Tensor) -> Tensor:
        """Token ids to their rows of the embedding, fp32."""
        weight = self.model.embed_tokens.weight
        if weight.dtype is torch.float32:
            return self.model.embed_tokens(tokens_BT)
        # Every row once: where a token comes often, its gradient is summed in fp32.
        tokens, places_BT = tokens_BT.unique(return_inverse=True)
        return F.embedding(places_BT, F.embedding(tokens, weight).float())

    def logits(self, h_BTD: Tensor) -> Tensor:
        """Final norm and head: [..., D] to fp32 logits [..., V]."""
        head = self.lm_head
        if head is None:
            head = self.model.embed_tokens
        return linear(self.model.norm(h_BTD), self.copies.of(head.weight)).float()

    def loss(self, h_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, int]:
        """(sum over tokens of the cross entropy in nats, a differentiable fp32 scalar; number of
        these tokens). Tokens with the target NO_TARGET or UNTRAINED are left out of both.

        With a large vocabulary the tokens are taken in pieces of at most ``logits_at_once`` logits,
        and backward computes each piece's logits again instead of keeping them.
        """
        h_ND = h_BTD.reshape(-1, h_BTD.shape[-1])
        targets_N = for_loss(targets_BT.reshape(-1))
        # Counted where they are: of targets on the host nothing waits for the device.
        tokens = int((targets_N != NO_TARGET).sum())
        targets_N = brought(targets_N, h_BTD.device)
        at_once = max(1, self.logits_at_once // self.settings.vocab)
        if len(targets_N) <= at_once:
            return self._piece(h_ND, targets_N), tokens
        total = h_ND.new_zeros((), dtype=torch.float32)
        for h, targets in zip(h_ND.split(at_once), targets_N.split(at_once), strict=True):
            self.pause()
            if h.requires_grad:
                h.register_hook(self._pause_backward)
            part = partial(self._piece, targets_N=targets)
            total = total + recomputed(part, h, self._head_parameters())
        return total, tokens

    def _head_parameters(self) -> list[Tensor]:
        """Parameters that :meth:`logits` reads."""
        head = self.lm_head
        if head is None:
            head = self.model.embed_tokens
        return [*self.model.norm.parameters(), *head.parameters()]

    def _piece(self, h_ND: Tensor, targets_N: Tensor) -> Tensor:
        compiled = self.kernels.loss
        if compiled is None:
            return self.cross_entropy(h_ND, targets_N)
        return compiled(self, h_ND, targets_N)

    def cross_entropy(self, h_ND: Tensor, targets_N: Tensor) -> Tensor:
        """The loss of some tokens, whose logits are held at once."""
        return self.kernels.cross_entropy(self.logits(h_ND), targets_N)


class Blocks(_Stage):
    """A block stage: layers ``layers`` in order, hidden states to hidden states. Initialised on
    construction."""

    def __init__(self, settings: ModelSettings, layers: range) -> None:
        super().__init__(settings, layers)
        initialise(self, settings)
        adapt(self, settings)

    def forward(self, h_BTD: Tensor, document_ends: Sequence[int] = ()) -> Tensor:
        """[B, T, D] to [B, T, D]; ``document_ends`` as for :meth:`through`."""
        return self.through(h_BTD, document_ends)


def build(
    settings: ModelSettings, stages: int, stage: int, parameters: str = "fp32"
) -> Ends | Blocks:
    """The module of ``stage`` in a cut into ``stages``, initialised, on the CPU. ``parameters``:
    the format to which they, and weights beside adapters, are rounded; a module in bf16 computes
    under autocast only.

    Raises UsageFault for a shape, cut or stage that does not exist.
    """
    parameter_shapes(settings, stages, stage)
    if stage == ENDS:
        module = Ends(settings)
    else:
        module = Blocks(settings, layers_of(settings, stages, stage))
    return module.to(dtype_of(parameters))


@torch.no_grad()
def initialise(module: nn.Module, settings: ModelSettings) -> None:
    """Overwrite every parameter by its initial value, a function of (init_seed, name, shape) alone.
    Where a run begins from given ``weights`` nothing is written: they have yet to be put in place.

    Biases are zero, other vectors (norms) one. Matrices are drawn with standard deviation
    ``init_std``; the two projections that write to the residual stream are scaled by 1/sqrt(2
    layers), as in GPT-2.
    """
    if settings.weights:
        return
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        std = settings.init_std
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * settings.layers) ** 0.5
        _draw(parameter, f"{settings.init_seed}:{name}", std)


@torch.no_grad()
def adapt(module: nn.Module, settings: ModelSettings) -> None:
    """Give the matrices with adapters theirs, if the run trains adapters, and make all other
    parameters of the module buffers."""
    if not settings.adapter:
        return
    for inner in list(module.modules()):
        for name, child in list(inner.named_children()):
            if name in settings.adapter_targets and isinstance(child, nn.Linear):
                setattr(inner, name, Adapted(child, settings.adapter, settings.adapter_alpha))
    for path, inner in module.named_modules():
        if path.endswith((".lora_A", ".lora_B")):
            continue
        for name, parameter in list(inner.named_parameters(recurse=False)):
            delattr(inner, name)
            inner.register_buffer(name, parameter.data)
    for name, parameter in module.named_parameters():
        if name.endswith(".lora_A.weight"):
            _draw(parameter, f"{settings.init_seed}:{name}", (3 * parameter.shape[1]) ** -0.5)
        else:
            parameter.fill_(0.0)


def base_of(module: nn.Module) -> dict[str, Tensor]:
    """Name to tensor of the model itself, in the module's own memory: parameters, and buffers where
    adapters are trained."""
    return {name: t for name, t in module.state_dict().items() if ".lora_" not in name}


def _draw(parameter: Tensor, seed: str, std: float) -> None:
    """Fill with bell-shaped numbers of mean 0 and deviation ``std``, bit for bit the same on every
    machine.

    Each number is the sum of the four 16-bit words of one 64-bit draw (Irwin-Hall, within 3.46
    deviations): whole-number arithmetic and one rounding, where a normal distribution would depend
    on the machine's logarithm.
    """
    key = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key)
    scale = np.float32(std / ((2**32 - 1) / 3) ** 0.5)
    flat = np.empty(parameter.numel(), dtype=np.float32)
    piece = 1 << 20  # bounds the memory beside the parameter itself
    for start in range(0, flat.size, piece):
        stop = min(start + piece, flat.size)
        words = bits.random_raw(stop - start).astype("<u8", copy=False).view("<u2").reshape(-1, 4)
        flat[start:stop] = (words.sum(axis=1, dtype=np.int32) - 2 * 65535).astype(
            np.float32
        ) * scale
    parameter.copy_(torch.from_numpy(flat).view(parameter.shape))
