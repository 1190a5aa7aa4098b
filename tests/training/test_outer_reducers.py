"""Outer rounds that do not take the mean: one cell of four lies about what it moved by, in real
exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from node.averaging.strategies.outer import OuterSettings
from tests.training.conftest import SHAPES, Peer, Rig
from tests.training.test_outer_rounds import inner, meeting

DELTAS = OuterSettings("butterfly", "deltas", 1, "sgd", lr=1.0, momentum=0.0)
"""The next parameters are the anchor minus what was made of the deltas."""
PARAMETERS = OuterSettings("butterfly", "parameters", 1)

Values = dict[str, torch.Tensor]


def lies(p: Peer) -> None:
    """From now on its speaker gives a thousand times what it has, the other way, and says that it
    is as much work as any."""
    assert p.outer is not None
    run = p.outer.run

    async def wrong(request, hook):
        given = {n: -1000 * t for n, t in (request.gradients or {}).items()}
        return await run(replace(request, gradients=given or None), hook)

    p.outer.run = wrong  # type: ignore[method-assign]


async def met(rig: Rig, names: str, liar: bool) -> tuple[list[Values], Values]:
    """One outer round of cells of one, the last of which may lie: what the honest gave, and what
    all took."""
    rig.deadline_s = 60.0
    peers = await rig.add(*names)
    cells: Sequence[Sequence[Peer]] = [[p] for p in peers]
    begun, plan = peers[0].parameters(), inner(rig, cells, None)
    await rig.epoch(plan, *peers)
    if liar:
        lies(peers[-1])
    held = [p.parameters() for p in (peers[:-1] if liar else peers)]
    await rig.epoch(meeting(rig, cells, plan), *peers)
    assert len({p.work.stage.digest for p in peers}) == 1, "all hold the same, whatever it is"
    after = peers[0].parameters()
    if rig.outer.carries == "parameters":
        return held, after
    return [{n: begun[n] - h[n] for n in SHAPES} for h in held], {
        n: begun[n] - after[n] for n in SHAPES
    }


def flat(values: Values) -> torch.Tensor:
    return torch.cat([values[n].flatten() for n in SHAPES])


def beyond(honest: Sequence[Values], made: Values) -> bool:
    """Whether some number is outside of what the honest have there, by more than rounding."""
    given, result = torch.stack([flat(h) for h in honest]), flat(made)
    slack = 1e-5 * given.abs().max()
    return bool(
        ((result < given.min(0).values - slack) | (result > given.max(0).values + slack)).any()
    )


@pytest.mark.parametrize(
    "settings",
    [DELTAS, PARAMETERS, replace(DELTAS, strategy="parameter-server")],
    ids=["d", "p", "s"],
)
@pytest.mark.parametrize("reducer", ["median", "trimmed-mean"])
async def test_one_lying_cell_of_four_moves_nothing_beyond_the_honest(
    rig: Rig, settings: OuterSettings, reducer: str
) -> None:
    rig.outer = replace(settings, reducer=reducer)
    honest, made = await met(rig, "abcd", liar=True)
    assert not beyond(honest, made)


@pytest.mark.parametrize("reducer", ["clipped-mean", "centered-clip"])
async def test_clipping_limits_the_step_to_an_honest_cells_length(rig: Rig, reducer: str) -> None:
    rig.outer = replace(DELTAS, reducer=reducer, codec="int8")
    honest, made = await met(rig, "abcd", liar=True)
    given = torch.stack([flat(h) for h in honest])
    assert (flat(made) - given.mean(0)).norm() < given.norm(dim=1).max()


async def test_it_moves_their_mean_wherever_it_likes(rig: Rig) -> None:
    """What the others are for: the same lie, and the mean."""
    rig.outer = DELTAS
    honest, made = await met(rig, "abcd", liar=True)
    assert beyond(honest, made)
    given = torch.stack([flat(h) for h in honest])
    assert (flat(made) - given.mean(0)).norm() > 10 * given.norm(dim=1).max()


async def test_the_median_over_honest_cells_is_that_of_their_values(rig: Rig) -> None:
    rig.outer = replace(PARAMETERS, reducer="median")
    held, made = await met(rig, "abc", liar=False)
    torch.testing.assert_close(
        flat(made), torch.stack([flat(h) for h in held]).median(0).values, rtol=1e-6, atol=1e-7
    )
