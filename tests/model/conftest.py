from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from node.model.export import Export
from node.model.settings import ModelSettings


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def exported(
    directory: Path,
    settings: ModelSettings,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: bytes | None = None,
    parameters: str = "fp32",
    card: str = "",
) -> Path:
    """Write all tensors of a model at once; the directory."""
    out = Export(directory, settings, parameters)
    try:
        out.open()
        out.put(tensors)
        out.publish(tokenizer, card)
    finally:
        out.discard()
    return out.directory
