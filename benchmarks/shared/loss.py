"""Cost of harm to a run: a live run's losses beside those of one process without network, on the
same samples."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from statistics import fmean

import torch

from benchmarks.report import Report
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Peer
from testbed.reference.swarm import Reference

LAST = 50
"""Number of epochs at the end over which the compared mean loss is taken."""
MOST = 1.03


def loss_row(report: Report, what: str, box: Box, peers: Iterable[Peer]) -> None:
    """Add one row. `peers`: peers that may have led, since a leader alone reports its commits."""
    found: dict[int, float] = {}
    for t in sorted(chain.from_iterable(p.told() for p in peers), key=attrgetter("at")):
        if t.kind == COMMITTED and t.get("tokens"):
            found[int(t.get("epoch"))] = float(t.get("loss"))
    epochs = sorted(found)[-LAST:]
    torch.set_num_threads(1)
    alone = {e.epoch: e.loss for e in Reference(box.manifest, box.root).train(epochs[-1] + 1)}
    live = fmean(found[e] for e in epochs)
    without = fmean(alone[e] for e in epochs)
    report.add(
        f"{what}: loss of epochs {epochs[0]} to {epochs[-1]}",
        live / without,
        "of one process without network",
        f"{live:.4f} and {without:.4f} nats per token",
        f"at most {MOST}",
        holds=live / without <= MOST,
    )
