"""The learning rate as a function of the epoch alone, so that every owner has the same."""

from __future__ import annotations

import math

from node.optim.settings import OptimSettings

SCHEDULES = ("linear", "cosine", "constant")
DIGITS = 12
"""Of the cosine: the last bits of a machine's own would give owners different rates."""


def share(settings: OptimSettings, epoch: int, epochs: int) -> float:
    """Of the peak rate, in [0, 1]: linear from 1/warmup over the first epochs, 1, then down to
    ``floor`` at epoch ``epochs`` - 1, along a line or half a wave of the cosine; a constant stays.

    ``epoch`` counts from 0; ``epochs`` 0 means that the end is not known and there is no decay.
    Where warm-up and decay overlap the smaller rules. Epochs past the end keep the last rate.
    """
    warm = min(1.0, (epoch + 1) / settings.warmup) if settings.warmup > 0 else 1.0
    start, last = epochs * (1 - settings.decay), epochs - 1
    if settings.schedule == "constant" or min(epochs, settings.decay) <= 0 or epoch < start:
        return warm
    gone = 1.0 if epoch >= last else (epoch - start) / (last - start)
    if settings.schedule == "cosine":
        gone = round((1 - math.cos(math.pi * gone)) / 2, DIGITS)
    down = settings.floor if gone == 1.0 else 1 - (1 - settings.floor) * gone
    return min(warm, down)


def learning_rate(settings: OptimSettings, method: str, epoch: int, epochs: int) -> float:
    """Of a method (muon, shampoo, soap, adamw) in this epoch."""
    peaks = {
        "muon": settings.lr,
        "shampoo": settings.shampoo_lr,
        "soap": settings.soap_lr,
        "adamw": settings.adam_lr,
    }
    return peaks[method] * share(settings, epoch, epochs)
