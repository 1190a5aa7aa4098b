"""Memory of windows: counted before a stage is loaded, and never less than is used while a window
runs and afterwards."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.app.capacity import check_memory, hosted, main_memory, planned_memory
from node.averaging.strategies.keys import MOST_TOGETHER
from node.averaging.strategies.outer import OuterSettings
from node.config import NodeConfig
from node.core.errors import OutOfResources
from node.core.numbers import human
from node.manifest import Manifest, amended
from node.model.settings import DIGEST
from node.model.shapes import count, parameter_shapes
from node.outer import window
from node.outer.memory import OuterBytes, outer_bytes
from node.pipeline.settings import PipelineLimits
from tests.training.conftest import SHAPES, Peer, Rig
from tests.training.test_meeting import WITHIN_S, Cells

SIZES = {name: 4 * math.prod(shape) for name, shape in SHAPES.items()}
STAGE = sum(SIZES.values())
CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = OuterSettings("butterfly", window_s=60.0)
DILOCO = replace(PARAMETERS, carries="deltas", optimizer="nesterov")
STATE = OuterSettings("gossip", "state", "nesterov", window_s=60.0)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def kept(p: Peer) -> tuple[int, int]:
    """Return the bytes of anchors and momenta, those for a roll-back included; and the bytes of
    error-feedback residuals, present and pending."""
    anchor = p.work.anchor
    meeting = p.work.windows._meeting
    before, words, *_ = anchor._before or (None, {})
    states = [s for s in (anchor.state, before) if s is not None]
    sides = (anchor.words, words, (meeting and meeting.merge.owes) or {})
    return nbytes(
        t for s in states for side in (s.anchor, s.momentum) for t in side.values()
    ), nbytes(t for side in sides for t in side.values())


def under_way(p: Peer) -> int:
    """Bytes that the window gives, has received and has made, without the parameters in place."""
    m = p.work.windows._meeting
    c = m.contributions
    made = {}
    if m.mean is not None:
        made = m.mean.tensors
    sides = (c.given or {}, c.own or {}, made, *c.came.values())
    here = {t.untyped_storage().data_ptr() for t in m.local.values()}
    return nbytes(
        t for side in sides for t in side.values() if t.untyped_storage().data_ptr() not in here
    )


@pytest.mark.parametrize(
    "settings",
    [
        PARAMETERS,
        DILOCO,
        replace(DILOCO, codec="top-k", feedback=True),
        replace(DILOCO, codec="int8", feedback=True, fragments=2),
        STATE,
    ],
    ids=lambda s: f"{s.strategy}-{s.carries}-{s.codec}-{s.fragments}",
)
async def test_what_a_peer_keeps_is_what_was_counted(
    rig: Rig, settings: OuterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "AGAIN_S", 0.01)
    rig.outer = settings
    rig.deadline_s = WITHIN_S
    # The counted number of cells: two, or the largest group.
    names = "ab" if settings.strategy == "gossip" else "abcd"
    monkeypatch.setattr("node.outer.memory.MOST_TOGETHER", len(names))
    counted = outer_bytes(settings, SIZES)
    peers = await rig.add(*names)
    cells = Cells(rig, *([p] for p in peers))
    seen: list[int] = []
    made = window.Contributions.enough

    def enough(gathered: Any, merge: Any, partners: int, late: bool) -> bool:
        if done := made(gathered, merge, partners, late):
            meeting = (p for p in peers if p.work.windows._meeting.contributions is gathered)
            seen.append(max(under_way(p) for p in meeting))
        return done

    monkeypatch.setattr(window.Contributions, "enough", enough)
    for number in (1, 2, 3):
        await cells.train()
        assert 2 * kept(peers[0])[0] == counted.anchor, "nothing takes its place yet"
        await cells.give(number)
        # Received parameters are released once there is a mean.
        means = [p.work.windows._meeting.mean for p in peers]
        most = max(seen) + max(nbytes(mean.tensors.values()) for mean in means if mean)
        assert most <= counted.sent + counted.served
        owed = max(kept(p)[1] for p in peers)
        await cells.land(number)
        both = kept(peers[0])[0]
        if settings.fragments == 1:
            assert both == counted.anchor, (
                "the state before the round stays until nobody can undo it"
            )
        assert both <= counted.anchor
        owed = max(owed, *(kept(p)[1] for p in peers))
        assert owed <= counted.residual
    assert bool(owed) is settings.feedback
    assert len(seen) == 3 * len(peers)


def test_every_setting_that_keeps_something_is_counted() -> None:
    assert outer_bytes(OuterSettings(), SIZES) == OuterBytes()
    gossip = outer_bytes(replace(PARAMETERS, strategy="gossip"), SIZES)
    assert gossip == OuterBytes(sent=STAGE, served=2 * STAGE, device=STAGE)
    assert gossip.main == 3 * STAGE
    grid = OuterSettings("moshpit", grid=(4, 8), window_s=60.0)
    assert outer_bytes(grid, SIZES).served == 8 * STAGE, "the longest line of the grid"
    assert outer_bytes(PARAMETERS, SIZES).served == MOST_TOGETHER * STAGE
    plain = OuterBytes(anchor=4 * STAGE, sent=2 * STAGE, device=STAGE)
    assert replace(outer_bytes(DILOCO, SIZES), served=0) == plain
    assert outer_bytes(replace(DILOCO, codec="int8", feedback=True), SIZES).residual == 3 * STAGE
    state = outer_bytes(STATE, SIZES)
    assert (state.anchor, state.served) == (4 * STAGE, 4 * STAGE)


@pytest.mark.parametrize("name", ["diloco-top-k", "gossip", "diloco-streaming"])
def test_a_stage_without_memory_for_anchors_is_refused_early(name: str, tmp_path: Path) -> None:
    config = NodeConfig(tmp_path, limits=PipelineLimits(recompute="off"))
    manifest = Manifest.parse((CONFIGS / f"{name}.toml").read_bytes())
    plain = replace(manifest, outer=OuterSettings())
    ample = 1 << 40
    whole, without = (check_memory(config, m, 1, ample) for m in (manifest, plain))
    tight = int(without.needed / 0.9) + 1
    assert check_memory(config, plain, 1, tight).ok
    refused = check_memory(config, manifest, 1, tight)
    assert "rounds between cells" in refused.text
    with pytest.raises(OutOfResources):
        refused.require()
    assert check_memory(config, manifest, 1, int(whole.needed / 0.9) + 1).ok
    more = whole.needed - without.needed
    assert without.spare - more <= whole.spare <= without.spare - more // 2, (
        "the leader hears of what is left for optimizer state, which stands twice in a round"
    )


def test_ends_with_nothing_to_train_are_planned(tmp_path: Path) -> None:
    given = {"model.adapter": 8, "model.weights": [DIGEST + "a" * 64] * 4, "pipeline.stages": 3}
    manifest = amended(Manifest.default_demo(), given)
    config = NodeConfig(tmp_path)
    ends = check_memory(config, manifest, 0, 1 << 40)
    assert ends.ok
    assert {row.what for row in ends.table if row.when == "always" and row.nbytes} == {"parameters"}
    assert " for the ends or " in planned_memory(config, manifest)[0]


def test_a_joiner_is_told_of_the_stage_that_takes_most(tmp_path: Path) -> None:
    wide = {"model.d_model": 1024, "model.layers": 20, "pipeline.stages": 8}
    config = NodeConfig(tmp_path)
    manifest = amended(Manifest.default_demo(), wide)
    needed = {s: check_memory(config, manifest, s, 1 << 60).needed for s in range(1, 9)}
    most = max(needed, key=lambda s: needed[s])
    assert hosted(config, manifest, 1 << 60) == [0, most]
    (told,) = planned_memory(config, manifest)
    assert f" or {human(needed[most])} for stage {most}, " in told
    chosen = replace(config, node=replace(config.node, stage="2"))
    told, *parts = planned_memory(chosen, manifest, verbose=True)
    assert told == f"up to {human(needed[2])} for stage 2, beside the program itself"
    assert parts[0] == "stage 2:"
    assert parts[1].startswith("  always parameters")


def test_anchors_of_a_device_with_own_memory_use_main_memory(tmp_path: Path) -> None:
    config = NodeConfig(tmp_path)
    manifest = Manifest.parse((CONFIGS / "diloco.toml").read_bytes())
    plain = replace(manifest, outer=OuterSettings())
    ample = 1 << 40
    main = (
        check_memory(config, manifest, 1, ample).needed
        - check_memory(config, plain, 1, ample).needed
    )
    assert main > 0
    on_device = (
        check_memory(config, manifest, 1, ample, ample).needed
        - check_memory(config, plain, 1, ample, ample).needed
    )
    assert 0 < on_device < main, "only the parameters that are given stay there"
    main -= on_device
    # Beside them are the parameters that a round makes, and a checkpoint.
    verdict = check_memory(config, manifest, 1, ample, ample)
    kept = main_memory(plain, 1, verdict, gpu=True)
    parameters = 4 * count(parameter_shapes(plain.model, plain.pipeline.stages, 1))
    assert kept > 2 * parameters
    main += kept
    assert main_memory(manifest, 1, verdict, gpu=True) == main
    assert check_memory(config, manifest, 1, ample, int(main / 0.9) + 1).ok
    short = check_memory(config, manifest, 1, ample, main)
    assert "main memory" in short.text
    with pytest.raises(OutOfResources) as caught:
        short.require()
    assert "a machine" in caught.value.next_step
    assert not check_memory(config, manifest, 1, 1 << 10, ample).ok, (
        "the device's own counts as before"
    )


def test_a_stage_that_does_not_fit_recomputes(tmp_path: Path) -> None:
    demo = Manifest.default_demo()
    ample = 1 << 40

    def config(recompute: str) -> NodeConfig:
        return NodeConfig(tmp_path, limits=PipelineLimits(recompute=recompute))

    needed = {
        mode: check_memory(config(mode), demo, 1, ample).needed
        for mode in ("off", "layers", "stage")
    }
    assert needed["off"] > needed["layers"]
    for available, mode in (
        (ample, "off"),
        (int(needed["off"] / 0.9) + 1, "off"),
        (needed["off"], "layers"),
        (int(needed["layers"] / 0.9) + 1, "layers"),
    ):
        verdict = check_memory(config("auto"), demo, 1, available)
        assert (verdict.ok, verdict.recompute) == (True, mode)
        assert ("the input of every layer is kept" in verdict.text) == (mode == "layers")
    refused = check_memory(config("auto"), demo, 1, 1 << 10)
    least = min(needed.values())
    assert (refused.ok, refused.needed) == (False, least), "advice begins from what needs least"
    assert not check_memory(config("off"), demo, 1, needed["off"]).ok
    assert check_memory(config("stage"), demo, 0, ample).recompute == "off", "the ends keep little"
