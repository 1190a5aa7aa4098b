"""Settings of the copies of checkpoints, and what becomes of an address with a password."""

from pathlib import Path
from typing import Any

import pytest

from node.app.launch import as_flags, environment_of_child, for_child
from node.config import NodeConfig
from node.core.errors import UsageFault

SECRET = "s3://key:secret77@bucket/run"


def loaded(tmp_path: Path, **flags: Any) -> NodeConfig:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return NodeConfig.load({"home": tmp_path, **given}, {})


@pytest.mark.parametrize("to", ["", "/mnt/backup", "~/backup", "memory://x", SECRET])
def test_a_place_is_a_whole_path_or_an_address(tmp_path: Path, to: str) -> None:
    assert loaded(tmp_path, checkpoint__to=to).checkpoint.to == to
    assert loaded(tmp_path, restore=to).node.restore == to


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"checkpoint__to": "backup"}, "whole path"),
        ({"restore": "backup"}, "whole path"),
        ({"checkpoint__to": "simplecache::s3://bucket/run"}, "checkpoint.to"),
        ({"checkpoint__to": "s3://a/b::c"}, "chain"),
        ({"checkpoint__to": "/mnt/x", "checkpoint__to_every": "0 epochs"}, "no interval"),
        ({"checkpoint__to": "/mnt/x", "checkpoint__to_every": "1 fortnight"}, "no interval"),
        ({"checkpoint__to": "/mnt/x", "checkpoint__to_keep": "0"}, "to_keep"),
        ({"checkpoint__to": "/mnt/x", "checkpoint__within_s": "0"}, "none are written here"),
    ],
)
def test_what_cannot_be_copied_is_refused_at_the_start(
    tmp_path: Path, flags: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageFault) as e:
        loaded(tmp_path, **flags)
    assert says in f"{e.value.what} {e.value.next_step}"


def test_children_get_an_address_where_nobody_else_reads_it(tmp_path: Path) -> None:
    config = loaded(tmp_path, checkpoint__to=SECRET, restore="/mnt/backup")
    words = as_flags(for_child(config, "child", 1, "/ip4/127.0.0.1/tcp/1"))
    assert "secret77" not in " ".join(words)
    variables = environment_of_child(config)
    child = NodeConfig.load({"home": tmp_path / "child"}, variables)
    assert (child.checkpoint.to, child.node.restore) == (SECRET, "/mnt/backup")
    none = environment_of_child(loaded(tmp_path))
    assert NodeConfig.load({"home": tmp_path / "child"}, none).checkpoint.to == ""
