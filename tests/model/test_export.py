import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from node.core.errors import LocalFault, OutOfResources, Refused, UsageFault
from node.model import export
from node.model.export import Export
from node.model.extras import Extras
from node.model.settings import ModelSettings
from node.model.stages import build
from testbed.reference.unsplit import Unsplit
from tests.model.conftest import exported

SMALL = ModelSettings(
    layers=3, d_model=32, heads=4, kv_heads=2, d_ff=48, vocab=259, seq_len=16, init_std=0.1
)
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": [
            {
                "id": i,
                "content": w,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, w in ((256, "<|bos|>"), (257, "<|eos|>"), (258, "<|pad|>"))
        ],
        "model": {
            "type": "WordLevel",
            "vocab": {"a": 0, "<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258},
            "unk_token": "a",
        },
    }
).encode()


def merged(settings, stages=2):
    every = [build(settings, stages, stage).state_dict() for stage in range(stages + 1)]
    return {name: tensor for part in every for name, tensor in part.items()}


KINDS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama 3": ("LlamaForCausalLM", {"rope_factor": 8.0, "rope_context": 16}),
    "wide heads": ("LlamaForCausalLM", {"head_width": 24}),
    "qwen 2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen 3": ("Qwen3ForCausalLM", {"qk_norm": True, "head_width": 48}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it_with_equal_logits(tmp_path, kind, tied):
    name, changes = KINDS[kind]
    settings = replace(SMALL, tied=tied, rope_theta=777.0, norm_eps=1e-6, **changes)
    ours = Unsplit(settings)
    for parameter in ours.parameters():
        # away from the first value, so that a missing parameter would show
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    tensors = ours.ends.state_dict() | ours.blocks.state_dict()
    where = exported(tmp_path / "out", settings, tensors, TOKENIZER)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        where, output_loading_info=True
    )
    assert type(theirs).__name__ == name
    assert not any(info.values()), info
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 259, (2, 16))
    with torch.no_grad():
        logits = ours.logits(tokens)
        assert logits.std() > 0.1
        torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert theirs.generation_config.eos_token_id == 257
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        256,
        257,
        258,
    )


def test_the_export_carries_the_torch_format_and_no_extra_files(tmp_path):
    where = exported(tmp_path / "a" / "out", SMALL, merged(SMALL))
    with safe_open(where / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(merged(SMALL))
    assert sorted(p.name for p in where.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [p.name for p in where.parent.iterdir()] == ["out"]


def test_an_earlier_export_is_replaced_and_strangers_are_not(tmp_path):
    where = tmp_path / "out"
    where.mkdir()
    exported(where, SMALL, merged(SMALL), TOKENIZER)
    other = replace(SMALL, init_seed=2)
    exported(where, other, merged(other))
    assert not (where / "tokenizer.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    for name, content in (
        ("config.json", '{"model_type": "llama"}'),
        ("config.json", "[]"),
        ("notes.txt", "mine"),
    ):
        stranger = tmp_path / f"stranger-{len(list(tmp_path.iterdir()))}"
        stranger.mkdir()
        (stranger / name).write_text(content)
        with pytest.raises(Refused):
            exported(stranger, SMALL, merged(SMALL))
        assert (stranger / name).read_text() == content
    with pytest.raises(Refused):
        exported(stranger / "notes.txt", SMALL, merged(SMALL))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lm_head.weight": None}, "1 tensors missing"),
        ({"x": torch.zeros(1)}, "1 unknown"),
        ({"lm_head.weight": torch.zeros(1, 2)}, "shape"),
    ],
)
def test_half_a_model_is_refused(tmp_path, changes, why):
    tensors = {n: t for n, t in (merged(SMALL) | changes).items() if t is not None}
    with pytest.raises(UsageFault, match=why):
        exported(tmp_path / "out", SMALL, tensors)
    assert not (tmp_path / "out").exists()


def test_the_root_is_no_place(tmp_path):
    with pytest.raises(UsageFault, match="cannot be an export"):
        exported(Path("/"), SMALL, merged(SMALL))


def test_a_place_that_cannot_be_looked_at_is_named(tmp_path):
    with pytest.raises(UsageFault, match="File name too long"):
        exported(tmp_path / ("x" * 300), SMALL, merged(SMALL))


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("writes", [0, 1, 5, 31, 32])
def test_a_full_disk_leaves_the_old_export(tmp_path, monkeypatch, writes):
    out = exported(tmp_path / "out", SMALL, merged(SMALL))
    before = (out / "model.safetensors").read_bytes()
    other = replace(SMALL, init_seed=9)
    tensors = merged(other)
    real = export._write_at
    left = [writes]

    def full(fd, data, offset):
        if not left[0]:
            raise NO_SPACE
        left[0] -= 1
        real(fd, data, offset)

    monkeypatch.setattr(export, "_write_at", full)
    with pytest.raises(OutOfResources):
        exported(out, other, tensors)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_fails_at_the_last_moment_leaves_the_old_export(tmp_path, monkeypatch):
    out = exported(tmp_path / "out", SMALL, merged(SMALL))
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(export, "sync", Mock(side_effect=NO_SPACE))
    with pytest.raises(OutOfResources):
        exported(out, SMALL, merged(SMALL))
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = Mock(return_value=Mock(total=1 << 40, free=1 << 20))
    monkeypatch.setattr(export.shutil, "disk_usage", usage)
    with pytest.raises(OutOfResources, match=r"needs 64\.2 MiB, and 1\.0 MiB are free"):
        exported(tmp_path / "a" / "out", SMALL, merged(SMALL))
    large = replace(SMALL, vocab=1 << 18)
    alone = Export(tmp_path / "out", large).needed
    with_gguf = Export(tmp_path / "out", large, gguf=True)
    assert with_gguf.needed == pytest.approx(alone + with_gguf.nbytes / 2, rel=1e-3)
    usage.return_value.free = alone
    with pytest.raises(OutOfResources):
        with_gguf.open()
    usage.return_value.free = 1 << 20
    assert list(tmp_path.iterdir()) == []
    usage.return_value.total = 0  # a file system that does not tell
    exported(tmp_path / "a" / "out", SMALL, merged(SMALL))


def test_a_file_that_is_short_is_noticed(tmp_path, monkeypatch):
    real = export._write_at
    monkeypatch.setattr(export, "_write_at", lambda fd, data, at: real(fd, data[:-1], at))
    with pytest.raises(LocalFault, match="not written whole"):
        exported(tmp_path / "out", SMALL, merged(SMALL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_all_files_have_one_mode(tmp_path, mask):
    before = os.umask(mask)
    try:
        out = exported(tmp_path / "out", SMALL, merged(SMALL), TOKENIZER, card="# card")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()}
    assert modes == dict.fromkeys(modes, 0o644 & ~mask)
    assert len(modes) == 6
    assert stat.S_IMODE(out.stat().st_mode) == 0o755 & ~mask


def test_stages_come_in_any_order_and_once(tmp_path):
    stages = [build(SMALL, 2, stage).state_dict() for stage in (2, 0, 1)]
    out = Export(tmp_path / "out", SMALL)
    out.open()
    for tensors in stages:
        out.put(tensors)
    with pytest.raises(UsageFault, match="given twice"):
        out.put(stages[0])
    out.publish()
    out.discard()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == merged(SMALL).keys()
    assert all(torch.equal(found[name], t) for name, t in merged(SMALL).items())


def test_an_export_that_is_given_up_leaves_nothing(tmp_path):
    out = Export(tmp_path / "deep" / "out", SMALL)
    out.open()
    out.put(build(SMALL, 2, 1).state_dict())
    assert [p.name for p in (tmp_path / "deep").iterdir()] != ["out"]
    out.discard()
    out.discard()
    assert list((tmp_path / "deep").iterdir()) == []


def test_what_somebody_added_to_an_export_is_not_lost(tmp_path):
    out = exported(tmp_path / "out", SMALL, merged(SMALL), card="# card")
    assert exported(out, SMALL, merged(SMALL), card="# newer card") == out
    assert (out / "README.md").read_text() == "# newer card"
    (out / "README.md").write_text("# newer card\nlicense: mine")
    with pytest.raises(Refused, match=r"README\.md was changed"):
        exported(out, SMALL, merged(SMALL), card="# third")
    (out / "README.md").unlink()
    (out / "results.txt").write_text("mine")
    with pytest.raises(Refused, match=r"holds results\.txt"):
        exported(out, SMALL, merged(SMALL), card="# third")
    assert (out / "results.txt").read_text() == "mine"
    (out / "results.txt").unlink()
    exported(out, SMALL, merged(SMALL), card="# third")


def test_an_export_of_before_there_were_cards_is_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "llama", "tutti": {"format": 1}}')
    exported(out, SMALL, merged(SMALL), card="# card")
    assert (out / "README.md").read_text() == "# card"


def test_when_the_new_cannot_take_its_place_the_old_comes_back(tmp_path, monkeypatch):
    out = exported(tmp_path / "out", SMALL, merged(SMALL))
    before = (out / "model.safetensors").read_bytes()
    real = export.Path.rename

    def once_refused(self, target):
        if (
            (self / "model.safetensors").exists()
            and target == out
            and not self.name.endswith(".old")
        ):
            raise OSError(errno.EIO, "input/output error")
        return real(self, target)

    monkeypatch.setattr(export.Path, "rename", once_refused)
    with pytest.raises(UsageFault):
        exported(out, SMALL, merged(SMALL))
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageFault, match="tokenizer"):
        exported(tmp_path / "out", SMALL, merged(SMALL), b"[]")
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_is_written_in_several_files_with_an_index(tmp_path):
    tensors = merged(SMALL)
    where = exported(tmp_path / "out", SMALL, tensors, shard_bytes=40_000)
    shards = sorted(p.name for p in where.glob("model-*.safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    largest = max(t.numel() * 4 for t in tensors.values())
    for name in shards:
        assert (where / name).stat().st_size < max(40_000, largest) + 8192
    index = json.loads((where / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        where, output_loading_info=True
    )
    assert not any(info.values()), info
    for name, parameter in loaded.state_dict().items():
        assert torch.equal(parameter, tensors[name]), name
    exported(where, SMALL, tensors)
    assert not list(where.glob("model-*")), "an earlier export in shards is replaced"


class Killed(BaseException):
    """The process ends here: nothing is cleaned up, and its descriptors are closed."""


def killed(out: Export) -> None:
    out._close()
    out._let_go()


def begun(directory: Path) -> Export:
    """An export that has its hidden directory and a part of the model."""
    out = Export(directory, SMALL)
    out.open()
    out.put(build(SMALL, 2, 1).state_dict())
    return out


def test_what_a_killed_export_has_left_is_removed_by_the_next_one(tmp_path, monkeypatch):
    where = tmp_path / "out [1]"
    lives = begun(where)
    killed(begun(where))
    theirs = tmp_path / ".out [1].0123abcd"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    (tmp_path / ".out [1].deadbeef").write_text("a file")
    (tmp_path / ".other.0123abcd").mkdir()
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".out [1].")]) == 4
    usage = Mock(return_value=Mock(total=1 << 40, free=1 << 20))
    with monkeypatch.context() as disk:
        disk.setattr(export.shutil, "disk_usage", usage)
        with pytest.raises(OutOfResources):
            Export(where, SMALL).check()
    left = {lives._staged.name, theirs.name, ".out [1].deadbeef", ".other.0123abcd"}
    assert {p.name for p in tmp_path.iterdir()} == left, (
        "also where it took the room that is needed"
    )
    for stage in (0, 2):
        lives.put(build(SMALL, 2, stage).state_dict())
    lives.publish()
    lives.discard()
    assert {p.name for p in tmp_path.iterdir()} == left - {lives._staged.name} | {where.name}


@pytest.mark.parametrize("at", range(4))
def test_an_export_killed_while_it_takes_its_place_leaves_one_there(tmp_path, monkeypatch, at):
    """``at``: number of renames that are made before the end."""
    where = exported(tmp_path / "out", SMALL, merged(SMALL), card="# before")
    out = begun(where)
    for stage in (0, 2):
        out.put(build(SMALL, 2, stage).state_dict())
    rename = export.Path.rename
    left = [at]

    def counted(self, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return rename(self, target)

    def half_removed(path, **how):
        (Path(path) / "model.safetensors").unlink()
        raise Killed

    with monkeypatch.context() as end:
        end.setattr(export.Path, "rename", counted)
        end.setattr(export.shutil, "rmtree", half_removed)
        with pytest.raises(Killed):
            out.publish(Extras(card="# after"))
    killed(out)
    if at == 3:
        assert not list(tmp_path.glob(".*.old")), "half of one does not come back"
    Export(where, SMALL).check()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (where / "README.md").read_text() == ("# before", "# after")[at >= 2]
    assert load_file(where / "model.safetensors").keys() == merged(SMALL).keys()


def test_an_export_that_changes_places_with_an_earlier_one_is_left_alone(tmp_path, monkeypatch):
    where = exported(tmp_path / "out", SMALL, merged(SMALL))
    rename = export.Path.rename

    def watched(self, target):
        found = rename(self, target)
        Export(where, SMALL).check()
        return found

    monkeypatch.setattr(export.Path, "rename", watched)
    exported(where, SMALL, merged(SMALL), card="# after")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (where / "README.md").read_text() == "# after"
