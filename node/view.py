"""What the operator sees and may ask of a running daemon: the control window, and the answers strangers get over libp2p."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.averaging.spread import ERROR
from node.control.service import as_event
from node.control.window import Window
from node.core.errors import ExitCode, LocalFault, NetworkFault, PeerFault, TimedOut, UsageFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Plan
from node.core.version import VERSION
from node.identity.invites import Invite
from node.manifest import Manifest
from node.scheduler.costs import Costs
from node.scheduler.reasons import reasons
from node.telemetry.events import Event, Journal
from protos import ask_pb2 as ask
from protos import control_pb2 as pb

if TYPE_CHECKING:
    from node.assembly import Assembled
    from node.daemon import Daemon
    from node.training.service import Training
    from node.training.work import Work

HISTORY = 256
"""Losses kept for the picture."""
STALL_S = 30.0
"""A training peer that has done nothing useful for so long is not healthy."""
MEASURE_S = 5.0
"""Between two looks at the numbers of the metrics page."""


@dataclass
class Tally:
    """What the journal told so far, for the screen: counted once here instead of asked of every room."""

    loss: float = 0.0
    loss_first: float = 0.0
    loss_val: float = 0.0
    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    tokens_per_s: float = 0.0
    seen_epoch: int = -1
    last_plan_at: float = 0.0
    mismatches: int = 0
    cpu_began: float = -1.0
    waits: Counter[str] = field(default_factory=Counter)
    forecast_s: float = 0.0
    last_said_s: float = 0.0
    last_took_s: float = 0.0

    def planned(self, epoch: int, loss: float, loss_val: float, tokens: int, now: float, forecast_s: float = 0.0) -> float:
        """News that travels with every plan: the epoch before it, as the whole swarm saw it. Seconds that one took, 0 for unknown."""
        if epoch <= self.seen_epoch:
            return 0.0
        seconds = now - self.last_plan_at if self.last_plan_at and epoch == self.seen_epoch + 1 else 0.0
        if self.cpu_began < 0:
            self.cpu_began = time.process_time()
        if loss > 0:
            self.loss, self.loss_first = loss, self.loss_first or loss
            self.losses = [*self.losses, loss][-HISTORY:]
        self.loss_val = loss_val or self.loss_val
        if self.last_plan_at and now > self.last_plan_at and tokens > self.tokens > 0:
            rate = (tokens - self.tokens) / (now - self.last_plan_at)
            self.tokens_per_s = rate if not self.tokens_per_s else 0.7 * self.tokens_per_s + 0.3 * rate
        if seconds:
            self.last_said_s, self.last_took_s = self.forecast_s, seconds
        self.forecast_s = forecast_s
        self.tokens, self.seen_epoch, self.last_plan_at = tokens, epoch, now
        return seconds


class View(Window):
    """The daemon behind the unix socket. ``stop`` and ``drain`` end it through ``daemon``."""

    def __init__(self, daemon: Daemon) -> None:
        self._d = daemon
        self.tally = Tally()
        self._told: dict[Any, float] = {}
        self._kinds: set[str] = set()

    @property
    def journal(self) -> Journal:
        return self._d.journal

    # ------------------------------------------------------------ status

    def snapshot(self) -> pb.Snapshot:
        """Everything one screen needs; no waiting."""
        d, t = self._d, self.tally
        now = time.monotonic()
        s = pb.Snapshot(
            peer=d.identity.peer_id, name=d.name, version=VERSION, up_s=now - d.started, state=d.state(), home=str(d.config.home),
            metrics_url=d.metrics_url, addresses=d.addresses(), p2pd_restarts=d.transport.p2p.restarts,
            role=d.role, loss=t.loss, loss_val=t.loss_val, loss_first=t.loss_first, tokens=t.tokens,
            tokens_per_s=t.tokens_per_s, loss_history=t.losses,
        )  # fmt: skip
        if d.manifest is not None:
            s.swarm.CopyFrom(self._swarm(d.manifest))
        s.cpu_s = time.process_time() - t.cpu_began if t.cpu_began >= 0 else 0.0
        links = d.transport.peers()
        s.bytes_sent, s.bytes_received = sum(p.sent for p in links.values()), sum(p.received for p in links.values())
        s.peers_direct = sum(p.path == "direct" for p in links.values())
        s.peers_tunnel = sum(p.path == "tunnel" for p in links.values())
        if d.assembled is not None:
            self._work(s)
        s.healthy, s.reason, s.next_step = self._health(s)
        return s

    def _work(self, s: pb.Snapshot) -> None:
        d = self._d
        a = d.assembled
        if a is None or d.manifest is None:
            return
        work, training = a.work, a.training
        s.stage, s.layers = a.stage.stage, a.layers
        s.replicas = 1 + len(d.presence.replicas(a.stage.stage)) if d.presence else 1
        s.epoch, s.digest = a.stage.epoch, a.stage.digest
        s.phase = training.member.state.value if d.mover.target is None else f"to stage {d.mover.target}"
        s.leader = training.leader_id() or ""
        s.device, s.memory_used, s.memory_limit = a.device_said, a.device.memory_used(), a.memory_limit
        s.stash_bytes, s.stash_limit = a.pipeline.stash.used, d.config.limits.stash_bytes
        s.micro_batches, s.last_work_s = a.meter.micro_batches, max(0.0, time.monotonic() - a.meter.last_work)
        for kind, seconds in d.metrics.totals().items():
            s.time_s[kind] = seconds
        s.round.CopyFrom(
            pb.RoundLine(
                done=work.rounds.done,
                failed=work.rounds.failed,
                last_s=work.rounds.seconds,
                members=work.rounds.members,
                contributors=work.rounds.contributors,
                bytes=work.rounds.nbytes,
                repaired=training.leader.repaired if training.leader else 0,
            )  # fmt: skip
        )
        if work.plan is not None and work.plan.paths:
            s.paths.CopyFrom(self._paths(work.plan, d.manifest, training.leader.routing.costs if training.leader else None))
        if training.standing.in_force.cell or work.outer.number:
            s.outer.CopyFrom(outer_line(work, training.member.cell))
        if training.standing.known.revision:
            s.change.CopyFrom(change_line(training, work.plan))
        s.digest_mismatches = training.leader.mismatches if training.leader else 0
        s.progress = work.fetching
        s.momentum_lost, s.momentum_age = work.momentum_lost, work.momentum_age
        if training.past.given_up_epochs:
            n, tokens = training.past.given_up_epochs, training.past.given_up_tokens
            s.warnings.append(f"{n} epochs ({tokens} tokens) of this side were given up when the network healed")
        if s.replicas == 1 and d.manifest.training.epochs > s.epoch:
            what = "the ends have" if a.stage.stage == ENDS else f"stage {a.stage.stage} has"
            s.warnings.append(f"{what} one peer only: when it leaves, training waits")

    def _paths(self, plan: Plan, m: Manifest, costs: Costs | None) -> pb.PathsLine:
        t = self.tally
        return pb.PathsLine(
            how=m.scheduler.paths, run_s=plan.forecast[0], round_s=plan.forecast[1], last_said_s=t.last_said_s,
            last_took_s=t.last_took_s, why=reasons(plan, m.pipeline.stages, costs),
        )  # fmt: skip

    def _health(self, s: pb.Snapshot) -> tuple[bool, str, str]:
        d = self._d
        if d.problem:
            return False, d.problem, d.problem_next
        if s.state in ("starting", "joining", "finished", "draining", "moving", "stopping"):
            return True, "", ""
        if d.role == "rendezvous":
            return True, "", ""
        if d.assembled is None:
            return True, "", ""
        waiting = d.assembled.training.waiting_for()
        if waiting:
            return (
                False,
                f"waiting for {waiting}",
                "invite one: tutti swarm invite" if "a peer for" in waiting else "nothing to do if it comes; see tutti peers",
            )
        if s.last_work_s > STALL_S and s.epoch:
            return False, f"no useful work for {s.last_work_s:.0f} s", "see tutti logs"
        return True, "", ""

    def _swarm(self, m: Manifest) -> ask.SwarmLine:
        epoch = self._d.assembled.stage.epoch if self._d.assembled else 0
        return ask.SwarmLine(
            name=m.swarm.name, run_id=m.run_id, epoch=max(0, epoch), epochs=m.training.epochs, loss=self.tally.loss,
            stages=m.pipeline.stages,
        )  # fmt: skip

    # ------------------------------------------------------------ the metrics page

    def planned(self, plan: Plan) -> None:
        """A new plan reached this peer."""
        seconds = self.tally.planned(plan.epoch, plan.loss, plan.loss_val, plan.tokens, time.monotonic(), sum(plan.forecast))
        if seconds:
            self._d.metrics.epoch_seconds.observe(seconds)

    async def keep_measuring(self) -> None:
        """Bring the page that is scraped up to date with the screen, for ever."""
        while True:
            self.measure()
            await asyncio.sleep(MEASURE_S)

    def measure(self) -> None:
        """Every gauge and counter of the page that this file knows about."""
        s, m = self.snapshot(), self._d.metrics
        for gauge, value in (
            (m.epoch, s.epoch), (m.stage, s.stage), (m.loss, s.loss), (m.loss_held_out, s.loss_val),
            (m.tokens_per_second, s.tokens_per_s), (m.replicas, s.replicas), (m.stash_bytes, s.stash_bytes),
            (m.memory_bytes, s.memory_used), (m.cells_apart, s.outer.spread.relative),
        ):  # fmt: skip
            gauge.set(value)
        tasks = kinds_of_tasks()
        for kind in tasks.keys() | self._kinds:
            m.tasks.labels(kind=kind).set(tasks[kind])
        self._kinds |= tasks.keys()
        for counter, total in (
            (m.tokens_total, s.tokens), (m.micro_batches_total.labels(result="counted"), s.micro_batches),
            (m.rounds_total.labels(result="done"), s.round.done), (m.rounds_total.labels(result="failed"), s.round.failed),
            (m.rounds_total.labels(result="repaired"), s.round.repaired), (m.digest_mismatches_total, s.digest_mismatches),
        ):  # fmt: skip
            # A total that went back (a leader that was replaced counts anew) adds nothing: a counter only grows.
            counter.inc(max(0.0, total - self._told.get(counter, 0.0)))
            self._told[counter] = total

    # ------------------------------------------------------------ peers

    def peers(self) -> ask.PeersAnswer:
        """Every peer in sight, this one first."""
        d = self._d
        answer = ask.PeersAnswer()
        if d.manifest is not None:
            answer.swarm.CopyFrom(self._swarm(d.manifest))
        now = d.clock.wall()
        me = d.body()
        answer.peers.append(
            ask.PeerLine(
                peer=d.identity.peer_id,
                name=d.name,
                state=me.state,
                stage=me.stage,
                role=me.role,
                path="self",
                epoch=me.epoch,
                tokens_per_s=me.tokens_per_s,
                up_s=time.monotonic() - d.started,
                version=VERSION,
                progress=d.assembled.work.fetching if d.assembled else 0.0,
            )  # fmt: skip
        )
        if d.presence is None:
            return answer
        links = d.transport.peers()
        for peer, entry in sorted(d.presence.others().items()):
            b, link = entry.body, links.get(peer)
            answer.peers.append(
                ask.PeerLine(
                    peer=peer,
                    name=b.name,
                    state=b.state,
                    stage=b.stage,
                    role=b.role,
                    path=link.path if link else "",
                    rtt_s=link.rtt if link else 0.0,
                    tokens_per_s=b.tokens_per_s,
                    epoch=b.epoch,
                    up_s=max(0.0, now - b.started),
                    version=b.version,
                    seen_s=max(0.0, now - entry.refreshed),
                )  # fmt: skip
            )
        for peer, (entry, since) in sorted(d.presence.lost().items()):
            b = entry.body
            answer.peers.append(
                ask.PeerLine(
                    peer=peer,
                    name=b.name,
                    state="lost",
                    stage=b.stage,
                    role=b.role,
                    epoch=b.epoch,
                    version=b.version,
                    seen_s=max(0.0, now - since),
                )  # fmt: skip
            )
        return answer

    async def answer(self, peer: PeerId, question: ask.Ask) -> ask.Answer:
        """A stranger's question over libp2p. Private facts (addresses, files) are not among the answers.

        Raises Refused when the run is private and ``peer`` shows no token for it.
        """
        kind = question.WhichOneof("question")
        m = self._d.manifest
        if m is not None and kind in ("manifest", "peers"):
            # Of a private run a stranger learns nothing, not even who is in it.
            self._d.gate().admit(peer, getattr(question, kind).admission, self._d.clock.wall())
        if kind == "manifest" and m is not None and question.manifest.run_id in ("", m.run_id):
            return ask.Answer(manifest=ask.ManifestAnswer(toml=m.to_toml()))
        if kind == "peers":
            return ask.Answer(peers=self.peers())
        raise LocalFault("this node has no such thing to tell", code=ExitCode.PROTOCOL)

    async def ping(self, peer: str, count: int) -> pb.PingReport:
        """Round trips on the path that work takes."""
        d = self._d
        found = self._resolve(peer)
        entry = d.presence.others().get(found) if d.presence else None
        report = pb.PingReport(peer=found, name=entry.body.name if entry else "")
        try:
            for i in range(count):
                report.rtt_s.append(await d.transport.ping(found, 5.0))
                if i + 1 < count:
                    await asyncio.sleep(0.2)
        except PeerFault as e:
            report.error = e.reason
        report.path = d.transport.path(found)
        return report

    def _resolve(self, text: str) -> PeerId:
        if text.startswith("/"):
            peer = PeerId(text.rpartition("/p2p/")[2])
            self._d.transport.learn(peer, [text])
            return peer
        known = set(self._d.presence.others()) if self._d.presence else set()
        by_name = [p for p in known if self._d.presence and self._d.presence.others()[p].body.name == text]
        hits = by_name or [p for p in known if p.endswith(text) or p == text]
        if len(hits) != 1:
            why = f"{len(hits)} peers match {text!r}" if hits else f"no peer in sight ends in {text!r}"
            raise UsageFault(why, "see tutti peers")
        return hits[0]

    # ------------------------------------------------------------ leaving

    def stop(self) -> None:
        """End the daemon soon."""
        self._d.stop("asked to stop")

    async def drain(self, timeout_s: float) -> None:
        """Finish the epoch under way, leave the swarm, end. Raises TimedOut."""
        d = self._d
        d.draining = True
        if d.presence is not None:
            d.presence.changed()
        self.journal.emit("daemon", "draining", "finishing the epoch under way, then leaving")
        if d.assembled is not None:
            try:
                async with asyncio.timeout(timeout_s or 120.0):
                    await d.assembled.training.leave("drain")
                    await d.assembled.work.saved()
            except TimeoutError as e:
                d.draining = False
                d.assembled.training.stay()
                raise TimedOut(f"the epoch did not end in {timeout_s:.0f} s", "try again, or tutti stop") from e
        self.journal.emit("daemon", "drained", "left the swarm: it is safe to switch off")
        d.stop("drained")

    # ------------------------------------------------------------ the model

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.Piece]:
        """Text through the live swarm, a piece a token."""
        from node.generate import speak

        async for piece in speak(self._ends("start a sentence", "generate"), self._d.transport, request):
            yield piece

    async def evaluate(self, request: pb.EvaluateRequest) -> AsyncIterator[pb.Evaluated]:
        """Held-out loss through the live swarm, one choice of missing stages after the other."""
        from node.evaluate import answer

        async for found in answer(self._ends("compute a loss", "eval"), self._d.transport, request):
            yield found

    def _ends(self, what: str, verb: str) -> Assembled:
        """What this daemon hosts, if that is the ends. Raises UsageFault."""
        a = self._d.assembled
        if a is None or a.ends is None:
            raise UsageFault(
                f"this peer hosts no ends, so it cannot {what}",
                f"ask the daemon of an ends peer: tutti --home ITS_HOME {verb} ...",
            )
        return a

    async def export(self, directory: str) -> AsyncIterator[pb.Event]:
        """Gather every stage at one epoch and write a Hugging Face directory."""
        from node.export import gather

        a, m = self._d.assembled, self._d.manifest
        if a is None or m is None:
            raise NetworkFault("the daemon has not joined yet", "try again when tutti status says ready")
        feed: asyncio.Queue[Event | None] = asyncio.Queue()

        def say(kind: str, text: str, **fields: object) -> None:
            feed.put_nowait(Event(self._d.clock.wall(), "info", "export", kind, text, dict(fields)))

        async def work() -> LocalFault | PeerFault | None:
            """Its fault belongs to whoever asked for the export; raised here it would be one of the daemon's own tasks."""
            try:
                await gather(a, m, self._d.transport, Path(directory), say)
            except (LocalFault, PeerFault) as fault:
                return fault
            finally:
                feed.put_nowait(None)
            return None

        task = self._d.tasks.spawn(work(), "export")
        with contextlib.suppress(asyncio.CancelledError):
            while (event := await feed.get()) is not None:
                yield as_event(event)
            if (fault := await task) is not None:
                raise fault

    def switch(self, change: str) -> pb.SwitchReply:
        """A change to how cells average, to everybody. Raises Refused when the owner did not sign it, UsageFault for an old one."""
        a = self._d.assembled
        if a is None:
            raise NetworkFault("this daemon takes no part in a run yet", "try again when tutti status says ready")
        if a.training.finished.is_set():
            raise UsageFault(
                "the run is complete, so nothing averages any more", "a new run begins with  tutti swarm init --from FILE"
            )
        known = a.training.standing.known
        rules = a.training.change(change)
        if rules.revision < known.revision or (rules.revision == known.revision and change != known.change):
            raise UsageFault(
                f"change {known.revision} is known here already", f"give the new one the number {known.revision + 1}"
            )
        return pb.SwitchReply(revision=rules.revision)

    def invite(self) -> pb.InviteReply:
        """The line another machine needs."""
        d = self._d
        if d.manifest is None:
            raise NetworkFault("no swarm yet", "wait until tutti status shows one")
        addresses = tuple(d.addresses())
        text = Invite(d.manifest.run_id, d.manifest.swarm.owner, addresses[:4], d.config.admission).encode()
        return pb.InviteReply(invite=text, addresses=addresses)


def change_line(training: Training, plan: Plan | None) -> pb.ChangeLine:
    """The owner's newest change to how cells average, and what is in force."""
    rules = training.standing.in_force
    o, cell = rules.outer, f"cells of {rules.cell}" if rules.cell else "one cell"
    says = f"{cell}, {o.strategy} of {o.carries} after every {o.every} epochs" if o.every else cell
    since = plan.since if plan is not None and rules.revision else 0
    return pb.ChangeLine(revision=training.standing.known.revision, in_force=rules.revision, since=since, says=says)


def outer_line(work: Work, cell: int) -> pb.OuterLine:
    """Where this peer is among the cells of its stage, and what its last outer round was."""
    news, epoch = work.outer, work.version.epoch
    compared, apart = work.plan.spread.get(work.stage.stage, (0, 0.0)) if work.plan is not None else (0, 0.0)
    ahead = (e - epoch for e in range(epoch, epoch + work.anchor.ahead.every + 1) if work.anchor.due(e))
    return pb.OuterLine(
        cell=cell + 1, last=news.number, cells=news.cells, peers=news.peers, bytes=news.nbytes, last_s=news.seconds, next=next(ahead, 0),
        spread=pb.SpreadLine(cells=compared, relative=apart, error=ERROR if compared else 0.0),
    )  # fmt: skip


def kinds_of_tasks() -> Counter[str]:
    """Tasks of the running event loop by the first word of their name, or, for those of libraries, by their function; none outside of a loop."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return Counter()
    return Counter(
        getattr(t.get_coro(), "__qualname__", "") if t.get_name().startswith("Task-") else t.get_name().split(" ")[0]
        for t in tasks
    )
