"""Forward work of an ends peer through the live swarm, with block stages missing. Held-out loss:
without the requested stages, without stages that have no peer, or without a share by turns. Text:
one forward pass a token, over a path chosen anew for each."""

import asyncio
import math
import random
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Sequence,
)

import torch

from node.app.assembly import Assembled
from node.core.errors import LocalFault, PeerFault, UsageFault, refuse
from node.core.ids import PeerId
from node.core.numbers import several
from node.data.tokenizer import Tokenizer
from node.data.tokenizer_files import TokenizerFiles
from node.inference.chat import StopTexts, chat_prompt
from node.inference.forward_router import ForwardRouter, Reroute, named
from node.inference.text_session import TextSession
from node.pipeline.service import Pipeline
from node.reach.ladder import Rung
from node.stage.text import Samples
from node.transport.port import TransportPort
from node.wire.limits import NAME, STOPS
from protos import control_pb2 as pb

MOST_CHOICES = 1000
MOST_BATCHES = 10_000
CHOICES = 8
TOGETHER = 4
"""Batches under way at once."""
SLOW = 10.0
"""Tokens a second below which the reasons are shown."""
COLD = 1e-6
"""A lower temperature counts as 0: logits divided by it may be infinite."""


def choose(
    stages: int, fixed: Collection[int], count: int, choices: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """At most ``choices`` different sets of ``count`` missing block stages, all of which hold
    ``fixed``.

    Every other stage is missing about equally often: each set takes those that were missing least
    so far, ties by dice.
    """
    dice = random.Random(seed)
    rest = [s for s in range(1, stages + 1) if s not in fixed]
    free = count - len(fixed)
    seen = dict.fromkeys(rest, 0)
    out = list[tuple[int, ...]]()
    possible = math.comb(len(rest), free)
    # Drawn sets repeat; if few are possible, this number of draws finds nearly all.
    for _ in range(20 * choices):
        if len(out) >= min(choices, possible):
            break
        drawn = sorted(sorted(rest, key=lambda s: (seen[s], dice.random()))[:free])
        made = tuple(sorted((*fixed, *drawn)))
        for s in drawn:
            seen[s] += 1
        if made not in out:
            out.append(made)
    return out


async def evaluate(
    pipeline: Pipeline,
    text: Samples,
    around: Callable[[Sequence[int]], ForwardRouter],
    asked: Sequence[int],
    share: float,
    choices: int,
    batches: int,
) -> AsyncIterator[pb.Evaluated]:
    """The loss without ``asked`` and without dead stages. Then, with a ``share``, the loss of
    choices that lack this share of the block stages; without ``epoch``.

    ``around(stages)`` makes the way without these stages. Raises UsageFault when nothing is held
    out or a share is no share, NetworkFault when a stage has nobody and may not be left out.
    """
    count = min(batches, MOST_BATCHES, text.held_out_count())
    if not count:
        raise UsageFault("no text is held out", "make a run with data.holdout above 0")
    whole = await _loss(pipeline, text, around(asked), count, frozenset())
    yield whole
    if not share:
        return
    if not 0 <= share < 1:
        raise UsageFault(
            f"a share of {share:g} of the block stages",
            "give 0 or more and less than 1, such as 0.5",
        )
    missing = (*whole.missing.asked, *whole.missing.dead)
    stages = whole.missing.stages
    wanted = round(share * stages)
    refuse(
        (
            wanted >= stages,
            f"a share of {share:g} leaves none of {stages} block stages",
            "give a smaller share",
        ),
        (
            wanted < len(missing),
            f"a share of {share:g} is {wanted} of {stages} block stages, and {len(missing)} are "
            "missing anyway",
            "give a larger share, or none",
        ),
    )
    if wanted == len(missing):
        return
    for chosen in choose(stages, missing, wanted, min(choices or CHOICES, MOST_CHOICES)):
        # Dead stages are left out by name: whoever asks for a share accepts that this share of the
        # stages is missing.
        yield await _loss(pipeline, text, around(chosen), count, frozenset(whole.missing.dead))


async def answer(
    a: Assembled, transport: TransportPort, request: pb.EvaluateRequest
) -> AsyncGenerator[pb.Evaluated, None]:
    """Answer to ``tutti eval``, choice by choice; ``a`` hosts the ends. Raises as :func:`evaluate`
    does."""
    text = a.work.engines.text
    settings = a.pipeline.settings
    if text is None:
        raise UsageFault(
            "this peer holds no text", "ask a peer that hosts the ends; see  tutti peers"
        )
    asked = named(settings.stages, request.leave_out.stages, request.leave_out.after)
    async for found in evaluate(
        a.pipeline,
        text,
        lambda without: ForwardRouter(transport, settings, lambda: a.work.plan, without),
        asked,
        request.share,
        request.choices,
        request.batches or a.work.settings.eval_batches,
    ):
        found.epoch = max(0, a.stage.version.epoch)
        if not request.batches and (plan := a.work.plan) is not None:  # else of another text
            found.loss_before = plan.reference.held_out
        yield found


async def _loss(
    pipeline: Pipeline, text: Samples, way: ForwardRouter, count: int, dead: frozenset[int]
) -> pb.Evaluated:
    """Loss over the first ``count`` batches, all without the same stages."""
    try:
        before = await way.look()
        while True:
            total = 0.0
            tokens = 0
            for begin in range(0, count, TOGETHER):
                turns = range(begin, min(count, begin + TOGETHER))
                for loss, n in await asyncio.gather(
                    *(_batch(pipeline, text, way, i) for i in turns)
                ):
                    total = total + loss
                    tokens = tokens + n
            now = way.reroute
            if now.missing == before.missing:
                fell = dead & set(now.asked) | set(now.dead)
                missing = pb.Missing(
                    asked=[s for s in now.asked if s not in fell],
                    dead=sorted(fell),
                    stages=now.stages,
                )
                return pb.Evaluated(missing=missing, loss=total / max(1, tokens), tokens=tokens)
            # A stage died or came back on the way: the sum is of two different models.
            before = now
    finally:
        await way.close()


async def _batch(
    pipeline: Pipeline, text: Samples, way: ForwardRouter, i: int
) -> tuple[float, int]:
    inputs, targets = await text.fetch_held_out(i)
    return await way.take(i, lambda hops: pipeline.evaluate(hops, inputs, targets))


# Text
# ------------------------------------------------------------


async def speak(
    a: Assembled, transport: TransportPort, request: pb.GenerateRequest
) -> AsyncGenerator[pb.Piece, None]:
    """Answer to ``tutti generate``; ``a`` hosts the ends. A piece without text names the stages
    that are missing from there on. Waits while ``a.texts`` has no place.

    Raises UsageFault for an impossible request and for stages that are not there, NetworkFault
    when a stage has nobody and may not be left out.
    """
    check_drawing(request)
    if a.tokenizer is None:
        raise UsageFault(
            "this peer has no tokenizer", "ask a peer that hosts the ends; see  tutti peers"
        )
    pipeline = a.pipeline
    asked = named(pipeline.settings.stages, request.leave_out.stages, request.leave_out.after)
    way = ForwardRouter(transport, pipeline.settings, lambda: a.work.plan, asked)
    files = await _files(a, request)
    count = 0
    missing = ()
    trained = 0
    async with a.texts:
        ids = await asyncio.to_thread(_prompt_ids, a.tokenizer, files, request)
        began = time.monotonic()
        session = TextSession(pipeline, way, lambda: a.stage.version.epoch)
        try:
            async for piece in sample(session.logits, a.tokenizer, request, ids, files.eos_ids):
                now = way.reroute
                if now.missing != missing:
                    missing = now.missing
                    yield pb.Piece(
                        missing=pb.Missing(asked=now.asked, dead=now.dead, stages=now.stages)
                    )
                if not piece.finish:
                    count += 1
                    trained += a.training.member.busy
                    yield piece
                    continue
                speed = count / max(1e-9, time.monotonic() - began)
                slow = slow_words(way.reroute, transport.path, training=2 * trained > count)
                if speed >= SLOW:
                    slow = ""
                piece.last = True
                piece.tokens_per_s = speed
                piece.slow = slow
                yield piece
        finally:
            await way.close()


async def _files(a: Assembled, request: pb.GenerateRequest) -> TokenizerFiles:
    """Tokenizer files of the run. A prompt can be continued without them, and then no token ends
    its text: where they cannot be had, there are none. A conversation needs them. Raises as
    ``a.files``."""
    try:
        return await a.files()
    except (LocalFault, PeerFault):
        if request.messages:
            raise
        return TokenizerFiles()


def _prompt_ids(
    tokenizer: Tokenizer, files: TokenizerFiles, request: pb.GenerateRequest
) -> list[int]:
    """Tokens of the prompt, or of the conversation as the chat template writes it. Blocks."""
    text = request.prompt
    if request.messages:
        text = chat_prompt(files, [(m.role, m.content) for m in request.messages])
    ids = [int(i) for i in tokenizer.encode(text)]
    return ids or [int(i) for i in tokenizer.encode("\n")]


def slow_words(reroute: Reroute, path: Callable[[PeerId], str], *, training: bool) -> str:
    """The reasons for few tokens a second. ``path(peer)``: the way to a peer; ``training``: epochs
    went on meanwhile."""
    why = [f"every token is a pass through {several(len(reroute.live), 'block stage')}"]
    if training:
        why.append("the swarm trains at the same time")
    relayed = [
        f"stage {stage}"
        for stage, peers in reroute.live
        if any(path(peer) == Rung.RELAYED.word for peer in peers)
    ]
    if relayed:
        why.append(f"{', '.join(relayed)} can be reached through a relay only")
    return "; ".join(why)


def check_drawing(request: pb.GenerateRequest) -> None:
    """Raise UsageFault for a request by which no token can be drawn."""
    if not 0 <= request.temperature <= 10:
        raise UsageFault(f"a temperature of {request.temperature:g}", "give a number from 0 to 10")
    if not 0 <= request.top_p <= 1:
        raise UsageFault(f"top_p = {request.top_p:g}", "give a number above 0, at most 1")
    if len(request.stop) > STOPS or any(len(stop.encode()) > NAME for stop in request.stop):
        raise UsageFault(
            "too many stop texts, or one that is too long",
            f"give at most {STOPS} of {NAME} bytes each",
        )


async def sample(
    forward: Callable[[Sequence[int]], Awaitable[torch.Tensor]],
    tokenizer: Tokenizer,
    request: pb.GenerateRequest,
    prompt: Sequence[int],
    eos_ids: Collection[int] = (),
) -> AsyncIterator[pb.Piece]:
    """Yield the continuation of ``prompt``, a piece for each token, and one with ``finish``.

    ``forward(ids)`` gives the logits [V] of the position after ``ids``. ``temperature`` 0 takes the
    likeliest token; ``top_k`` 0 and ``top_p`` 0 keep all. The same seed and parameters give the
    same text.
    """
    ids = list(prompt)
    dice = torch.Generator().manual_seed(request.seed)
    say = tokenizer.stream(ids)
    stops = StopTexts(request.stop)
    finish = "length"

    def drawn(logits: torch.Tensor) -> tuple[int, float, str]:
        """The next token, its log-probability, and the text that it adds."""
        token = _pick(logits, request, dice)
        chance = float(torch.log_softmax(logits.double(), -1)[token])
        text = ""
        if token not in eos_ids:
            text = say(token)
        return token, chance, text

    for turn in range(request.max_tokens or 100):
        logits = (await forward(ids)).float()
        # A large vocabulary and a tokenizer take their time, and the event loop has none.
        token, chance, text = await asyncio.to_thread(drawn, logits)
        ids.append(token)
        counted = 0
        if turn == 0:
            counted = len(prompt)
        yield pb.Piece(text=stops.feed(text), token=token, logprob=chance, prompt_tokens=counted)
        if token in eos_ids or stops.found:
            finish = "stop"
            break
    yield pb.Piece(text=stops.rest(), finish=finish)


def _pick(logits: torch.Tensor, request: pb.GenerateRequest, dice: torch.Generator) -> int:
    if request.temperature < COLD:
        return int(logits.argmax())
    logits = logits / request.temperature
    if 0 < request.top_k < logits.numel():
        least = logits.topk(request.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    chances = torch.softmax(logits, -1)
    if 0 < request.top_p < 1:
        sorted_chances, order = chances.sort(descending=True)
        # The token with which the sum reaches top_p is kept, and so is the likeliest one.
        beyond = sorted_chances.cumsum(-1) - sorted_chances >= request.top_p
        chances[order[beyond]] = 0.0
    return int(torch.multinomial(chances, 1, generator=dice))
