"""The key file, its refusals, its lock, and the strength of a signature."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import OutOfResources, Refused, WireError
from node.core.ids import PeerId
from node.identity import keys
from node.identity.keys import Identity, name_of, peer_id_of, public_key_of, verify

ROOT = Path(keys.__file__).parents[2]
HOLDER = """
import sys
from pathlib import Path
from node.identity.keys import Identity
me = Identity.load(Path(sys.argv[1]))
me.lock()
print("locked", flush=True)
sys.stdin.read()
"""


ME = Identity.ephemeral()
OTHER = Identity.ephemeral()
PEER = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "identity.key"


def test_the_file_is_the_libp2p_protobuf_and_private(path: Path) -> None:
    old = os.umask(0)
    try:
        made = Identity.create(path)
    finally:
        os.umask(old)
    raw = path.read_bytes()
    assert (raw[:4], raw[36:], len(raw)) == (bytes((0x08, 0x01, 0x12, 0x40)), made.public, 68)
    assert [place.stat().st_mode & 0o777 for place in (path, path.parent)] == [0o600, 0o700]
    assert os.listdir(path.parent) == ["identity.key"]
    assert raw == made.key_file_bytes()


def test_peer_id_of_a_known_key() -> None:
    # The public key of the Ed25519 example in the libp2p peer-id specification.
    public = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_id_of(public) == PEER
    assert public_key_of(PEER) == public


def test_the_slower_of_two_creators_takes_the_other_key(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Identity.create(path)
    missing = Refused("no key")
    missing.__cause__ = FileNotFoundError()
    looks = Mock(side_effect=[missing, Identity.load(path)])
    monkeypatch.setattr(Identity, "load", looks)
    assert (Identity.load_or_create(path).peer_id, looks.call_count) == (fast.peer_id, 2)


def test_create_never_replaces_a_key(path: Path) -> None:
    before = Identity.create(path).key_file_bytes()
    with pytest.raises(Refused, match="exists already"):
        Identity.create(path)
    assert (path.read_bytes(), os.listdir(path.parent)) == (before, ["identity.key"])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_key_others_can_use_is_refused(path: Path, mode: int) -> None:
    Identity.create(path)
    path.chmod(mode)
    with pytest.raises(Refused, match="open to other users") as caught:
        Identity.load(path)
    assert caught.value.next_step == f"chmod 600 {path}"
    assert path.stat().st_mode & 0o777 == mode, "it is left alone"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: b"", "0 bytes"),
        (lambda raw: raw[:3], "3 bytes"),
        (lambda raw: raw[:40], "40 bytes"),
        (lambda raw: raw + b"\0", "69 bytes"),
        (lambda raw: raw * 2, "136 bytes"),
        (lambda raw: b"\x08\x00" + raw[2:], "not a libp2p Ed25519 key"),
        (lambda raw: b"-----BEGIN", "not a libp2p Ed25519 key"),
        (lambda raw: raw[:10] + bytes([raw[10] ^ 1]) + raw[11:], "damaged"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "damaged"),
        (lambda raw: raw[:3] + b"\x41" + raw[4:], "damaged"),
    ],
)
def test_a_garbled_key_is_one_clear_refusal(path: Path, damage, says: str) -> None:
    Identity.create(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Refused, match=says) as caught:
        Identity.load(path)
    assert caught.value.next_step


def test_a_directory_or_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not a file"):
        Identity.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(Refused, match="not a file"):
        Identity.load(tmp_path / "pipe")


def test_a_full_disk_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OutOfResources):
        Identity.create(path)
    assert os.listdir(path.parent) == []


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(Refused, match="cannot write"):
        Identity.create(tmp_path / "home" / "identity.key")


def test_two_objects_cannot_hold_one_key(path: Path) -> None:
    first = Identity.create(path)
    second = Identity.load(path)
    first.lock()
    first.lock()
    with pytest.raises(Refused, match=f"in use by pid {os.getpid()}$"):
        second.lock()
    first.unlock()
    first.unlock()
    second.lock()
    second.unlock()
    Identity.ephemeral().lock()  # which has no file


def test_another_process_is_named_and_its_death_frees_the_key(path: Path) -> None:
    mine = Identity.create(path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(Refused, match=f"in use by pid {holder.pid}") as caught:
            mine.lock()
        assert str(holder.pid) in caught.value.next_step
        holder.kill()
    mine.lock()
    mine.unlock()


def test_the_secret_is_not_in_the_repr() -> None:
    assert repr(ME) == f"Identity({ME.peer_id})"


SIGNED = ME.sign(b"data", "plan")


@pytest.mark.parametrize(
    ("who", "data", "signature", "domain", "fault"),
    [
        (OTHER, b"data", SIGNED, "plan", Refused),
        (ME, b"datA", SIGNED, "plan", Refused),
        (ME, b"data", SIGNED, "record", Refused),
        (ME, b"data", SIGNED[:-1], "plan", WireError),
        # Domain and data do not run into each other.
        (ME, b"c", ME.sign(b"bc", "a"), "ab", Refused),
    ],
    ids=["another key", "other data", "another domain", "cut", "run together"],
)
def test_a_signature_holds_for_nothing_else(who, data, signature, domain: str, fault) -> None:
    with pytest.raises(fault):
        verify(who.peer_id, data, signature, domain)


def test_names_are_stable_and_speakable() -> None:
    adjective, animal = name_of(PEER).split("-")
    assert adjective.isalpha()
    assert animal.isalpha()
    assert len({name_of(Identity.ephemeral().peer_id) for _ in range(50)}) > 40


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "é",
        "12D3KooW",
        " ",
        "1" * 64,
        "Q" * 10_000,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        # A PeerId has only one spelling.
        PEER + " ",
        PEER + "\n",
        "1" + PEER,
        PEER[1:],
    ],
)
def test_a_text_that_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        public_key_of(text)


@given(
    st.text(max_size=70)
    | st.text(alphabet="123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=60)
)
def test_any_text_is_a_peer_id_or_a_wire_error(text: str) -> None:
    try:
        assert peer_id_of(public_key_of(text)) == text
    except WireError:
        pass
