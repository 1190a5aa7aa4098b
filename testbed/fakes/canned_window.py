"""A canned daemon behind a real control service: for tests of the command line and the monitor, and
for trying their looks."""

import asyncio
import json
import math
from collections.abc import AsyncIterator

from node.core.errors import Refused
from node.core.version import VERSION
from node.telemetry.events import Journal
from protos import control_pb2 as pb
from protos.ask_pb2 import PeerLine, PeersAnswer, SwarmLine
from protos.control_pb2 import (
    Event,
    GenerateRequest,
    InviteReply,
    Piece,
    PingReport,
    RoundLine,
    Snapshot,
)

RUN = "9f3c21" + "0" * 58
ME = "12D3KooWCannedCannedCannedCannedCannedCannedCankJ4m2a"


class CannedWindow:
    """A :class:`node.control.service.DaemonWindow` with canned answers. Stop and drain set
    `stopped`."""

    def __init__(self, snapshot: Snapshot | None = None, peers: PeersAnswer | None = None) -> None:
        self.journal = Journal()
        self.said = snapshot or training_snapshot()
        self.seen = peers or some_peers()
        self.past = some_history(self.said)
        self.stopped = asyncio.Event()
        self.drained: float | None = None
        self.switched = ""
        self.ordered = ""
        self.paused: tuple[float | None, str, bool] | None = None

    def snapshot(self) -> Snapshot:
        return self.said

    def peers(self) -> PeersAnswer:
        return self.seen

    async def cells(self) -> pb.CellsAnswer:
        there = (("a" * 16, True, True, (1, 2)), ("b" * 16, False, False, (1, 0)))
        lines = [
            pb.CellSeen(cell=cell, own=own, works=works, epoch=120, tokens_per_s=900, replicas=of)
            for cell, own, works, of in there
        ]
        return pb.CellsAnswer(cells=3, seen=lines)

    async def history(self, after: int, edition: int) -> pb.RunHistory:
        answer = pb.RunHistory()
        answer.CopyFrom(self.past)
        if edition == answer.edition:
            del answer.epochs[:]
            answer.epochs.extend(line for line in self.past.epochs if line.epoch > after)
        return answer

    def reach(self) -> pb.ReachReport:
        return pb.ReachReport(
            standing="open", reachable=self.said.reachable, addresses=self.said.addresses
        )

    async def ping(self, peer: str, count: int, improve: bool = False) -> PingReport:
        found = next((p for p in self.seen.peers if p.peer.endswith(peer)), None)
        if found is None:
            raise Refused(f"no peer {peer} in sight", "see  tutti peers --all")
        return PingReport(
            peer=found.peer, name=found.name, path=found.path or "direct", rtt_s=[0.031] * count
        )

    async def drain(self, timeout_s: float) -> None:
        self.drained = timeout_s
        self.journal.emit("daemon", "drain-started", "finishing what is in flight")
        self.journal.emit("daemon", "drained", "left the swarm; safe to stop")
        self.stopped.set()

    def stop(self) -> None:
        self.stopped.set()

    async def pause(self, seconds: float | None, reason: str, now: bool) -> str:
        self.paused = (seconds, reason, now)
        return "paused by its operator, until 23:10: 312 MiB of main memory given back after 0.4 s"

    def resume(self) -> str:
        if self.paused is None:
            raise Refused("this daemon is not paused", "see what it does with  tutti status")
        self.paused = None
        return "goes on: it takes a stage again; see  tutti status"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Piece]:
        if request.leave_out.stages:
            yield Piece(missing=pb.Missing(asked=request.leave_out.stages, dead=[1], stages=8))
        said = request.messages[-1].content if request.messages else request.prompt
        for letter in said.upper()[: request.max_tokens]:
            yield Piece(text=letter)
        yield Piece(last=True, tokens_per_s=42.0, finish="stop")

    async def evaluate(self, request: pb.EvaluateRequest) -> AsyncIterator[pb.Evaluated]:
        named = list(request.leave_out.stages)
        yield pb.Evaluated(missing=pb.Missing(asked=named, stages=4), loss=1.0, tokens=64, epoch=7)
        for stage in range(1, 1 + round(4 * request.share)):
            yield pb.Evaluated(
                missing=pb.Missing(asked=[*named, stage], stages=4),
                loss=1.0 + stage,
                tokens=64,
                epoch=7,
            )

    async def export(self, request: pb.ExportRequest) -> AsyncIterator[Event]:
        yield Event(
            at=1.0,
            level="info",
            component="checkpoint",
            kind="export-progress",
            text="stage 1 of 3 fetched",
            fields="{}",
        )
        yield Event(
            at=2.0,
            level="info",
            component="checkpoint",
            kind="exported",
            text=f"written to {request.directory}",
            fields="{}",
        )

    def invite(self) -> InviteReply:
        return InviteReply(invite="tutti2canned", addresses=[f"/ip4/127.0.0.1/tcp/31337/p2p/{ME}"])

    def switch(self, change: str) -> pb.SwitchReply:
        self.switched = change
        return pb.SwitchReply(revision=self.said.change.revision + 1)

    def order(self, order: str) -> pb.OrderReply:
        self.ordered = order
        return pb.OrderReply(number=json.loads(order.partition("\n")[2])["number"])


def training_snapshot(**changes: object) -> Snapshot:
    """A healthy block-stage peer in the middle of a run; keyword arguments replace fields."""
    losses = [5.56 * math.exp(-i / 40) + 1.6 * (1 - math.exp(-i / 40)) for i in range(120)]
    snapshot = Snapshot(
        peer=ME,
        name="brisk-otter",
        version=VERSION,
        up_s=11_540,
        state="training",
        healthy=True,
        swarm=SwarmLine(
            name="tiny-demo", run_id=RUN, epoch=120, epochs=150, loss=losses[-1], stages=3
        ),
        stage=2,
        role="stage",
        layers="layers 2-3",
        replicas=2,
        epoch=120,
        phase="round",
        loss=losses[-1],
        loss_first=losses[0],
        loss_val=2.01,
        tokens_per_s=18_204,
        tokens=41_200_000,
        micro_batches=1204,
        last_work_s=0.8,
        bytes_sent=3 << 30,
        bytes_received=2 << 30,
        paths_to={"direct": 5, "relayed": 1},
        reachable="direct, by a port that the router maps (UPnP)",
        round=RoundLine(
            done=118, repaired=2, failed=0, last_s=0.42, members=2, contributors=2, bytes=1 << 20
        ),
        device="cpu, 1 thread",
        memory_used=900 << 20,
        memory_limit=4 << 30,
        stash_bytes=12 << 20,
        stash_limit=1 << 30,
        leader=ME,
        leader_name="brisk-otter",
        placed=True,
        left_s=11_400,
        left_over_s=600,
        digest="ab" * 32,
        time_s={"compute": 620.0, "wire": 80.0, "wait": 240.0, "round": 60.0},
        loss_history=losses,
        home="/home/me/.local/share/tutti",
        metrics_url="http://127.0.0.1:9101/metrics",
    )
    for name, value in changes.items():
        setattr(snapshot, name, value)
    return snapshot


def some_history(s: Snapshot) -> pb.RunHistory:
    """The history behind a snapshot of :func:`training_snapshot`, with two repaired rounds."""
    answer = pb.RunHistory(edition=1, stage_bytes=[3 << 30, 8 << 30, 9 << 30, 10 << 30])
    each = s.tokens // max(1, len(s.loss_history))
    for epoch, loss in enumerate(s.loss_history, 1):
        line = answer.epochs.add(
            epoch=epoch, tokens=each * epoch, loss=loss, seconds=2.4 + epoch % 5 / 5, epochs=1
        )
        if epoch % 10 == 0:
            line.loss_val = loss + 0.1
        if epoch in (40, 90):
            line.repaired = 1
            line.seconds += 2.0
    return answer


def some_peers() -> PeersAnswer:
    """Six peers in every state a table must show."""
    rows = (
        ("kJ4m2a", "brisk-otter", "training", 2, "self", 0.0, 18_204, 120, 11_540, 0.0),
        ("Qm81xF", "golden-condor", "training", 1, "direct", 0.031, 61_000, 120, 187_200, 0.0),
        ("9Zt9pw", "quiet-ferret", "training", 0, "tunnel", 0.212, 7_400, 120, 1_080, 0.0),
        ("b7Lq3d", "basement", "joining", 3, "direct", 0.044, 0, 0, 120, 0.62),
        ("e55Rkk", "mac-m2", "draining", 3, "direct", 0.058, 3_900, 119, 34_800, 0.0),
        ("Tz9Uaa", "sunny-stoat", "lost", 3, "", 0.0, 0, 101, 0, 0.0),
    )
    peers = [
        PeerLine(
            peer=ME[:-6] + tail,
            name=name,
            state=state,
            stage=stage,
            role="ends" if stage == 0 else "stage",
            path=path,
            rtt_s=rtt,
            tokens_per_s=speed,
            epoch=epoch,
            up_s=up,
            version=VERSION,
            progress=progress,
            seen_s=41.0 if state == "lost" else 1.0,
            leads=stage == 0,
        )
        for tail, name, state, stage, path, rtt, speed, epoch, up, progress in rows
    ]
    return PeersAnswer(
        peers=peers,
        swarm=SwarmLine(name="tiny-demo", run_id=RUN, epoch=120, epochs=150, loss=1.8, stages=3),
    )
