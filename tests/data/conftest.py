from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import tokenizers
import torch

from node.data.settings import OWN_MANIFEST, DataSettings, Places
from node.data.sources import Corpus, open_data
from node.data.streamed import pieces
from node.data.streamed import stream as stream_module
from node.data.streamed.stream import Stream
from testbed.fakes.web_server import Answers
from tests.data.streamed import stream


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces small, ask a server that is gone again at once, and one that refuses not for
    long."""
    monkeypatch.setattr(pieces, "PIECE", 4096)
    monkeypatch.setattr(pieces, "LANES", 4)
    monkeypatch.setattr(stream_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(stream_module, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(stream_module, "REFUSED_S", 0.02)


@pytest.fixture
async def opens() -> AsyncIterator[Callable[..., Stream]]:
    """Factory of streams, with the arguments of :func:`stream`; closes all of them after the
    test."""
    made: list[Stream] = []

    def opened(*what: object, **more: object) -> Stream:
        made.append(stream(*what, **more))  # type: ignore[arg-type]
        return made[-1]

    yield opened
    for one in made:
        await one.close()


@pytest.fixture
def answers():
    """Factory of an :class:`Answers` from a function; closes each of them after the test."""
    made = []
    yield lambda say: made.append(Answers(say)) or made[-1]
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """File of a tokenizer that learnt a few words, and that truncates its inputs."""
    rust = tokenizers.Tokenizer(tokenizers.models.BPE())
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    rust.train_from_iterator(["the cat sat on the mat and the hat"] * 4, trainer)
    rust.enable_truncation(4)
    path = tmp_path / "tokenizer.json"
    rust.save(str(path))
    return path


def open_source(
    settings: DataSettings, seq_len: int, home: Path, places: Places = OWN_MANIFEST
) -> Corpus:
    """For a model that has embeddings for whatever is in the data, and the peer of the owner."""
    return open_data(settings, seq_len, 1 << 32, home, places)[0]
