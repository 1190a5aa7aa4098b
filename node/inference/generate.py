"""Sampling text through the live swarm: one forward pass a token, over a path chosen anew for
each."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import torch

from node.app.assembly import Assembled
from node.core.errors import UsageFault
from node.data.tokenizer import Tokenizer
from node.inference.forward_router import ForwardRouter, named
from node.transport.port import TransportPort
from protos import control_pb2 as pb
from protos.control_pb2 import GenerateRequest


async def speak(
    a: Assembled, transport: TransportPort, request: GenerateRequest
) -> AsyncGenerator[pb.Piece, None]:
    """What ``tutti generate`` is told; ``a`` hosts the ends. A piece without text says which stages
    are missing from there on.

    Raises UsageFault for stages that are not there, NetworkFault when one has nobody and may not be
    left out.
    """
    if a.tokenizer is None:
        raise UsageFault(
            "this peer has no tokenizer", "ask a peer that hosts the ends; see  tutti peers"
        )
    pipeline = a.pipeline
    asked = named(pipeline.settings.stages, request.leave_out.stages, request.leave_out.after)
    way = ForwardRouter(transport, pipeline.settings, lambda: a.work.plan, asked)
    began, count, missing = time.monotonic(), 0, ()
    try:
        async for piece in sample(
            lambda turn, tokens: way.take(turn, lambda hops: pipeline.logits(hops, tokens)),
            a.tokenizer,
            request,
            a.manifest.model.seq_len,
        ):
            now = way.reroute
            if now.missing != missing:
                missing = now.missing
                yield pb.Piece(
                    missing=pb.Missing(asked=now.asked, dead=now.dead, stages=now.stages)
                )
            count += 1
            yield piece
    finally:
        await way.close()
    yield pb.Piece(last=True, tokens_per_s=count / max(1e-9, time.monotonic() - began))


async def sample(
    forward: Callable[[int, torch.Tensor], Awaitable[torch.Tensor]],
    tokenizer: Tokenizer,
    request: GenerateRequest,
    window: int,
) -> AsyncIterator[pb.Piece]:
    """Yield the continuation of ``request.prompt``, a piece for each token.

    ``forward(turn, tokens)`` gives the logits [1, V] of the position after ``tokens`` [1, T], of
    which it sees the last ``window``. ``temperature`` 0 takes the likeliest token; ``top_k`` 0
    keeps all. The same seed and parameters give the same text.
    """
    ids = [int(i) for i in tokenizer.encode(request.prompt)] or [
        int(i) for i in tokenizer.encode("\n")
    ]
    dice = torch.Generator().manual_seed(request.seed)
    say = tokenizer.stream(ids)
    for turn in range(request.max_tokens or 100):
        logits = (await forward(turn, torch.tensor([ids[-window:]], dtype=torch.int64)))[0].float()
        ids.append(_pick(logits, request.temperature, request.top_k, dice))
        chance = float(torch.log_softmax(logits.double(), -1)[ids[-1]])
        yield pb.Piece(text=say(ids[-1]), token=ids[-1], logprob=chance)


def _pick(logits: torch.Tensor, temperature: float, top_k: int, dice: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=dice))
