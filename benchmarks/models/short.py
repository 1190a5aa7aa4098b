"""A daemon's device runs out of memory once, in forward, backward, loss or step: the cost for the
run."""

from pathlib import Path

import torch

from benchmarks.report import Report
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import REPOSITORY, Box, Peer
from testbed.reference.swarm import Reference

VICTIMS = {
    "forward": "stage-1-0",
    "backward": "stage-1-0",
    "loss": "ends-0",
    "step": "stage-1-0",
}
EPOCHS = 45
CLOSE = 1e-4
RUN = {
    "training.epochs": EPOCHS,
    "training.min_replicas": 1,
    "training.eval_every": 0,
}


def rows(report: Report, root: Path) -> None:
    """A row for each."""
    torch.set_num_threads(1)
    for where, label in VICTIMS.items():
        box = Box(root / where, settings=())
        box.root.mkdir()
        try:
            peers = box.swarm((1, 1, 1), **RUN)
            victim = box.made[label]
            victim.environment = {
                **victim.environment,
                "SCARCE": where,
                "PYTHONPATH": f"{REPOSITORY / 'benchmarks' / 'models' / 'scarce'}:{REPOSITORY}",
            }
            box.start(*peers)
            box.wait("the end", lambda p=peers: all(map(finished, p)), 120.0)
            committed = [t for t in box.made["ends-0"].told() if t.kind == COMMITTED]
            warned = [w for w in victim.status().warnings if w.startswith("memory ran out")]
        finally:
            box.clean_up()
        m = box.manifest.model
        t = box.manifest.training
        tokens = sum(int(c.get("tokens")) for c in committed)
        asked = EPOCHS * t.target_batch * m.seq_len
        alone = {e.epoch + 1: e.loss for e in Reference(box.manifest, root).train(EPOCHS)}
        live = {int(c.get("epoch")): float(c.get("loss")) for c in committed}
        whole = live.keys() == alone.keys()
        worst = max(abs(live[e] / alone[e] - 1) for e in alone) if whole else 1.0
        report.add(
            f"5 out of memory in {where}: tokens lost",
            asked - tokens,
            f"of {asked:,}, in {len(committed)} epochs; status: {'; '.join(warned) or 'nothing'}",
            f"losses of one process within {worst:.2g}, relative",
            f"0, {EPOCHS} epochs, losses within {CLOSE:g}, and status says so",
            holds=tokens == asked
            and len(committed) == EPOCHS
            and worst <= CLOSE
            and len(warned) == 1,
        )


def finished(peer: Peer) -> bool:
    """Return True if its run has come to its end."""
    return peer.status().state == "finished"
