"""``tutti upgrade``: asks an index once, when it is told to, and believes only what is proven."""

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution

import pytest

from node.app.owner import upgrade
from node.core.errors import NetworkFault, Refused
from node.core.version import VERSION, extra_command
from tests.cli.conftest import refused

NEXT = "99.1.0"


def wheel(version: str, **how) -> dict:
    return {"filename": f"tutti-{version}-py3-none-any.whl", "requires-python": ">=3.11"} | how


def listing(*files: dict) -> bytes:
    return json.dumps({"meta": {"api-version": "1.1"}, "name": "tutti", "files": files}).encode()


class Index(BaseHTTPRequestHandler):
    """An index on loopback. ``reply`` writes the answer; ``asked`` are the requests so far."""

    asked: list[tuple[str, str]] = []
    reply: Callable[["Index"], None]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Accept"]))
        type(self).reply(self)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def give(self, raw: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def index(monkeypatch) -> Iterator[type[Index]]:
    """A server, and its address in ``index.url``; it answers with ``index.reply``."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    class Own(Index):
        asked = []
        url = ""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Own.url = f"http://127.0.0.1:{server.server_address[1]}/simple/"
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_newer_version_is_found_by_one_request(tutti, index):
    files = [wheel("0.0.1"), wheel(NEXT), wheel("98.0.0")]
    index.reply = lambda self: self.give(listing(*files))
    shown = tutti("upgrade", "--check", "--index", index.url).good()
    assert f"here     tutti {VERSION}" in shown
    assert f"index    {NEXT}" in shown
    assert "tutti restart" in shown
    assert index.asked == [("/simple/tutti/", "application/vnd.pypi.simple.v1+json")]
    document = json.loads(tutti("upgrade", "--check", "--index", index.url, "--json").good())
    assert (document["newest"], document["newer"]) == (NEXT, True)


@pytest.mark.parametrize(
    ("files", "newest", "blocked"),
    [
        ([wheel(VERSION)], VERSION, ""),
        ([wheel(VERSION), wheel(NEXT, yanked="broken")], VERSION, ""),
        ([wheel(VERSION), wheel(NEXT + "rc1")], VERSION, ""),
        ([wheel(VERSION), wheel(NEXT, **{"requires-python": ">=99"})], VERSION, NEXT),
        ([{"filename": f"tutti-{NEXT}.tar.gz"}], NEXT, ""),
        ([{"filename": "tutti-x.whl"}, {"filename": "readme"}, {}, 3, wheel(VERSION)], VERSION, ""),
        ([wheel(NEXT, **{"requires-python": "soon"}), wheel(VERSION)], VERSION, ""),
        ([], "", ""),
    ],
)
def test_only_what_this_python_can_run_is_offered(index, files, newest, blocked):
    index.reply = lambda self: self.give(listing(*files))
    found = upgrade.check(index.url)
    assert (found.newest, found.blocked) == (newest, blocked)
    assert found.newer == (newest == NEXT)


def test_nothing_newer_is_said(tutti, index):
    index.reply = lambda self: self.give(listing(wheel(VERSION)))
    shown = tutti("upgrade", "--check", "--index", index.url).good()
    assert "nothing newer" in shown
    assert "update " not in shown


def test_nobody_is_asked_without_check(tutti, index, monkeypatch):
    monkeypatch.setattr(upgrade, "INDEX", index.url)
    index.reply = lambda self: self.give(listing())
    shown = tutti("upgrade").good()
    assert "update " in shown
    assert not index.asked
    refused(tutti("upgrade", "--index", index.url), 2, "--check")


def test_a_package_of_the_same_name_is_not_believed(index, monkeypatch):
    """Whoever comes first has a name in an index; the metadata of this version proves it."""
    monkeypatch.setattr(upgrade, "INDEX", index.url)
    index.reply = lambda self: self.give(listing(wheel(VERSION), wheel(NEXT)))
    with pytest.raises(Refused, match="not known to be this project"):
        upgrade.check()
    mine = hashlib.sha256(distribution("tutti").read_text("METADATA").encode()).hexdigest()
    proof = {"core-metadata": {"sha256": mine}}
    index.reply = lambda self: self.give(listing(wheel(VERSION, **proof), wheel(NEXT)))
    found = upgrade.check()
    assert (found.newest, found.proven) == (NEXT, True)
    index.reply = lambda self: self.give(listing(wheel(VERSION), wheel(NEXT, **proof)))
    with pytest.raises(Refused):  # not of the version here
        upgrade.check()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda self: self.give(b"", 404), "does not have tutti"),
        (lambda self: self.give(b"", 500), "status 500"),
        (lambda self: self.give(b"<html>"), "no list of files"),
        (lambda self: self.give(b"[]"), "no list of files"),
        (lambda self: self.give(b'{"name": "other", "files": []}'), "another list"),
        (lambda self: self.give(b'{"name": "tutti", "files": 3}'), "another list"),
        (lambda self: self.give(b" " * (upgrade.MOST_BYTES + 1)), "more than"),
        (lambda self: self.wfile.write(b"nonsense\r\n\r\n"), "cannot ask"),
        (lambda self: self.give(b"", 302), "status 302"),
    ],
)
def test_another_answer_is_a_fault_of_the_network(tutti, index, reply, says):
    index.reply = reply
    refused(tutti("upgrade", "--check", "--index", index.url), 4, says)


def test_an_index_that_never_ends_its_answer_is_given_up(index):
    gone = threading.Event()

    def drips(self: Index) -> None:
        self.send_response(200)
        self.end_headers()
        while not gone.wait(0.02):
            self.wfile.write(b" ")
            self.wfile.flush()

    index.reply = drips
    with pytest.raises(NetworkFault, match="has not answered within"):
        upgrade.check(index.url, deadline_s=0.3)
    gone.set()


def test_no_network_is_a_clear_fault(tutti):
    with socket.socket() as sock:  # bound and not listening: nobody can take the port meanwhile
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
        refused(tutti("upgrade", "--check", "--index", url), 4, "cannot ask", "check the network")


WHEEL = '{"url": "file:///tmp/it/tutti-0.2.0-py3-none-any.whl", "archive_info": {}}'
FOLDER = '{"url": "file:///home/anna/my%20tutti", "dir_info": {}}'
FILE = "./tutti-VERSION-py3-none-any.whl"


@pytest.mark.parametrize(
    ("prefix", "origin", "proven", "command"),
    [
        ("venv", WHEEL, False, f"-m pip install --upgrade {FILE}"),
        ("pipx/venvs/tutti", WHEEL, False, f"pipx install --force {FILE}"),
        ("uv/tools/tutti", WHEEL, False, f"uv tool install --force {FILE}"),
        ("venv", FOLDER, False, "-m pip install --upgrade '/home/anna/my tutti'"),
        ("venv", "", False, "-m pip install --upgrade tutti"),
        ("pipx/venvs/tutti", "", False, "pipx upgrade tutti"),
        ("uv/tools/tutti", WHEEL, True, "uv tool upgrade tutti"),
        ("venv", "[]", False, "-m pip install --upgrade tutti"),
    ],
)
def test_an_installation_from_a_file_is_updated_from_a_file(
    tmp_path, monkeypatch, prefix, origin, proven, command
):
    """In the public index the name is another project's."""
    where = tmp_path / prefix
    where.mkdir(parents=True)
    if prefix.startswith("uv/"):
        (where / "uv-receipt.toml").touch()
    monkeypatch.setattr("sys.prefix", str(where))
    monkeypatch.setattr(upgrade, "__file__", str(where / "lib/node/app/owner/upgrade.py"))
    monkeypatch.setattr(upgrade, "_installed", {"direct_url.json": origin.encode()}.__getitem__)
    first, restart = upgrade.update_commands(proven)
    assert first.endswith(command)
    assert restart == "tutti restart"


def test_an_optional_part_is_installed_beside_this_tutti(monkeypatch):
    monkeypatch.setattr("sys.executable", "/opt/a b/bin/python")
    assert extra_command("data") == "'/opt/a b/bin/python' -m pip install 'tutti[data]'"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert extra_command("data") == "uv pip install --python '/opt/a b/bin/python' 'tutti[data]'"


@pytest.mark.parametrize("url", ["http://example.org/simple/", "ftp://x/", "pypi.org", "https://"])
def test_only_https_is_asked(tutti, url):
    refused(tutti("upgrade", "--check", "--index", url), 2, "https address")
