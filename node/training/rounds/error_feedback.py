"""Error feedback between cells: who rounds keeps what its rounding lost, and adds it to what it
rounds next of the same part. Enters: what this peer says for its cell, what became of it. Leaves:
numbers to say, what is owed. Never: a word with anybody outside the cell: nobody has to know what
another owes.

All replicas of a cell owe the same, because each may be asked for what the cell says: who joins
takes it over with the anchor. Whatever was moved has been said, or is owed (Seide et al. 2014).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from node.averaging.coding.codecs import settle
from node.averaging.coding.formats import FORMATS

Named = Mapping[str, Tensor]
WORDS = "words"
"""What is owed of a part, in a checkpoint."""
FADES = 0.95
"""Share that is kept of what is owed in formats that leave numbers out: a number's turn comes after
many rounds, and old differences point where nobody is any more (SparseLoCo, arXiv 2508.15706)."""


@torch.no_grad()
def says(
    given: Named, owed: Named, codec: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(what is said of ``given`` and what is ``owed`` of it, its bytes, what is owed of it once
    that was taken), fp32 on the CPU. Raises ValueError for what cannot be said."""
    keeps = FADES if FORMATS[codec].biased else 1.0
    said: dict[str, Tensor] = {}
    coded: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in given.items():
        whole = tensor.detach().to("cpu", torch.float32)
        if name in owed:
            whole = whole + owed[name] * keeps
        coded[name], said[name] = settle(whole, codec)
        left[name] = whole - said[name]
    return said, coded, left
