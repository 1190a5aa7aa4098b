import dataclasses

import pytest

from node.core.errors import Refused, UsageFault
from node.core.ids import RunId
from node.identity.keys import Identity
from node.manifest import MAX_MANIFEST, Manifest, amended

DEMO = Manifest.default_demo()


def toml_with(section: str, line: str) -> bytes:
    """The default manifest with one line replacing, or added to, a section."""
    key = line.split("=")[0].strip()
    out, inside = [], False
    for old in DEMO.to_toml().decode().splitlines():
        if old.startswith("["):
            inside = old.startswith(f"[{section}]")
            out.append(old)
            if inside:
                out.append(line)
        elif not (inside and old.split("=")[0].strip() == key):
            out.append(old)
    return "\n".join(out).encode()


def test_the_run_id_depends_on_fields_and_not_on_formatting():
    assert (
        Manifest.parse(b"format = 2\n[optimizer]\nlr = 1").run_id
        == Manifest.parse(b"# note\nformat = 2\n[optimizer]\nlr = 1.0\n").run_id
    )
    seen = {DEMO.run_id}
    for section, line in (
        ("model", "layers = 7"),
        ("data", "seed = 43"),
        ("swarm", 'name = "other"'),
        ("averaging", 'wire = "bf16"'),
    ):
        seen.add(Manifest.parse(toml_with(section, line)).run_id)
    assert len(seen) == 5


MORE = {"training.epochs": DEMO.training.epochs + 1}


@pytest.mark.parametrize(
    ("changes", "says", "step"),
    [
        ({}, "training.epochs", "--epochs"),
        ({**MORE, "optimizer.parameters": "bf16"}, r"optimizer\.parameters differs", "--from"),
        ({**MORE, "model.layers": DEMO.model.layers + 1}, "model differs", "--from"),
    ],
)
def test_a_run_goes_on_only_as_what_it_was(changes: dict[str, object], says: str, step: str):
    with pytest.raises(UsageFault, match=says) as caught:
        amended(DEMO, changes).check_continues(DEMO)
    assert step in caught.value.next_step


@pytest.mark.parametrize(
    ("section", "line", "says"),
    [
        ("model", "layers = 0", "model.layers = 0"),
        ("model", 'layers = "six"', 'model.layers = "six"'),
        ("model", "layers = true", "model.layers = true"),
        ("model", "layers = 6.5", "model.layers = 6.5"),
        ("model", "layerz = 6", "model.layerz is not a setting"),
        ("optimizer", "lr = nan", "optimizer.lr = nan"),
        ("optimizer", "lr = -1", "optimizer.lr = -1"),
        ("averaging", 'wire = "int4"', 'averaging.wire = "int4"'),
        ("averaging", 'reducer = "krum"', 'averaging.reducer = "krum"'),
        ("averaging", "trim = 0.5", "averaging.trim = 0.5"),
        ("averaging", "clip = 0.0", "averaging.clip = 0.0"),
        ("averaging", "clip_iterations = 0", "averaging.clip_iterations = 0"),
        ("data", 'source = "ftp://x"', "data.source"),
        ("data", 'sha256 = "zz"', "data.sha256"),
        ("swarm", 'name = "a b\\u001b[2J"', "swarm.name"),
        ("optimizer", 'parameters = "fp16"', 'optimizer.parameters = "fp16"'),
        ("swarm", "protocol = 99", "swarm.protocol = 99"),
        ("swarm", 'owner = "me"', "swarm.owner"),
    ],
)
def test_a_bad_field_is_reported_with_the_allowed_values(section: str, line: str, says: str):
    with pytest.raises(UsageFault) as fault:
        Manifest.parse(toml_with(section, line))
    assert fault.value.what.startswith(says)
    assert fault.value.next_step
    assert "\x1b" not in fault.value.what


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"averaging.quarantine": 1.5}, "averaging.quarantine = 1.5"),
        ({"averaging.reducer": "trimmed-mean", "averaging.trim": 0.0}, "averaging.trim = 0"),
        ({"model.heads": 3}, "model.heads = 3"),
        ({"model.kv_heads": 3}, "model.kv_heads = 3"),
        ({"pipeline.stages": 7}, "pipeline.stages = 7"),
        ({"training.target_batch": 100}, "training.target_batch = 100"),
        ({"model.vocab": 100}, "model.vocab = 100"),
        ({"data.holdout": 0.0}, "data.holdout"),
        ({"data.tokenizer_sha256": "a" * 64}, "data.tokenizer_sha256"),
        (
            {"optimizer.parameters": "bf16", "averaging.cell": 2, "outer.window_s": 20.0},
            'optimizer.parameters = "bf16"',
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, object], says: str):
    with pytest.raises(UsageFault) as fault:
        amended(DEMO, changes)
    assert fault.value.what.startswith(says)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xfe",
        b"[swarm",
        b"x = 1",
        b"[extra]\n",
        b"swarm = 3",
        b"x = " + b"[" * 20_000,
        b"#" * (MAX_MANIFEST + 1),
        b"signature = 1",
    ],
)
def test_rubbish_from_a_stranger_is_refused_and_never_crashes(raw: bytes):
    with pytest.raises(UsageFault):
        Manifest.parse(raw)


def test_one_changed_character_breaks_it():
    raw = amended(DEMO, {"model.layers": 7}).sign(Identity.ephemeral())
    commented = Manifest.parse(raw.replace(b"# heads = 4", b"# heads = 8"))
    commented.verify()  # a default behind a # is for people
    for changed in (
        raw.replace(b"layers = 7", b"layers = 8"),
        raw.replace(b"layers = 7\n", b""),
        raw.replace(b"# heads = 4", b"heads = 8"),
        raw.replace(b"format = 2\n", b""),
    ):
        assert changed != raw
        with pytest.raises(Refused, match="changed after signing"):
            Manifest.parse(changed).verify()


OWNER, THIEF = Identity.ephemeral(), Identity.ephemeral()
SIGNED = Manifest.parse(DEMO.sign(OWNER))
STOLEN = dataclasses.replace(SIGNED, signature=Manifest.parse(DEMO.sign(THIEF)).signature)


@pytest.mark.parametrize(
    ("manifest", "expected", "says"),
    [
        (SIGNED, (RunId("0" * 64),), "is of run"),
        (SIGNED, (None, THIEF.peer_id), "belongs to"),
        (DEMO, (), "not signed"),
        (STOLEN, (), "signed by"),
    ],
    ids=["another run", "another owner", "no signature", "another signer"],
)
def test_a_manifest_of_another_run_owner_or_signer_is_refused(manifest, expected, says: str):
    with pytest.raises(Refused, match=says):
        manifest.verify(*expected)


def test_only_its_owner_signs_a_manifest():
    with pytest.raises(Refused, match="not you"):
        SIGNED.sign(THIEF)


def test_amended_reads_text_as_the_field_type():
    changed = amended(
        DEMO,
        {"model.layers": "12", "optimizer.lr": "0.5", "model.qk_norm": "true", "swarm.name": "x"},
    )
    assert (
        changed.model.layers,
        changed.optimizer.lr,
        changed.model.qk_norm,
        changed.swarm.name,
    ) == (12, 0.5, True, "x")
    with pytest.raises(UsageFault, match="model.layer"):
        amended(DEMO, {"model.layer": "12"})


def test_the_parameter_count_of_the_demo_is_that_of_its_shapes():
    # 2 * 259 * 128 embedding and head, 128 last norm, 6 blocks of q o (128*128), k v (128*64), 3 of
    # 128*384, two norms
    assert DEMO.parameter_count() == 2 * 259 * 128 + 128 + 6 * (
        2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    )


def test_a_signed_file_that_was_cut_anywhere_is_refused():
    whole = DEMO.sign(Identity.ephemeral())
    Manifest.parse(whole).verify()
    begin = whole.index(b"\n") + 1
    for at in (
        *range(begin, len(whole) - 2, 37),
        *(i + 1 for i, b in enumerate(whole[:-1]) if b == ord("\n")),
    ):
        with pytest.raises((UsageFault, Refused)) as fault:
            Manifest.parse(whole[:at]).verify()
        assert fault.value.next_step
    with pytest.raises(UsageFault, match="middle of a line"):
        Manifest.parse(whole[: whole.index(b'owner = "') + 12])
