"""An epoch in which no token is trained on: a run of conversations may draw one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.conftest import SHAPES, shared


@pytest.mark.parametrize("loss_mask", [True, False])
async def test_an_epoch_without_a_token_to_train_on_keeps_everything(
    rig: Any, loss_mask: bool
) -> None:
    a, b = await rig.add("a", "b")
    owners = shared(a, b)
    plan = await rig.train((a, b), owners, 1)
    before = a.parameters()

    async def nothing(epoch: int) -> tuple[dict[str, torch.Tensor], int]:
        return {name: torch.zeros(shape) for name, shape in SHAPES.items()}, 0

    for peer in (a, b):
        pipeline = peer.pipeline
        pipeline.shape = replace(pipeline.shape, loss_mask=loss_mask)
        pipeline.take_gradients = nothing
    plan = await rig.begun((a, b), owners, plan, deadline_s=2.0)
    ended = await rig.average(plan, a, b, deadline_s=2.0)
    assert all(bool(e.missing) != loss_mask for e in ended)
    if loss_mask:
        for peer in (a, b):
            assert all(torch.equal(peer.parameters()[n], t) for n, t in before.items())
