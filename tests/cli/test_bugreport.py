"""``tutti bugreport``: what it gathers, and that no secret of the machine is in it."""

import gzip
import json
import os
import stat
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest

from node.app.owner import bugreport
from node.app.owner.redaction import Redactor
from node.config import NodeConfig
from node.coordinator.recording.recorder import Recorder
from node.core.errors import LocalFault
from node.core.journey import Version
from node.core.version import VERSION
from node.identity.admission import admission_token
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from tests.cli.conftest import refused

FRIEND = Identity.of_seed(bytes(range(32)))
"""The same in every process: the names of tests hold its PeerId."""
ADDRESSES = ("203.0.113.77", "2001:db8:77::abcd", "192.168.77.5", "10.77.3.4")
RUN = "ab" * 32
TOKEN = admission_token(FRIEND, RUN, Identity.ephemeral().peer_id, 4e9).hex()
GRANT = admission_token(FRIEND, RUN, None, 4e9)
INVITE = Invite(
    RUN, FRIEND.peer_id, (f"/ip4/{ADDRESSES[0]}/tcp/31337/p2p/{FRIEND.peer_id}",), GRANT
).encode()
SECRETS = {
    "admission token": TOKEN,
    "invite": INVITE,
    "hub token": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "serve token": "open-sesame-77",
    "a password": "correct-horse-battery",
    "a bearer": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI3NyJ9.c2lnbmF0dXJl",
    "public address": ADDRESSES[0],
    "address 6": ADDRESSES[1],
    "address on the LAN": ADDRESSES[2],
    "address in a field": ADDRESSES[3],
    "hardware address": "52:54:00:77:ab:cd",
    "dns name": "peer.anna-at-home.example",
    "data host": "nas.anna.lan",
    "mail": "anna@anna-at-home.example",
    "address of copies": "s3://anna77:copies-pw@bucket-of-anna/run?sig=copies-sig",
    "web address": "https://anna:pw@files.anna-at-home.example/private.jsonl",
    "data file": "letters-of-anna.txt",
    "data directory": "diaries of anna",
    "source in the manifest": "thesis-draft-7.txt",
    "data of another start": "ledger-of-anna.parquet",
    "tokenizer": "anna-words.json",
    "a path outside": "/mnt/usb-of-anna/film.mkv",
    "home of the user": "/home/annasmith",
    "human name": "anna-4090",
    "a key in a trace": "MC4CAQAwBQYDK2VwBCIEIDAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4",
}


@pytest.fixture(autouse=True)
def _no_doctor(monkeypatch):
    """The doctor answers at once, with secrets in its findings."""
    run = subprocess.run

    def doctor(words, **how):
        if "doctor" not in words:
            return run(words, **how)
        found = {"checks": [{"check": "data", "cause": sentence()}], "exit_code": 0}
        return SimpleNamespace(stdout=json.dumps(found).encode(), stderr=b"", returncode=0)

    monkeypatch.setattr(bugreport.subprocess, "run", doctor)


def sentence() -> str:
    """Every secret as a log would have it."""
    said = " ".join(f"{name}: {SECRETS[name]};" for name in SECRETS if name != "a password")
    return (
        f"{said} password={SECRETS['a password']} Authorization: Bearer {SECRETS['a bearer']} "
        f"dials /dns4/{SECRETS['dns name']}/tcp/4001 and /ip6/{ADDRESSES[1]}/udp/1/quic-v1, "
        f'[{ADDRESSES[1]}]:8080, {ADDRESSES[2]}:80. File "{SECRETS["home of the user"]}/x y.py"'
    )


@pytest.fixture
def seeded(home, tmp_path, monkeypatch):
    """A home with secrets in everything that a report reads. The secrets that only it knows come on
    top of :data:`SECRETS`."""
    identity = Identity.create(home / "identity.key")
    folder = tmp_path / SECRETS["data directory"]
    folder.mkdir()
    data = folder / SECRETS["data file"]
    data.write_text("dear diary")
    (home / "config.toml").write_text(
        f'name = "{SECRETS["human name"]}"\nadmission = "{TOKEN}"\ndata = "{data}"\n'
        f'join = ["{INVITE}"]\ndata_hosts = ["{SECRETS["data host"]}:8000"]\n'
        f'[checkpoint]\nto = "{SECRETS["address of copies"]}"\n'
        f'[transport]\nhost = "{ADDRESSES[2]}"\nannounce = ["{ADDRESSES[0]}:31337"]\n'
    )
    ours = NodeConfig.load({"home": home}, {})
    manifest = Manifest.parse(
        amended(
            Manifest.default_demo().owned_by(identity.peer_id),
            {
                "data.source": f"file:{SECRETS['source in the manifest']}",
                "data.tokenizer": SECRETS["tokenizer"],
                "data.tokenizer_sha256": "77" * 32,
            },
        ).sign(identity)
    )
    ours.remember(manifest)
    run = ours.swarm_dir(manifest.run_id)
    (run / "invite").write_text(INVITE + "\n")
    (run / "places.json").write_text(
        json.dumps({"data": f"/x/{SECRETS['data of another start']}", "hosts": ["b.lan:1"]})
    )
    log = home / "log"
    log.mkdir()
    fields = {"peer": FRIEND.peer_id, ADDRESSES[3]: sentence(), "deep": [{"x": str(data)}]}
    event = {"at": 1.0, "level": "info", "component": "daemon", "kind": "banner"}
    lines = [
        json.dumps(event | {"text": sentence(), "fields": fields | {"run": manifest.run_id}}),
        json.dumps(event | {"text": f"reads {data} as {identity.seed().hex()}", "fields": {}}),
        sentence() + "  a torn line",
    ]
    (log / "events.jsonl").write_text("\n".join(lines) + "\n")
    key_file = identity.key_file_bytes().hex()
    (log / "crash.log").write_text(f"Traceback\n  {sentence()}\n{key_file}\n")
    (home / "daemon.out").write_text(f"{sentence()}\nkept {home}/log/events.jsonl\n")
    monkeypatch.setenv("TUTTI_SERVE_TOKEN", SECRETS["serve token"])
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub token"])
    own = {"seed": identity.seed().hex(), "key": key_file, "path": str(data)}
    return SECRETS | own | {"tutti's home": str(home)}


def written(path) -> dict[str, str]:
    """Files of an archive by name."""
    with tarfile.open(path) as tar:
        files = {m.name: tar.extractfile(m).read().decode() for m in tar.getmembers()}
    return {name.removeprefix("tutti-bugreport/"): text for name, text in files.items()}


def test_no_secret_is_in_the_archive(tutti, seeded, tmp_path):
    tutti("bugreport", "report.tar.gz", "--yes").good()
    path = tmp_path / "report.tar.gz"
    raw = gzip.decompress(path.read_bytes()).decode(errors="replace")
    assert {name for name, secret in seeded.items() if secret in raw} == set()
    files = written(path)
    assert {
        "status.json",
        "versions.json",
        "machine.json",
        "settings.json",
        "manifest.json",
        "events.jsonl",
        "daemon.out",
        "crash.log",
        "doctor.json",
    } <= set(files)
    for name, text in files.items():
        assert text.strip(), name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.getenv("USER", "no such user") not in raw.splitlines()[0]


def test_every_source_is_redacted_and_not_left_out(tutti, seeded, tmp_path, monkeypatch):
    """Without the redactor every secret is there: the test above looks where they are."""
    monkeypatch.setattr(Redactor, "text", lambda self, text: text)
    monkeypatch.setattr(bugreport.Collector, "_check", lambda self: None)
    tutti("bugreport", "report.tar.gz", "--yes").good()
    files = written(tmp_path / "report.tar.gz")
    for name in ("events.jsonl", "daemon.out", "crash.log", "doctor.json"):
        text = files[name]
        missing = [one for one, secret in SECRETS.items() if json.dumps(secret)[1:-1] not in text]
        assert missing in ([], ["a password"]), name


def test_what_helps_stays(tutti, seeded, tmp_path):
    tutti("bugreport", "report.tar.gz", "--yes").good()
    files = written(tmp_path / "report.tar.gz")
    assert json.loads(files["versions.json"])["tutti"] == VERSION
    settings = json.loads(files["settings.json"])
    assert settings["threads"] == {"value": 0, "source": ""}
    assert settings["name"]["source"] == "<home>/config.toml"
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()[:2]]
    assert [event["kind"] for event in events] == ["banner", "banner"]
    assert events[0]["fields"]["peer"] == FRIEND.peer_id  # public, and needed to follow a fault
    run = json.loads(files["manifest.json"])["run"]
    assert events[0]["fields"]["run"] == run  # its first digits, as people see it
    assert len(run) == 12
    assert "kept <home>/log/events.jsonl" in files["daemon.out"]
    assert json.loads(files["manifest.json"])["model"]["layers"] > 0
    assert json.loads(files["doctor.json"])["exit_code"] == 0


def test_equal_secrets_have_equal_marks(tutti, seeded, tmp_path):
    tutti("bugreport", "report.tar.gz", "--yes").good()
    lines = written(tmp_path / "report.tar.gz")["daemon.out"]
    marks = {mark for mark in lines.split() if mark.startswith("<address-")}
    assert len(marks) >= 3


def test_it_is_shown_before_it_is_written(tutti, seeded, tmp_path):
    shown = tutti("bugreport", "report.tar.gz")
    refused(shown, 2, "--print", "--yes")
    assert not (tmp_path / "report.tar.gz").exists()
    whole = tutti("bugreport", "--print").good()
    assert not list(tmp_path.glob("*.tar.gz"))
    files = {name for name in whole.splitlines() if name.startswith("==== ")}
    assert "==== events.jsonl" in files
    assert [name for name, secret in seeded.items() if secret in whole] == []


@pytest.mark.parametrize(
    ("answers", "there"), [(["n"], False), (["perhaps", "y"], True), (["s", "y"], True)]
)
def test_a_terminal_is_asked(tutti, seeded, tmp_path, monkeypatch, answers, there):
    said = iter(answers)
    pages = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("click.prompt", lambda *_, **__: next(said))
    monkeypatch.setattr("click.echo_via_pager", pages.append)
    shown = tutti("bugreport", "report.tar.gz")
    assert (tmp_path / "report.tar.gz").exists() == there
    assert "events.jsonl" in shown.stderr  # the table of contents comes first
    assert "redacted" in shown.stderr
    assert bool(pages) == ("s" in answers)
    assert shown.returncode == (0 if there else 5)


def test_no_file_is_replaced(tutti, seeded, tmp_path):
    (tmp_path / "report.tar.gz").write_text("mine")
    refused(tutti("bugreport", "report.tar.gz", "--yes"), 5, "--force")
    assert (tmp_path / "report.tar.gz").read_text() == "mine"
    document = json.loads(tutti("bugreport", "report.tar.gz", "--yes", "--force", "--json").good())
    assert document["file"] == str(tmp_path / "report.tar.gz")
    assert {one["name"] for one in document["files"]} == set(written(tmp_path / "report.tar.gz"))
    refused(tutti("bugreport", "nowhere/report.tar.gz", "--yes"), 2, "no directory")


def test_an_empty_home_has_a_report_too(tutti, tmp_path):
    shown = tutti("bugreport", "--yes")
    [path] = tmp_path.glob("tutti-bugreport-*.tar.gz")
    assert str(path.name) in shown.good()
    assert "doctor.json" in written(path)
    assert "manifest.json    " in shown.stderr  # is not there, and why
    assert "no swarm is remembered" in shown.stderr


def test_a_running_daemon_tells_its_state(tutti, daemon, tmp_path):
    tutti("bugreport", "report.tar.gz", "--yes").good()
    document = json.loads(written(tmp_path / "report.tar.gz")["status.json"])
    assert set(document) == {"status", "peers", "reach"}
    assert document["status"]["name"] == daemon.said.name


def recording(path, advice: str = "") -> None:
    """A recording of one member that says nothing but its checkpoints, and ``advice``."""
    lines = list[bytes]()
    recorder = Recorder(lines.append)
    recorder.member(FRIEND.peer_id, Version(0, ""))
    recorder.close(advice or "stopped")
    path.write_bytes(b"".join(lines))


def test_a_recording_comes_along_as_it_is(tutti, seeded, home, tmp_path):
    recording(tmp_path / "machines.rec")
    with (home / "log" / "events.jsonl").open("a") as events:
        text = f"records its machines in {tmp_path / 'machines.rec'}"
        events.write(json.dumps({"at": 2.0, "kind": "recording", "text": text}) + "\n")
    tutti("bugreport", "report.tar.gz", "--yes").good()
    found = written(tmp_path / "report.tar.gz")["machines.rec"]
    assert found == (tmp_path / "machines.rec").read_text()


@pytest.mark.parametrize("secret", ["invite", "public address", "data file", "hub token"])
def test_a_recording_with_a_secret_stays_here(tutti, seeded, tmp_path, secret):
    recording(tmp_path / "machines.rec", f"stopped by {SECRETS[secret]}")
    shown = tutti("bugreport", "r.tar.gz", "--yes", "--recording", "machines.rec")
    assert "not given away" in shown.stderr
    assert "machines.rec" not in written(tmp_path / "r.tar.gz")
    refused(tutti("bugreport", "--recording", "none.rec"), 2, "none.rec")


def test_what_is_recorded_after_the_check_stays_here(tutti, seeded, tmp_path, monkeypatch):
    path = tmp_path / "machines.rec"
    recording(path)
    before = path.read_text()
    archive = bugreport._archive

    def later(*args):
        with path.open("a") as file:
            file.write(SECRETS["public address"])
        archive(*args)

    monkeypatch.setattr(bugreport, "_archive", later)
    tutti("bugreport", "r.tar.gz", "--yes", "--recording", "machines.rec").good()
    assert written(tmp_path / "r.tar.gz")["machines.rec"] == before


def test_a_file_with_a_secret_left_in_it_is_dropped(ours, seeded, monkeypatch):
    monkeypatch.setattr(Redactor, "text", lambda self, text: text)
    report = bugreport.Collector(ours, ["doctor"]).collect(lambda line: None)
    assert "events.jsonl" not in {one.name for one in report.entries}
    assert "still in it" in report.left_out["events.jsonl"]


def test_an_archive_that_cannot_be_finished_leaves_nothing(tmp_path):
    report = bugreport.BugReport([bugreport.ArchiveFile("x", "x", source=tmp_path / "gone")])
    with pytest.raises(LocalFault, match=r"report.tar.gz: No such file"):
        bugreport.write(report, tmp_path / "report.tar.gz")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------ the redactor alone


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("epoch 12/120 at 12:34:56, tok/s 61.0k, 2.5 MB/s", True),
        ("tutti 0.2.0, python 3.11.7, torch 2.13.0+cpu", True),
        ("listens on 127.0.0.1:8000, ::1 and 0.0.0.0", True),
        (f"peer {FRIEND.peer_id} left", True),
        ("/proc/self/status and /usr/lib/python3", True),
        ("tokens: 4096, 12 tokens", True),
        ("<home>/log/events.jsonl", True),
        ("cli.py:123: UserWarning", True),
        ("either/or and and/or", True),
        ("http://127.0.0.1:9090/", True),
        ("at 203.0.113.7", False),
        ("fe80::1%eth0 and 2001:db8::1", False),
        ("::ffff:203.0.113.7", False),
        ("~/books/mine.txt", False),
        ("C:\\Users\\anna\\mine.txt", False),
        ("nas.lan", False),
        ("seed.example.org:4001", False),
        ("token = abc", False),
        ("ghp_0123456789abcdef0123", False),
        ("-----BEGIN PRIVATE KEY-----\nMC4\n-----END PRIVATE KEY-----", False),
        ("0123456789abcdef0123456789abcdef", False),
    ],
)
def test_rules_find_secrets_and_nothing_else(text, kept):
    redactor = Redactor({}, {})
    assert (redactor.text(text) == text) == kept
    assert bool(redactor.found) != kept


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("ipv6:%5B2001:db8:1:2::1%5D:50051", "ipv6:[<address-1>]:50051"),
        ("ipv6:%5b2001:DB8::1%5d:50051", "ipv6:[<address-1>]:50051"),
        ("ipv6:2001:db8::1", "ipv6:<address-1>"),
        ("ipv6:2001:db8:1:2:3:4:5:6", "ipv6:<address-1>"),
        ("node:2001:db8::1", "node:<address-1>"),
        ("2001:db8::1: refused", "<address-1>: refused"),
        ("at 2001:db8::1...", "at <address-1>..."),
        ("2001:db8::1:50051", "<address-1>:50051"),
        ("cannot reach 203.0.113.5.", "cannot reach <address-1>."),
        ("peer_203.0.113.5", "peer_<address-1>"),
        ("ipv4:203.0.113.5:50051", "ipv4:<address-1>:50051"),
        ("ipv6:%5B::1%5D:50051", "ipv6:[::1]:50051"),
        ("at:12:34:56: started", "at:12:34:56: started"),
    ],
)
def test_an_address_is_found_in_every_form(text, redacted):
    redactor = Redactor({}, {})
    assert redactor.text(text) == redacted
    assert redactor.leaks(text) == ["address"] * ("<address-1>" in redacted)


def test_a_known_secret_is_found_as_a_word_only():
    redactor = Redactor({"anna": "name"}, {"/h/anna": "<home>"})
    assert redactor.text("anna, anna-2, savannah, /h/anna/log") == (
        "<name-1>, <name-1>-2, savannah, <home>/log"
    )


def test_a_text_made_to_be_slow_is_not():
    """Strangers write into logs. Each rule reads a text in about one pass, which a count of steps
    cannot show; a quadratic rule would take minutes here, and the test's time limit is three."""
    for unit in ("a-", "a.", "/", "::", "[", "-----BEGIN A", "a@", "token", "a" * 64 + " ", '"/'):
        Redactor({"secret": "x"}, {}).text(unit * (60_000 // len(unit)))
