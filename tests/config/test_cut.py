"""The cut of a model that follows from the memory of the machines that will train it."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.app.capacity import PROCESS, Cut, check_memory, cut_for, cut_lines
from node.config import NodeConfig, sizes_of
from node.core.errors import OutOfResources, UsageFault
from node.core.ids import ENDS
from node.manifest import Manifest
from tests.config.test_fine_tuning import LLAMA_8B, SMOLLM2, made

SMALL = made(SMOLLM2)
LARGE = made(LLAMA_8B, model__adapter=16, optimizer__parameters="bf16", pipeline__micro_batch=1)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    """Settings of a machine where nobody set anything."""
    return NodeConfig(tmp_path)


def cut_manifest(manifest: Manifest, cut: Cut) -> Manifest:
    return replace(
        manifest,
        model=replace(manifest.model, ends_layers=cut.ends_layers),
        pipeline=replace(manifest.pipeline, stages=cut.stages),
    )


def held(config: NodeConfig, manifest: Manifest, cut: Cut) -> bool:
    """True if each machine of the cut, but for a single one, admits its stage as a daemon does."""
    cut_up = cut_manifest(manifest, cut)
    rooms = {p.stage: config.memory_limit(p.memory) - PROCESS for p in cut.places}
    return all(check_memory(config, cut_up, stage, room).ok for stage, room in rooms.items())


@pytest.mark.parametrize(
    ("manifest", "machines"),
    [
        (SMALL, "24GB"),
        (SMALL, "8GB,8GB"),
        (SMALL, "8GB,8GB,24GB"),
        (SMALL, "3GB,3GB,3GB,3GB"),
        (LARGE, "16GB,16GB,16GB"),
        (LARGE, "8GB,8GB,8GB,8GB,8GB"),
        (LARGE, "24GB,8GB,8GB"),
    ],
)
def test_each_machine_holds_its_stage(config, manifest, machines) -> None:
    sizes = sizes_of(machines)
    cut = cut_for(config, manifest, sizes)
    cut_manifest(manifest, cut).check()
    assert [place.stage for place in cut.places] == list(range(cut.stages + 1))
    if len(sizes) == 1:
        assert {place.memory for place in cut.places} == set(sizes)
        assert sum(place.needed for place in cut.places) <= sizes[0]
    else:
        assert held(config, manifest, cut)
        used = [*(place.memory for place in cut.places), *cut.more, *cut.small]
        assert sorted(used) == sorted(sizes)


def test_the_number_of_stages_follows_from_the_memory(config) -> None:
    assert cut_for(config, SMALL, sizes_of("24GB,24GB,24GB")).stages == 1
    smaller = [
        cut_for(config, LARGE, sizes_of(",".join([f"{size}GB"] * 12))).stages
        for size in (64, 16, 10, 8)
    ]
    assert smaller == sorted(smaller)
    assert smaller[0] < smaller[-1]
    for size in (16, 10, 8):
        machines = sizes_of(",".join([f"{size}GB"] * 12))
        cut = cut_for(config, LARGE, machines)
        fewer = cut_manifest(LARGE, replace(cut, stages=cut.stages - 1))
        room = config.memory_limit(machines[0]) - PROCESS
        stages = range(1, cut.stages)
        assert cut.stages > 1
        assert not all(check_memory(config, fewer, stage, room).ok for stage in stages)


def test_a_large_machine_keeps_layers_at_the_ends_where_nothing_else_fits(config) -> None:
    machines = sizes_of("24GB,4GB,4GB")
    cut = cut_for(config, LARGE, machines)
    assert cut.ends_layers > 0
    assert cut.places[ENDS].memory == machines[0]
    assert held(config, LARGE, cut)
    fewer = replace(cut, ends_layers=cut.ends_layers - 1)
    assert not held(config, LARGE, fewer), "as few layers as possible"
    with pytest.raises(OutOfResources):
        cut_for(config, LARGE, machines, ends_layers=0)
    assert cut_for(config, SMALL, sizes_of("24GB,24GB")).ends_layers == 0
    assert cut_for(config, SMALL, sizes_of("24GB,24GB"), ends_layers=5).ends_layers == 5


def test_machines_that_hold_nothing_and_machines_to_spare_are_named(config) -> None:
    cut = cut_for(config, SMALL, sizes_of("24GB,24GB,24GB,600MB"))
    assert cut.small == (600 * 10**6,)
    assert cut.more == (24 * 10**9,)
    said = "\n".join(cut_lines(cut))
    assert "too small for a block stage: 1 of " in said
    assert "another peer of a block stage: 1 of 24 GB" in said
    assert "the fewest that fit" in said
    # A machine that is small, but not too small, makes the stages smaller.
    assert cut_for(config, LARGE, sizes_of("64GB,64GB,64GB,64GB,64GB")).stages == 1
    useful = cut_for(config, LARGE, sizes_of("64GB,64GB,64GB,64GB,9GB"))
    assert not useful.small
    assert useful.stages > 1


def test_each_stage_is_shown_with_its_layers_and_its_machine(config) -> None:
    cut = cut_for(config, LARGE, sizes_of("16GB,16GB,16GB"))
    assert cut.stages == 2
    first, ends, one, two, *_ = cut_lines(cut)
    assert first == (
        "stages   2 block stages, the fewest with which each of these machines can hold a part"
    )
    assert ends.strip().startswith("the ends (embedding, head): ")
    assert one.strip().startswith("stage 1 (layers 0-15): ")
    assert two.strip().startswith("stage 2 (layers 16-31): ")
    assert all(line.endswith(" of 16 GB") for line in (ends, one, two))


def test_the_founder_is_told_if_its_machine_cannot_hold_all(config) -> None:
    few = cut_for(config, LARGE, sizes_of("16GB,16GB,16GB"))
    assert not few.alone
    assert "--role ends" in cut_lines(few)[-1]
    alone = cut_for(config, SMALL, sizes_of("24GB"))
    assert alone.alone
    assert not any("--role" in line for line in cut_lines(alone))


def test_machines_that_are_too_small_are_refused_with_the_demands(config) -> None:
    with pytest.raises(OutOfResources, match=r"2 of 4 GB.*the block stage takes .* GiB") as refused:
        cut_for(config, LARGE, sizes_of("4GB,4GB"))
    assert "model.adapter" in refused.value.next_step
    with pytest.raises(OutOfResources, match="each of 2 block stages takes up to"):
        cut_for(config, LARGE, sizes_of("4GB,4GB,4GB"))
    with pytest.raises(OutOfResources):
        cut_for(config, SMALL, [0])


def test_sizes_need_units() -> None:
    assert sizes_of("8GB, 8GiB,1.5TB") == [8 * 10**9, 8 << 30, 1_500_000_000_000]
    for text in ("8", "8GB,,8GB", "", "8GB;8GB", "-8GB", "eight"):
        with pytest.raises(UsageFault, match="not the memory of a machine"):
            sizes_of(text)
