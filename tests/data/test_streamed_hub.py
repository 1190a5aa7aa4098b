"""Data sets of the Hub: the files of a split at one commit, from a server that answers as the Hub
does."""

import asyncio
import json
import re
import socket

import pytest
from huggingface_hub import constants

from node.core.errors import NetworkFault, UsageFault
from node.data.streamed import shards
from tests.data.streamed import documents, served, stream, write

COMMIT = "5f0c1d2e" * 5
CARD = {
    "configs": [
        {"config_name": "en", "data_files": [{"split": "train", "path": "en/train-*"},
                                             {"split": "test", "path": ["en/test.parquet"]}]},
        {"config_name": "de", "data_files": "de/*.jsonl.gz"},
    ]
}  # fmt: skip
TRAIN = ("en/train-0.parquet", "en/train-1.parquet")
FILES = (*TRAIN, "en/test.parquet", "de/a.jsonl.gz", "README.md")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server of one data set; `publish(names, card)` sets its files and its card."""
    root = tmp_path / "hub"
    files = root / "datasets/owner/name/resolve" / COMMIT

    def publish(names=FILES, card=CARD):
        for i, name in enumerate(names):
            path = files / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, documents(60, i))
        said = {
            "id": "owner/name",
            "sha": COMMIT,
            "cardData": card,
            "siblings": [{"rfilename": n, "size": (files / n).stat().st_size} for n in names],
        }
        (root / "api/datasets/owner").mkdir(parents=True)
        (root / "api/datasets/owner/name").write_text(json.dumps(said))

    with served(root) as server:
        server.publish = publish
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server


def names(made) -> list[str]:
    return [re.sub(f".*/{COMMIT}/", "", s.name) for s in made.listing.shards]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("owner/name:train", list(TRAIN)),
        ("owner/name:en:test", ["en/test.parquet"]),
        ("owner/name:de:train", ["de/a.jsonl.gz"]),
    ],
)
def test_the_card_says_which_files_a_split_has(hub, tmp_path, asked, found):
    hub.publish()
    made = stream(f"hf:{asked}", tmp_path)
    assert names(made) == found
    name, *rest = asked.split(":")
    assert made.listing.source == ":".join((f"hf:{name}@{COMMIT}", *rest))
    assert asyncio.run(made.rows(range(4))).shape == (4, 17)
    asyncio.run(made.close())


def test_without_a_card_names_say_it(hub, tmp_path):
    hub.publish(("data/train-0.parquet", "data/retrain.parquet", "data/test-0.parquet"), None)
    assert names(stream("hf:owner/name:train", tmp_path)) == ["data/train-0.parquet"]


@pytest.mark.parametrize(
    ("asked", "down", "fault", "says"),
    [
        ("owner/name:fr:train", False, UsageFault, "has no files of"),
        ("owner/name:en:validation", False, UsageFault, "has no files of"),
        ("owner/other:train", False, UsageFault, "has no data set"),
        ("owner/two/names:train", False, UsageFault, "has no data set"),
        ("owner/name:train", True, NetworkFault, None),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub, tmp_path, asked, down, fault, says):
    hub.publish()
    hub.down = down
    with pytest.raises(fault, match=says):
        stream(f"hf:{asked}", tmp_path)


def test_a_hub_that_never_answers_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "HUB_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{host}:{port}")
        with pytest.raises(NetworkFault, match="cannot reach the Hub"):
            stream("hf:owner/name:train", tmp_path)
