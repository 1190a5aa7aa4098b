from pathlib import Path

import pytest
import torch

from node.data.places import AS_NAMED, Places
from node.data.settings import DataSettings
from node.data.sources import Corpus, open_data


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def open_source(
    settings: DataSettings, seq_len: int, home: Path, places: Places = AS_NAMED
) -> Corpus:
    """For a model that has embeddings for whatever is in the data."""
    return open_data(settings, seq_len, 1 << 32, home, places)[0]
