"""The optimizer and its schedule: the learning rate as a function of the epoch alone, so that every
owner has the same. Part of the manifest."""

import math
from dataclasses import dataclass

from node.core.tables import setting

SCHEDULES = ("linear", "cosine", "constant")
PEAKS = {"muon": "lr", "shampoo": "shampoo_lr", "soap": "soap_lr", "adamw": "adam_lr"}
"""Method to the field that has its peak rate."""
DIGITS = 12
"""Digits to which the cosine is rounded: the last bits of a machine's own would give owners
different rates."""


@dataclass(frozen=True)
class OptimSettings:
    """A matrix method for the matrices of the blocks, AdamW for the rest."""

    name: str = setting(
        "muon",
        "muon | shampoo | soap | adamw (adamw: for every parameter).",
        choices=("muon", "shampoo", "soap", "adamw"),
    )
    parameters: str = setting(
        "fp32",
        "Number format of the parameters that every peer holds and computes with: fp32 | bf16. In "
        "a run with bf16 the owner of a part keeps it in fp32 too, as a part of its state (its "
        "master, arXiv 1710.03740).",
        choices=("fp32", "bf16"),
    )
    lr: float = setting(
        0.02,
        "Peak learning rate of Muon, in units of its update (unit spectral norm, scaled by "
        "sqrt(max(1, rows/cols))).",
        least=0.0,
        most=100.0,
    )
    momentum: float = setting(
        0.95,
        "Muon's and Shampoo's momentum, Nesterov form; SOAP's decay of the first moment.",
        least=0.0,
        most=0.9999,
    )
    ns_steps: int = setting(5, "Newton-Schulz iterations.", least=1, most=20)
    coefficients: str = setting(
        "simple",
        "Coefficients of the iteration: simple | quintic | polar_express | deepseek_v4 "
        "(node/optim/gram.py).",
        choices=("simple", "quintic", "polar_express", "deepseek_v4"),
    )
    stack: bool = setting(
        True,
        "Step matrices side by side, small ones of one shape together. False: one after the other, "
        "each on all threads; slower.",
    )
    shampoo_lr: float = setting(
        3e-3,
        "Peak learning rate of Shampoo; its update is scaled to the norm of an update that "
        "changes every number by 1.",
        least=0.0,
        most=100.0,
    )
    soap_lr: float = setting(
        3e-3, "Peak learning rate of SOAP, in units of AdamW's.", least=0.0, most=100.0
    )
    precondition_every: int = setting(
        10,
        "Steps between two decompositions of Shampoo's and SOAP's statistics.",
        least=1,
        most=10**6,
    )
    precondition_side: int = setting(
        10_000,
        "Longest side with a preconditioner. SOAP leaves a longer side as it is; Shampoo leaves "
        "such a matrix to AdamW.",
        least=1,
        most=65536,
    )
    adam_lr: float = setting(
        3e-3, "Peak learning rate of AdamW: embedding, head, norms.", least=0.0, most=100.0
    )
    adam_beta1: float = setting(0.9, "AdamW's decay of the first moment.", least=0.0, most=0.9999)
    adam_beta2: float = setting(
        0.95,
        "Decay of the second moment, and of Shampoo's and SOAP's statistics.",
        least=0.0,
        most=0.999999,
    )
    adam_eps: float = setting(
        1e-8, "Added to the root of the second moment.", least=1e-16, most=1.0
    )
    weight_decay: float = setting(
        0.0, "Decoupled weight decay, scaled by the learning rate.", least=0.0, most=10.0
    )
    warmup: int = setting(10, "Epochs of linear warm-up.", least=0, most=10**9)
    decay: float = setting(
        0.4,
        "Last share of the epochs over which the rate falls; 1: from the first one on.",
        least=0.0,
        most=1.0,
    )
    schedule: str = setting(
        "linear",
        "Shape of that fall: linear | cosine (arXiv 1608.03983, without restarts) | constant: not"
        " at all.",
        choices=SCHEDULES,
    )
    floor: float = setting(
        0.1, "Share of the peak that is left in the last epoch.", least=0.0, most=1.0
    )

    @property
    def masters(self) -> bool:
        """True if owners keep parameters in fp32 while all others hold them in fewer bytes."""
        return self.parameters != "fp32"

    @property
    def width(self) -> int:
        """Bytes of a parameter, where it is held to compute with."""
        return 2 if self.masters else 4


def share(settings: OptimSettings, epoch: int, epochs: int) -> float:
    """Share of the peak rate, in [0, 1]: linear from 1/warmup over the first epochs, 1, then down
    to ``floor`` at epoch ``epochs`` - 1, along a line or half a wave of the cosine; a constant
    stays.

    ``epoch`` counts from 0; ``epochs`` 0 means that the end is not known and there is no decay.
    Where warm-up and decay overlap the smaller rules. Epochs past the end keep the last rate.
    """
    warm = 1.0
    if settings.warmup > 0:
        warm = min(1.0, (epoch + 1) / settings.warmup)
    start = epochs * (1 - settings.decay)
    last = epochs - 1
    if settings.schedule == "constant" or min(epochs, settings.decay) <= 0 or epoch < start:
        return warm
    gone = 1.0
    if epoch < last:
        gone = (epoch - start) / (last - start)
    if settings.schedule == "cosine":
        gone = round((1 - math.cos(math.pi * gone)) / 2, DIGITS)
    down = settings.floor
    if gone != 1.0:
        down = 1 - (1 - settings.floor) * gone
    return min(warm, down)


def peak(settings: OptimSettings) -> tuple[str, float]:
    """Setting and value of the peak rate of the optimizer that the run is named after."""
    key = PEAKS[settings.name]
    return f"optimizer.{key}", getattr(settings, key)


def learning_rate(settings: OptimSettings, method: str, epoch: int, epochs: int) -> float:
    """Learning rate of a method (muon, shampoo, soap, adamw) in this epoch."""
    rate: float = getattr(settings, PEAKS[method])
    return rate * share(settings, epoch, epochs)
