"""Strangers in an open run, as one process: each with a key of its own, the real transport and
directory, and a tongue.

argv: one JSON object {home, manifest, join: [multiaddr, ...], below: PeerId, stages: [0, 1, 2,
...]}: one stranger for each stage, the first of them with a PeerId ground to be smaller than
``below``. ``knows`` {PeerId: [stage, [multiaddr, ...]]}: peers whom they know without the
directory. Nobody of them has data or parameters. Prints one JSON object {peers: [...]} when they
have looked for the directory, then one for every command read from its standard input:

    {"do": "look"}                            -> {peers: how many others each of them sees}
    {"do": "keep", "leaked": FILE}            -> {kept: epoch}: plans of the honest leader that a
                                              member gave away are kept for later, with their
                                              certificates; -1 without one
    {"do": "attack", "kind": K, "seconds": s, "whom": [PeerId, ...]}
                                              -> {sent, accepted, refused, heard: {answer: times}}

Kinds: "term" (plans of term 2^62), "no-paths" (plans that end the run), "tokens" (heartbeats of a
history with 2^53 tokens, then of one with as many as the run's epochs can have), "leads" (the
ground key says that it leads, the others that they follow it, and it plans), "replays" (the plans
that were kept, as they were, under a signature of their own, and as a plan of today with a
certificate of then), "forged" (plans with a certificate and support of their own making, in the
names of the honest), "guests" ("leads" and "tokens" at once, to peers of a private run).
"""

import asyncio
import base64
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc.aio

from node.consensus.trust import NO_WARRANT, Warrant
from node.consensus.votes import (
    Ballot,
    Certificate,
    Supporter,
    Vote,
    names,
    signing_domain,
    support_said,
)
from node.coordinator import notes
from node.coordinator.presence import Presence
from node.core.clock import SystemClock
from node.core.errors import PeerFault
from node.core.ids import ENDS, NO_CELL, PeerId
from node.core.journey import Hop, Plan, PlanMember, Version
from node.core.journey import Path as Way
from node.core.version import VERSION
from node.dht.directory import Directory
from node.dht.record import PeerBody
from node.dht.settings import DirectorySettings
from node.epoch import events as ev
from node.identity.keys import Identity
from node.manifest import Manifest
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.telemetry.sinks import JsonlSink
from node.transport.handshake import Facts
from node.transport.service import Transport
from node.transport.settings import TransportSettings
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc

FAKE = "f" * 32
ANSWER_S = 5.0


class Agrees(rpc.TrainingServicer):
    """Takes whatever it is told, as a leader would."""

    async def Tell(self, request: pb.Note, context: Any) -> pb.NoteReply:
        return pb.NoteReply(accepted=True)


class Stranger:
    """One of them."""

    def __init__(self, home: Path, identity: Identity, manifest: Manifest, stage: int) -> None:
        self.identity = identity
        self.me = identity.peer_id
        self.manifest = manifest
        self.stage = stage
        self.leads = False
        self.follows = ""
        self.epoch = 0
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.journal = Journal([JsonlSink(home / "events.jsonl")])
        self.clock = SystemClock()
        self.transport = Transport(
            identity,
            TransportSettings(host="127.0.0.1"),
            self.journal,
            Metrics(),
            lambda: Facts(manifest.run_id, home.name, VERSION),
            lambda peer, hello: math.inf,
        )
        rpc.add_TrainingServicer_to_server(Agrees(), self.transport.server)
        settings = DirectorySettings(refresh_s=1.0)
        self.directory = Directory(identity, settings, self.clock, manifest.run_id, self.journal)
        self.presence = Presence(
            self.me,
            self.directory,
            self.clock,
            1.0,
            lambda peer, body: self.transport.learn(peer, body.maddrs),
            lambda name, error: self.journal.emit("lab", "failed", f"{name}: {error!r}", "error"),
        )

    async def start(self, join: list[str]) -> None:
        await self.transport.start(join)
        await self.directory.attach(self.transport.p2p.p2p, join)
        self.presence.start()
        self.presence.announce(self.body)

    def body(self) -> PeerBody:
        return PeerBody(
            self.stage,
            "stage" if self.stage else "ends",
            "training",
            self.epoch,
            "stranger",
            VERSION,
            speed=1.0,
            maddrs=tuple(self.transport.reachable.multiaddrs()),
            leads=self.leads,
            follows=self.follows,
        )

    async def tell(self, peer: PeerId, note: pb.Note) -> str:
        """ "" when it was accepted, else the answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                stub = rpc.TrainingStub(await self.transport.channel(peer))
                reply = await stub.Tell(note, timeout=ANSWER_S)
        except (PeerFault, grpc.aio.AioRpcError, TimeoutError) as e:
            return f"not heard: {type(e).__name__}"
        return "" if reply.accepted else reply.reason or "refused"

    def signed(self, plan: Plan, warrant: Warrant = NO_WARRANT) -> pb.Note:
        """Under its own signature."""
        domain = signing_domain("plan", self.manifest.run_id)
        return notes.plan_note(plan, self.identity.sign(plan.canonical(), domain), warrant)


class Band:
    """All of them."""

    def __init__(self, asked: dict[str, Any]) -> None:
        manifest = Manifest.parse(Path(asked["manifest"]).read_bytes())
        home = Path(asked["home"])
        self.join = list(asked["join"])
        keys = [ground(asked["below"]), *(Identity.ephemeral() for _ in asked["stages"][1:])]
        self.all = [
            Stranger(home / str(i), key, manifest, stage)
            for i, (key, stage) in enumerate(zip(keys, asked["stages"], strict=True))
        ]
        self.manifest, self.chief = manifest, self.all[0]
        self._known: dict[PeerId, PeerBody] = {
            PeerId(p): _told_of(stage, maddrs)
            for p, (stage, maddrs) in asked.get("knows", {}).items()
        }
        self._whom: frozenset[PeerId] = frozenset()
        self.kept: list[pb.PlanNote] = []

    async def start(self) -> None:
        for one in self.all:
            await one.start(self.join)
            for peer, body in self._known.items():
                one.transport.learn(peer, list(body.maddrs))

    def honest(self) -> dict[PeerId, PeerBody]:
        """Everybody else who hosts a stage, as the first of them sees it, or as they were told."""
        mine = {one.me for one in self.all}
        presence = self.chief.presence
        seen = {p: presence.view.everybody[p].body for p in presence.view.hosts if p not in mine}
        found = self._known | seen
        return {p: body for p, body in found.items() if not self._whom or p in self._whom}

    async def do_look(self) -> dict[str, Any]:
        return {"peers": [len(one.presence.view.everybody) for one in self.all]}

    async def do_keep(self, leaked: str) -> dict[str, Any]:
        lines = (await asyncio.to_thread(Path(leaked).read_bytes)).splitlines()
        self.kept = [pb.PlanNote.FromString(base64.b64decode(line)) for line in lines]
        self.kept = [note for note in self.kept if note.HasField("certificate")]
        return {"kept": Plan.parse(self.kept[-1].plan).epoch if self.kept else -1}

    async def do_attack(
        self, kind: str, seconds: float, whom: Sequence[str] = ()
    ) -> dict[str, Any]:
        self._whom = frozenset(map(PeerId, whom))
        said: Counter[str] = Counter()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            words = getattr(self, "_" + kind.replace("-", "_"))(
                end - time.monotonic() < seconds / 2
            )
            said.update(await asyncio.gather(*(who.tell(peer, note) for who, peer, note in words)))
            await asyncio.sleep(1.0)
        for one in self.all:
            one.leads = False
            one.follows = ""
            one.presence.changed()
        unheard = sum(n for text, n in said.items() if text.startswith("not heard"))
        return {
            "sent": said.total(),
            "accepted": said[""],
            "unheard": unheard,
            "refused": said.total() - said[""] - unheard,
            "heard": {text[:120]: n for text, n in said.most_common(6)},
        }

    # ----------------------------------------------------------- messages

    def _plan(
        self, who: Stranger, term: int, *, works: bool = True, epoch: int | None = None
    ) -> Plan:
        """Plan of all peers, by their records; nobody owns anything."""
        there = self.honest()
        members = tuple(
            PlanMember(p, b.stage) for p, b in sorted([*there.items(), (who.me, who.body())])
        )
        newest = max((b.epoch for b in there.values()), default=0) if epoch is None else epoch
        firsts = {b.stage: p for p, b in sorted(there.items(), reverse=True)}
        hops = tuple(
            Hop(s, firsts[s]) for s in range(1, self.manifest.pipeline.stages + 1) if s in firsts
        )
        path = Way(0, who.me, tuple(range(self.manifest.pipeline.micro_batch)), hops)
        return Plan(newest, term, who.me, members, (path,) if works else (), {}, lineage=FAKE)

    def _term(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        return [
            (one, p, one.signed(self._plan(one, 2**62))) for one in self.all for p in self.honest()
        ]

    def _no_paths(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        plans = [
            (
                one,
                self._plan(
                    one, 10**6, works=False, epoch=self.manifest.training.epochs if late else None
                ),
            )
            for one in self.all
        ]
        return [(one, p, one.signed(plan)) for one, plan in plans for p in self.honest()]

    def _tokens(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        t = self.manifest.training
        epoch = t.epochs - 1
        tokens = epoch * t.target_batch * self.manifest.model.seq_len if late else 2**53 - 1
        found = []
        for one in self.all:
            one.epoch = epoch
            heard = ev.Heartbeat(
                one.me, one.stage, Version(epoch, FAKE), "d" * 16, ev.Capacity(1.0), (), 0, tokens
            )
            found += [
                (one, p, notes.ready_note(heard))
                for p, b in self.honest().items()
                if b.stage == ENDS
            ]
        return found

    def _leads(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        self.chief.leads = True
        for one in self.all:
            one.follows = self.chief.me
            one.presence.changed()
        plan = self._plan(self.chief, 10**6)
        return [(self.chief, p, self.chief.signed(plan)) for p in self.honest()]

    def _guests(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        return self._leads(late) + self._tokens(late)

    def _replays(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        found = []
        for old in (self.kept[0], self.kept[-1]):
            plan = Plan.parse(old.plan)
            mine = replace(plan, leader=self.chief.me, term=plan.term + 1)
            today = replace(self._plan(self.chief, plan.term + 1), lineage=plan.lineage)
            warrant = notes.parse_warrant(old)
            found += [pb.Note(epoch=plan.epoch, term=plan.term, plan=old)]
            found += [self.chief.signed(one, warrant) for one in (mine, today)]
        return [(self.chief, p, note) for p in self.honest() for note in found]

    def _forged(self, late: bool) -> list[tuple[Stranger, PeerId, pb.Note]]:
        """The first half of the time the ground key also says that it leads."""
        self.chief.leads = not late
        for one in self.all:
            one.follows = self.chief.me
            one.presence.changed()
        plan = self._plan(self.chief, 10**3)
        voters = tuple(sorted(self.honest()))
        ballots = tuple(self._ballot(plan, voters, p, b.stage) for p, b in self.honest().items())
        made = Certificate(NO_CELL, plan.term - 1, plan.base, voters, ballots)
        at = int(time.time())
        domain = signing_domain("support", self.manifest.run_id)
        said = support_said(NO_CELL, self.chief.me, plan.term - 1, at)
        signature = self.chief.identity.sign(said, domain)
        supporters = tuple(Supporter(p, plan.term - 1, at, signature) for p in voters)
        note = self.chief.signed(plan, Warrant(made, supporters))
        return [(self.chief, p, note) for p in self.honest()]

    def _ballot(self, plan: Plan, voters: tuple[PeerId, ...], peer: PeerId, stage: int) -> Ballot:
        vote = Vote(NO_CELL, plan.term - 1, 0, plan.base, names(voters), stage, "d" * 16)
        mine = self.chief.identity.sign(vote.said(), signing_domain("vote", self.manifest.run_id))
        return Ballot(peer, stage, 0, "d" * 16, mine)


def _told_of(stage: int, maddrs: list[str]) -> PeerBody:
    role = "stage" if stage else "ends"
    return PeerBody(stage, role, "training", 0, "", VERSION, maddrs=tuple(maddrs))


def ground(below: str) -> Identity:
    """A key with a PeerId smaller than ``below``."""
    while True:
        made = Identity.ephemeral()
        if made.peer_id < below:
            return made


async def main() -> None:
    band = Band(json.loads(sys.argv[1]))
    await band.start()
    print(json.dumps({"peers": [one.me for one in band.all]}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        print(json.dumps(await getattr(band, f"do_{asked.pop('do')}")(**asked)), flush=True)
    for one in band.all:
        await one.presence.close()
        await one.transport.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
