"""Settings of a run that begins from a pretrained model: rates, their schedule, the size of an
epoch.

Enters: the shape of the model, and the settings that the owner has given. Leaves: values for the
others, and sentences that explain them. Never: a file, torch.

A pretrained model is spoilt by steps that a new one needs. The rate of AdamW follows the width: the
gradient of a matrix adds up over its inputs, so equal steps change the output of a wide matrix more
(arXiv 2203.03466). Adapters take twenty times that rate, whatever their rank: the output of an
adapter is small beside the output of the model. The other methods take the rate at which their
updates are as long as AdamW's.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from node.core.journey import Losses, is_worse
from node.epoch.settings import TrainingSettings
from node.manifest import Manifest
from node.model.settings import ModelSettings
from node.model.shapes import all_shapes, count
from node.optim.settings import OptimSettings, peak
from node.pipeline.settings import PipelineSettings

RATE_BY_WIDTH = 0.1152
"""Peak rate of AdamW times the width of the model: 2e-4 at a width of 576, 2.8e-5 at 4,096.
Measured with SmolLM2 (docs/benchmarks/history.md, 2026-11-30)."""
ADAPTERS = 20.0
"""Times that rate, for adapters."""
HIGHEST, HIGHEST_OF_ADAPTERS = 1e-3, 5e-3
"""No pretrained model is trained with a higher rate of AdamW."""
ADAM_RMS = 0.2
"""Root mean square of AdamW's update over its rate, as measured in training (arXiv 2502.16982)."""
WARMUP = 0.1
"""Share of the epochs over which the rate rises: the first steps of AdamW know one gradient."""
MOST_WARMUP = 100
FLOOR = 0.1
"""Share of the peak that is left in the last epoch."""
PARAMETERS_PER_TOKEN = 1 << 15
"""Parameters of the model for each token of an epoch ..."""
LEAST_TOKENS, MOST_TOKENS = 1 << 12, 1 << 16
"""... within these bounds: an epoch of a small model takes a minute on a core."""
MICRO_BATCH_TOKENS = 1 << 10
LONG_FROM = 1 << 14
"""Tokens of an epoch from which sequences may be long."""
MODEL = "model."
"""Section of the settings that fix the shape."""
SHORT, LONG = 512, 1024
"""Tokens of a sequence."""
EVALUATIONS = 10
"""Evaluations in a run, at least."""


def usual(of_model: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a new run that its owner has not given. ``of_model``: settings that the given
    model fixes, empty for a run from new weights; ``said``: those that the owner gave. Both are
    typed and go by their names."""
    given = {**of_model, **said}
    shape = {k.removeprefix(MODEL): v for k, v in given.items() if k.startswith(MODEL)}
    m = ModelSettings(**shape)
    found: dict[str, Any] = {
        "training.mixed_precision": True,
        "pipeline.stages": max(1, min(PipelineSettings.stages, m.layers - m.ends_layers)),
    }
    if of_model:
        found |= _schedule(given) | _rates(m) | _work(m, given, said)
    return {name: value for name, value in found.items() if name not in said}


def adamw_rate(model: ModelSettings) -> float:
    """Peak rate of AdamW."""
    rate = RATE_BY_WIDTH / model.d_model
    if model.adapter:
        return _rounded(min(HIGHEST_OF_ADAPTERS, ADAPTERS * rate))
    return _rounded(min(HIGHEST, rate))


def explained(manifest: Manifest) -> list[str]:
    """Describe rates and epochs of a run from a pretrained model in lines for people."""
    m, o, t, p = manifest.model, manifest.optimizer, manifest.training, manifest.pipeline
    rates = _rates(m)
    setting, rate = peak(o)
    what = f"adapters of rank {m.adapter}" if m.adapter else "all weights"
    lines = [
        f"rates    {o.name}, {what}, peak {rate:.2g} after {o.warmup:,} of {t.epochs:,} "
        f"epochs, down to {rate * o.floor:.2g}"
    ]
    if rate == rates[setting]:
        times = f", times {ADAPTERS:.0f} for adapters" if m.adapter else ""
        lines.append(
            f"         the model is pretrained and {m.d_model} wide{times}; another rate:  "
            f"--set {setting}=…"
        )
    else:
        lines.append(
            f"         as you said; {rates[setting]:.2g} is usual for a pretrained "
            f"model {m.d_model} wide"
        )
    lines.append(
        f"epoch    {t.target_batch * m.seq_len:,} tokens: {t.target_batch} sequences of "
        f"{m.seq_len}, {p.micro_batch} at a time; more:  --set training.target_batch=…"
    )
    return lines


def advice(optimizer: OptimSettings) -> str:
    """A step for the owner of a run that makes its model worse."""
    setting, rate = peak(optimizer)
    return f"begin anew with --set {setting}={rate / 10:.2g}, a tenth of the rate"


def worse(manifest: Manifest, epoch: int, held_out: float, reference: Losses) -> str:
    """A warning for a run at ``epoch``, if its last evaluation came after the warm-up and says that
    the model got worse; else an empty string."""
    t = manifest.training
    measured = epoch if epoch >= t.epochs else epoch - epoch % max(1, t.eval_every)
    if not is_worse(held_out, reference, measured, manifest.optimizer.warmup):
        return ""
    return f"the model got worse: {advice(manifest.optimizer)}"


def _schedule(given: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer, warm-up, decay, and how often the held-out loss is measured."""
    epochs = given.get("training.epochs", TrainingSettings.epochs)
    rising = max(1, min(MOST_WARMUP, round(WARMUP * epochs)))
    warmup = given.get("optimizer.warmup", rising)
    return {
        "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.0,
        "optimizer.warmup": warmup,
        "optimizer.decay": round(max(0.0, 1 - warmup / epochs), 4),
        "optimizer.floor": FLOOR,
        "training.reference": True,
        "training.eval_every": max(1, min(TrainingSettings.eval_every, epochs // EVALUATIONS)),
    }


def _rates(model: ModelSettings) -> dict[str, float]:
    """Peak rates of all methods, equal in the length of their updates.

    An orthogonal matrix of n columns has numbers of 1/sqrt(n), once Muon has scaled it; the update
    of Shampoo has numbers of 1.
    """
    rate = adamw_rate(model)
    return {
        "optimizer.adam_lr": rate,
        "optimizer.soap_lr": rate,
        "optimizer.lr": _rounded(ADAM_RMS * rate * math.sqrt(model.d_model)),
        "optimizer.shampoo_lr": _rounded(ADAM_RMS * rate),
    }


def _work(m: ModelSettings, given: Mapping[str, Any], said: Collection[str]) -> dict[str, int]:
    """Length of a sequence, sequences of a micro-batch and of an epoch."""
    tokens = _tokens(count(all_shapes(m)))
    length = m.seq_len
    if "model.seq_len" not in said:
        length = min(m.seq_len, LONG if tokens >= LONG_FROM else SHORT)
    micro = given.get("pipeline.micro_batch", max(1, MICRO_BATCH_TOKENS // length))
    batch = given.get("training.target_batch", max(1, round(tokens / length / micro)) * micro)
    if "pipeline.micro_batch" not in said:
        micro = next(size for size in range(min(micro, batch), 0, -1) if batch % size == 0)
    return {"model.seq_len": length, "pipeline.micro_batch": micro, "training.target_batch": batch}


def _tokens(parameters: int) -> int:
    """Tokens of an epoch: the power of two nearest to the parameters' share."""
    nearest = 1 << round(math.log2(max(1.0, parameters / PARAMETERS_PER_TOKEN)))
    return max(LEAST_TOKENS, min(MOST_TOKENS, nearest))


def _rounded(rate: float) -> float:
    """The rate in two digits."""
    return float(f"{rate:.1e}")
