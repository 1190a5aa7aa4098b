"""The learning rate as a function of the epoch alone, so that every owner has the same."""

from __future__ import annotations

from node.optim.settings import OptimSettings

FLOOR = 0.1
"""Share of the peak rate that is left in the last epoch."""


def share(settings: OptimSettings, epoch: int, epochs: int) -> float:
    """In (0, 1]: linear from 1/warmup over the first epochs, 1, then linear to a tenth at epoch
    ``epochs`` - 1.

    ``epoch`` counts from 0; ``epochs`` 0 means that the end is not known and there is no decay.
    Where warm-up and decay overlap the smaller rules. Epochs past the end keep the last rate.
    """
    warm = min(1.0, (epoch + 1) / settings.warmup) if settings.warmup > 0 else 1.0
    start, last = epochs * (1 - settings.decay), epochs - 1
    if epochs <= 0 or settings.decay <= 0 or epoch <= start:
        return warm
    down = FLOOR if epoch >= last else 1 - (1 - FLOOR) * (epoch - start) / (last - start)
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
