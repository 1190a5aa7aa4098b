"""``tutti id export|import``: a key goes to another machine locked, and none is lost on the way."""

import io
import json
import os
import stat
import sys
from types import SimpleNamespace

import pytest

from node.app.owner import identity as files
from node.core.errors import LocalFault, Refused, TooNew, UsageFault
from node.identity import backup
from node.identity.backup import open_sealed, seal
from node.identity.keys import Identity
from tests.cli.conftest import refused

PASSPHRASE = "four words with nothing"
CHEAP = 1 << 4
"""N of scrypt for tests that do not look at it."""


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    """A passphrase becomes a key at once."""
    monkeypatch.setattr(backup.seal, "__defaults__", (CHEAP,))


@pytest.fixture
def secret(tmp_path):
    """A file with the passphrase."""
    path = tmp_path / "secret"
    path.write_text(PASSPHRASE + "\n")
    return str(path)


@pytest.fixture
def key(tutti, home):
    """The key of this home."""
    tutti("id", "new").good()
    return Identity.load(home / "identity.key")


@pytest.fixture
def moved(tutti, key, secret, tmp_path):
    """The key of this home, exported; the home is another machine's from here on."""
    path = tmp_path / "key.json"
    tutti("id", "export", str(path), "--passphrase-file", secret).good()
    return path


def test_a_key_arrives_as_the_key_it_was(tutti, key, moved, home, secret):
    home.rename(home.with_name("before"))
    shown = tutti("id", "import", str(moved), "--passphrase-file", secret)
    assert key.peer_id in shown.good()
    path = home / "identity.key"
    assert path.read_bytes() == key.key_file_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "one machine at a time" in " ".join(shown.stderr.split())
    assert key.peer_id in tutti("id", "show").good()


def test_the_file_is_private_and_has_no_key_in_it(key, moved):
    assert stat.S_IMODE(moved.stat().st_mode) == 0o600
    raw = moved.read_bytes()
    for form in (key.seed(), key.seed().hex().encode(), PASSPHRASE.encode()):
        assert form not in raw
    assert json.loads(raw)["peer"] == key.peer_id


def test_export_says_what_two_of_one_id_cost(tutti, key, secret, tmp_path):
    shown = tutti("id", "export", str(tmp_path / "k"), "--passphrase-file", secret, "--json")
    assert json.loads(shown.good()) == {"peer": key.peer_id, "file": str(tmp_path / "k")}
    assert "votes twice" in shown.stderr


def test_nothing_is_replaced_without_force(tutti, key, moved, home, secret):
    before = moved.read_bytes()
    words = ("--passphrase-file", secret)
    refused(tutti("id", "export", str(moved), *words), 5, "--force")
    refused(tutti("id", "import", str(moved), *words), 5, "--home DIR", "--force")
    assert moved.read_bytes() == before
    tutti("id", "export", str(moved), *words, "--force").good()
    assert moved.read_bytes() != before
    refused(tutti("id", "export", str(home / "identity.key"), *words, "--force"), 2, "itself")
    assert Identity.load(home / "identity.key").peer_id == key.peer_id


def test_a_key_that_is_replaced_is_set_aside(tutti, moved, home, secret, key):
    os.remove(home / "identity.key")
    tutti("id", "new").good()
    own = (home / "identity.key").read_bytes()
    shown = tutti("id", "import", str(moved), "--passphrase-file", secret, "--force", "--json")
    document = json.loads(shown.good())
    assert document["peer"] == key.peer_id
    aside = home / os.path.basename(document["before"])
    assert aside.read_bytes() == own
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600


def test_a_key_that_cannot_be_written_leaves_the_one_before(ours, moved, monkeypatch):
    own = ours.identity_path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            with pytest.raises(LocalFault, match="no space"):
                files.import_key(ours, moved, lambda new: PASSPHRASE, force=True)
        assert ours.identity_path.read_bytes() == own
        assert {p.name for p in ours.home.iterdir()} == {"identity.key", "identity.key.lock"}


def test_there_is_a_key_at_every_moment(ours, moved, monkeypatch):
    calls = []
    for call in ("link", "replace", "unlink"):
        real = getattr(os, call)

        def watched(*args, real=real, **how):
            real(*args, **how)
            calls.append(Identity.load(ours.identity_path).peer_id)

        monkeypatch.setattr(os, call, watched)
    files.import_key(ours, moved, lambda new: PASSPHRASE, force=True)
    assert len(calls) >= 2


def test_a_daemon_that_starts_meanwhile_keeps_its_key(ours, moved):
    holder = Identity.load(ours.identity_path)
    own = ours.identity_path.read_bytes()

    def ask(new):
        holder.lock()
        return PASSPHRASE

    try:
        with pytest.raises(Refused, match="in use"):
            files.import_key(ours, moved, ask, force=True)
    finally:
        holder.unlock()
    assert ours.identity_path.read_bytes() == own


@pytest.mark.usefixtures("daemon")
def test_no_key_is_put_under_a_running_daemon(tutti, moved, home, secret):
    own = (home / "identity.key").read_bytes()
    words = ("id", "import", str(moved), "--passphrase-file", secret, "--force")
    refused(tutti(*words), 5, "tutti stop")
    assert (home / "identity.key").read_bytes() == own


def test_a_wrong_passphrase_opens_nothing(tutti, moved, home, tmp_path):
    (tmp_path / "wrong").write_text("another phrase\n")
    home.rename(home.with_name("before"))
    words = ("id", "import", str(moved), "--passphrase-file", str(tmp_path / "wrong"))
    refused(tutti(*words), 5, "passphrase is wrong")
    assert not home.exists()


def test_every_change_of_the_file_is_noticed():
    identity = Identity.ephemeral()
    whole = json.loads(seal(identity, PASSPHRASE))
    assert open_sealed(json.dumps(whole).encode(), PASSPHRASE).peer_id == identity.peer_id
    changed = {
        "peer": Identity.ephemeral().peer_id,
        "salt": "00" * 16,
        "nonce": "00" * 12,
        "sealed": "00" * 48,
        "n": CHEAP * 2,
    }
    for name, value in changed.items():
        with pytest.raises(Refused, match="passphrase is wrong"):
            open_sealed(json.dumps(whole | {name: value}).encode(), PASSPHRASE)


@pytest.mark.parametrize(
    "change",
    [
        {"n": backup.MOST_COST * 2},
        {"n": 100_000},
        {"n": -2},
        {"n": True},
        {"n": "16"},
        {"r": 1 << 20},
        {"p": 1 << 20},
        {"kdf": "none"},
        {"cipher": "none"},
        {"salt": ""},
        {"nonce": "zz" * 12},
        {"sealed": 3},
    ],
)
def test_no_memory_is_taken_for_a_file_that_asks_for_it(change, monkeypatch):
    monkeypatch.setattr(backup, "Scrypt", None)  # would be called for what is let through
    whole = {"tutti_identity": 1, "peer": "x", "kdf": "scrypt", "n": 16, "r": 8, "p": 1}
    whole |= {"salt": "00" * 16, "cipher": "chacha20-poly1305"}
    whole |= {"nonce": "00" * 12, "sealed": "00" * 48}
    with pytest.raises(UsageFault, match="damaged"):
        open_sealed(json.dumps(whole | change).encode(), PASSPHRASE)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"a": 1}', b"\xff", b"[" * 4000, b" " * 9999])
def test_another_file_is_no_identity(raw):
    with pytest.raises(UsageFault):
        open_sealed(raw, PASSPHRASE)


def test_a_file_of_a_newer_tutti_is_known_as_one():
    with pytest.raises(TooNew):
        open_sealed(b'{"tutti_identity": 2}', PASSPHRASE)


def test_a_passphrase_is_one_in_either_spelling():
    composed = "caf\u00e9 caf\u00e9 caf\u00e9"
    decomposed = "cafe\u0301 cafe\u0301 cafe\u0301"
    identity = Identity.ephemeral()
    assert open_sealed(seal(identity, composed), decomposed).peer_id == identity.peer_id


def test_guessing_is_as_slow_as_it_is_meant_to_be():
    assert backup.COST >= 1 << 17
    assert backup.COST <= backup.MOST_COST


@pytest.mark.parametrize(
    ("words", "says"),
    [((), "--passphrase-file"), (("--passphrase-file", "short"), "10 or more")],
)
def test_a_passphrase_is_needed(tutti, key, tmp_path, words, says):
    (tmp_path / "short").write_text("short\n")
    refused(tutti("id", "export", "key.json", *words), 2, says)
    assert not (tmp_path / "key.json").exists()


def test_a_passphrase_comes_from_stdin_or_is_typed_twice(tutti, key, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ten letters\r\n")))
    tutti("id", "export", "one", "--passphrase-file", "-").good()
    assert open_sealed((tmp_path / "one").read_bytes(), "ten letters").peer_id == key.peer_id
    typed = iter(["ten letters", "ten lettres", "ten letters", "ten letters"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("getpass.getpass", lambda _: next(typed))
    refused(tutti("id", "export", "two"), 2, "differ")
    assert not (tmp_path / "two").exists()
    tutti("id", "export", "two").good()


def test_a_pipe_and_a_directory_are_no_files(ours, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
        with pytest.raises(LocalFault):
            files.import_key(ours, path, lambda new: PASSPHRASE, force=False)
