"""Changes that the owner may make in a running swarm, and that nobody else can make."""

import base64
import json
import string
from dataclasses import replace
from pathlib import Path

import pytest

from node.app.change import DOMAIN, read, signed, wanted
from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import MAX_CHANGE, Rules
from node.core.errors import Refused, UsageFault
from node.identity.keys import Identity
from node.identity.signed_text import sign_text
from node.manifest import Manifest, amended

DILOCO = (
    b'[averaging]\ncell = 2\n[outer]\nstrategy = "butterfly"\ncarries = "deltas"\n'
    b'window_s = 20.0\noptimizer = "nesterov"\ncodec = "int8"\n'
)


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "owner.key")


@pytest.fixture
def manifest(owner: Identity) -> Manifest:
    gossip = {"averaging.cell": 1, "outer.window_s": 20.0, "outer.strategy": "gossip"}
    return Manifest.parse(amended(Manifest().owned_by(owner.peer_id), gossip).sign(owner))


def test_a_change_is_read_as_it_was_signed(manifest: Manifest, owner: Identity) -> None:
    text = signed(manifest, wanted(manifest, DILOCO), 3, owner)
    settings = OuterSettings("butterfly", "deltas", "nesterov", codec="int8", window_s=20.0)
    assert read(manifest, text) == Rules(2, settings, 3, text)
    assert read(manifest, "") == Rules(1, OuterSettings("gossip", window_s=20.0))
    assert len(text) < MAX_CHANGE
    plain = b"[averaging]\ncell = 3\n[outer]\nwindow_s = 20.0\n"
    whole = signed(manifest, wanted(manifest, plain), 1, owner)
    assert read(manifest, whole) == Rules(3, OuterSettings(window_s=20.0), 1, whole), (
        "what the file leaves out has its default"
    )
    grid = wanted(
        manifest,
        b'[averaging]\ncell = 1\n[outer]\nstrategy = "moshpit"\nwindow_s = 20\ngrid = [2, 3]\n',
    )
    assert read(manifest, signed(manifest, grid, 1, owner)).outer.grid == (2, 3)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (b"[model]\nlayers = 9\n" + DILOCO, "not model.layers"),
        (b"[optimizer]\nlr = 0.5\n[data]\nseed = 9\n" + DILOCO, "not optimizer.lr, data.seed"),
        (DILOCO.replace(b"cell = 2", b"cell = 2\nreducer = 'median'"), "not averaging.reducer"),
        (b"[averaging]\ncell = 2\n", "never average"),
        (b'[averaging]\ncell = 2\n[outer]\ncarries = "gradients"\nwindow_s = 20\n', "carries"),
        (
            b'[averaging]\ncell = 1\n[outer]\nstrategy = "gossip"\ncarries = "deltas"\n'
            b'window_s = 20\noptimizer = "nesterov"\n',
            "anchors",
        ),
        (DILOCO.replace(b"20.0", b"30.0"), "outer.window_s is 20.0 and cannot change"),
        (b'[averaging]\ncell = "all"\n', "outer.window_s is 20.0 and cannot change"),
        (b"[outer]\nevery = 4\n", "not a setting any more"),
        (b"[outer]\nlearning = 1\n", "not a setting"),
        (b"\xff", "not TOML"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(
    manifest: Manifest, file: bytes, says: str
) -> None:
    with pytest.raises(UsageFault, match=says):
        wanted(manifest, file)


def test_a_file_may_repeat_what_stays(manifest: Manifest) -> None:
    same = (
        f'[model]\nlayers = {manifest.model.layers}\n[swarm]\nname = "{manifest.swarm.name}"\n'
    ).encode()
    assert wanted(manifest, same + DILOCO).outer.codec == "int8"


def test_a_run_of_one_cell_stays_one(owner: Identity) -> None:
    with pytest.raises(UsageFault, match=r"outer\.window_s is 0\.0 and cannot change"):
        wanted(Manifest().owned_by(owner.peer_id), DILOCO)


def test_only_the_owner_signs_and_numbers_begin_at_one(
    manifest: Manifest, owner: Identity, tmp_path: Path
) -> None:
    changed = wanted(manifest, DILOCO)
    with pytest.raises(Refused, match="belongs to"):
        signed(manifest, changed, 1, Identity.load_or_create(tmp_path / "other.key"))
    for revision in (0, -1, 1 << 53):
        with pytest.raises(UsageFault, match="revision"):
            signed(manifest, changed, revision, owner)


def test_a_forged_or_damaged_change_is_refused(
    manifest: Manifest, owner: Identity, tmp_path: Path
) -> None:
    text = signed(manifest, wanted(manifest, DILOCO), 3, owner)
    signature, body = text.split("\n")
    stranger = Identity.load_or_create(tmp_path / "other.key")
    other_run = Manifest.parse(amended(manifest, {"training.epochs": 7}).sign(owner))

    def by_owner(**changes: object) -> str:
        altered = json.dumps({**json.loads(body), **changes})
        return sign_text(owner, altered, DOMAIN)

    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    respelled = signature[:85] + digits[digits.index(signature[85]) ^ 1] + "=="
    assert base64.b64decode(respelled) == base64.b64decode(signature)
    for bad in (
        respelled + "\n" + body,
        signature + "\n" + body.replace('"revision":3', '"revision":4'),
        sign_text(stranger, body, DOMAIN),
        sign_text(owner, body, "tutti/manifest/1"),
        signed(other_run, wanted(other_run, DILOCO), 3, owner),
        by_owner(more=1),
        by_owner(revision=0),
        by_owner(revision=True),
        by_owner(revision=1 << 53),
        by_owner(cell=0),
        by_owner(cell=None),
        by_owner(outer={"window_s": 20.0, "carries": "gradients"}),
        by_owner(outer=[]),
        by_owner(outer={"lr": "x"}),
        body,
        "x",
        "\n",
        text + " ",
        "x" * (MAX_CHANGE + 1),
        "é\n{}",
    ):
        with pytest.raises(Refused):
            read(manifest, bad)
    with pytest.raises(Refused):
        read(replace(manifest, swarm=replace(manifest.swarm, owner="")), text)  # type: ignore


def test_a_change_has_room_for_many_and_refuses_more(manifest: Manifest, owner: Identity) -> None:
    marks = [f"{i:016x}" for i in range(60)]
    assert read(manifest, signed(manifest, manifest, 3, owner, marks)).revoked == set(marks)
    with pytest.raises(UsageFault, match="do not fit"):
        signed(manifest, manifest, 3, owner, [f"{i:016x}" for i in range(200)])
