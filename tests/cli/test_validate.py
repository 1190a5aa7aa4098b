"""`tutti swarm init` and `tutti swarm validate` open the files that a manifest names, and report
their errors."""

import hashlib
import json
import shlex
import sys
from pathlib import Path

import pytest
import tokenizers

from node import fine_tuning
from node.app.joining import run_name
from node.app.run_files import RunFiles
from node.config import NodeConfig
from node.data.readers import pydoc
from node.data.settings import Places
from node.data.tokenizer_files import FilesMissing
from node.identity.keys import Identity
from node.manifest import Manifest, amended, read_manifest
from node.model.pretrained import Weights
from testbed.models import directories
from tests.cli.conftest import refused

TEXT = "the cat sat on the mat and looked at the rain\n" * 200


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "elsewhere" / "corpus.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


@pytest.fixture
def words(tmp_path):
    """A tokenizer of 1,024 words."""
    rust = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(1024)}, unk_token="w0")
    )
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "elsewhere" / "words.json"
    path.parent.mkdir(exist_ok=True)
    rust.save(str(path))
    return path


def test_init_writes_hashes_and_remembers_file_locations(tutti, home, ours, corpus, words):
    said = tutti(
        "swarm",
        "init",
        "--data",
        str(corpus),
        "--tokenizer",
        str(words),
        "--set",
        "model.vocab=1024",
        "--json",
    ).good()
    made = read_manifest(home.parent / "swarm.toml")
    assert (made.data.source, made.data.tokenizer) == ("file:corpus.txt", "words.json")
    assert (made.data.sha256, made.data.tokenizer_sha256) == tuple(
        hashlib.sha256(content).hexdigest() for content in (TEXT.encode(), words.read_bytes())
    )
    assert str(corpus.parent) not in (home.parent / "swarm.toml").read_text()
    assert ours.places(made.run_id) == Places(str(corpus), str(words))
    assert json.loads(said)["data"]["sha256"] == made.data.sha256
    # Here it is found again; another machine says where it keeps them.
    assert "signature good" in tutti("swarm", "validate", "swarm.toml").stdout
    elsewhere = ("--home", str(home.parent / "guest"))
    refused(
        tutti("swarm", "validate", "swarm.toml", *elsewhere),
        2,
        "words.json: No such file",
        "--tokenizer PATH",
    )
    both = ("--data", str(corpus.parent), "--tokenizer", str(corpus.parent))
    assert tutti("swarm", "validate", "swarm.toml", *elsewhere, *both).returncode == 0


def test_the_hash_of_builtin_data_is_written_too(tutti, home):
    said = tutti("swarm", "init").good()
    digest = hashlib.sha256(pydoc()).hexdigest()
    assert read_manifest(home.parent / "swarm.toml").data.sha256 == digest
    assert digest[:12] in said


def test_init_refuses_what_cannot_be_trained_on(tutti, home, corpus, words):
    cases = (
        (
            ("--tokenizer", str(words)),
            "1024 token ids, the model 259",
            "model.vocab to at least 1024",
        ),
        (("--data", str(corpus.parent / "gone.txt")), "gone.txt: No such file", "--data PATH"),
        (
            ("--tokenizer", str(corpus.parent / "gone.json")),
            "gone.json: No such file",
            "--tokenizer PATH",
        ),
        (("--data", "file:" + str(words)), "no row that can be read", "data.column"),
        (("--data", str(corpus), "--set", "model.seq_len=8192"), "too few", "longer text"),
    )
    for words_, *says in cases:
        refused(tutti("swarm", "init", *words_), 2, *says)
        assert not (home.parent / "swarm.toml").exists()
    refused(
        tutti("swarm", "init", "--data", str(corpus), "--set", f"data.sha256={'0' * 64}"),
        5,
        "sha256",
        "same data",
    )


def test_validate_refuses_what_init_of_others_let_pass(tutti, home, corpus, words):
    assert tutti("swarm", "init", "--data", str(corpus)).returncode == 0
    made = read_manifest(home.parent / "swarm.toml")

    def written(**fields) -> str:
        changed = amended(made, {f"data.{k}": v for k, v in fields.items()})
        (home.parent / "other.toml").write_bytes(changed.to_toml())
        return "other.toml"

    data = ("--data", str(corpus))
    both = (*data, "--tokenizer", str(words))
    for fields, place, *says in (
        ({"tokenizer": "w.json"}, both, "1024 token ids, the model 259", "model.vocab"),
        ({"tokenizer": str(words)}, data, str(words), "no hash of it", "--tokenizer FILE"),
        ({"source": f"file:{corpus}", "sha256": ""}, (), str(corpus), "no hash", "--data FILE"),
        ({"source": "file:/nowhere/c.txt"}, (), "/nowhere/c.txt", "No such file", "--data"),
    ):
        refused(tutti("swarm", "validate", written(**fields), *place), 2, *says)
    corpus.write_text(TEXT + "one more line\n")
    refused(tutti("swarm", "validate", "swarm.toml"), 5, "sha256", "same data")
    assert tutti("swarm", "validate", "swarm.toml", "--no-open").returncode == 0
    # Without a hash the report says that nothing is compared.
    assert "no hash" in tutti("swarm", "validate", written(sha256=""), *data).stdout


def test_a_run_made_of_somebody_elses_manifest_reads_no_file_that_it_names(
    tutti, home, corpus, words
):
    """``--from`` signs it as this user's own: paths without a hash are named again by the user."""
    guest = ("--home", str(home.parent / "guest"))
    named = (f"--set=data.source=file:{corpus}", f"--set=data.tokenizer={words}")
    tutti("swarm", "init", "--no-open", *named, "--set=model.vocab=1024").good()
    made = read_manifest(home.parent / "swarm.toml")
    (home.parent / "theirs.toml").write_bytes(
        amended(made, {"data.source": f"file:{corpus}", "data.tokenizer": str(words)}).sign(
            Identity.load(home / "identity.key")
        )
    )
    init = ("swarm", "init", "own.toml", "--from", "theirs.toml")
    refused(tutti(*init, *guest), 2, str(words), "is not opened", "--tokenizer FILE")
    place = ("--tokenizer", str(words))
    refused(tutti(*init, *guest, *place), 2, str(corpus), "is not opened", "--data FILE")
    demo = tutti("demo", "--manifest", "theirs.toml", *guest)
    refused(demo, 2, str(corpus), "is not opened", "swarm init --data FILE")
    tutti(*init, *guest, *place, "--data", str(corpus)).good()
    # The owner of the manifest repeats it and is asked nothing.
    tutti("swarm", "init", "again.toml", "--from", "theirs.toml").good()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_manifest_cut_is_refused_by_both(tutti, home, share):
    assert tutti("swarm", "init").returncode == 0
    lines = (home.parent / "swarm.toml").read_bytes().splitlines(keepends=True)
    (home.parent / "half.toml").write_bytes(b"".join(lines[: int(len(lines) * share)]))
    refused(tutti("swarm", "validate", "half.toml"), 2, "ends before its signature", "whole file")
    refused(
        tutti("swarm", "init", "new.toml", "--from", "half.toml"), 2, "ends before its signature"
    )
    assert not (home.parent / "new.toml").exists()


def test_a_handwritten_draft_is_valid_and_defaults_are_listed(tutti, home):
    (home.parent / "draft.toml").write_text("[model]\nlayers = 4\n[pipeline]\nstages = 2\n")
    said = tutti("swarm", "validate", "draft.toml").good()
    assert "not signed yet" in said
    assert "[optimizer], [data], [training]" in said
    assert tutti("swarm", "init", "--from", "draft.toml").returncode == 0
    assert Manifest.parse((home.parent / "draft-2.toml").read_bytes()).model.layers == 4


def test_a_place_is_remembered_until_it_is_gone(home, ours, corpus):
    ours.keep_places("f" * 64, Places(str(corpus)))
    assert ours.places("f" * 64) == Places(str(corpus))
    set_here = NodeConfig.load({"home": home, "data": str(home)}, {"TUTTI_TOKENIZER": "t.json"})
    assert set_here.places("f" * 64).data == str(home)
    assert set_here.places("f" * 64).tokenizer.endswith("/t.json")
    corpus.unlink()
    assert ours.places("f" * 64) == Places()
    for rubbish in (b"[1]", b"{", b"\xff", b'{"data": 3}', b'{"data": "\\u0000"}'):
        (ours.swarm_dir("f" * 64) / "places.json").write_bytes(rubbish)
        assert ours.places("f" * 64) == Places()


@pytest.mark.parametrize(
    ("model", "shape", "data", "name"),
    [
        (None, None, "", None),
        (None, None, "builtin:pydoc", None),
        (None, None, "synthetic:7", None),
        ("/models/Qwen3-0.6B/", None, "book.txt", "Qwen3-0.6B"),
        ("/h/models--Qwen--Qwen3-0.6B/snapshots/" + "a1" * 20, None, "", "Qwen3-0.6B"),
        (None, "qwen3-0.6b", "book.txt", "qwen3-0.6b"),
        (None, None, "/texts/my book, part 1.jsonl.zst", "my-book-part-1"),
        (None, None, "file:book.txt", "book"),
        (None, None, "hf:allenai/c4@" + "b" * 40 + ":en:train", "c4"),
        (None, None, "https://host/some/corpus/SHA256SUMS", "corpus"),
        (None, None, "книга.txt", "run"),
    ],
)
def test_a_run_of_ones_own_is_not_called_demo(model, shape, data, name):
    said = run_name(Path(model) if model else None, shape, data)
    assert said == name
    if said is not None:
        amended(Manifest.default_demo(), {"swarm.name": said})


def test_a_name_that_was_given_stays(tutti, home):
    for words, name in (
        (("--shape", "qwen3-0.6b"), "qwen3-0.6b"),
        (("--shape", "qwen3-0.6b", "--name", "mine"), "mine"),
        (("--shape", "qwen3-0.6b", "--set", "swarm.name=ours"), "ours"),
        ((), "demo"),
    ):
        tutti("swarm", "init", "--force", "--no-open", *words).good()
        assert read_manifest(home.parent / "swarm.toml").swarm.name == name
    tutti("swarm", "init", "--no-open", "--name", "base", "base.toml").good()
    tutti("swarm", "init", "--no-open", "--from", "base.toml", "again.toml").good()
    assert read_manifest(home.parent / "again.toml").swarm.name == "base"


def with_tokenizer(model, **config):
    """A word tokenizer of 300 ids beside a model, its end of text "w7", and a chat template."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(300)}, unk_token="w0")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["w7"])
    if "pad" in config:
        inner.add_special_tokens([config.pop("pad")])
    inner.save(str(model / "tokenizer.json"))
    config = {"eos_token": "w7", "chat_template": "T", **config}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def test_init_names_the_files_of_the_model_by_hash(tutti, home, ours, tmp_path):
    model = with_tokenizer(directories.made("llama", tmp_path / "model"))
    (tmp_path / "book.txt").write_text(" ".join(f"w{i % 290}" for i in range(9000)))
    words = ["swarm", "init", "--from", str(model), "--data", str(tmp_path / "book.txt")]
    tutti(*words).good()
    made = read_manifest(home.parent / "swarm.toml")
    assert made.data.end == 7
    names = ["config.json", "generation_config.json", "tokenizer_config.json"]
    assert [entry.partition(":")[0] for entry in made.data.files] == names
    for name in names:
        assert ours.file_path(made.run_id, name).read_bytes() == (model / name).read_bytes()
    (model / "tokenizer_config.json").unlink()  # the copy in the home counts
    files = RunFiles(ours, made, None).load()
    assert (files.chat_template, files.end_id) == ("T", 7)
    tutti("swarm", "init", "--from", "swarm.toml", "again.toml").good()
    again = read_manifest(home.parent / "again.toml")
    assert (again.data.files, again.data.end) == (made.data.files, 7)
    assert RunFiles(ours, again, None).load().chat_template == "T"
    ours.file_path(again.run_id, "tokenizer_config.json").write_bytes(b"{}")
    with pytest.raises(FilesMissing, match=r"tokenizer_config\.json"):
        RunFiles(ours, again, None).load()


def test_a_token_beyond_the_vocabulary_is_named_with_a_step_that_works(
    tutti, tmp_path, monkeypatch
):
    model = with_tokenizer(directories.made("llama", tmp_path / "model"), pad="[PAD]")
    words = ["swarm", "init", "--data", "synthetic:7", "--from"]
    shown = tutti(*words, str(model))
    refused(shown, 2, "[PAD] is id 300", "has 300 ids", "resize_token_embeddings")
    command = next(line for line in shown.stderr.splitlines() if " -c " in line)
    _, flag, code, *arguments = shlex.split(command)
    assert flag == "-c"
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    exec(code, {})
    tutti(*words, arguments[1]).good()


def test_stages_follow_the_memory_of_the_machines_named(tutti, home, tmp_path):
    model = directories.made("qwen3", tmp_path / "model")
    words = ["swarm", "init", "--from", str(model), "--data", "synthetic:7", "--tokenizer", "bytes"]
    shown = tutti(*words, "--machines", "8GB,8GB,24GB").good()
    made = read_manifest(home.parent / "swarm.toml")
    assert made.pipeline.stages == 1
    assert len(made.model.weights) == 2
    for line in (
        "stages   1 block stage, the fewest with which each of these machines can hold a part",
        f"stage 1 (layers 0-{made.model.layers - 1}): ",
        "another peer of a block stage: 1 of 8 GB",
    ):
        assert line in shown
    said = json.loads(
        tutti(*words, "--force", "--machines", "8GB,24GB", "--ends-layers", "1", "--json").good()
    )
    assert read_manifest(home.parent / "swarm.toml").model.ends_layers == 1
    ends, block = said["machines"]["stages"]
    assert (ends["stage"], block["stage"]) == (0, 1)
    assert {ends["memory"], block["memory"]} == {8 * 10**9, 24 * 10**9}
    assert said["machines"]["holds_all"] is True
    small = tutti(*words, "--force", "--machines", "450MB,450MB")
    refused(small, 7, "does not fit into machines of this memory: 2 of ", "larger ones")
    refused(tutti(*words, "--force", "--machines", "8"), 2, "'8' is not the memory", "8GB,24GB")
    for given in (("--stages", "2"), ("--set", "pipeline.stages=2")):
        twice = tutti(*words, "--force", "--machines", "8GB", *given)
        refused(twice, 2, "--machines and a number of block stages")


def test_init_begins_from_the_model_in_a_directory(tutti, home, ours, tmp_path):
    model = directories.made("qwen3", tmp_path / "model")
    words = ["swarm", "init", "--from", str(model), "--data", "synthetic:7", "--stages", "2"]
    refused(tutti(*words), 2, "tokenizer.json")
    words += ["--tokenizer", "bytes"]
    refused(tutti(*words, "--set", "model.seq_len=65"), 2, "sees 64 positions")
    refused(tutti(*words, "--set", "model.layers=2"), 2, "tensors that the model")
    refused(tutti(*words, "--shape", "qwen3-0.6b"), 2, "--from DIR and --shape")
    shown = tutti(*words).good()
    assert "begins from weights" in shown
    made = read_manifest(home.parent / "swarm.toml")
    for line in fine_tuning.explained(made):
        assert line in shown
    assert made.optimizer.name == "adamw"
    assert made.swarm.name == "model"
    assert made.model.weights == Weights(model).digests(made.model, 2)
    assert (made.model.vocab, made.model.head_width, made.model.seq_len) == (300, 24, 64)
    assert ours.places(made.run_id) == Places(weights=str(model))
    assert str(tmp_path) not in (home.parent / "swarm.toml").read_text()
    assert Manifest.parse(made.to_toml()).run_id == made.run_id
    again = tutti("swarm", "init", "--from", "swarm.toml", "more.toml", "--stages", "3")
    refused(again, 2, "model.weights has 3 digests")
    refused(tutti("demo", "--manifest", "swarm.toml"), 2, "begins from a model")
