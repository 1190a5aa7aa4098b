"""The attackers of the benchmark: they speak HTTP/2 as gRPC does, and only to this machine."""

import asyncio
import importlib
import math
import struct
import time
from collections import Counter
from types import SimpleNamespace
from typing import cast

import grpc
import grpc.aio
import pytest

from benchmarks.report import UNJUDGED, Report, Row
from benchmarks.strangers import __main__ as strangers
from benchmarks.strangers import direct, siege, watched
from benchmarks.strangers.band import check_loopback, is_reason
from benchmarks.strangers.files import OpenWatch
from benchmarks.strangers.http2 import Http2, printable_parts
from benchmarks.strangers.siege import Minute, Siege
from benchmarks.strangers.table import ATTACKS, GROUNDS, Attack
from benchmarks.strangers.watched import blocked
from node.core.errors import UsageFault
from node.reach.secure import make_certificate
from node.transport.auth import TOKEN_KEY
from testbed.daemons.fleet import Box, Peer

METHOD = "/tutti.v1.Training/Tell"


def minute(
    epochs: int = 20,
    met: int = 1,
    calls: int = 1,
    cores: float = 0.1,
    cores_of_attackers: float = 0.0,
) -> Minute:
    """A minute of an attack in which all but the epochs are as they should be."""
    said = {"met": met, "heard": {"no": 1}, "refused": 1, "calls": calls, "sent": 1}
    return Minute(
        60.0,
        epochs=epochs,
        joined_s=1.0,
        said=said,
        banned=1,
        cores=cores,
        cores_of_attackers=cores_of_attackers,
    )


def row_of(report: Report, words: str) -> Row:
    """The row with these words in its name."""
    (found,) = [row for row in report.rows if words in row.name]
    return found


async def test_a_body_arrives_only_when_its_last_byte_does() -> None:
    calls: list[tuple[bytes, str]] = []
    came = asyncio.Event()

    async def tell(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        calls.append((request, str(metadata[TOKEN_KEY])))
        came.set()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no seat is free")
        return b""

    certificate = make_certificate()
    server = grpc.aio.server()
    handler = {"Tell": grpc.unary_unary_rpc_method_handler(tell)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tutti.v1.Training", handler),)
    )
    credentials = grpc.ssl_server_credentials([(certificate.key, certificate.pem)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    heard: Counter[str] = Counter()
    connection = Http2(f"127.0.0.1:{port}", heard)
    try:
        async with asyncio.timeout(20.0):
            await connection.connect()
            unfinished = await connection.begin(METHOD, "aa")
            await connection.data(unfinished, struct.pack(">BI", 0, 4) + b"abc")
            whole = await connection.begin(METHOD, "bb")
            await connection.data(whole, struct.pack(">BI", 0, 3) + b"xyz")
            await came.wait()
            while not heard:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        connection.close()
        await server.stop(None)
    assert calls == [(b"xyz", "bb")]
    assert connection.ended == {whole}
    assert "no seat is free" in next(iter(heard))


def test_attackers_leave_other_machines_alone() -> None:
    check_loopback("127.0.0.1")
    check_loopback("::1")
    for host in ("192.168.1.7", "8.8.8.8", "::ffff:8.8.8.8"):
        with pytest.raises(UsageFault):
            check_loopback(host)


def test_every_attack_is_there() -> None:
    for attack in ATTACKS:
        assert attack.ground in GROUNDS
        assert bool(attack.run) != bool(attack.bent)
        if attack.run:
            module, _, function = attack.run.partition(":")
            assert callable(
                getattr(importlib.import_module(f"benchmarks.strangers.{module}"), function)
            )


def test_a_block_is_time_in_which_the_loop_ran_code() -> None:
    assert blocked(due=1.0, now=3.0, cpu_before=5.0, cpu=7.5) == 2.0
    assert blocked(due=1.0, now=3.0, cpu_before=5.0, cpu=5.1) == pytest.approx(0.1)
    assert blocked(due=1.0, now=0.9, cpu_before=5.0, cpu=5.1) == 0.0


async def test_a_callback_that_takes_long_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(watched, "TELL_S", 0.0)
    (tmp_path / watched.FILE).parent.mkdir()
    begin = time.time()
    watched.LoopWatch(tmp_path / watched.FILE)
    busy_until = time.thread_time() + 0.3
    while time.thread_time() < busy_until:
        pass
    while not (told := watched.read_blocks(tmp_path, begin, math.inf)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    # The first tick was due within the block, and the rest of the block counts.
    assert told[0].seconds >= 0.3 - watched.TICK_S - 0.01


@pytest.mark.parametrize(
    ("members", "attackers", "epochs", "holds"),
    [(1.0, 0.7, 9, True), (1.0, 0.7, 5, False), (1.2, 0.7, 5, None), (1.2, 0.7, 9, None)],
)
def test_epochs_are_not_judged_where_the_processors_do_not_suffice(
    monkeypatch, members, attackers, epochs, holds
) -> None:
    monkeypatch.setattr(siege.os, "cpu_count", lambda: 2)
    quiet = Minute(60.0, epochs=10, joined_s=1.0, cores=1.9)
    attacked = minute(epochs=epochs, cores=members, cores_of_attackers=attackers)
    report = Report()
    siege.rows(report, "1 an attack", quiet, attacked, ATTACKS[0])
    row = row_of(report, "epochs")
    assert row.value == epochs / 10
    assert row.holds is holds
    assert ("not judged: members and attackers kept 1.90 of 2" in row.target) == (holds is None)
    assert all(other.holds for other in report.rows if other is not row)


def test_epochs_are_not_judged_beside_a_quiet_minute_with_few() -> None:
    report = Report()
    siege.rows(report, "1 an attack", minute(epochs=0), minute(epochs=1), ATTACKS[0])
    row = row_of(report, "epochs")
    assert row.holds is None
    assert "not judged: a quiet time has fewer than" in row.target


STRANGERS = next(attack for attack in ATTACKS if attack.run == "calls:silent")
PRIVATE = next(attack for attack in ATTACKS if attack.ground == "private")
BENT = next(attack for attack in ATTACKS if attack.bent)


@pytest.mark.parametrize(
    ("attack", "met", "calls", "holds"),
    [
        (STRANGERS, 160, 9, True),
        (STRANGERS, 0, 9, False),
        (STRANGERS, 160, 0, False),
        (PRIVATE, 0, 9, True),
        (PRIVATE, 0, 0, False),
        (BENT, 1, 0, True),
    ],
)
def test_attackers_are_refused_where_they_have_attacked(
    attack: Attack, met: int, calls: int, holds: bool
) -> None:
    report = Report()
    attacked = minute(met=met, calls=calls)
    siege.rows(report, "1 an attack", minute(), attacked, attack)
    assert row_of(report, "attackers refused").holds is holds


def test_a_handshake_that_fails_before_an_attack_is_no_refusal_of_it() -> None:
    assert is_reason("too many calls")
    assert not is_reason("handshake: this run is at another protocol")


@pytest.mark.parametrize("well", [True, False])
def test_a_swarm_that_does_not_go_on_after_an_attack_has_a_row(monkeypatch, well: bool) -> None:
    monkeypatch.setattr(strangers, "assault", lambda *_: None)
    left = list(ATTACKS[:2])
    report = Report()
    strangers._until_unwell(report, cast("Siege", SimpleNamespace(well=well)), left, 1.0)
    assert [row.holds for row in report.rows] == ([True, True] if well else [False])
    assert bool(left) != well


def test_a_row_that_could_not_be_judged_shows_in_the_exit_code(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.report.judged", lambda rows, load: list(rows))
    report = Report()
    report.add("epochs", 0.5, "x", "", "at least 0.9; not judged: a crowd", None)
    report.add("peers", 3, "peers", "no target")
    assert report.end(None) == UNJUDGED
    report.add("memory", 9, "MiB", "", "at most 8", holds=False)
    assert report.end(None) == 1


@pytest.mark.parametrize("ground", ["open", "private"])
def test_members_of_a_private_run_join_by_an_invite_of_its_owner(
    monkeypatch, tmp_path, ground: str
) -> None:
    started: list[str] = []

    def start(peer: Peer) -> Peer:
        started.append(peer.child.arguments[0])
        return peer

    monkeypatch.setattr(Peer, "start", start)
    monkeypatch.setattr(Box, "wait", lambda *_: None)
    monkeypatch.setattr(Box, "invite", lambda box, giver: "INVITE")
    peers = siege.start_members(Box(tmp_path), GROUNDS[ground])
    others = "join" if ground == "private" else "start"
    assert started == ["start", *[others] * (len(peers) - 1)]
    assert [peer.child.arguments[0] for peer in peers] == started


def test_records_of_cells_that_are_read_are_measured() -> None:
    report = Report()
    direct.records(report)
    accepted, refused = [row for row in report.rows if "memory" in row.name]
    assert "2048 replicas each, 64 were read" in accepted.peer
    assert refused.peer.endswith(" 0 were read")
    assert accepted.holds
    assert refused.holds


def test_it_is_seen_that_a_file_is_opened(tmp_path) -> None:
    path = tmp_path / "passwords.txt"
    path.write_text("secret")
    watch = OpenWatch(path)
    assert not watch.opened()
    path.read_text()
    assert watch.opened()
    assert watch.opened()
    watch.close()


def test_reasons_are_read_out_of_a_header_block() -> None:
    block = b"\x88\x40\x0bgrpc-status\x018\x40\x0cgrpc-message\x0fno seat is free"
    assert "no seat is free" in printable_parts(block)
