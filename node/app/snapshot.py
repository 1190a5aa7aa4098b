"""State of a running daemon at this moment: the snapshot that one screen needs, the list of peers,
the page of metrics. Enters: the daemon, news of every plan. Leaves: figures. Never: a wait, a
change to anything it looks at."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from node.app.assembly import Assembled
from node.app.capacity import PROCESS, stage_demands
from node.app.last import epochs_on_disk
from node.app.node import Node
from node.app.progress import Progress
from node.availability.machine import By
from node.availability.words import PUBLIC
from node.control.causes import STALL_S, Cause, Situation, cause
from node.control.text import ABSENT, doing
from node.control.words import lasting
from node.coordinator.presence import LEAVING
from node.coordinator.service import Training
from node.coordinator.vitals import Life
from node.core.contention import Contention
from node.core.home import pasteable
from node.core.ids import ENDS, CellId, PeerId, RunId, short, stage_name
from node.core.journey import Losses, Plan
from node.core.numbers import human, several
from node.core.version import VERSION
from node.dht.record import PeerBody
from node.epoch.pace import WAY_TIMEOUT_S
from node.epoch.waiting import Lack, Wait
from node.fine_tuning import worse
from node.manifest import Manifest
from node.outer.service import CellMeetings, CellTally
from node.pipeline.rounding import NOTHING_SENT, Rounding
from node.reach.interfaces import InterfaceKind, address_kinds
from node.scheduler.costs import Costs
from node.scheduler.reasons import reasons
from node.telemetry.events import EPOCH
from node.telemetry.history import EpochLine, History
from node.transport.addresses import host_of
from node.transport.port import PeerLink
from protos import ask_pb2 as ask
from protos import control_pb2 as pb

HISTORY = 256
"""Losses kept for the picture."""
STALL_EPOCHS = 3.0
"""A peer without useful work is unhealthy after this many expected times of an epoch, and not
before :data:`node.control.causes.STALL_S`."""
JOB_S = 600.0
"""Seconds for which a single job of the device may run and still count as work."""
TELL_S = 30.0
"""Seconds between two sentences about the same activity."""
SAID_ONCE = ("finished", "paused")
"""Activities that are not told again while they last."""
NEWS_S = 5.0
"""Seconds between two looks for a new activity."""
FULL = 16 << 20
"""Free bytes below which a disk counts as full."""
PAUSED_APART_S = 30.0
"""Seconds before an order to pause is in force here within which a peer that went has obeyed it:
clocks differ."""
LOOPBACK = {"127.0.0.1", "::1"}
WORKERS = 256
"""Most peers in an answer about the history, each with its work at one stage; this peer is in it in
any case."""
MEASURE_S = 5.0
"""Seconds between two looks at the numbers of the metrics page."""


@dataclass
class StagesGivenUp:
    """Stages that this peer has given up since its daemon started: the ``epoch`` of the last one's
    parameters, the micro-batches at all of them, the monotonic second of the ``last_work``."""

    epoch: int = 0
    micro_batches: int = 0
    last_work: float = 0.0


class Tally:
    """Reports of all plans so far. ``shown``: a snapshot with the losses, the tokens and their
    rate; ``tokens_before``: tokens that were counted before the first plan seen here."""

    def __init__(self) -> None:
        self.shown = pb.Snapshot()
        self.tokens_before = 0
        self.cpu_began = -1.0
        self.forecast_s = self.last_said_s = self.last_took_s = 0.0
        self.progress = Progress()
        self.given_up = StagesGivenUp()
        self._cell: CellId | None = None
        self._epoch = -1
        self._at = 0.0

    def left_s(self, now: float) -> float:
        """Seconds until the epoch under way should end, by the plan's forecast; 0 if unknown."""
        if not self._at:
            return 0.0
        return max(0.0, self._at + self.forecast_s - now)

    def gave_up(self, a: Assembled) -> None:
        """Keep the counts of a stage that this peer gives up for a pause. The speed is measured
        anew afterwards, for the pause is no training."""
        self.progress.restart()
        self._at = 0.0
        self.shown.tokens_per_s = 0.0
        self.given_up.epoch = max(0, a.stage.version.epoch)
        if a.meter.micro_batches:
            self.given_up.micro_batches += a.meter.micro_batches
            self.given_up.last_work = a.meter.last_work

    def planned(self, plan: Plan, now: float) -> float:
        """Take over the report of a new plan on the previous epoch. Returns the seconds that this
        epoch took, 0 if they are unknown."""
        s = self.shown
        since = 0.0
        if self._at:
            since = now - self._at
        if plan.cell_id != self._cell:
            self._cell = plan.cell_id
            self.progress.restart()
        self.progress.reached(plan.epoch, now)
        if plan.epoch == self._epoch:
            return 0.0
        if plan.epoch < self._epoch:
            # The swarm went back, or this peer came into another cell.
            since = 0.0
            s.tokens_per_s = 0.0
        if self._epoch < 0:
            self.tokens_before = plan.tokens
            self.cpu_began = time.process_time()
        if plan.loss > 0:
            s.loss = plan.loss
            s.loss_first = s.loss_first or plan.loss
            s.loss_history[:] = [*s.loss_history, plan.loss][-HISTORY:]
        s.loss_val = plan.loss_val or s.loss_val
        s.loss_before = plan.reference.training or s.loss_before
        s.loss_val_before = plan.reference.held_out or s.loss_val_before
        if since > 0 and plan.tokens > s.tokens > 0:
            rate = (plan.tokens - s.tokens) / since
            if s.tokens_per_s:
                rate = 0.7 * s.tokens_per_s + 0.3 * rate
            s.tokens_per_s = rate
        seconds = 0.0
        if plan.epoch == self._epoch + 1:
            seconds = since
        if seconds:
            self.last_said_s = self.forecast_s
            self.last_took_s = seconds
        self.forecast_s = sum(plan.forecast)
        s.tokens = plan.tokens
        self._epoch = plan.epoch
        self._at = now
        return seconds


def _allowed(a: Assembled, m: Manifest | None) -> float:
    """Seconds that this peer may have nothing to do while others work: half of the time that the
    plan gives to an epoch, for a large model with deadlines above the manifest's lower bounds. 0
    for other models."""
    plan = a.work.plan
    round_s = a.work.rounds.figures.deadline_s
    if m is None or plan is None or not plan.paths:
        return 0.0
    if plan.deadline_s > m.training.epoch_timeout_s or round_s > m.averaging.round_timeout_s:
        return (plan.deadline_s + round_s) / 2
    return 0.0


class MetricsPage:
    """The numbers of the last look, as the metrics page has them. Its counters only grow: a total
    that went back (a leader that was replaced counts anew) adds nothing."""

    def __init__(self) -> None:
        self.metrics: Sequence[Metric] = ()
        self._told = Counter[tuple[str, str]]()
        """Total of each counter, by name and result, at the last look."""
        self._grown = Counter[tuple[str, str]]()
        """Value of each counter that the page shows, by name and result."""

    def measure(self, snapshot: pb.Snapshot, tokens_before: int) -> None:
        """Look at every number that the screen shows as well."""
        page = [*gauges(snapshot), sent_gauge(snapshot.sent), tasks_gauge(kinds_of_tasks())]
        for name, text, totals in totals_of(snapshot, tokens_before):
            page.append(family := CounterMetricFamily(f"tutti_{name}", text, labels=["result"]))
            for result, total in totals.items():
                self._grown[name, result] += max(0, total - self._told[name, result])
                self._told[name, result] = total
                family.add_metric([result] if result else [], self._grown[name, result])
        self.metrics = page


class SnapshotBuilder:
    """Builds the snapshots of one daemon for its operator."""

    def __init__(self, daemon: Node) -> None:
        self._d = daemon
        self.tally = Tally()
        self._history = History(int(daemon.clock.wall()))
        self._repeated = 0
        """Rounds that this peer saw repeated before the newest plan."""
        self._stage_bytes: tuple[str, list[int]] = ("", [])
        """Run id, and the memory that a peer needs for each of its stages."""
        self._cell = CellTally()
        self._page = MetricsPage()
        self._troubles: list[str] = []
        self._silent: set[PeerId] = set()
        """Peers that the journal has reported as silent."""
        self._disk = ""
        """A sentence about the disk of the home, while it is full."""
        self._contention = Contention()
        self._ways_since = time.monotonic()
        """Time at which the leader began to wait for peers to reach each other."""
        """Contention since the last look for news; not measured while nothing is wrong."""
        self._told_last: pb.Snapshot | None = None
        """The snapshot of the last look for news."""

    # ----------------------------------------------------------- status

    def snapshot(self) -> pb.Snapshot:
        """Snapshot with everything that one screen needs; no waiting."""
        d = self._d
        t = self.tally
        transport = d.transport
        manifest = d.manifest
        traffic = transport.traffic
        up_rate, down_rate = traffic.lately()
        cpu_s = 0.0
        if t.cpu_began >= 0:
            cpu_s = time.process_time() - t.cpu_began
        step = ""
        if d.assembled is None:
            step = d.step
        s = pb.Snapshot(
            peer=d.identity.peer_id,
            name=d.name,
            version=VERSION,
            up_s=time.monotonic() - d.started,
            state=d.state,
            home=str(d.config.home),
            metrics_url=d.metrics_url,
            addresses=d.transport.reachable.multiaddrs(),
            p2pd_restarts=transport.p2p.restarts,
            role=d.role,
            swarm=self._swarm(manifest),
            cpu_s=cpu_s,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            max_up=traffic.max_up,
            max_down=traffic.max_down,
            up_rate=up_rate,
            down_rate=down_rate,
            paths_to=Counter(p.path for p in transport.peers().values() if p.path),
            reachable=transport.reachable.words(len(transport.relays.held)),
            warnings=d.child_trouble.values(),
            step=step,
            paused=self._paused(),
            paused_until=d.availability.ends_at,
            pauses=d.availability.count.pauses,
            paused_s=d.availability.seconds_paused(),
            given_back=d.given_back,
            order=self._order(),
            archive=self._archive(),
            paused_by_run=d.availability.paused_by_run,
        )
        s.MergeFrom(t.shown)
        if t.given_up.micro_batches:
            s.micro_batches = t.given_up.micro_batches
            s.last_work_s = max(0.0, time.monotonic() - t.given_up.last_work)
        if d.place is not None:
            s.stage = d.place
            s.placed = True
        if manifest is not None:
            if d.state not in ABSENT:
                left_s, s.left_over_s = t.progress.left(manifest.training.epochs, time.monotonic())
                s.left_s = left_s
            s.warmup = manifest.optimizer.warmup
        if d.assembled is not None and manifest is not None:
            s.MergeFrom(self._work(d.assembled, manifest))
            reference = Losses(s.loss_before, s.loss_val_before)
            if trouble := worse(manifest, s.epoch, s.loss_val, reference):
                s.warnings.insert(0, trouble)
        found = self._cause(s)
        s.cause = found.kind
        s.reason = pasteable(found.what, d.config.home_flag)
        s.next_step = pasteable(found.step, d.config.home_flag)
        s.healthy = not found.kind or found.usual
        return s

    def _work(self, a: Assembled, m: Manifest) -> pb.Snapshot:
        """Snapshot of the hosted stage's work."""
        d = self._d
        work = a.work
        training = a.training
        here = a.stage.stage
        leader = training.leader
        to = d.to_stage
        plan = work.plan
        beside = beside_peak = memory_process = 0
        if not a.device.is_cuda:
            beside, beside_peak = d.memory_beside()
            memory_process = d.memory_process
        costs = None
        repaired = mismatches = 0
        if leader:
            costs = leader.planning.routing.costs
            repaired = leader.repeats.repaired
            mismatches = leader.repeats.mismatches
        replicas = 1
        if d.presence:
            replicas += len(d.presence.view.replicas(here))
        phase = training.member.state.value
        if to is not None:
            phase = f"to {stage_name(to)}"
        cell = None
        if a.meetings is not None:
            cell = self._cell_line(a, a.meetings, m)
        change = None
        if training.admission.changes.known.revision:
            change = change_line(training)
        paths = None
        if plan is not None and plan.paths:
            paths = pb.PathsLine(
                how=m.scheduler.paths,
                run_s=plan.forecast[0],
                round_s=plan.forecast[1],
                last_said_s=self.tally.last_said_s,
                last_took_s=self.tally.last_took_s,
                why=self._reasons(plan, m, costs),
            )
        s = pb.Snapshot(
            stage=here,
            layers=a.layers,
            replicas=replicas,
            epoch=a.stage.version.epoch,
            digest=a.stage.digest,
            phase=phase,
            leader=training.leader_id() or "",
            leader_name=d.journal.names.known(training.leader_id()),
            device=a.device_said,
            precision=a.precision.format,
            kernels=a.pipeline.math.kernels,
            memory_used=a.device.memory_used() + beside,
            memory_peak=a.device.memory_peak() + beside_peak,
            memory_process=memory_process,
            memory_limit=a.memory_limit,
            memory_planned=a.memory.needed,
            memory_plan=[
                pb.MemoryLine(when=when, what=what, bytes=nbytes)
                for when, what, nbytes in a.memory.table
                if nbytes
            ],
            stash_bytes=a.pipeline.stash.used,
            stash_limit=a.pipeline.stash.limit,
            texts=len(a.pipeline.texts),
            text_bytes=a.pipeline.texts.used,
            recompute=a.pipeline.math.recompute,
            sent=[
                pb.SentLine(
                    peer=peer,
                    name=d.journal.names.known(peer),
                    wire=sent.wire,
                    error=sent.error,
                    measured=sent.measured,
                )
                for peer, sent in a.pipeline.rounding.peers().items()
            ],
            micro_batches=self.tally.given_up.micro_batches + a.meter.micro_batches,
            last_work_s=max(0.0, time.monotonic() - a.meter.last_work),
            time_s=d.metrics.totals(),
            round=pb.RoundLine(
                done=work.rounds.figures.done,
                failed=work.rounds.figures.failed,
                last_s=work.rounds.figures.seconds,
                members=work.rounds.figures.members,
                contributors=work.rounds.figures.contributors,
                bytes=work.rounds.figures.nbytes,
                repaired=repaired,
            ),
            digest_mismatches=mismatches,
            progress=work.fetching,
            momentum_lost=work.state_export.taking.lost,
            momentum_age=work.state_export.taking.age,
            optimizer_bytes=work.engines.owner.nbytes,
            paths=paths,
            cell=cell,
            change=change,
        )
        if (shares := training.credit.shares).epochs:
            s.receipts.CopyFrom(
                pb.ReceiptsLine(
                    own=shares.own,
                    work=shares.work,
                    unsigned=shares.unsigned,
                    epochs=shares.epochs,
                )
            )
        if given_up := training.following.past.given_up_epochs:
            tokens = training.following.past.given_up_tokens
            s.warnings.append(
                f"the two sides of a partition met: {several(given_up, 'epoch')} of this one "
                f"({tokens} tokens) discarded"
            )
        s.warnings.extend(self._troubles)
        if d.archive is not None and d.archive.trouble:
            s.warnings.append(d.archive.trouble)
        if refused := d.transport.refusals.line():
            s.warnings.append(refused)
        if n := a.pipeline.math.slice:
            s.warnings.append(
                f"memory ran out: computes {several(n, 'sequence')} at once; see --memory"
            )
        if times := work.engines.owner.singly:
            s.warnings.append(
                f"memory ran out in {several(times, 'step')}, which took one matrix at a time"
            )
        if s.replicas == 1 and m.training.epochs > s.epoch:
            what = "the ends have"
            if here != ENDS:
                what = f"stage {here} has"
            alone = ""
            waits = "training"
            if a.meetings is not None:
                alone = " in this cell"
                waits = "the cell"
            s.warnings.append(f"{what} one peer only{alone}: when it leaves, {waits} waits")
        return s

    def _reasons(self, plan: Plan, m: Manifest, costs: Costs | None) -> list[str]:
        """The routes and the unequal shares of a plan. Routes have short ids alone, for they are
        long; ``tutti peers`` has the names beside them."""
        names = self._d.journal.names
        lines = reasons(plan, m.pipeline.stages, costs)
        return [names.within(line) if line.startswith("stage ") else line for line in lines]

    def _cell_line(self, a: Assembled, meetings: CellMeetings, m: Manifest) -> pb.CellLine:
        d = self._d
        training = a.training
        members = 1
        if d.presence:
            members += len(d.presence.view.stages())
        line = self._cell.line(
            training.cell,
            members,
            meetings.register.standing()[1],
            a.work.windows.news,
            m.outer.window_s,
            d.clock.wall(),
        )
        if training.following.finished.is_set():
            line.next_s = 0.0
            line.alone = False
        return line

    def _cause(self, s: pb.Snapshot) -> Cause:
        """The reason for which this peer does not train, with names of peers."""
        names = self._d.journal.names
        found = cause(self._situation(s))
        return replace(found, what=names.within(found.what))

    def _situation(self, s: pb.Snapshot) -> Situation:
        """The facts from which the reason is found."""
        d = self._d
        a = self._d.assembled
        now = time.monotonic()
        clocks = d.clocks
        fault = "", ""
        if d.fault is not None:
            fault = d.fault.what, d.fault.next_step
        starting = ""
        if a is None and d.role != "rendezvous":
            starting = d.step
        general = Situation(
            state=s.state,
            up_s=s.up_s,
            fault=fault,
            admission=d.admission_trouble(),
            p2p_up=d.transport.p2p.up,
            clock=clocks.wrong(),
            stopped_s=clocks.stopped_s,
            slept=clocks.slept,
            woke_s=now - clocks.woke_at,
            starting=starting,
            starting_s=now - d.step_since,
            disk=self._disk,
            child_trouble=tuple(d.child_trouble.values()),
            paused=self._paused(),
            paused_by_run=d.availability.paused_by_run,
            owns=d.manifest is not None and d.manifest.swarm.owner == d.identity.peer_id,
        )
        if a is None or d.presence is None:
            return general
        training = a.training
        view = d.presence.view
        text = a.work.engines.text
        plan = training.member.plan
        loading = d.loading()
        if plan is not None and training.member.busy:
            leader = training.member.leader
        else:
            leader = training.leader_id()
        told, waits_for, _ = training.reporting.contact.reply
        if told != leader:
            waits_for = ""
        voters = ()
        if plan is not None:
            voters = plan.electorate.voters
        reportable = training.peers.reportable(view.hosts)
        hosts = {peer: at for peer, at in view.hosts.items() if peer in reportable}
        about = {*hosts, *voters}
        if leader is not None:
            about.add(leader)
        standing = {peer: training.standing_of(peer) for peer in about - {training.kit.me}}
        expected = max(self.tally.forecast_s, self.tally.last_took_s)
        busy = 0.0 < a.thread.busy_for < JOB_S
        unreached = tuple(training.peers.unproven())
        reporting = dict[PeerId, int]()
        if training.leader is not None:
            # A peer that has just published its record reports with its next heartbeat.
            known = {*view.follows, *training.leader.roster.peers.candidates, *unreached}
            reporting = {p: stage for p, stage in hosts.items() if p not in known}
        wait = self._wait(a, loading)
        if wait is None or wait.lack is not Lack.WAYS:
            self._ways_since = now
            apart = {*unreached}
        else:
            apart = {*unreached, *wait.peers}
        text_trouble = ""
        if text is not None:
            text_trouble = text.trouble
        idle_s = 0.0
        if training.started and not busy:
            idle_s = s.last_work_s
        return replace(
            general,
            awaits_weights=a.work.stage.empty and a.work.fetching >= 1.0,
            fetched=a.work.fetching,
            fetch_still_s=now - a.work.fetched_at,
            text=text_trouble,
            wait=wait,
            leader=leader,
            leads=training.leader is not None,
            unled=training.leader_id() is None,
            leader_answers=told is not None and told == leader,
            leader_waits=waits_for,
            voters=voters,
            life={p: found for p, found in standing.items() if found[0] is not Life.LIVES},
            hosts=view.hosts,
            coming={**view.coming, **reporting},
            children=tuple(sorted(loading)),
            children_s=now - max(loading.values(), default=now),
            unreached=unreached,
            beside=frozenset(p for p in apart if self._on_this_machine(p)),
            contended=self._contention.last,
            ways_had_time=now - self._ways_since >= 2 * WAY_TIMEOUT_S,
            idle_s=idle_s,
            idle_most_s=max(STALL_S, STALL_EPOCHS * expected, _allowed(a, d.manifest)),
        )

    def _on_this_machine(self, peer: PeerId) -> bool:
        """Return True if a peer announces an address that only this machine has."""
        presence = self._d.presence
        if presence is None:
            return False
        if peer == presence.me:
            return True
        hosts = {host_of(address) for address in presence.addresses(peer)} - {""}
        own = {a for a, kind in address_kinds().items() if kind < InterfaceKind.TUNNEL}
        return not own.isdisjoint(hosts) or (bool(hosts) and hosts <= LOOPBACK)

    def _archive(self) -> pb.ArchiveLine | None:
        """The state of this peer's archive; None if it has no archive."""
        archive = self._d.archive
        if archive is None:
            return None
        at = 0.0
        if archive.copied is not None:
            at = archive.copied[1]
        return pb.ArchiveLine(
            to=archive.shown,
            epoch=archive.last or 0,
            known=archive.last is not None,
            at=at,
            trouble=archive.trouble,
        )

    def _order(self) -> pb.OrderLine | None:
        """The order of the run's owner that outranks the others, with the largest number of all;
        None for none."""
        orders = self._d.orders
        if orders is None or orders.known is None:
            return None
        known = orders.known
        return pb.OrderLine(
            number=orders.number,
            verb=known.verb.value,
            reason=known.reason,
            begins=known.begins,
            in_force=known in orders.orders.obeyed,
        )

    def _paused(self) -> str:
        """The reason of a pause, empty for a daemon that works or that ends."""
        d = self._d
        if d.pausing or d.paused:
            return d.availability.reason
        return ""

    def _wait(self, a: Assembled, loading: Mapping[int, float]) -> Wait | None:
        """The reason for which no epoch is under way. While this machine loads stages, the leader's
        reason is shown at once, and otherwise only when it has lasted."""
        if not a.training.started:
            return None
        leader = a.training.leader
        at_once = None
        if leader is not None and loading:
            at_once = leader.gathering.waiting
        return a.training.waiting() or at_once

    def _swarm(self, m: Manifest | None) -> ask.SwarmLine | None:
        if m is None:
            return None
        return ask.SwarmLine(
            name=m.swarm.name,
            run_id=m.run_id,
            epoch=self._run_epoch(m),
            epochs=m.training.epochs,
            loss=self.tally.shown.loss,
            stages=m.pipeline.stages,
        )

    def recall_epoch(self) -> None:
        """Show the epoch of the checkpoints while this peer, which starts paused, hears of no later
        epoch."""
        if self._d.manifest is None:
            return
        checkpoints = self._d.config.checkpoint_dir(self._d.manifest.run_id)
        epochs = [epoch for _, epoch in epochs_on_disk(checkpoints)]
        self.tally.given_up.epoch = max(epochs, default=0)

    def _run_epoch(self, m: Manifest) -> int:
        """Epoch of the run. A peer without parameters takes the median epoch of the records of
        peers that have parameters, so that no single record decides; without such records, the
        epoch of its own last parameters."""
        d = self._d
        if d.assembled is not None and d.assembled.stage.version.epoch > 0:
            return d.assembled.stage.version.epoch
        told = list[int]()
        if d.presence is not None:
            told = [e.body.epoch for e in d.presence.view.others.values() if e.body.epoch > 0]
        if not told:
            return self.tally.given_up.epoch
        return min(median_high(told), m.training.epochs)

    # ----------------------------------------------------------- history

    async def history(self, after: int, edition: int) -> pb.RunHistory:
        """Epochs above ``after`` (all of them for a reader of another edition), the work of each
        peer since this daemon started, and the memory that each stage needs."""
        h = self._history
        known = self._d.journal.names.known
        answer = pb.RunHistory(edition=h.edition, stage_bytes=await self._needed())
        for line in h.after(after, edition):
            answer.epochs.append(
                pb.EpochLine(
                    epoch=line.epoch,
                    tokens=line.tokens,
                    loss=line.loss,
                    loss_val=line.loss_val,
                    seconds=line.seconds,
                    repaired=line.repaired,
                    epochs=line.epochs,
                )
            )
        for w in h.work(WORKERS, self._d.identity.peer_id):
            answer.work.append(
                pb.WorkLine(
                    peer=w.peer,
                    name=known(w.peer),
                    stage=w.stage,
                    micro_batches=w.micro_batches,
                    epochs=w.epochs,
                    of_stage=w.of_stage,
                )
            )
        return answer

    async def _needed(self) -> list[int]:
        """Bytes that a daemon needs for each stage of the run, computed once."""
        m = self._d.manifest
        if m is None:
            return []
        if self._stage_bytes[0] != m.run_id:
            found = await asyncio.to_thread(stage_demands, self._d.config, m)
            self._stage_bytes = (m.run_id, [nbytes + PROCESS for nbytes in found.values()])
        return self._stage_bytes[1]

    def _rounds_repeated(self) -> int:
        """Rounds that were repeated since the start: of all stages where this peer leads, else of
        its own stage."""
        a = self._d.assembled
        if a is None:
            return 0
        leader = a.training.leader
        if leader is not None:
            return leader.repeats.repaired
        return a.work.rounds.figures.failed

    # ----------------------------------------------------------- ways

    def reach(self) -> pb.ReachReport:
        """Ways by which others reach this peer, and its ways to them with all attempts."""
        d = self._d
        t = d.transport
        now = d.clock.wall()
        r = t.reachable
        lan = "off"
        if d.lan is not None:
            lan = d.lan.trouble
        report = pb.ReachReport(
            standing=r.standing.value,
            reachable=r.words(len(t.relays.held)),
            addresses=r.multiaddrs(),
            seen=r.seen(),
            relays=t.relays.held,
            mapping={} if r.local else r.mapper.tried,
            clients=t.relay.clients,
            circuits=t.relay.circuits,
            bootstrap=t.p2p.bootstrap.results,
            lan=lan,
            ports=dict(zip(("libp2p", "gRPC"), t.ports, strict=True)),
        )
        if d.presence is None:
            return report
        links = t.peers()
        for peer, entry in sorted(d.presence.view.everybody.items()):
            b = entry.body
            link = links.get(peer, PeerLink())
            report.ways.append(
                pb.WayLine(
                    peer=peer,
                    name=b.name,
                    stage=b.stage,
                    role=b.role,
                    path=link.path,
                    via=link.via,
                    rtt_s=link.rtt,
                    up=link.up,
                    down=link.down,
                    proven_s=max(0.001, now - link.proven) if link.proven else 0.0,
                    tried=t.lines.tried(peer),
                    standing=b.reach,
                )
            )
        return report

    # ----------------------------------------------------------- the metrics page

    def planned(self, plan: Plan) -> None:
        """Take in a new plan that reached this peer."""
        s = self.tally.shown
        config = self._d.config
        m = self._d.manifest
        known = s.loss_first
        if not known and m is not None:
            s.loss_first = known = config.reference(m.run_id)
        seconds = self.tally.planned(plan, time.monotonic())
        repeated = self._rounds_repeated()
        line = self._history.planned(plan, seconds, max(0, repeated - self._repeated))
        self._repeated = repeated
        if line is not None and m is not None:
            self._tell_epoch(line, m.run_id)
        if s.loss_first and not known and m is not None:
            keep = asyncio.to_thread(config.keep_reference, m.run_id, s.loss_first)
            self._d.tasks.spawn(keep, "reference loss")
        if seconds:
            self._d.metrics.epoch_seconds.observe(seconds)
        if m is not None and m.outer.windows:
            self._cell.planned(plan, m.outer.window_s, self._d.clock.wall())

    def _tell_epoch(self, line: EpochLine, run_id: RunId) -> None:
        """Report an epoch to the sinks of curves."""
        self._d.journal.emit(
            "daemon",
            EPOCH,
            f"epoch {line.epoch} ended with {line.tokens} tokens and a loss of {line.loss:.3f}",
            "debug",
            run=run_id,
            epoch=line.epoch,
            tokens=line.tokens,
            loss=line.loss,
            loss_val=line.loss_val,
            seconds=line.seconds,
            tokens_per_s=self.tally.shown.tokens_per_s,
        )

    async def keep_telling(self) -> None:
        """Report this peer's activity in the journal until cancelled: at once when it changes, and
        again after :data:`TELL_S` seconds, except for :data:`SAID_ONCE`."""
        news = ""
        told = 0.0
        while True:
            self._tell_silence()
            if self._told_last is None or self._told_last.healthy:
                self._contention.rest()
            else:
                self._contention.share()
            self._told_last = self.snapshot()
            word, text = doing(self._told_last)
            now = time.monotonic()
            if word != news or (now - told >= TELL_S and word not in SAID_ONCE):
                news = word
                told = now
                self._d.journal.emit("daemon", "doing", text, state=word)
            await asyncio.sleep(NEWS_S)

    def _tell_silence(self) -> None:
        """Say in the journal which peers fall silent and which are heard again. A leader reports
        its decisions about these peers instead. A peer that leaves is expected to be silent."""
        d = self._d
        a = self._d.assembled
        if a is None or d.presence is None or a.training.leader is not None:
            return
        view = d.presence.view
        here = (p for p in view.hosts if a.training.peers.has_met(p))
        hosts = {p for p in here if view.others[p].body.state not in LEAVING}
        silent = {p: s for p in hosts if (s := a.training.standing_of(p))[0] is Life.SILENT}
        for peer, (_, seconds) in silent.items():
            if peer not in self._silent and seconds >= NEWS_S:
                self._silent.add(peer)
                text = f"{short(peer)} has been silent for {lasting(seconds)}"
                d.journal.emit("daemon", "peer-silent", text, peer=peer)
        for peer in self._silent - silent.keys():
            self._silent.discard(peer)
            if peer in hosts and a.training.standing_of(peer)[0] is Life.LIVES:
                d.journal.emit("daemon", "peer-heard", f"{short(peer)} is heard again", peer=peer)

    async def keep_measuring(self) -> None:
        """Keep the metrics page and the disk's state on the screen up to date, until cancelled."""
        self.measure()
        self._d.metrics.registry.register(self)
        while True:
            # A network disk may take its time to answer.
            self._disk = await asyncio.to_thread(full_disk, self._d.config.home)
            if self._d.assembled is not None:
                self._troubles = await asyncio.to_thread(
                    self._d.assembled.work.local_checkpoints.troubles
                )
            self.measure(self._told_last)
            await asyncio.sleep(MEASURE_S)

    def collect(self) -> Sequence[Metric]:
        """The numbers of the last measurement. A scrape calls this, on a thread of its own."""
        return self._page.metrics

    def measure(self, snapshot: pb.Snapshot | None = None) -> None:
        """Look at every number of the metrics page that the screen shows as well. ``snapshot``: a
        recent snapshot, if there is one: with many peers a snapshot costs milliseconds."""
        s = snapshot
        if s is None:
            s = self.snapshot()
        self._page.measure(s, self.tally.tokens_before)

    # ----------------------------------------------------------- peers

    def peers(self) -> ask.PeersAnswer:
        """Every peer in sight, this one first, and the reason for which this one does not train."""
        answer = self.peers_in_sight()
        s = self.snapshot()
        answer.reason = s.reason
        answer.next_step = s.next_step
        if self._d.manifest is not None:
            for line in answer.peers:
                invite = self._d.gate.invite_of(PeerId(line.peer))
                if invite is not None:
                    answer.invites[line.peer] = invite
        return answer

    def peers_in_sight(self) -> ask.PeersAnswer:
        """Every peer in sight, this one first."""
        d = self._d
        answer = ask.PeersAnswer(swarm=self._swarm(d.manifest))
        progress = 0.0
        if d.assembled:
            progress = d.assembled.work.fetching
        now = d.clock.wall()
        answer.peers.append(
            _peer_line(
                d.identity.peer_id,
                d.body(),
                path="self",
                up_s=time.monotonic() - d.started,
                progress=progress,
            )
        )
        if d.presence is None:
            return answer
        links = d.transport.peers()
        sent: Mapping[PeerId, Rounding] = {}
        if d.assembled:
            sent = d.assembled.pipeline.rounding.peers()
        for peer, entry in sorted(d.presence.view.everybody.items()):
            link = links.get(peer, PeerLink())
            body = entry.body
            seen_s = max(0.0, now - entry.refreshed)
            life, silent_s = self._life(peer, link, now)
            if life is not Life.LIVES and not body.paused:
                body = replace(body, state=life.value, tokens_per_s=0.0)
            body = self._as_paused(peer, body, wall=now)
            if life in (Life.LOST, Life.LEFT):
                seen_s = silent_s
            answer.peers.append(
                _peer_line(
                    peer,
                    body,
                    path=link.path,
                    via=link.via,
                    rtt_s=link.rtt,
                    up_s=max(0.0, now - body.started),
                    seen_s=seen_s,
                    silent_s=silent_s,
                    wire=sent.get(peer, NOTHING_SENT).wire,
                    wire_error=sent.get(peer, NOTHING_SENT).error,
                )
            )
        for peer, (entry, since) in sorted(d.presence.sightings.lost.items()):
            # A record that goes before it expires was taken down by its writer.
            withdrawn = entry.not_after > since or entry.body.state in LEAVING
            state = "left" if withdrawn else "lost"
            body = replace(entry.body, state=state, tokens_per_s=0.0)
            if withdrawn:
                body = self._as_paused(peer, body, wall=since)
            answer.peers.append(_peer_line(peer, body, seen_s=max(0.0, now - since)))
        return answer

    def _as_paused(self, peer: PeerId, body: PeerBody, *, wall: float) -> PeerBody:
        """The record of a peer that went at ``wall``. A peer that pauses with this one, by an order
        of the run's owner to all or as its child, is shown as paused."""
        d = self._d
        gone = body.state in (*LEAVING, "left")
        if not gone or not (d.paused or d.pausing):
            return body
        by = ""
        since = d.availability.run_paused_at
        if since and wall >= since - PAUSED_APART_S:
            by = PUBLIC[By.RUN]
        elif peer in d.own_children():
            by = d.availability.public_reason
        if not by:
            return body
        return replace(body, state="paused", paused=by, tokens_per_s=0.0)

    def _life(self, peer: PeerId, link: PeerLink, wall: float) -> tuple[Life, float]:
        """The signs of life of a peer. A connection that was made after the evidence of its death
        is a sign of life."""
        d = self._d
        now = time.monotonic()
        if d.presence is None:
            return Life.LIVES, 0.0
        if link.path:
            d.presence.sightings.vitals.alive(peer, now - max(0.0, wall - link.since))
        if d.assembled is not None:
            return d.assembled.training.standing_of(peer)
        return d.presence.sightings.vitals.look(peer, now)


def _peer_line(peer: PeerId, body: PeerBody, **seen: Any) -> ask.PeerLine:
    return ask.PeerLine(
        peer=peer,
        name=body.name,
        state=body.state,
        stage=body.stage,
        role=body.role,
        tokens_per_s=body.tokens_per_s,
        epoch=body.epoch,
        version=body.version,
        oldest_protocol=body.protocols[0],
        newest_protocol=body.protocols[1],
        cell=body.cell,
        leads=body.leads,
        paused=body.paused,
        **seen,
    )


def full_disk(home: Path) -> str:
    """A sentence if the disk of ``home`` is full or does not answer, else empty."""
    try:
        free = shutil.disk_usage(home).free
    except OSError as e:
        return f"the disk of {home} does not answer: {e.strerror or e}"
    if free < FULL:
        return f"the disk of {home} is full: {human(free)} are free"
    return ""


def change_line(training: Training) -> pb.ChangeLine:
    """The owner's newest change to how cells average, beside the rules in force."""
    rules = training.admission.changes.in_force
    o = rules.outer
    says = "one cell"
    if rules.cell:
        says = f"cells of {rules.cell}"
    if o.windows:
        says += f", {o.says}"
    known = training.admission.changes.known
    if known.revoked:
        says += f", revoked peers: {len(known.revoked)}"
    return pb.ChangeLine(
        revision=known.revision, in_force=rules.revision, says=says, signed=known.change
    )


def tasks_gauge(kinds: Mapping[str, int]) -> Metric:
    """Numbers of tasks in the event loop by their kind, for the metrics page."""
    tasks = GaugeMetricFamily(
        "tutti_tasks", "Tasks of the event loop, by what they do", labels=["kind"]
    )
    for kind, number in kinds.items():
        tasks.add_metric([kind], number)
    return tasks


def totals_of(s: pb.Snapshot, tokens_before: int) -> list[tuple[str, str, dict[str, int]]]:
    """Name, text and totals by result of the counters that the screen shows as well.
    ``tokens_before``: tokens that the swarm had counted when this daemon started."""
    return [
        (
            "tokens_total",
            "Tokens counted by the swarm since this daemon started",
            {"": max(0, s.tokens - tokens_before)},
        ),
        (
            "micro_batches_total",
            "Micro-batches that ended here (counted)",
            {"counted": s.micro_batches},
        ),
        (
            "rounds_total",
            "Averaging rounds (done, repaired, failed)",
            {"done": s.round.done, "failed": s.round.failed, "repaired": s.round.repaired},
        ),
        (
            "digest_mismatches_total",
            "Epochs after which replicas differed",
            {"": s.digest_mismatches},
        ),
        ("pauses_total", "Pauses of this peer since its daemon started", {"": s.pauses}),
        ("paused_seconds_total", "Seconds in which it was paused", {"": round(s.paused_s)}),
        (
            "windows_total",
            "Windows for which a mean with other cells came into place here, or in which the "
            "cell found no other (averaged, alone)",
            {"averaged": s.cell.averaged_windows, "alone": s.cell.alone_windows},
        ),
    ]


def sent_gauge(sent: Iterable[pb.SentLine]) -> Metric:
    """Relative errors of the tensors that this peer sent to others, for the metrics page."""
    errors = GaugeMetricFamily(
        "tutti_sent_error",
        "Relative error of the activations and gradients that a peer got, by their number format",
        labels=["peer", "wire"],
    )
    for line in sent:
        if line.measured:
            errors.add_metric([line.peer, line.wire], line.error)
    return errors


def gauges(s: pb.Snapshot) -> list[Metric]:
    """The numbers of the metrics page that may go up and down, but the tasks."""
    return [
        GaugeMetricFamily(f"tutti_{name}", text, value)
        for name, text, value in (
            ("epoch", "Version of the parameters held here", s.epoch),
            ("stage", "Stage hosted here, 0 for the ends", s.stage),
            ("loss", "Nats per token, last epoch", s.loss),
            ("loss_held_out", "Nats per token on held-out text, last evaluation", s.loss_val),
            (
                "tokens_per_second",
                "Tokens the swarm counts per second, last epochs",
                s.tokens_per_s,
            ),
            ("replicas", "Live peers of this stage, this one included", s.replicas),
            ("stash_bytes", "Activations kept for backward", s.stash_bytes),
            ("memory_bytes", "Memory used, resident or on the device", s.memory_used),
            ("memory_planned_bytes", "Memory that the stage is planned to need", s.memory_planned),
            ("memory_limit_bytes", "Most memory that this peer may take", s.memory_limit),
            ("paused", "1 while this peer is paused, else 0", float(bool(s.paused))),
            (
                "cells_apart",
                "Distance of the partners' parameters in the last window, relative to the own ones",
                s.cell.apart,
            ),
            (
                "cell_peers",
                "Peers of the own cell, this one included; 0 for one cell",
                s.cell.peers,
            ),
            (
                "cells",
                "About how many cells there are, the own one included; 0 for one cell",
                s.cell.cells,
            ),
            (
                "window_cells",
                "Cells of the last mean that came into place in a window; 0: none yet",
                s.cell.cells_averaged,
            ),
            ("window_bytes", "Bytes pulled for that mean", s.cell.bytes),
            ("window_seconds", "Seconds until that mean was here", s.cell.last_s),
        )
    ]


def kinds_of_tasks() -> Counter[str]:
    """Number of tasks of the running event loop, by the first word of their name; a library's task
    counts by its function."""
    return Counter(map(_kind, asyncio.all_tasks()))


def _kind(task: asyncio.Task[Any]) -> str:
    if task.get_name().startswith("Task-"):
        return getattr(task.get_coro(), "__qualname__", "")
    return task.get_name().split(" ")[0]
