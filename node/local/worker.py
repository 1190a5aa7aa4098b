"""The process of one further device: carries out rank 0's commands, in order, until its standard
input ends.

    python -m node.local.worker        (started by ranks.py)

The first line gives its rank; the others are commands. Any error ends it: ranks that are no longer
at one place in the program would exchange tensors that do not belong together.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.local.optimizer import PartOrder, RankSteps
from node.local.program import Program
from node.local.rank import Rank
from node.model.device import Device, set_threads
from node.model.settings import ModelSettings
from node.optim.kernel_rule import KernelRule
from node.optim.newton_schulz import follow
from node.optim.settings import OptimSettings
from node.pipeline.gradients import GradientSum


class Worker:
    """This rank's state between commands: graphs, gradients and optimizer state by number, the
    gradient sums of a round."""

    def __init__(self, program: Program, steps: RankSteps) -> None:
        self._program = program
        self._optimizer = steps
        self._here = program.here
        self._device = program.here.device.device
        self._kept: dict[int, Any] = {}
        self._sum = GradientSum()
        self._round = 0

    def do(self, words: dict[str, Any]) -> None:
        """Carry out this rank's part of a command of rank 0."""
        for number in words["forget"]:
            self._kept.pop(number, None)
        match words["do"]:
            case "forward" | "embed" | "loss" | "logits" as what:
                with torch.set_grad_enabled(words["keep"] > 0):
                    self._compute(
                        what, words["keep"], words["shape"], words.get("document_ends", ())
                    )
            case "backward":
                self._backward(words["graph"], words["keep"], words["shape"])
            case "add":
                if words["round"] != self._round:
                    self._sum = GradientSum()
                    self._round = words["round"]
                self._sum.offer([self._kept.pop(words["share"])], 0)
                self._sum.drain()
            case "take":
                if words["round"] != self._round:
                    raise ValueError(
                        f"sums of round {words['round']} are asked for, these are of {self._round}"
                    )
                self._kept[words["number"]] = self._sum.whole()[0]
            case "gather":
                self._program.whole(self._kept[words["number"]], [words["name"]])
            case "load":
                self._program.load(None)
            case "step":
                follow(KernelRule(**words["rule"]), self._device.type)
                orders = [PartOrder(**{**o, "shape": tuple(o["shape"])}) for o in words["orders"]]
                states, _, _ = self._optimizer.step(orders, words["epoch"], self._kept)
                self._kept |= states
            case "keep":
                shapes = {key: (rows, cols) for key, (rows, cols) in words["shapes"].items()}
                self._kept[words["number"]] = self._optimizer.keep(
                    words["name"], words["host"], shapes
                )
            case "collect":
                rows, cols = words["shape"]
                piece = self._kept[words["number"]].get(words["key"])
                self._optimizer.collect(words["name"], words["host"], (rows, cols), piece)
            case other:
                raise ValueError(f"no command is called {other!r}")

    def _compute(
        self, what: str, keep: int, shape: list[int], document_ends: Sequence[int]
    ) -> None:
        dtype = torch.float32
        if what == "embed":
            dtype = torch.int64
        x = self._receive(shape, dtype)
        if keep and what != "embed":
            x.requires_grad_()
        if what == "forward":
            output = self._program.forward(x, document_ends)
        elif what == "loss":
            output = self._program.loss(x, self._receive(shape[:2], torch.int64))
        elif what == "embed":
            output = self._program.embed(x, document_ends)
        else:
            output = self._program.logits(x)
        if keep:
            self._kept[keep] = [x] if x.requires_grad else [], output

    def _backward(self, graph: int, keep: int, shape: list[int] | None) -> None:
        inputs, output = self._kept.pop(graph)
        gradient = None
        if shape is not None:
            gradient = self._receive(shape, torch.float32)
        _, share, _ = self._program.gradients(output, inputs, gradient)
        self._kept[keep] = share

    def _receive(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return self._here.share(torch.empty(shape, dtype=dtype, device=self._device))


def main() -> int:
    """Run one rank until rank 0 closes its standard input. Returns 0, or 1 after an error, which is
    printed on stderr."""
    lines = sys.stdin.buffer
    w = json.loads(lines.readline())
    try:
        set_threads(w["threads"], w["onednn"])
        device = Device.pick(w["device"])
        if device.is_cuda:
            torch.cuda.set_device(device.device)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        here = Rank.meet(w["rank"], w["size"], device, Path(w["store"]), w["timeout_s"])
        program = Program(here, ModelSettings(**w["model"]), w["stages"], w["stage"])
        worker = Worker(program, RankSteps(program, OptimSettings(**w["optimizer"]), w["epochs"]))
        while line := lines.readline():
            worker.do(json.loads(line))
    except Exception as e:  # noqa: BLE001 - said in one line; the exit code tells rank 0
        what = (str(e).splitlines() or [""])[0]
        print(
            f"tutti: local device {w['rank']}: {type(e).__name__}: {what}",
            file=sys.stderr,
            flush=True,
        )
        return 1
    Rank.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
