"""Peers that send false tensors to their neighbours in a pipeline.

Eight peers, two at the ends and two at each of three stages, train a small model in one process
under a real leader (:class:`testbed.models.judged.JudgedCell`); two of the six block peers compute
in bf16, the others in fp32. All micro-batches of a liar go between the same two neighbours unless
the leader parts them, which is the hardest case.
"""

import copy
import statistics
import time
from pathlib import Path

import torch

from benchmarks.report import ROOT, Report
from node.core.ids import PeerId
from node.model.settings import ModelSettings
from node.model.stages import build
from node.pipeline.events import Crossing, Direction
from node.pipeline.visit_buffers import StageMath
from node.wire.sketch import BYTES
from testbed.models.judged import JudgedCell
from testbed.models.lying import ACCUSED, KINDS, Lie, LyingCell, peers
from testbed.models.visits import arrived, returned

SMALL = ModelSettings(layers=3, d_model=32, heads=2, kv_heads=1, d_ff=64, vocab=256, seq_len=32)
LOW = frozenset((PeerId("s1b"), PeerId("s2a")))
LIARS = (PeerId("s2b"), PeerId("s1a"))
"""The first one lies in runs to the end."""
HONEST = 1000
"""Epochs in which nobody lies."""
WARM = 20
"""Honest epochs before a lie."""
AFTER = 60
"""Epochs from the first lie to the end of a run."""
LAST = 10
"""Epochs at the end over which losses are compared."""
MOST = 10
"""Epochs within which a liar must be out."""
MOST_LOSS = 1.03
MOST_COST = 3.0
"""Percent of the processor time of a stage."""
TENSORS = {Direction.FORWARD: "activations", Direction.BACKWARD: "gradients"}


def rows(report: Report, root: Path, quick: bool = False) -> None:
    """Ten lies, false reports, honest epochs, cost."""
    torch.set_num_threads(1)
    _lies(report, quick)
    _reports(report)
    _honest(report, HONEST // 10 if quick else HONEST)
    _cost(report, 20 if quick else 100)


def _made() -> JudgedCell:
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    cell = LyingCell(SMALL, 3, tokens, low=LOW, epochs=HONEST)
    return JudgedCell(cell, list(peers(2, 2, 2, 2)), micro_batches=8, micro_batch=4)


def _trained() -> JudgedCell:
    cell = _made()
    if cell.run(WARM).banned:
        raise RuntimeError("a peer was banned before anybody lied")
    return cell


def _lies(report: Report, quick: bool) -> None:
    """Each kind of lie, in each direction."""
    trained = _trained()
    honest = copy.deepcopy(trained).run(AFTER)
    wanted = statistics.fmean(honest.losses[-LAST:])
    worst = 0.0
    wrong = len(honest.banned)
    for liar in LIARS[:1] if quick else LIARS:
        for kind in KINDS:
            for way, what in TENSORS.items():
                outcome = copy.deepcopy(trained).run(AFTER, Lie(liar, kind, way))
                epochs = outcome.banned.pop(liar, 0)
                wrong += len(outcome.banned)
                worst = max(worst, statistics.fmean(outcome.losses[-LAST:]) / wanted)
                report.add(
                    f"5 epochs until {liar} with {kind} {what} is out",
                    epochs,
                    "epochs",
                    "of 6 block peers, 2 in bf16",
                    f"{MOST}",
                    0 < epochs <= MOST and liar not in outcome.worked,
                )
    report.add("5 honest peers banned beside a liar", wrong, "peers", "", "0", wrong == 0)
    name = f"5 largest loss of these runs {AFTER} epochs after the first lie"
    peer = f"{wanted:.3f} nats a token where nobody lies"
    report.add(name, worst, "ratio", peer, f"{MOST_LOSS}", worst <= MOST_LOSS)


def _reports(report: Report) -> None:
    """Lies with false reports beside them."""
    trained = _trained()
    lies = {
        "reports its true tensors": ("flipped", "false"),
        "reports nothing": ("flipped", "none"),
        "accuses its neighbours": (ACCUSED, "true"),
    }
    for name, (kind, alibi) in lies.items():
        for way in Direction:
            outcome = copy.deepcopy(trained).run(MOST, Lie(LIARS[0], kind, way, alibi=alibi))
            epochs = outcome.banned.pop(LIARS[0], 0)
            report.add(
                f"5 epochs until a liar that {name} ({way.value}) is out",
                epochs,
                "epochs",
                f"{len(outcome.banned)} honest peers banned",
                f"{MOST}, 0 honest peers banned",
                0 < epochs <= MOST and not outcome.banned,
            )


def _honest(report: Report, epochs: int) -> None:
    """Honest peers of two number formats."""
    outcome = _made().run(epochs)
    report.add(
        f"5 peers banned in {epochs} honest epochs of bf16 and fp32 together",
        len(outcome.banned),
        "peers",
        f"loss {outcome.losses[0]:.2f} to {outcome.losses[-1]:.2f}",
        "0",
        not outcome.banned,
    )
    judging_ms = 1000 * outcome.judging_s / epochs
    report.add("5 leader's processor time for an epoch of 8 micro-batches", judging_ms, "ms")
    bytes_each = BYTES * len(Crossing)
    report.add("5 bytes that a peer reports for a micro-batch", bytes_each, "bytes")


def _cost(report: Report, visits: int) -> None:
    """Forward and backward of a stage of the default model, with and without sketches, in turns."""
    model = ModelSettings()
    module = build(model, 3, 1)
    plain = StageMath(module, "fp32")
    sketching = StageMath(module, "fp32")
    sketching.sketch_as("benchmark")
    x, dy = torch.randn(2, 16, model.seq_len, model.d_model)

    def seconds(math: StageMath) -> float:
        work = arrived(x)
        began = time.process_time()
        math.forward(work)
        returned(math, work, dy)
        return time.process_time() - began

    ratios: list[float] = []
    for i in range(visits + 1):
        if i % 2:
            without = seconds(plain)
            ratios.append(seconds(sketching) / without)
        else:
            beside = seconds(sketching)
            ratios.append(beside / seconds(plain))
    del ratios[0]  # the first visit of each
    cost = 100 * (statistics.median(ratios) - 1)
    name = "5 processor time that sketches add to a stage of the default model"
    report.add(
        name,
        cost,
        "% of processor time",
        "2 layers of width 128",
        f"{MOST_COST}",
        cost <= MOST_COST,
    )
