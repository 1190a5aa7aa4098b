"""A daemon's news on its terminal and counts on its metrics page."""

import asyncio
import json
import re
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from node.app import daemon as running
from node.app import snapshot as module
from node.app.daemon import Daemon, fault_line, serve_metrics
from node.app.node import Node
from node.app.operator_service import OperatorService
from node.app.snapshot import SnapshotBuilder
from node.config import NodeConfig
from node.core.clock import SystemClock
from node.core.errors import NetworkFault, Refused
from node.core.ids import PeerId
from node.core.journey import UNKNOWN
from node.identity.admission import admission_token, shown
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.orders.order import RunEnded, Verb, signed
from node.reach.standing import Standing
from node.telemetry.events import Event, Journal
from node.telemetry.metrics import Metrics
from protos.control_pb2 import Snapshot
from testbed.fakes.canned_window import training_snapshot
from testbed.fakes.clock import VirtualClock


async def told(
    monkeypatch: pytest.MonkeyPatch, *snapshots: Snapshot, again_s: float = 1e9
) -> list[str]:
    """Return the journal's lines while the daemon shows each of these snapshots in turn."""
    monkeypatch.setattr(module, "NEWS_S", 0.0)
    monkeypatch.setattr(module, "TELL_S", again_s)
    journal = Journal()
    left = list(snapshots)
    daemon: Any = SimpleNamespace(journal=journal, assembled=None, clock=VirtualClock())
    shown = SnapshotBuilder(daemon)

    def snapshot() -> Snapshot:
        if not left:
            raise asyncio.CancelledError
        return left.pop(0)

    monkeypatch.setattr(shown, "snapshot", snapshot)
    with pytest.raises(asyncio.CancelledError):
        await shown.keep_telling()
    return [event.text for event in journal.recent(100, "info")]


async def test_join_reports_each_step_once_and_training_repeatedly(monkeypatch):
    steps = [
        training_snapshot(state="choosing", cause="starting", reason="finds out which stage"),
        training_snapshot(state="joining", stage=2, progress=0.25),
        training_snapshot(state="joining", stage=2, progress=0.5),
        training_snapshot(epoch=7),
        training_snapshot(epoch=8),
    ]
    said = await told(monkeypatch, *steps)
    assert len(said) == 3
    assert "25%" in said[1]
    assert "epoch 7/150" in said[2]
    said = await told(monkeypatch, *steps, again_s=0.0)
    assert len(said) == 5
    assert "epoch 8/150" in said[-1]


async def test_join_reports_trouble_with_the_next_step_and_its_end(monkeypatch):
    waiting = training_snapshot(
        state="waiting",
        healthy=False,
        cause="stages",
        reason="waiting for a peer for stage 3",
        next_step="invite one",
    )
    said = await told(monkeypatch, training_snapshot(), waiting, waiting, training_snapshot())
    assert len(said) == 3
    assert said[1] == "waiting for a peer for stage 3; invite one"


async def test_join_reports_a_finished_run_once(monkeypatch):
    done = training_snapshot(state="finished")
    assert len(await told(monkeypatch, done, done, done, again_s=0.0)) == 1


async def test_a_total_that_went_back_adds_nothing_to_the_page(monkeypatch):
    page = SnapshotBuilder(SimpleNamespace(clock=VirtualClock()))  # type: ignore[arg-type]
    tokens = iter((5, 3, 4))
    monkeypatch.setattr(page, "snapshot", lambda: Snapshot(tokens=next(tokens)))
    for grown in (5, 5, 6):
        page.measure()
        counted = {s.name: s.value for family in page.collect() for s in family.samples}
        assert (counted["tutti_tokens_total"], counted["tutti_epoch"]) == (grown, 0)


async def test_the_page_has_every_result_that_its_help_names(monkeypatch):
    page = SnapshotBuilder(SimpleNamespace(clock=VirtualClock()))  # type: ignore[arg-type]
    monkeypatch.setattr(page, "snapshot", Snapshot)
    page.measure()
    for family in page.collect():
        named = re.findall(r"\(([^)]*)\)$", family.documentation)
        results = {s.labels["result"] for s in family.samples if "result" in s.labels}
        assert results == set(", ".join(named).split(", ")) - {""}, family.name


async def test_tokens_counted_before_the_start_are_not_on_the_page(monkeypatch):
    page = SnapshotBuilder(SimpleNamespace(clock=VirtualClock()))  # type: ignore[arg-type]
    told = []
    monkeypatch.setattr(page, "snapshot", lambda: page.tally.shown)
    for epoch, tokens in ((-1, 0), (70, 1_000_000), (71, 1_000_500)):
        if epoch >= 0:
            plan: Any = SimpleNamespace(
                epoch=epoch,
                tokens=tokens,
                loss=1.0,
                loss_val=0.0,
                reference=UNKNOWN,
                forecast=(1.0, 1.0),
                cell_id="",
            )
            page.tally.planned(plan, 0.1 * epoch)
        page.measure()
        counted = {s.name: s.value for family in page.collect() for s in family.samples}
        told.append(counted["tutti_tokens_total"])
    assert told == [0, 0, 500]


def banner_of(log_format: str) -> tuple[list[Event], Any]:
    """The journal of a daemon that has begun with this log format."""
    journal = Journal()
    manifest = Manifest.default_demo()
    daemon: Any = SimpleNamespace(
        journal=journal,
        manifest=manifest,
        name="otter",
        identity=SimpleNamespace(peer_id="12D3KooWxxxxkJ4m2a"),
        config=SimpleNamespace(
            node=SimpleNamespace(log_format=log_format),
            home="/h",
            home_flag="",
            identity_path="/h/identity.key",
            transport=SimpleNamespace(host=""),
        ),
        transport=SimpleNamespace(reachable=SimpleNamespace(multiaddrs=lambda: ["/ip4/a"])),
        view=SimpleNamespace(invite=lambda: SimpleNamespace(invite="tutti2x", only_on="network")),
        metrics_url="http://m",
        _new_key=False,
    )
    Daemon._banner(daemon, False)
    return journal.recent(level="info"), daemon


@pytest.mark.parametrize("log_format", ["auto", "text"])
def test_the_banner_is_text_where_the_log_is(log_format: str, capsys):
    told, _ = banner_of(log_format)
    assert told == []
    said = capsys.readouterr().out
    assert "tutti join tutti2x" in said
    assert "own network only" in said


def test_the_banner_is_a_line_of_json_where_the_log_is(capsys):
    (event,), _ = banner_of("json")
    assert capsys.readouterr().out == ""
    assert (event.kind, event.fields["invite"]) == ("banner", "tutti2x")
    assert event.fields["addresses"] == ["/ip4/a"]
    assert event.fields["only_on"] == "network"


def test_the_fault_that_ends_a_daemon_is_a_line_of_its_log():
    line = json.loads(fault_line(NetworkFault("the port is taken", "choose another")))
    assert (line["level"], line["kind"], line["text"]) == ("error", "fault", "the port is taken")
    assert line["fields"] == {"next_step": "choose another", "exit_code": 4}


def test_an_invite_names_the_rendezvous_before_its_record_is_seen():
    """A founder behind a router that starts with ``--join`` is asked for an invite at once."""
    me = Identity.ephemeral().peer_id
    other = Identity.ephemeral().peer_id
    mine = f"/ip4/192.168.1.2/tcp/1/p2p/{me}"
    rendezvous = f"/ip4/11.0.0.7/tcp/1/p2p/{other}"
    reachable = SimpleNamespace(multiaddrs=lambda: [mine], standing=Standing.CLOSED)
    daemon: Any = SimpleNamespace(
        manifest=amended(Manifest.default_demo(), {"swarm.owner": me}),
        identity=SimpleNamespace(peer_id=me),
        config=SimpleNamespace(
            admission=b"", node=SimpleNamespace(join=(rendezvous, "tutti2ofanother"))
        ),
        transport=SimpleNamespace(reachable=reachable),
        open_peers=list,
    )
    reply = OperatorService.invite(SimpleNamespace(_d=daemon))
    assert list(reply.addresses) == [rendezvous, mine]
    assert reply.only_on == ""


def test_a_taken_port_of_the_metrics_is_the_fault_of_any_taken_port():
    first = Metrics()
    port = int(first.serve().rpartition(":")[2].partition("/")[0])
    with pytest.raises(NetworkFault, match=f"cannot listen on tcp port {port} of 127") as caught:
        serve_metrics(Metrics(), port)
    assert "--metrics-port PORT" in caught.value.next_step
    first.close()


@pytest.mark.parametrize("told", [True, False])
def test_a_start_in_an_ended_run_is_refused_before_anything_is_said(tmp_path, told: bool):
    ours = NodeConfig.load({"home": tmp_path}, {})
    owner = Identity.load_or_create(ours.identity_path)
    manifest = Manifest.parse(Manifest.default_demo().owned_by(owner.peer_id).sign(owner))
    end = signed(manifest.run_id, owner.peer_id, owner, Verb.END, number=1, begins=1.0)
    ours.keep_order(manifest.run_id, end)
    daemon: Any = SimpleNamespace(
        manifest=manifest,
        role="auto",
        told_order="",
        config=ours,
        clock=SystemClock(),
        identity=owner,
    )
    daemon._after_end = partial(Daemon._after_end, daemon)
    if told:
        daemon.told_order = ours.order(manifest.run_id)
        ours.keep_order(manifest.run_id, "rubbish")
    with pytest.raises(RunEnded) as caught:
        Daemon._check_not_ended(daemon)
    assert "--continue" in caught.value.next_step
    assert ours.order(manifest.run_id).endswith("}"), "it is known at the next start too"
    daemon.role = "rendezvous"
    Daemon._check_not_ended(daemon)


class Member(Node):
    """The node of a daemon of a private run, without a network."""

    def __init__(self, ours: NodeConfig, manifest: Manifest, admission: bytes) -> None:
        self.config = ours
        self.manifest = manifest
        self.invite = Invite(manifest.run_id, manifest.swarm.owner, (DOOR,), admission)
        self.identity = Identity.load_or_create(ours.identity_path)
        self.clock = VirtualClock()
        self.journal = Journal()
        self._shown = partial(shown, me=self.identity)


OWNER = Identity.ephemeral()
DOOR = f"/ip4/127.0.0.1/tcp/1/p2p/{OWNER.peer_id}"
DAY_S = 86400.0


def member(tmp_path, days: float, kind: str = "invite", peer: PeerId | None = None) -> Any:
    """A member with ``days`` left of its admission."""
    ours = NodeConfig.load({"home": tmp_path}, {})
    base = Manifest.default_demo().owned_by(OWNER.peer_id)
    manifest = Manifest.parse(amended(base, {"swarm.admission": kind}).sign(OWNER))
    until = VirtualClock().wall() + days * DAY_S
    return Member(ours, manifest, admission_token(OWNER, manifest.run_id, peer, until))


def test_a_start_after_the_end_of_the_own_admission_is_refused_with_the_date(tmp_path):
    late = member(tmp_path, -1.0)
    ended = time.strftime("%Y-%m-%d", time.localtime(late.clock.wall() - DAY_S))
    with pytest.raises(Refused, match=f"admission to this private run ended on {ended}") as caught:
        Daemon._check_admitted(late)
    assert "tutti join INVITE" in caught.value.next_step
    assert late.admission_trouble() == caught.value.what
    for sound in (member(tmp_path, 1.0), member(tmp_path, -1.0, "open")):
        Daemon._check_admitted(sound)
        assert sound.admission_trouble() == ""


def test_an_admission_of_somebody_else_is_a_reason_and_no_end(tmp_path):
    other = member(tmp_path, 1.0, peer=Identity.ephemeral().peer_id)
    Daemon._check_admitted(other)
    assert other.admission_trouble() == "the admission token is for another peer"


@pytest.mark.parametrize(
    ("days", "kinds"),
    [(30.0, []), (2.0, ["admission-ends"]), (-1.0, ["admission-ended"])],
)
async def test_the_end_of_an_admission_is_said_some_days_before_and_once(
    tmp_path, monkeypatch, days: float, kinds: list[str]
):
    one = member(tmp_path, days)
    looks = iter(range(3))

    async def look(seconds: float) -> None:
        if next(looks, None) is None:
            raise asyncio.CancelledError

    monkeypatch.setattr(running.asyncio, "sleep", look)
    with pytest.raises(asyncio.CancelledError):
        await Daemon._watch_admission(one)
    assert [event.kind for event in one.journal.recent()] == kinds
    assert all("tutti join INVITE" in event.text for event in one.journal.recent())


@pytest.mark.parametrize("first", [True, False])
async def test_what_the_first_work_loads_is_not_searched_for_garbage(first, monkeypatch):
    """Later there has been a stage, whose memory must come back."""
    worked: list[object] = []
    frozen: list[bool] = []
    monkeypatch.setattr(running, "first_work", worked.append)
    monkeypatch.setattr(running, "set_threads", lambda threads: None)
    monkeypatch.setattr(running.gc, "freeze", lambda: frozen.append(bool(worked)))
    node = SimpleNamespace(device="cpu", local_devices=1, threads=1)
    alone = SimpleNamespace(config=SimpleNamespace(node=node))
    await Daemon._first_work(alone, first=first)
    assert len(worked) == 1
    assert frozen == [True] * first
