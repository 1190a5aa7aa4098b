from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from node.data.tokenizer_files import TokenizerFiles
from node.model.export import Export
from node.model.extras import Extras
from node.model.files import TOKENIZER
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
    given: TokenizerFiles | None = None,
    shard_bytes: int = 10**9,
    gguf: bool = False,
    base: str = "",
) -> Path:
    """Write all tensors of a model at once and return its directory. `given`: the files that came
    with the model; `tokenizer`: a tokenizer.json alone."""
    given = given or TokenizerFiles({}, tokenizer)
    files = dict(given.files)
    if given.tokenizer_json is not None:
        files[TOKENIZER] = given.tokenizer_json
    extras = Extras(
        files=files,
        bos=given.bos_id,
        eos=given.eos_ids,
        pad=given.pad_id,
        words=given.special_tokens,
        template=given.chat_template,
        card=card,
        base=base,
    )
    out = Export(directory, settings, parameters, shard_bytes, gguf=gguf)
    try:
        out.open()
        out.put(tensors)
        out.publish(extras)
    finally:
        out.discard()
    return out.directory
