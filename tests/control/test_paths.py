"""Directories with names that mean something to gRPC, to a shell, or to a list."""

import asyncio
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from node.config import NodeConfig
from node.control.service import ControlService
from node.core.home import control_socket, fits_socket, socket_target
from node.core.ids import PeerId
from node.transport.p2p import RuntimeDirectory
from node.transport.ways.tunnel import Tunnel, carry_over
from testbed.fakes.canned_window import CannedWindow
from tests.control.conftest import ask

NAMES = (
    "plain",
    "a b",
    "a,b",
    "#1?%41",
    'it\'s "so"',
    "größe-日本",
    "line\nbreak",
    "a;b&c=d$e",
    "back\\slash",
    "[v6]:1",
    "deep" * 40,
)


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a short path: below pytest's own, no socket fits."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize("name", NAMES)
async def test_a_daemon_can_be_asked_whatever_its_home_is_called(base, name, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    home = base / name
    path = NodeConfig.load({"home": home}, {}).prepare_control_socket()
    service = ControlService(CannedWindow(), path)
    await service.start()
    assert (await ask(path, lambda c: c.status())).name == "brisk-otter"
    await service.close(0.1)
    in_home = name not in ("a,b", "deep" * 40)
    assert (path.parent == home) is in_home
    if not in_home:
        assert (home / "ctl.sock.path").read_text(encoding="utf-8") == f"{path}\n"


def test_a_session_directory_that_no_socket_fits_into_is_not_used(base, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    assert control_socket(base / "a,b").is_relative_to(base)
    (base / "x,y").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "x,y"))
    assert fits_socket(control_socket(base / "a,b"))


@pytest.mark.parametrize("name", [name for name in NAMES if len(name) < 40])
async def test_a_tunnel_is_dialled_whatever_tmpdir_is_called(base, name, monkeypatch):
    (base / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base / name))
    runtime = RuntimeDirectory()
    assert (runtime.path.parent == base / name) is ("," not in name)
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"yes")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("any", {"Call": answer}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    open_stream = partial(asyncio.open_connection, "127.0.0.1", port)
    carry = partial(carry_over, open_stream, None)
    tunnel = Tunnel(PeerId("12D3KooWA"), runtime.path / "tunnel-0.sock", carry)
    await tunnel.start()
    async with grpc.aio.insecure_channel(tunnel.target) as channel:
        assert await channel.unary_unary("/any/Call")(b"", timeout=30) == b"yes"
    await tunnel.close()
    await server.stop(0)
    runtime.close()


def test_a_target_is_a_uri():
    assert socket_target(Path("/tmp/a b#c?d%e\nü/s")) == "unix:/tmp/a%20b%23c%3Fd%25e%0A%C3%BC/s"


def test_a_path_too_long_or_with_a_comma_fits_no_socket():
    assert fits_socket(Path("/tmp/ab/s"), 20)
    assert not fits_socket(Path("/tmp/a,b/s"))
    assert not fits_socket(Path("/tmp") / ("x" * 90), 20)
