"""Cuts of each parameter over the devices of a box, and the numbers of devices that a model can be
cut over. No tensor library.

Attention is cut by heads and the SwiGLU by its inner width, as in Megatron-LM (arXiv 1909.08053):
the first matrix of each pair by rows of its [out, in] weight, the second by columns. The embedding
and the head are cut by the vocabulary.
"""

from math import gcd

from node.core.errors import UsageFault
from node.model.settings import ModelSettings

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")
PER_HEAD = ("q_norm", "k_norm")
"""Modules that every rank holds whole and applies to its own heads: a rank's gradient is of these
heads alone, and the sum is over ranks."""
MOST = 64
"""Devices of a box."""


def cut_of(name: str) -> int | None:
    """The dimension a parameter is cut along: 0 rows, 1 columns; None: every rank holds it whole.
    Vectors are cut as matrices of one column."""
    module = name.split(".")[-2]
    if module in BY_ROWS:
        return 0
    if module in BY_COLUMNS:
        return 1
    return None


def stepped_in_pieces(name: str) -> bool:
    """Return True if the optimizer steps a parameter at all ranks. Vectors are small: rank 0 steps
    them alone."""
    return cut_of(name) is not None and not name.endswith(".bias")


def per_head(name: str) -> bool:
    """Return True if every rank holds the parameter whole and their gradients are to be summed."""
    return name.split(".")[-2] in PER_HEAD


def span(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """[start, stop) of ``rank``'s share of ``size``: equal pieces but for the last ones, as
    ``torch.chunk`` cuts."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def check_devices(settings: ModelSettings, devices: int) -> None:
    """Raises UsageFault unless ``devices`` divide the heads, the key/value heads and the inner
    width; it says which would."""
    if not 1 <= devices <= MOST:
        raise UsageFault(f"{devices} local devices", f"give 1 to {MOST}")
    whole = {
        "heads": settings.heads,
        "key/value heads": settings.kv_heads,
        "inner width": settings.d_ff,
    }
    bad = [f"{what} ({count})" for what, count in whole.items() if count % devices]
    if bad or devices > settings.vocab:
        common = gcd(*whole.values())
        able = [
            n for n in range(1, min(common, MOST) + 1) if common % n == 0 and n <= settings.vocab
        ]
        raise UsageFault(
            f"{devices} local devices do not divide the model's {', '.join(bad) or 'vocabulary'}",
            f"set local_devices to {_either(able)}",
        )


def _either(numbers: list[int]) -> str:
    words = [str(n) for n in numbers]
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"
