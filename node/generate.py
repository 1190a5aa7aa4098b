"""Sampling text through the live swarm: one forward pass a token, over a path chosen anew for each."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import torch

from node.core.journey import Hop
from node.data.tokenizer import ByteTokenizer, Tokenizer
from protos.control_pb2 import GenerateRequest


class Forward(Protocol):
    """The part of the pipeline that is needed: logits [1, V] of the position after ``tokens`` [1, T]."""

    async def logits(self, hops: tuple[Hop, ...], tokens: torch.Tensor) -> torch.Tensor: ...


async def sample(
    pipeline: Forward, route: Callable[[int], tuple[Hop, ...]], tokenizer: Tokenizer, request: GenerateRequest, window: int
) -> AsyncIterator[str]:
    """Yield the continuation of ``request.prompt`` piece by piece.

    The model sees the last ``window`` tokens. ``temperature`` 0 takes the likeliest token; ``top_k`` 0 keeps all.
    The same seed and parameters give the same text. Raises PeerFault when a stage has nobody left to answer.
    """
    ids = [int(i) for i in tokenizer.encode(request.prompt)] or [int(i) for i in tokenizer.encode("\n")]
    dice = torch.Generator().manual_seed(request.seed)
    partial = codecs.getincrementaldecoder("utf-8")("replace")
    for turn in range(request.max_tokens or 100):
        logits = (await pipeline.logits(route(turn), torch.tensor([ids[-window:]], dtype=torch.int64)))[0].float()
        ids.append(_pick(logits, request.temperature, request.top_k, dice))
        piece = tokenizer.decode([ids[-1]])
        # A byte model may be in the middle of a character: hold its bytes back until it is whole.
        text = partial.decode(bytes([ids[-1]])) if ids[-1] < 256 and isinstance(tokenizer, ByteTokenizer) else piece
        if text:
            yield text


def _pick(logits: torch.Tensor, temperature: float, top_k: int, dice: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=dice))
