"""Inspection of real tensors in the first epochs of a model, which learns the text of the demo."""

from pathlib import Path

import numpy as np
import pytest
import torch

from node.core.ids import PeerId
from node.data.settings import OWN_MANIFEST
from node.data.sources import open_data
from node.manifest import Manifest
from node.model.settings import ModelSettings
from node.pipeline.events import Direction
from testbed.models.judged import JudgedCell
from testbed.models.lying import Lie, LyingCell, peers

SMALL = ModelSettings(layers=3, d_model=32, heads=2, kv_heads=1, d_ff=64, vocab=259, seq_len=32)
EPOCHS = 24
LIAR = PeerId("s2b")


@pytest.fixture
def cell(tmp_path: Path) -> JudgedCell:
    """Two peers at each of three stages, with two micro-batches each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Manifest.default_demo().data
    corpus, _ = open_data(data, SMALL.seq_len, SMALL.vocab, tmp_path, OWN_MANIFEST)
    tokens = torch.from_numpy(np.asarray(corpus.train[:200_000], np.int64))
    made = LyingCell(SMALL, 3, tokens, epochs=150)
    return JudgedCell(made, list(peers(1, 2, 2, 2)), micro_batches=4, micro_batch=4)


def test_nobody_is_banned_while_the_model_is_young(cell: JudgedCell) -> None:
    outcome = cell.run(EPOCHS)
    assert outcome.losses[-1] < outcome.losses[0] - 1
    assert outcome.banned == {}


def test_a_liar_is_banned_while_the_model_is_young(cell: JudgedCell) -> None:
    assert cell.run(10).banned == {}
    outcome = cell.run(10, Lie(LIAR, "flipped", Direction.FORWARD), until_banned=True)
    assert list(outcome.banned) == [LIAR]
