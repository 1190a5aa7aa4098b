"""A manifest of somebody else makes a peer open no file that its user did not name."""

import hashlib
import os

import pytest

from node.core.errors import Refused, UsageFault
from node.data.places import named_for_one_run, open_regular
from node.data.settings import NO_PLACES, OWN_MANIFEST, DataSettings, Places
from node.data.sources import open_data, streams
from node.data.streamed import shards
from node.data.tokenizer import ByteTokenizer, open_tokenizer
from tests.data.streamed import documents, published, stream

TEXT = b"my diary, which is nobody's business\n" * 100
HASH = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture
def diary(tmp_path, monkeypatch):
    """A text in the user's home."""
    home = tmp_path / "user"
    home.mkdir()
    (home / "diary.txt").write_bytes(TEXT)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home / "diary.txt"


def corpus(source: str, home, places: Places = NO_PLACES, sha256: str = ""):
    return open_data(DataSettings(source=source, sha256=sha256), 16, 300, home, places)[0]


@pytest.mark.parametrize("name", ["{}", "~/diary.txt", "diary.txt", "../user/diary.txt"])
def test_a_path_without_a_hash_is_the_owners_alone(diary, tmp_path, name, monkeypatch):
    source = f"file:{name.format(diary)}"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
        with pytest.raises(UsageFault, match="no hash of it, so .* is not opened") as refused:
            corpus(source, tmp_path)
    assert "--data FILE" in refused.value.next_step
    assert corpus(source, tmp_path, OWN_MANIFEST).sha256 == HASH
    # A file that the user names is read; a directory for all runs is a place to look.
    assert corpus(source, tmp_path, Places(str(diary))).sha256 == HASH
    with pytest.raises(UsageFault, match="is not opened"):
        corpus(source, tmp_path, Places(str(diary.parent)))


def test_a_file_with_a_hash_is_found_and_compared_first(diary, tmp_path):
    for source, places in (
        ("file:~/diary.txt", NO_PLACES),
        ("file:/elsewhere/diary.txt", Places(str(diary.parent))),
    ):
        assert corpus(source, tmp_path, places, HASH).sha256 == HASH
        with pytest.raises(Refused, match="the data's sha256"):
            corpus(source, tmp_path, places, "0" * 64)


@pytest.mark.parametrize("name", ["..", "/", "", "x/.."])
def test_a_name_leads_out_of_no_directory(diary, tmp_path, name):
    with pytest.raises(UsageFault):
        corpus(f"file:{name}", tmp_path, Places(str(diary.parent)), HASH)


def test_a_tokenizer_without_a_hash_is_the_owners_alone(diary, tmp_path):
    path = diary.parent / "t.json"
    path.write_bytes(ByteTokenizer().to_json())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    named = DataSettings(tokenizer="~/t.json")
    with pytest.raises(UsageFault, match=r"tokenizer ~/t\.json and no hash of it") as refused:
        open_tokenizer(named)
    assert "--tokenizer FILE" in refused.value.next_step
    proven = DataSettings(tokenizer="~/t.json", tokenizer_sha256=digest)
    for settings, places in (
        (named, OWN_MANIFEST),
        (named, Places(tokenizer=str(path))),
        (proven, NO_PLACES),
    ):
        assert open_tokenizer(settings, places).digest == digest
    # Another file is not even parsed.
    path.write_bytes(TEXT)
    with pytest.raises(Refused, match="the tokenizer's sha256"):
        open_tokenizer(proven)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "kernel", "link", "gone"])
@pytest.mark.parametrize("places", [NO_PLACES, OWN_MANIFEST])
def test_what_is_no_regular_file_is_neither_read_nor_waited_for(tmp_path, kind, places):
    path = tmp_path / "a.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind in ("device", "kernel", "link"):
        target = {"device": "/dev/zero", "kernel": "/proc/self/environ", "link": "/proc/version"}
        path.symlink_to(target[kind])
        if not os.path.exists(path):
            pytest.skip("this system has none")
    with pytest.raises(UsageFault, match="not a regular file|interface of the kernel|No such file"):
        corpus(f"file:{path}", tmp_path / "home", places, HASH)
    with pytest.raises(UsageFault):
        open_tokenizer(DataSettings(tokenizer=str(path), tokenizer_sha256=HASH), places)


def test_shared_memory_is_no_device(tmp_path):
    if os.path.isdir("/dev/shm"):
        path = f"/dev/shm/tutti-test-{os.getpid()}"
        with open(path, "wb") as file:
            file.write(b"x")
        try:
            with open_regular(tmp_path.__class__(path), "") as file:
                assert file.read() == b"x"
        finally:
            os.unlink(path)


def test_a_directory_that_a_hub_name_happens_to_be_is_not_read(diary, tmp_path, monkeypatch):
    saved = diary.parent / "owner" / "words"
    saved.mkdir(parents=True)
    (saved / "dataset_info.json").write_text("{}")
    named = DataSettings(source="hf:owner/words:train")
    assert streams(named, NO_PLACES)  # of the Hub
    assert not streams(named, OWN_MANIFEST)
    assert not streams(named, Places(str(saved)))
    assert not streams(named, Places(str(saved.parent), own=True))
    # A place set for all runs is not named for this one.
    assert streams(named, Places(str(saved.parent)))
    assert streams(named, Places(str(saved), for_all_runs=("data",)))
    with pytest.raises(UsageFault, match="is read whole, as runs of older versions do"):
        corpus("hf:owner/words:train", tmp_path, NO_PLACES, HASH)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.jsonl", "a/../../x.jsonl"])
def test_a_list_names_files_beside_it(tmp_path, name):
    path = published(tmp_path / "here", {"a.jsonl": documents(20)})
    path.write_text(path.read_text() + f"{'0' * 64}  {name}\n")
    with pytest.raises(UsageFault, match="which is not beside it"):
        stream(f"file:{path}", tmp_path)


def test_a_list_without_a_hash_is_the_owners_alone(tmp_path):
    path = published(tmp_path / "here", {"a.jsonl": documents(20)})
    with pytest.raises(UsageFault, match="is not opened"):
        stream(f"file:{path}", tmp_path, places=NO_PLACES)
    digest = stream(f"file:{path}", tmp_path).sha256
    assert stream(f"file:{path}", tmp_path / "b", places=NO_PLACES, sha256=digest).listing.shards


@pytest.mark.parametrize("sha256", ["", "0" * 64])
def test_the_users_token_opens_no_data_set_that_only_the_user_may_read(sha256):
    """The Hub learns of this peer only if a hash proves the content or the manifest is the user's
    own."""
    named = DataSettings(source="hf:me/private:train", sha256=sha256)
    assert shards.admitted(named, NO_PLACES) == bool(sha256)
    assert shards.admitted(named, OWN_MANIFEST)


def test_a_place_that_names_a_file_is_for_one_run(diary):
    assert named_for_one_run(str(diary))
    assert not named_for_one_run(str(diary.parent))
    assert not named_for_one_run("")
