"""Peers that send false tensors, in a cell that trains a real model in one process under a real
leader."""

import copy
from pathlib import Path

import pytest
import torch

from node.core.ids import PeerId
from node.model.settings import ModelSettings
from node.pipeline.events import Direction
from testbed.models.judged import JudgedCell
from testbed.models.lying import ACCUSED, KINDS, Lie, LyingCell, peers

MODEL = ModelSettings(layers=3, d_model=32, heads=2, kv_heads=1, d_ff=64, vocab=256, seq_len=32)
LIAR = PeerId("s2b")
LOW = frozenset((PeerId("s1b"), PeerId("s2a")))
HONEST = 12
"""Epochs before the first lie."""
MOST = 10
"""Epochs within which a liar is out."""
DOCS = Path(__file__).resolve().parents[2] / "docs"


def made(*replicas: int) -> JudgedCell:
    """A cell of peers that compute in bf16 and of peers that compute in fp32."""
    text = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    cell = LyingCell(MODEL, len(replicas) - 1, tokens, low=LOW, epochs=100)
    return JudgedCell(cell, list(peers(*replicas)), micro_batches=8, micro_batch=4)


@pytest.fixture(scope="module")
def trained() -> JudgedCell:
    """A cell of eight peers that has trained for some epochs."""
    cell = made(2, 2, 2, 2)
    honest = cell.run(HONEST)
    assert honest.banned == {}
    assert honest.losses[-1] < honest.losses[0]
    return cell


def assert_out(cell: JudgedCell, lie: Lie, replicas: tuple[int, ...] = (2, 2, 2, 2)) -> None:
    """The liar gets no work after a few epochs, and everybody else still does."""
    outcome = cell.run(MOST, lie, until_banned=True)
    assert outcome.banned.keys() == {lie.peer}
    assert outcome.worked == {peer for peer, stage in peers(*replicas) if stage} - {lie.peer}


@pytest.mark.parametrize("way", list(Direction))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_liar_is_out_within_ten_epochs(trained: JudgedCell, kind: str, way: Direction) -> None:
    assert_out(copy.deepcopy(trained), Lie(LIAR, kind, way))


ALIBIS = ["false", "none", "disputed"]


@pytest.mark.parametrize("alibi", ALIBIS)
@pytest.mark.parametrize("way", list(Direction))
def test_no_report_hides_a_lie(trained: JudgedCell, alibi: str, way: Direction) -> None:
    """All micro-batches of the liar go between the same two neighbours at first."""
    assert_out(copy.deepcopy(trained), Lie(LIAR, "flipped", way, alibi=alibi))


@pytest.fixture(scope="module")
def narrow() -> dict[tuple[int, ...], JudgedCell]:
    """Trained cells by their replicas, made when they are asked for."""
    return {}


@pytest.mark.parametrize("alibi", ALIBIS)
@pytest.mark.parametrize(
    ("replicas", "liar", "way"),
    [
        ((1, 1, 2), "s2b", Direction.FORWARD),
        ((2, 1, 2), "s2b", Direction.FORWARD),
        ((1, 1, 3), "s2b", Direction.FORWARD),
        ((1, 2, 1, 2), "s3b", Direction.FORWARD),
        ((1, 2, 1), "s1b", Direction.BACKWARD),
    ],
)
def test_no_report_hides_a_lie_beside_the_only_replica_of_a_stage(
    narrow: dict[tuple[int, ...], JudgedCell],
    replicas: tuple[int, ...],
    liar: str,
    way: Direction,
    alibi: str,
) -> None:
    """Nobody can be put between the liar and the neighbour from which it takes its input."""
    if replicas not in narrow:
        narrow[replicas] = made(*replicas)
        assert narrow[replicas].run(HONEST).banned == {}
    lie = Lie(PeerId(liar), "flipped", way, alibi=alibi)
    assert_out(copy.deepcopy(narrow[replicas]), lie, replicas)


@pytest.mark.parametrize("way", list(Direction))
def test_who_accuses_its_neighbours_is_out_itself(trained: JudgedCell, way: Direction) -> None:
    assert_out(copy.deepcopy(trained), Lie(LIAR, ACCUSED, way))


@pytest.mark.parametrize("kind", ["flipped", "stale", "noisy"])
def test_a_lie_from_the_first_epoch_on_is_found_too(kind: str) -> None:
    assert_out(made(2, 2, 2, 2), Lie(LIAR, kind, Direction.FORWARD))


def test_the_last_of_a_stage_keeps_its_work() -> None:
    """Without another replica nobody can tell a lie from a change of the model."""
    outcome = made(2, 1, 2).run(6, Lie(PeerId("s1a"), "flipped", Direction.FORWARD))
    assert outcome.banned == {}
    assert "s1a" in outcome.worked
