"""A stage over two CPU processes beside the same stage on one device. One test at a time: a process
is in one group of ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from node.core.errors import DeviceLost
from node.core.ids import ENDS
from node.core.journey import Version
from node.local.optimizer import CutSteps
from node.local.program import Program
from node.local.ranks import Ranks
from node.local.stage import LocalStage
from node.model.device import Device
from node.model.settings import ModelSettings
from node.model.stages import build
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.pipeline.gradients import GradientSum
from node.pipeline.visit_buffers import StageMath
from node.stage.state import StageState
from testbed.reference.swarm import step_all

MODEL = ModelSettings(
    layers=2, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab=61, seq_len=16, qk_norm=True
)
DEEP = replace(MODEL, ends_layers=1)
"""The ends hold the first layer."""
BIASED = replace(DEEP, qk_norm=False, qkv_bias=True)
OPTIM = OptimSettings(warmup=1)
EPOCHS = 10


@dataclass
class Side:
    """The daemon's parts of a stage: arithmetic, gradient sums, parameters, optimizer."""

    math: StageMath
    gradients: GradientSum
    state: StageState
    owner: Owner

    def adopt(self, epoch: int) -> tuple[Mapping[str, torch.Tensor], int]:
        """Take the gradients, step, and put the fresh parameters in place.

        Returns the gradient sums by parameter, and their number of tokens.
        """
        sums, tokens = self.gradients.whole()
        parameters = self.state.parameters()
        mean = {n: g / tokens for n, g in sums.items()}
        fresh = {
            **parameters,
            **step_all(self.owner, {n: parameters[n] for n in mean}, mean, epoch),
        }
        self.state.adopt(fresh, Version(epoch + 1))
        self.gradients.reset()
        return sums, tokens


@dataclass
class Pair:
    """The stage over two processes, and the same stage alone."""

    ranks: Ranks
    local: LocalStage
    two: Side
    one: Side
    lost: list[DeviceLost] = field(default_factory=list)

    def step_alike(self, epoch: int, tokens: int) -> None:
        """Step both stages on their gradients; assert the same sums over `tokens` tokens and the
        same parameters."""
        sums, counted = self.two.adopt(epoch)
        wanted, counted_alone = self.one.adopt(epoch)
        assert counted == counted_alone == tokens
        assert sums.keys() == wanted.keys() == self.one.state.parameters().keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                sums[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        for name, parameter in self.one.state.parameters().items():
            # Newton-Schulz makes a direction's small components as large as the others: differences
            # in the last bits of a sum grow.
            torch.testing.assert_close(
                self.two.state.parameters()[name], parameter, rtol=1e-4, atol=1e-5
            )


@contextmanager
def pair(
    stage: int, folder: Path, model: ModelSettings = MODEL, optim: OptimSettings = OPTIM
) -> Iterator[Pair]:
    torch.set_num_threads(1)
    lost: list[DeviceLost] = []
    ranks = Ranks(folder / "devices", lost.append, timeout_s=300.0)
    try:
        ranks.start(["cpu", "cpu"], model, 1, stage, 1, optimizer=optim, epochs=EPOCHS)
        module = build(model, 1, stage)
        alone = build(model, 1, stage)
        device = Device.pick("cpu")
        program = Program(ranks.meet(device), model, 1, stage)
        steps = CutSteps(ranks, program, optim, EPOCHS)
        local = LocalStage(ranks, program, module, model, steps)
        two = Side(
            local.math(module, "fp32", device.autocast),
            local.gradients,
            StageState(module, stage, placed=local.place),
            Owner(optim, EPOCHS, steps=local.steps),
        )
        one = Side(
            StageMath(alone, "fp32"),
            GradientSum(),
            StageState(alone, stage),
            Owner(optim, EPOCHS),
        )
        yield Pair(ranks, local, two, one, lost)
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(1, tmp_path_factory.mktemp("blocks")) as made:
        yield made


@pytest.fixture(
    scope="module", params=[MODEL, DEEP, BIASED], ids=["plain", "with layers", "with biases"]
)
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with pair(ENDS, tmp_path_factory.mktemp("ends"), request.param) as made:
        yield made
