"""Replicas of one small decoder in one process, trained on the same text under any averaging
strategy of the daemon.

Every replica has its own samples, its own AdamW and, between rounds, its own parameters: rows of
one matrix. `node.averaging` decides how a round changes the rows; bytes are those of its formats,
time comes from a simulated line.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings, check, pieces
from node.averaging.strategies.strategy import (
    Butterfly,
    Groups,
    Moshpit,
    Pairs,
    Strategy,
)
from node.data.order import SampleOrder
from node.data.settings import OWN_MANIFEST, DataSettings
from node.data.sources import Ids, open_data
from node.model.kernels import rotate
from node.model.settings import ModelSettings
from node.model.stages import Rope
from node.outer.merging import moved, says
from node.wire.coding.codecs import settle
from node.wire.coding.formats import nbytes_of
from testbed.reference.mixing import mixing
from testbed.reference.unsplit import Unsplit

EVERY_EVAL = 50
"""Steps between looks at the held-out text."""


@dataclass(frozen=True)
class Line:
    """Every peer's: bytes per second each way, seconds one way; seconds a step computes."""

    rate: float = 20e6 / 8
    latency: float = 0.1
    step_s: float = 0.1

    def round_s(self, busiest: float) -> float:
        """A reduce-scatter and an all-gather, or a push and a pull; ``busiest`` bytes in one
        direction of the busiest line."""
        return 2 * self.latency + busiest / self.rate


@dataclass(frozen=True)
class Task:
    """Model, text and training, the same for every strategy."""

    replicas: int = 4
    steps: int = 2000
    batch: int = 8
    lr: float = 3e-3
    seed: int = 0
    model: ModelSettings = field(
        default_factory=lambda: ModelSettings(
            layers=2, d_model=48, heads=2, kv_heads=2, d_ff=128, vocab=259, seq_len=32
        )
    )


@dataclass
class Curve:
    """``points``: (tokens of all replicas, simulated seconds, held-out loss); ``sent``: bytes of
    the average peer, ``tokens``: of all."""

    points: list[tuple[int, float, float]] = field(default_factory=list)
    sent: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    replicas: int = 1

    @property
    def loss(self) -> float:
        """Loss at the end: the mean of the last three evaluations, since the noise of one is as
        large as the compared differences."""
        last = [loss for _, _, loss in self.points[-3:]]
        return sum(last) / len(last)

    @property
    def per_token(self) -> float:
        """Bytes a peer sends for each token it trains on."""
        return self.sent / (self.tokens / self.replicas)


class Text:
    """Batches of real text; of Python's own help, unless ``source`` names another."""

    def __init__(self, task: Task, home: Path, source: str = DataSettings().source) -> None:
        data = DataSettings(source=source)
        corpus = open_data(data, task.model.seq_len, task.model.vocab, home, OWN_MANIFEST)[0]
        self._task = task
        self._train = corpus.train
        self._order = SampleOrder(corpus.windows, task.seed)
        held = [self._window(corpus.held_out, i) for i in range(min(128, corpus.held_out_windows))]
        self.held_out = torch.stack(held)

    def batches(self, step: int) -> Tensor:
        """Token ids [replicas, batch, seq_len + 1]: samples nobody else has."""
        t = self._task
        many = t.replicas * t.batch
        order = (self._order.sample(step * many + i) for i in range(many))
        return torch.stack([self._window(self._train, window) for window in order]).view(
            t.replicas, t.batch, -1
        )

    def _window(self, tokens: Ids, index: int) -> Tensor:
        begin = index * self._task.model.seq_len
        ids = np.asarray(tokens[begin : begin + self._task.model.seq_len + 1])
        return torch.from_numpy(ids.astype(np.int64))


class Adam:
    """AdamW (arXiv 1711.05101) on every row by itself, with linear warm-up, a cosine to a tenth,
    and norms clipped at 1."""

    def __init__(self, like: Tensor, task: Task, scale: float = 1.0) -> None:
        self.m = torch.zeros_like(like)
        self.v = torch.zeros_like(like)
        self._task = task
        self._scale = scale
        self.steps = torch.zeros(len(like), 1)

    def step(self, rows: Tensor, gradients: Tensor, progress: float) -> None:
        """In place, the first ``len(rows)`` rows, at ``progress`` (0 to 1) through the training."""
        n = len(rows)
        m = self.m[:n]
        v = self.v[:n]
        steps = self.steps[:n].add_(1)
        lr = (
            self._task.lr
            * self._scale
            * min(1.0, progress / 0.03 + 0.02)
            * (0.55 + 0.45 * math.cos(math.pi * progress))
        )
        gradients = gradients * (1.0 / (gradients.norm(dim=1, keepdim=True) + 1e-6)).clamp_(max=1.0)
        m.lerp_(gradients, 0.1)
        v.mul_(0.95).addcmul_(gradients, gradients, value=0.05)
        root = (v / (1 - 0.95**steps)).sqrt_().add_(1e-8)
        rows.mul_(1 - lr * 0.01).sub_(m / (1 - 0.9**steps) / root, alpha=lr)


class Replicas:
    """All replicas' parameters as rows, and one forward pass for all: ``node.model``'s decoder with
    one more dimension."""

    def __init__(self, task: Task, text: Text) -> None:
        module = Unsplit(task.model)
        self.task = task
        self.text = text
        self.names = {name: p.shape for name, p in module.named_parameters()}
        flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        self.numbers = flat.numel()
        self.rows = flat.repeat(task.replicas, 1)
        self.curve = Curve(replicas=task.replicas)
        self._rope = Rope(task.model)

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of one row [V], or of several [R, V], by parameter."""
        parts = rows.split([shape.numel() for shape in self.names.values()], dim=-1)
        return {
            n: part.view(*rows.shape[:-1], *shape)
            for (n, shape), part in zip(self.names.items(), parts, strict=True)
        }

    def losses(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Mean loss [R] of every row on its own token ids [R, B, T + 1]."""
        m = self.task.model
        p = self.named(rows)
        R = tokens.shape[0]
        B = tokens.shape[1]
        T = tokens.shape[2] - 1
        cos, sin = self._rope.tables(T, rows)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (m.d_model,), None, m.norm_eps) * p[name][:, None, :]

        def linear(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, p[name].transpose(1, 2))

        x = tokens[:, :, :-1].reshape(R, B * T)
        h = p["model.embed_tokens.weight"].gather(1, x[:, :, None].expand(-1, -1, m.d_model))
        for i in range(m.layers):
            at = f"model.layers.{i}."
            n = norm(h, at + "input_layernorm.weight")
            q, k, v = (
                linear(n, f"{at}self_attn.{w}_proj.weight").view(R * B, T, m.heads, -1)
                for w in "qkv"
            )
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
            out = (
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .reshape(R, B * T, -1)
            )
            h = h + linear(out, at + "self_attn.o_proj.weight")
            n = norm(h, at + "post_attention_layernorm.weight")
            gated = F.silu(linear(n, at + "mlp.gate_proj.weight")) * linear(
                n, at + "mlp.up_proj.weight"
            )
            h = h + linear(gated, at + "mlp.down_proj.weight")
        logits = linear(norm(h, "model.norm.weight"), "lm_head.weight")
        loss = F.cross_entropy(
            logits.reshape(R * B * T, -1), tokens[:, :, 1:].reshape(-1), reduction="none"
        )
        return loss.view(R, -1).mean(1)

    def gradients(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Gradient [R, V] of every row's own loss."""
        here = rows.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.losses(here, tokens).sum(), here)
        self.curve.tokens += tokens[:, :, 1:].numel()
        return found

    def look(self, row: Tensor, step: int) -> None:
        """Note the held-out loss of ``row`` now and then, and at the end."""
        if step % EVERY_EVAL and step != self.task.steps:
            return
        with torch.no_grad():
            loss = float(self.losses(row[None], self.text.held_out[None]))
        self.curve.points.append((self.curve.tokens, self.curve.seconds, loss))


def data_parallel(task: Task, text: Text, line: Line) -> Curve:
    """Gradients through a butterfly every step: the mean of all into one optimizer step."""
    r = Replicas(task, text)
    row = r.rows[:1].clone()
    n = task.replicas
    inner = Adam(row, task)
    sent = 2 * (n - 1) / n * nbytes_of(r.numbers, "fp32")
    for step in range(task.steps):
        r.look(row[0], step)
        # The mean over equal batches is the gradient of all samples together.
        inner.step(row, r.gradients(row, text.batches(step).flatten(0, 1)[None]), step / task.steps)
        r.curve.sent += sent
        r.curve.seconds += line.step_s + line.round_s(sent)
    r.look(row[0], task.steps)
    return r.curve


def pushed(task: Task, text: Text, line: Line, *, locked: bool) -> Curve:
    """A server that steps on every push, a fraction of the rate each, without a barrier. Not
    ``locked``: half of a push may be missing in what its sender pulls."""
    r = Replicas(task, text)
    n = task.replicas
    server = r.rows[:1].clone()
    inner = Adam(server, task, 1 / task.replicas)
    half = r.numbers // 2
    whole = nbytes_of(r.numbers, "fp32")
    dice = np.random.RandomState(task.seed)
    for step in range(task.steps):
        r.look(server[0], step)
        gradients = r.gradients(r.rows, text.batches(step))
        for i in dice.permutation(n):
            before = server.clone()
            inner.step(server, gradients[i : i + 1], step / task.steps)
            r.rows[i] = server[0]
            if not locked:
                r.rows[i, half:] = before[0, half:]
        r.curve.sent += 2 * whole * (n - 1) / n
        # All lines end at the server's, which carries everybody's pushes; nobody waits for anybody
        # else.
        r.curve.seconds += max(line.step_s + line.round_s(whole), (n - 1) * whole / line.rate)
    r.look(server[0], task.steps)
    return r.curve


def rounds(
    task: Task, text: Text, line: Line, s: OuterSettings, *, every: int = 50, slow: int = 0
) -> Curve:
    """Train alone, with a round of `s` every `every` steps. The last `slow` replicas do half the
    steps; their contributions weigh half, and nobody waits for them."""
    r = Replicas(task, text)
    inner = Adam(r.rows, task)
    play = _states if s.carries == "state" else _deltas if s.carries == "deltas" else _parameters
    after = play(r, s, line, every, slow)
    for step in range(task.steps):
        r.look(r.rows.mean(0), step)
        n = task.replicas if step % 2 == 0 else task.replicas - slow
        inner.step(r.rows[:n], r.gradients(r.rows[:n], text.batches(step)[:n]), step / task.steps)
        r.curve.seconds += line.step_s
        after(step + 1)
    r.look(r.rows.mean(0), task.steps)
    return r.curve


def strategy_of(s: OuterSettings) -> Strategy:
    """The strategy named by `s`, one with a barrier and without a server. Raises UsageFault as
    :func:`check` does, KeyError for any other strategy."""
    check(s)
    made: dict[str, Callable[[], Strategy]] = {
        "butterfly": Butterfly,
        "gossip": Pairs,
        "moshpit": lambda: Moshpit(s.grid),
    }
    return made[s.strategy]()


def _parameters(
    r: Replicas, s: OuterSettings, line: Line, every: int, slow: int
) -> Callable[[int], None]:
    strategy = strategy_of(s)
    alive = np.ones(r.task.replicas, bool)

    def after(step: int) -> None:
        if step % every:
            return
        meeting = strategy.meet(len(alive), step // every - 1, r.task.seed)
        matrix = torch.from_numpy(mixing(meeting, alive)).float()
        r.rows.copy_(matrix @ r.rows)
        _charge(r, line, s, meeting, r.numbers)

    return after


def _deltas(
    r: Replicas, s: OuterSettings, line: Line, every: int, slow: int
) -> Callable[[int], None]:
    """DiLoCo with anchors equal everywhere: one state stands for all, what differs is the rows."""
    state = OuterState.begin(r.named(r.rows[0]))
    parts = pieces({n: nbytes_of(p.numel(), s.codec) for n, p in state.anchor.items()}, s.fragments)
    owing = [dict[str, Tensor]() for _ in r.rows]
    tokens = [1.0] * (len(r.rows) - slow) + [0.5] * slow
    weights = [t / sum(tokens) for t in tokens]
    meeting = strategy_of(s).meet(len(r.rows), 0, r.task.seed)
    gap = every // s.fragments

    def after(step: int) -> None:
        nonlocal state
        if step < gap or step % gap:
            return
        carried = parts[(step // gap - 1) % s.fragments]
        total: dict[str, Tensor] = {}
        local = [{n: p.clone() for n, p in r.named(row).items() if n in carried} for row in r.rows]
        for owed, mine, weight in zip(owing, local, weights, strict=True):
            given = pseudo_gradient(state, mine)
            if s.feedback:
                given, _, left = says(given, owed, s.codec)
                owed |= left
            else:
                given = {name: settle(tensor, s.codec)[1] for name, tensor in given.items()}
            for name, delta in given.items():
                total[name] = total.get(name, 0.0) + weight * delta
        state = outer_step(state, total, s)
        for row, mine in zip(r.rows, local, strict=True):
            for name, fresh in moved(mine, mine, state.anchor, s.mixing).items():
                r.named(row)[name].copy_(fresh)
        _charge(r, line, s, meeting, sum(t.numel() for t in total.values()))

    return after


def _states(
    r: Replicas, s: OuterSettings, line: Line, every: int, slow: int
) -> Callable[[int], None]:
    """DiLoCo over groups that are a part of all: each steps alone, then anchors and momenta are
    averaged."""
    states = [OuterState.begin(r.named(row)) for row in r.rows]
    strategy = strategy_of(s)
    alive = np.ones(r.task.replicas, bool)

    def after(step: int) -> None:
        nonlocal states
        if step % every:
            return
        meeting = strategy.meet(len(alive), step // every - 1, r.task.seed)
        stepped = [
            outer_step(a, pseudo_gradient(a, r.named(row)), s)
            for a, row in zip(states, r.rows, strict=True)
        ]
        # The step is linear: the mean of states that were stepped is the step of the mean state.
        matrix = torch.from_numpy(mixing(meeting, alive)).float()
        anchors, momenta = (
            [r.named(row) for row in matrix @ torch.stack([_flat(one) for one in of])]
            for of in ([one.anchor for one in stepped], [one.momentum for one in stepped])
        )
        states = [OuterState(a, m) for a, m in zip(anchors, momenta, strict=True)]
        for state, row in zip(states, r.rows, strict=True):
            row.copy_(_flat(state.anchor))
        _charge(r, line, s, meeting, 2 * r.numbers)

    return after


def _flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in named.values()])


def _charge(r: Replicas, line: Line, s: OuterSettings, meeting: object, numbers: int) -> None:
    """Bytes and time of one round of ``numbers`` numbers: everybody pulls what each of its group
    gives."""
    whole = nbytes_of(numbers, s.codec)
    assert isinstance(meeting, Groups)
    sent = whole * (int(np.bincount(meeting.labels).max()) - 1)
    r.curve.sent += sent
    r.curve.seconds += 2 * line.latency + sent / line.rate
