import base64
import dataclasses
import string
import tomllib

import pytest

from node.core.errors import Refused, UsageFault
from node.core.ids import RunId
from node.core.version import OLDEST_PROTOCOL, PROTOCOL, WIRES_SINCE, Protocols
from node.identity.keys import Identity
from node.manifest import MAX_MANIFEST, Manifest, amended

DEMO = Manifest.default_demo()


def test_the_run_id_depends_on_fields_and_not_on_formatting():
    assert (
        Manifest.parse(b"format = 2\n[optimizer]\nlr = 1").run_id
        == Manifest.parse(b"# note\nformat = 2\n[optimizer]\nlr = 1.0\n").run_id
    )
    changes = (
        {"model.layers": 7},
        {"data.seed": 43},
        {"swarm.name": "other"},
        {"averaging.wire": "bf16"},
    )
    assert len({DEMO.run_id, *(amended(DEMO, change).run_id for change in changes)}) == 5


@pytest.mark.parametrize(
    ("changes", "oldest"),
    [
        ({}, 1),
        ({"swarm.protocol": 7}, 7),
        ({"pipeline.wire": "bf16"}, 1),
        ({"pipeline.wire": "int8"}, WIRES_SINCE),
        ({"pipeline.wire": "int4", "swarm.protocol": 7}, WIRES_SINCE),
        ({"pipeline.wire": "bf16", "pipeline.wire_least": "int4"}, WIRES_SINCE),
    ],
)
def test_a_run_with_formats_of_few_bits_lets_no_peer_in_that_does_not_know_them(
    changes: dict[str, object], oldest: int
) -> None:
    run = amended(DEMO, changes)
    assert run.oldest_protocol == oldest
    ours = Protocols(max(OLDEST_PROTOCOL, run.oldest_protocol), PROTOCOL)
    assert bool(ours.common(Protocols(7, 7))) == (oldest < WIRES_SINCE)


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


FOUR = (
    "[model]\nlayers = 4\n[pipeline]\nstages = 4\nmicro_batch = 4\nmay_skip = 0.5\n"
    "[training]\ntarget_batch = 32\n[scheduler]\n"
)
FEW = FOUR.replace("target_batch = 32", "target_batch = 4")
TWO = "[averaging]\ncell = 2\n[outer]\n"
CLOCK = TWO + "window_s = 20.0\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nlayers = 0", "model.layers = 0"),
        ('[model]\nlayers = "six"', 'model.layers = "six"'),
        ("[model]\nlayers = true", "model.layers = true"),
        ("[model]\nlayers = 6.5", "model.layers = 6.5"),
        ("[model]\nlayerz = 6", "model.layerz is not a setting"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan"),
        ("[optimizer]\nlr = -1", "optimizer.lr = -1"),
        ('[averaging]\nwire = "int4"', 'averaging.wire = "int4"'),
        ('[pipeline]\nwire = "top-k"', 'pipeline.wire = "top-k"'),
        ('[pipeline]\nwire_least = "fp32"', 'pipeline.wire_least = "fp32"'),
        ('[pipeline]\nwire = "int8"\nwire_least = "bf16"', 'pipeline.wire_least = "bf16"'),
        ('[pipeline]\nwire = "bf16"\nwire_least = "fp16"', 'pipeline.wire_least = "fp16"'),
        ('[pipeline]\nwire = "int4"\nwire_least = "int4"', 'pipeline.wire_least = "int4"'),
        ('[averaging]\nreducer = "krum"', 'averaging.reducer = "krum"'),
        ("[averaging]\ntrim = 0.5", "averaging.trim = 0.5"),
        ("[averaging]\nclip = 0.0", "averaging.clip = 0.0"),
        ("[averaging]\nclip_iterations = 0", "averaging.clip_iterations = 0"),
        ('[data]\nsource = "ftp://x"', "data.source"),
        ('[data]\nsha256 = "zz"', "data.sha256"),
        ('[swarm]\nname = "a b\\u001b[2J"', "swarm.name"),
        ('[optimizer]\nparameters = "fp16"', 'optimizer.parameters = "fp16"'),
        ("[swarm]\nprotocol = 99", "swarm.protocol = 99"),
        ('[swarm]\nowner = "me"', "swarm.owner"),
        ("[averaging]\nquarantine = 1.5", "averaging.quarantine = 1.5"),
        ("[averaging]\nreducer = 'trimmed-mean'\ntrim = 0.0", "averaging.trim = 0"),
        ("[model]\nheads = 3", "model.heads = 3"),
        ("[model]\nkv_heads = 3", "model.kv_heads = 3"),
        ("[pipeline]\nstages = 7", "pipeline.stages = 7"),
        ("[training]\ntarget_batch = 100", "training.target_batch = 100"),
        ("[model]\nvocab = 100", "model.vocab = 100"),
        ("[data]\nholdout = 0.0", "data.holdout"),
        (f"[data]\ntokenizer_sha256 = '{'a' * 64}'", "data.tokenizer_sha256"),
        (CLOCK + "[optimizer]\nparameters = 'bf16'", 'optimizer.parameters = "bf16"'),
    ],
)
def test_a_bad_field_is_reported_with_the_allowed_values(text: str, says: str):
    with pytest.raises(UsageFault) as fault:
        Manifest.parse(text.encode())
    assert fault.value.what.startswith(says)
    assert fault.value.next_step
    assert "\x1b" not in fault.value.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWO, "never average"),
        ("[averaging]\ncell = 0\n", "averaging.cell"),
        ('[averaging]\ncell = "some"\n', "averaging.cell"),
        ("[outer]\nwindow_s = 20.0", "one cell"),
        (TWO + 'strategy = "gossip"', "outer.window_s is 0"),
        (CLOCK + 'strategy = "gossip"\ncarries = "deltas"\noptimizer = "sgd"', "different anchors"),
        (CLOCK + 'strategy = "moshpit"', "grid"),
        (CLOCK + 'strategy = "moshpit"\ngrid = [33, 2]', "outer.grid"),
        (CLOCK + 'strategy = "ringo"', "one of butterfly, moshpit"),
        (CLOCK + 'codec = "int2"', "outer.codec"),
        (TWO + "window_s = -1.0", "outer.window_s"),
        (TWO + "window_s = inf", "outer.window_s"),
        (CLOCK + "momentum = 1.0", "outer.momentum"),
        (CLOCK + "mixing = 1.5", "outer.mixing"),
        (CLOCK + "quorum = -1", "outer.quorum"),
        (CLOCK + "shards = 0", "outer.shards"),
        (CLOCK + "fragments = 0", "outer.fragments"),
        (CLOCK + 'strategy = "moshpit"\ngrid = ["2"]', "list of whole numbers"),
        (
            CLOCK + 'carries = "deltas"\noptimizer = "sgd"\nmomentum = 0.0\n'
            'strategy = "hogwild"\ncodec = "int8"\nfeedback = true',
            "too late",
        ),
        (CLOCK + 'carries = "parameters"\nstrategy = "hogwild"', "do not add up"),
        (CLOCK + "fragments = 3", "fragments of deltas"),
        (CLOCK + "quorum = 2", "quorum"),
        (CLOCK + 'carries = "deltas"\noptimizer = "sgd"\ncodec = "top-k"', "outer.feedback"),
        (CLOCK + 'carries = "gradients"', "parameters, deltas"),
        (CLOCK + 'codec = "int8"', "rounds"),
        (TWO + "every = 4", "outer.window_s"),
        (TWO + "overlap = 1", "outer.window_s"),
        (TWO + 'reducer = "median"', "outer.reducer is not a setting any more"),
        (TWO + "grace_s = 2.0", "a quorum waits"),
        (FOUR + 'paths = "shortest"', "planned"),
        (FOUR + "paths = 1", "scheduler.paths"),
        (FOUR + "skip = -0.1", "scheduler.skip"),
        (FOUR + "skip = 1.0", "scheduler.skip"),
        (FOUR + "skip = nan", "scheduler.skip"),
        (FOUR + 'skip = "half"', "scheduler.skip"),
        (FOUR + "max_swaps = -1", "scheduler.max_swaps"),
        (FOUR + "max_swaps = 4097", "scheduler.max_swaps"),
        (FOUR + "max_swaps = 1.5", "scheduler.max_swaps"),
        (FOUR + "max_jump = -1", "scheduler.max_jump"),
        (FOUR + "max_jump = true", "scheduler.max_jump"),
        (FOUR + "keep_first = -1", "scheduler.keep_first"),
        (FOUR + "swaps = 2", "max_swaps"),
        (FOUR + "skip = 0.2", "0.25 and more to leave out one"),
        (FOUR + "skip = 0.75", "pipeline.may_skip = 0.5"),
        (FOUR + "skip = 0.5\nmax_jump = 1", "max_jump 2"),
        (FOUR + "skip = 0.5\nkeep_first = 2", "at most 1"),
        (FEW + "skip = 0.5", "do not visit every stage"),
        ("[model]\nends_layers = 6", "model.ends_layers = 6 of model.layers = 6"),
        ("[model]\nends_layers = 4", "model.layers - model.ends_layers = 2"),
        ("[model]\nends_layers = -1", "model.ends_layers"),
    ],
)
def test_what_cannot_be_or_not_together_is_refused(text: str, says: str):
    with pytest.raises(UsageFault) as fault:
        Manifest.parse(text.encode())
    assert fault.value.next_step
    assert says in f"{fault.value}; {fault.value.next_step}"


def test_paths_that_hold_are_taken_and_come_back():
    made = Manifest.parse(
        f'{FOUR}paths = "round-robin"\nskip = 0.5\nmax_swaps = 2\nmax_jump = 3'.encode()
    )
    s = made.scheduler
    assert (s.paths, s.skip, s.max_swaps, s.max_jump, s.hops(4)) == ("round-robin", 0.5, 2, 3, 2)
    assert Manifest.parse(made.to_toml()) == made
    assert made.run_id != Manifest.parse(f"{FOUR}skip = 0.25".encode()).run_id
    # Cells and paths that leave out stages go together.
    Manifest.parse(f"{FOUR}skip = 0.5\n{CLOCK}".encode())


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
    # A default behind a # is for people.
    Manifest.parse(raw.replace(b"# heads = 4", b"# heads = 8")).verify()
    for changed in (
        raw.replace(b"layers = 7", b"layers = 8"),
        raw.replace(b"layers = 7\n", b""),
        raw.replace(b"# heads = 4", b"heads = 8"),
        raw.replace(b"format = 2\n", b""),
    ):
        assert changed != raw
        with pytest.raises(Refused, match="changed after signing"):
            Manifest.parse(changed).verify()


def test_a_signature_has_one_spelling():
    raw = DEMO.sign(Identity.ephemeral())
    signature = tomllib.loads(raw.decode())["signature"]["sig"]
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    respelled = signature[:85] + digits[digits.index(signature[85]) ^ 1] + "=="
    assert base64.b64decode(respelled) == base64.b64decode(signature)
    with pytest.raises(UsageFault, match=r"signature\.sig"):
        Manifest.parse(raw.replace(signature.encode(), respelled.encode()))


OWNER = Identity.ephemeral()
THIEF = Identity.ephemeral()
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
    for at in (
        *range(whole.index(b"\n") + 1, len(whole) - 2, 37),
        *(i + 1 for i, b in enumerate(whole[:-1]) if b == ord("\n")),
    ):
        with pytest.raises((UsageFault, Refused)) as fault:
            Manifest.parse(whole[:at]).verify()
        assert fault.value.next_step
    with pytest.raises(UsageFault, match="middle of a line"):
        Manifest.parse(whole[: whole.index(b'owner = "') + 12])


def test_a_key_of_a_thousand_parts_is_refused_before_it_is_parsed() -> None:
    raw = Manifest.default_demo().to_toml()
    with pytest.raises(UsageFault, match=r"line 2 of the manifest has more than 64 dots"):
        Manifest.parse(b"\n" + b"a." * 1000 + b"a = 1\n" + raw)
    assert Manifest.parse(b"# " + b"." * 1000 + b"\n" + raw) == Manifest.default_demo()
