"""The daemon: finds its swarm, hosts one stage, answers its operator, and ends in order. The only
file that knows every service; it decides nothing about training."""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import random
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import uvloop

from node.app.assembly import Assembled, assemble, check_room, split_between
from node.app.capacity import KERNELS, MainMemory, main_memory
from node.app.catchup import catch_up, keep_base
from node.app.last import ANEW, STARTED, STOPPING
from node.app.launch import (
    Child,
    again,
    as_flags,
    ask_to_end,
    environment_of_child,
    for_child,
    stop_all,
)
from node.app.node import Node
from node.app.operator_service import OperatorService
from node.app.peer import DRAIN_S, keep, leave, replicas_elsewhere
from node.app.tuning import first_work, tune_meanwhile, worth
from node.availability.machine import By
from node.availability.words import PUBLIC, paused_words
from node.config import NodeConfig
from node.control.causes import ADMISSION_STEP
from node.control.pledges import RENEW_S, Pledges
from node.control.retries import (
    Busy,
    GiveUp,
    Nobody,
    Outcome,
    Retries,
    Unanswered,
    busy_s,
)
from node.control.service import ControlService
from node.control.text import banner
from node.coordinator.presence import COMING, Presence
from node.core import interrupts
from node.core.addresses import Scope
from node.core.errors import (
    ExitCode,
    LocalFault,
    NetworkFault,
    OutOfResources,
    PeerFault,
    ProtocolMismatch,
    Refused,
    UsageFault,
    WireError,
)
from node.core.ids import ENDS, CellId, PeerId, RunId, stage_name
from node.core.memory import keep_freed, of_files, resident
from node.core.numbers import human, several
from node.core.version import PROTOCOLS, VERSION, Protocols
from node.dht.directory import Directory
from node.dht.room import Company
from node.identity.admission import admission_token
from node.identity.invites import Invite, peer_of_address, scope_of
from node.identity.keys import Identity, name_of
from node.inference.forwarding import EndsService
from node.kernels.trials import MicroBatch, choose_kernels
from node.manifest import Manifest
from node.model.device import Device, give_all_back, set_threads
from node.model.settings import DIGEST
from node.model.stages import Blocks, Ends
from node.orders.keeper import OrderKeeper, OrderPorts
from node.orders.order import Order, RunEnded, Verb, ended, going_on
from node.reach.interfaces import taken
from node.reach.standing import Standing
from node.telemetry.events import Event, JournalHandler
from node.telemetry.metrics import HOST, Metrics
from node.telemetry.resources import cores
from node.telemetry.sinks import say
from node.transport.addresses import multiaddr
from protos.ask_pb2 import Ask, AskManifest

TUNING_S = 90.0
"""Seconds to wait for measurements of the optimizer's products before the first micro-batch."""
GARBAGE = (10_000, 20, 20)
"""Thresholds of the garbage collector, by generation. The default ones search all objects outside
the modules after every few hundred new objects, which takes a seventh of a busy daemon's time."""
RETRY_S = 1.0
KEEP_S = 10.0
"""Seconds between two choices of the peers to remember for the next start."""
MOST_NAMES = 4096
"""Number of names to remember, the newest."""
KEEP_PEERS = 8
"""Number of peers to remember for the next start."""
GOODBYE_S = 1.0
"""Least seconds for a goodbye before a pause, which takes one message to the leader."""
LOOK_S = 0.1
"""Seconds between two looks at a stage that is being built, or at the company in the directory."""
ADMISSION_LOOK_S = 60.0
"""Seconds between two looks at whether the admission to a private run has ended."""
COMPANY_S = 3.0
"""Seconds in which a peer that starts should have met somebody in the directory."""
LAN_PEERS = 32
"""Peers of the run that are met because they announce themselves on the LAN; the directory tells of
the others."""


ARCHIVE_S = 60.0
"""Seconds for a copy of the last checkpoint, when the run's owner pauses or ends the run."""
CHILD_PAUSE_S = 60.0
"""Longest pause, in seconds, before a child that ends again and again is started anew."""
CHILD_STEADY_S = 30.0
"""Seconds that a child has to run to count as well."""
CHILD_ADMITTED_S = 365 * 86400.0
"""Seconds after its start for which a child of a private solo swarm is admitted."""


class Daemon(Node):
    """One peer. ``told_order``: an order of the run's owner that came with the manifest, not
    checked yet."""

    told_order = ""

    def __init__(
        self, config: NodeConfig, manifest: Manifest | None, invite: Invite | None
    ) -> None:
        self._new_key = not config.identity_path.exists()
        super().__init__(config, manifest, invite)
        self.view = OperatorService(self)
        self.children: list[Child] = []
        self._loading: dict[int, float] = {}
        """Time of the last start of each block stage's daemon in a solo swarm."""
        self.pledges = Pledges(config.home)
        self.interrupted = False
        """Ended by a Ctrl-C."""
        self._changing = asyncio.Lock()
        """Held while the stage is given up."""
        self._hosting: asyncio.Task[None] | None = None
        """The task that builds the stage and brings it to the newest state; None in a pause."""
        self.availability.on_change = self._availability_changed

    # ----------------------------------------------------------- life

    async def run(self) -> None:
        """Run until a signal, ``stop``, ``drain`` or a fault ends it. Raises LocalFault if it
        cannot start, and for the fault that ended it."""
        self.identity.lock()
        self.journal.emit("daemon", STARTED, f"tutti {VERSION}, pid {os.getpid()}", "debug")
        control = ControlService(self.view, self.config.prepare_control_socket())
        try:
            # Before anybody is told that this daemon listens.
            self._check_not_ended()
            self._check_admitted()
            await control.start()
            if self.config.node.metrics_port >= 0:
                self.metrics_url = serve_metrics(self.metrics, self.config.node.metrics_port)
            self.transport.asking.answerer = self.view.answer
            logging.getLogger().handlers[:] = [JournalHandler(self.journal)]
            faulthandler.enable()
            await self.transport.start(self._bootstrap(), serve=False, prefer=self.config.ports())
            self.config.keep_ports(*self.transport.ports)
            self.tasks.spawn(self._take_part(), "start")
            await self._end.wait()
        except LocalFault as fault:
            self._why = self._why or str(fault)
            raise
        finally:
            await self._close(control)
        if self.fault is not None:
            raise self.fault

    async def _take_part(self) -> None:
        if self.manifest is None and self.invite is not None:
            self.step = "asks the peers of the invite for the manifest of the run"
            self.manifest = await self._find_manifest(self.invite)
            self._check_not_ended()
            self._check_admitted()
        solo = self._solo()
        self._banner(solo)
        self.tasks.spawn(self.view.keep_telling(), "telling", eternal=True)
        self.tasks.spawn(self.clocks.watch(), "clock watch", eternal=True)
        self.tasks.spawn(self.clocks.keep_comparing(), "clock compare", eternal=True)
        if self.manifest is None:
            self.role = "rendezvous"
            self.journal.emit(
                "daemon", "rendezvous", "serving as a rendezvous: helps peers find each other"
            )
            return
        self.tasks.spawn(self._watch_admission(), "admission", eternal=True)
        directory = Directory(
            self.identity,
            self.config.directory,
            self.clock,
            self.manifest.run_id,
            self.journal,
            admit=self.gate.admit,
            admission=self.admission(self.manifest.run_id),
            company=Company(
                lambda peer: self.transport.established(peer),
                self.transport.has_met,
                self.transport.p2p.block,
            ),
            max_up=self.config.transport.max_up,
        )
        directory.on_refusal(lambda peer: self.transport.refusals.count("directory", peer))
        bootstrap = self._bootstrap()
        seeds = self.transport.p2p.dialable(bootstrap)
        attach = partial(directory.attach, initial_peers=seeds)
        await directory.serve(self._in_routing_tables(bool(bootstrap)))
        await attach(self.transport.p2p.p2p)
        self.transport.p2p.on_up.append(attach)
        self.transport.on_met = directory.ask
        self.presence = presence = Presence(
            self.identity.peer_id,
            directory,
            self.clock,
            self.config.directory.refresh_s,
            self._learn,
            self._failed,
        )
        told: set[str] = set()

        def moved() -> None:
            public = {
                a for a in self.transport.reachable.multiaddrs() if scope_of(a) is Scope.PUBLIC
            }
            if public - told:
                told.update(public)
                where = ", ".join(sorted(a.partition("/p2p/")[0] for a in public))
                text = (
                    f"others reach this peer at {where}: a fresh invite is printed by  tutti "
                    "swarm invite"
                )
                self.journal.emit("daemon", "reachable", text)
            presence.changed()

        self.transport.reachable.on_change.append(moved)
        self.transport.relays.on_change = moved
        presence.start()
        self.tasks.spawn(self._keep_acquaintances(self.manifest), "acquaintances", eternal=True)
        self.tasks.spawn(self._keep_dht_mode(directory, bool(bootstrap)), "dht mode", eternal=True)
        await self._meet_on_the_lan(self.manifest, directory)
        await self._hear_orders(self.manifest, presence)
        if self.role == "rendezvous":
            presence.announce(self.body)
            self.journal.emit(
                "daemon", "rendezvous", "serving as a rendezvous: helps peers find each other"
            )
            return
        self.tasks.spawn(self.view.keep_measuring(), "measure", eternal=True)
        await self._until_open(presence)
        if not solo and self._may_host_all() and not self.config.moved:
            self.step = "looks for other peers that host this run"
            solo = await self.alone(presence, self.manifest, self.own_children())
            if solo:
                text = "no other peer hosts this run: all stages run here until others join"
                self.journal.emit("daemon", "solo", text)
        self.step = "finds out which stage needs this peer, and claims it"
        stage = await self.take(
            presence,
            self.manifest,
            named=self.config.stage,
            ends=solo or self.role == "ends",
            kept=self.config.cell(self.manifest.run_id),
            company=bool(bootstrap),
        )
        hosting = self._keep_hosting(presence, self.manifest, stage, solo)
        self.tasks.spawn(hosting, "hosting", eternal=True)

    # ----------------------------------------------------------- the run's owner

    async def _hear_orders(self, manifest: Manifest, presence: Presence) -> None:
        """Find out what the run's owner has ordered, and obey newer orders from now on. Raises
        RunEnded for a run that has ended; a rendezvous goes on and tells others so."""
        run_id = manifest.run_id
        orders = OrderKeeper(
            self.identity.peer_id,
            run_id,
            manifest.swarm.owner,
            OrderPorts(
                presence.directory,
                self.clock,
                self.journal,
                partial(self.config.keep_order, run_id),
                self._obey,
                self.transport.fault,
                lambda: presence.pace.times,
            ),
            self.config.order(run_id),
        )
        if self.told_order:
            orders.hear(self.told_order)
        if self._bootstrap():
            # Nobody has been met yet; an order that is learned later costs a stage built in vain.
            for _ in range(round(COMPANY_S / LOOK_S)):
                if presence.directory.neighbours:
                    break
                await asyncio.sleep(LOOK_S)
        await orders.look()
        self.orders = orders
        if orders.ended and orders.known is not None and self.role != "rendezvous":
            raise RunEnded(orders.known, self._after_end(manifest))
        self.tasks.spawn(orders.run(), "orders", eternal=True)

    def _check_not_ended(self) -> None:
        """Raises RunEnded where this peer knows already that the run has ended. A rendezvous goes
        on and tells others so."""
        m = self.manifest
        if m is None or self.role == "rendezvous":
            return
        for text in (self.told_order, self.config.order(m.run_id)):
            if order := ended(m.run_id, m.swarm.owner, text, self.clock.wall()):
                self.config.keep_order(m.run_id, order.text)
                raise RunEnded(order, self._after_end(m))

    def _check_admitted(self) -> None:
        """Raises Refused if this peer's admission to its private run has ended."""
        if ended := self.admission_ended():
            raise Refused(ended, ADMISSION_STEP)

    async def _watch_admission(self) -> None:
        """Report the end of this peer's admission to a private run, and its coming some days
        before."""
        told = ""
        while True:
            ended = self.admission_trouble()
            said = ended or self.admission_ends_soon()
            if said and said != told:
                kind = "admission-ended" if ended else "admission-ends"
                self.journal.emit("daemon", kind, f"{said}: {ADMISSION_STEP}", "warning")
            told = said
            await asyncio.sleep(ADMISSION_LOOK_S)

    def _after_end(self, manifest: Manifest) -> str:
        """Advice for this machine's people after the end of the run, "" for other peers than the
        owner's."""
        if manifest.swarm.owner != self.identity.peer_id:
            return ""
        file = str(self.config.manifest_path(manifest.run_id))
        return going_on(manifest.training.epochs, file)

    def _obey(self, order: Order) -> None:
        """Obey an order of the run's owner, which is in force now."""
        if self.role == "rendezvous":
            return
        match order.verb:
            case Verb.PAUSE:
                self.availability.run_paused(order.begins, order.reason)
            case Verb.RESUME:
                self.availability.run_resumed()
            case Verb.END:
                # Before the first look is over, the start ends with the fault that says so.
                if self.orders is not None:
                    self.tasks.spawn(self._end_with_run(order), "run end")

    async def _end_with_run(self, order: Order) -> None:
        """Finish the epoch under way and end, with the last state on the disk."""
        why = f"the run {order.sentence(self.clock.wall())}"
        async with self._changing:
            a = self.assembled
            if a is not None and a.training.started and not self.going:
                self.draining = True
                if self.presence is not None:
                    self.presence.changed()
                self.journal.emit("daemon", "run-ending", f"{why}: finishes the epoch under way")
                if not await self._say_goodbye(a, why, self._epoch_s(), hands_over=False):
                    text = "the epoch did not end in time; ends all the same"
                    self.journal.emit("daemon", "run-end-hasty", text, "warning")
        text = why
        m = self.manifest
        if m is not None:
            where = self.config.checkpoint_dir(m.run_id)
            text = f"{why}; the last epoch of this stage is kept under {where}"
            if step := self._after_end(m):
                text += f"; {step}"
        self.journal.emit("daemon", "run-ended", text)
        self.stop(why)

    def _epoch_s(self) -> float:
        """Seconds within which the epoch under way should have ended, however slow it is."""
        return DRAIN_S + self.view.tally.left_s(time.monotonic())

    def _is_last_keeper(self) -> bool:
        """Return True if no other peer keeps the state, because the owner stops the whole run."""
        return self.orders is not None and (self.orders.paused or self.orders.ended)

    # ----------------------------------------------------------- working, and pausing

    async def _until_open(self, presence: Presence) -> None:
        """Wait until this machine works for the swarm, before a stage is chosen. Other peers see
        the reason meanwhile."""
        keeper = self.availability
        if keeper.rules.any:
            await keeper.sample()
        if keeper.measures:
            text = f"works while this machine is free, by: {keeper.measures}"
            self.journal.emit("daemon", "availability-measures", text)
        self.tasks.spawn(keeper.run(), "availability", eternal=True)
        if keeper.paused is None:
            return
        text = f"starts {paused_words(keeper.reason)}"
        if keeper.paused.by is not By.RUN:
            text += "; go on with  tutti resume"
        self.journal.emit("daemon", "paused", text)
        self.view.recall_epoch()
        self.paused = keeper.public_reason
        self.put_away.set()
        presence.announce(self.body)
        await keeper.open.wait()
        self._work_again(presence)

    def _work_again(self, presence: Presence) -> None:
        self.put_away.clear()
        self.paused = ""
        self.given_back = ""
        presence.changed()

    def _availability_changed(self) -> None:
        """Handle another reason of the pause, or the end of the pause."""
        if self.paused and self.availability.paused is not None:
            self.paused = self.availability.public_reason
            if self.presence is not None:
                self.presence.changed()

    async def _keep_hosting(
        self, presence: Presence, manifest: Manifest, stage: int, solo: bool
    ) -> None:
        """Host the stage until cancelled, except in pauses. The choice of the stage outlasts a
        short pause."""
        keeper = self.availability
        self._hosting = self.tasks.spawn(self._host(presence, manifest, stage, solo), "host")
        while True:
            await keeper.closed.wait()
            async with self._changing:
                done = await self._put_away(presence)
            if not done:
                # Most likely the process ends, or begins elsewhere.
                await asyncio.sleep(RETRY_S)
                continue
            if self._choosing is not None and self._choosing.stage is not None:
                # It may have chosen a block stage instead of the ends.
                stage = self._choosing.stage
            began = self.clock.now()
            by_run = keeper.paused_by_run
            await keeper.open.wait()
            paused_s = self.clock.now() - began
            self._work_again(presence)
            # Where the run was paused, all come back, and each stage needs those that held it.
            anew = not (solo or by_run) and self.chooses_again(presence, stage, paused_s)
            if anew:
                self.step = "finds out which stage needs this peer after the pause"
                stage = await self._choose(presence, company=False)
                self.journal.emit("daemon", "resuming", f"takes {stage_name(stage)} after a pause")
            else:
                self.step = "takes its stage back after the pause"
                self.journal.emit("daemon", "resuming", f"takes {stage_name(stage)} back")
            back = self._host_again(presence, manifest, stage, solo, anew=anew)
            self._hosting = self.tasks.spawn(back, "host")

    async def _host_again(
        self, presence: Presence, manifest: Manifest, stage: int, solo: bool, *, anew: bool
    ) -> None:
        """Take the stage back, or another one that was chosen ``anew``. Others may have its memory
        by now, which is no reason to end."""
        try:
            await self._host(presence, manifest, stage, solo, again=True, anew=anew)
        except OutOfResources as e:
            self.availability.failed(str(e))

    async def _put_away(self, presence: Presence) -> bool:
        """Leave the swarm's plan, write the committed state, and give the stage's memory back. The
        key, the ports, the connections and the directory stay. Return False if this peer leaves for
        another reason."""
        began = time.monotonic()
        host = self._hosting
        while host is not None and self.assembled is None and not (host.done() or self.ending):
            await asyncio.wait({host}, timeout=LOOK_S)
        if self.going:
            return False
        self.pausing = True
        presence.changed()
        why = paused_words(self.availability.reason)
        self.journal.emit("daemon", "pausing", f"leaves its stage, {why}")
        before = resident(os.getpid())
        if host is not None and not host.done():
            host.cancel()
            await asyncio.wait({host})
        # The traceback of a cancelled task holds the stage.
        host = None
        self._hosting = None
        if self.assembled is not None and self.assembled.training.started:
            await self._leave_plan(self.assembled)
        if self.ending:
            return False
        device_said = ""
        if self.assembled is not None and self.assembled.device.is_cuda:
            used = self.assembled.device.memory_used()
            device_said = f" and {human(used)} of {self.assembled.device.device}"
        kept = await self._give_stage_up()
        presence.pace.seeks = lambda: False
        await asyncio.to_thread(give_all_back)
        after = resident(os.getpid())
        self.pledges.pledge(max(0, after - of_files(os.getpid())))
        self.pausing = False
        self.hasty_pause = False
        self.paused = self.availability.public_reason or PUBLIC[By.OPERATOR]
        seconds = time.monotonic() - began
        self.given_back = (
            f"{human(max(0, before - after))} of main memory{device_said} given back after "
            f"{seconds:.1f} s"
        )
        if not kept:
            self.given_back += "; the newest epochs are not on this disk"
        text = f"{paused_words(self.availability.reason)}: {self.given_back}"
        self.journal.emit("daemon", "paused", text, seconds=round(seconds, 3))
        self.put_away.set()
        presence.changed()
        return True

    async def _leave_plan(self, a: Assembled) -> None:
        """Finish the epoch under way and hand over, if that is soon enough for the operator; else
        say goodbye at once, and others do this peer's part of the epoch again."""
        seconds = self.config.availability.leave_s
        by_run = self.availability.paused_by_run
        if by_run:
            # Others leave at the same moment, and everybody has to come back with one version.
            seconds = self._epoch_s()
        elif self.view.tally.left_s(time.monotonic()) > seconds:
            seconds = 0.0
        if self.hasty_pause:
            seconds = 0.0
        why = paused_words(self.availability.public_reason)
        if not await self._say_goodbye(a, why, max(GOODBYE_S, seconds), hands_over=not by_run):
            text = "leaves before the epoch ended and its state was fetched by others"
            self.journal.emit("daemon", "pause-hasty", text)

    async def _say_goodbye(
        self, a: Assembled, why: str, seconds: float, *, hands_over: bool
    ) -> bool:
        """Finish the epoch under way and hand over, unless the daemon is told to end meanwhile.
        Return False if that was not done after ``seconds``."""
        done = True

        async def say_goodbye() -> None:
            nonlocal done
            try:
                await leave(a, why, seconds, hands_over=hands_over)
            except TimeoutError:
                done = False

        goodbye = self.tasks.spawn(say_goodbye(), "goodbye")
        end = self.tasks.spawn(self._end.wait(), "end")
        # A daemon that is told to end meanwhile leaves as it does without a pause.
        await asyncio.wait({goodbye, end}, return_when=asyncio.FIRST_COMPLETED)
        for task in (goodbye, end):
            task.cancel()
        await asyncio.wait({goodbye, end})
        return done

    async def _give_stage_up(self) -> bool:
        """End everything that belongs to the stage, and write its committed state. Return False if
        that failed."""
        kept = True
        a = self.assembled
        if a is not None:
            await self._end_training(a, paused_words(self.availability.reason))
        ask_to_end(self.children)
        await self.stage_tasks.close()
        self.transport.vacate()
        if a is not None:
            kept = await keep(a, self.journal, always=self._is_last_keeper())
            await self._archive_last()
            await _close_services(a)
            self.view.tally.gave_up(a)
        self.assembled = None
        await asyncio.to_thread(stop_all, self.children)
        self.children.clear()
        self._loading.clear()
        self.child_trouble.clear()
        return kept

    async def _end_training(self, a: Assembled, why: str) -> None:
        # Nothing is committed from here on, so no further write is needed.
        await a.training.close()
        if a.recording is not None:
            await asyncio.to_thread(a.recording.close, why)

    # ----------------------------------------------------------- the stage

    async def _host(
        self,
        presence: Presence,
        manifest: Manifest,
        stage: int,
        solo: bool,
        *,
        again: bool = False,
        anew: bool = False,
    ) -> None:
        """Build the stage, bring it to the newest state, and take part. ``again``: after a pause,
        so that no other stage is chosen, unless this one was chosen ``anew``. Raises LocalFault if
        that cannot be."""
        await self._first_work(first=not again)
        process = resident(os.getpid()) + self.memory_beside()[0] + KERNELS
        own = MainMemory(process=process, libraries=of_files(os.getpid()))
        split: dict[int, dict[str, str]] = {}
        if solo:
            taken = replace(own, others=await asyncio.to_thread(self.pledges.others))
            split = await asyncio.to_thread(split_between, self.config, manifest, taken)
        own_part = split.get(stage, {})
        config = replace(self.config, node=replace(self.config.node, **own_part))
        build = partial(
            assemble,
            config,
            manifest,
            identity=self.identity,
            transport=self.transport,
            presence=presence,
            clock=self.clock,
            journal=self.journal,
            metrics=self.metrics,
            on_error=self._failed,
            learn=lambda peer, addresses: self.transport.learn(peer, list(addresses)),
            facts=lambda facts: replace(
                facts, may_lead=self.may_lead, invite_of=self.gate.invite_of
            ),
            on_step=self._does,
            pledges=self.pledges,
            own=own,
        )
        try:
            a = await build(stage)
        except LocalFault as e:
            if again and not anew:
                raise
            stage = await self.instead(presence, e)
            a = await build(stage)
        self.role = "ends" if stage == ENDS else "stage"
        built = resident(os.getpid()) + self.memory_beside()[0]
        if not a.device.is_cuda:
            built -= a.parameter_bytes  # a GPU's are not in main memory
        self.memory_process = max(0, built) + KERNELS
        if not a.device.is_cuda:
            # Building has loaded more of the libraries, and the limit was made for less.
            more = max(0, self.memory_process - process)
            a = replace(a, memory_limit=max(0, a.memory_limit - more))
        takes = main_memory(manifest, stage, a.memory, a.device.is_cuda)
        self.pledges.pledge(self.memory_process - of_files(os.getpid()) + takes)
        self.stage_tasks.spawn(self._keep_pledge(), "pledge", eternal=True)
        if stage == ENDS:
            EndsService(a, self.transport, self._members)
        self.transport.established = a.training.peers.is_established
        self.transport.leads = a.training.has_reported_to
        await self.transport.serve()
        self.assembled = a
        self.stage_tasks.spawn(self.watch_stage(presence), "placing", eternal=True)
        a.training.kit.callbacks.on_plan = self.view.planned
        a.training.kit.callbacks.on_move = self.asked
        a.training.kit.callbacks.on_cell = self._enters
        if a.training.cell:
            self._enters(a.training.cell)
        self._recall_change(a, manifest)
        tuning = None
        if worth(manifest, stage, a.device.device):
            tuning = self.stage_tasks.spawn(self._tune(a), "tuning")
        presence.changed()
        what = f"the ends ({a.layers}, data)"
        if stage != ENDS:
            what = f"stage {stage}, layers {a.layers}"
        self.journal.emit("daemon", "hosting", f"hosting {what} on {a.device_said}", stage=stage)
        if solo:
            self._host_the_rest(manifest, split)
        weights = manifest.model.weights
        given = ""
        if weights:
            given = weights[stage].removeprefix(DIGEST)
        fetches = a.work.stage.empty
        await catch_up(
            a.work,
            presence,
            self.config.incoming_dir(manifest.run_id, stage),
            self.journal,
            given=given,
            elsewhere=partial(replicas_elsewhere, presence, manifest, stage),
        )
        if fetches and a.work.stage.frozen is not None:
            where = self.config.base_dir(manifest.run_id, stage)
            self.stage_tasks.spawn(keep_base(a.work, where, self.journal), "base")
        await self._choose_kernels(a, tuning)
        self.start(a, presence, manifest)
        self._archive_from(a)

    def _archive_from(self, a: Assembled) -> None:
        """Copy checkpoints from now on, if the operator names a place."""
        self.archive = a.archive
        if a.archive is not None:
            self.stage_tasks.spawn(a.archive.run(), "archive", eternal=True)

    async def _archive_last(self) -> None:
        """Copy the last checkpoint of a stage that the run's owner stops at all peers."""
        if self.archive is not None and self._is_last_keeper():
            await self.archive.copy_newest(ARCHIVE_S)

    async def _tune(self, a: Assembled) -> None:
        """Measure the processor or the GPU, and the memory of a micro-batch anew: in another number
        format it keeps other tensors."""
        before = a.precision.format
        await tune_meanwhile(self.journal, a.device)
        if a.precision.format != before:
            a.pipeline.math.graph_bytes.clear()

    async def _choose_kernels(self, a: Assembled, tuning: asyncio.Task[None] | None) -> None:
        """Let the stage compute its layers by the kernels that the operator wants, or the fastest.
        Ranks of several local devices keep torch's own. ``tuning``: the measurement of the
        optimizer's products, where one is under way. A GPU has one at a time, and before it has
        micro-batches, for which it may need all its memory; elsewhere only kernels that are
        compiled for the number format must wait for it."""
        if tuning is not None and (a.device.is_cuda or self.config.node.kernels != "auto"):
            await asyncio.wait([tuning], timeout=TUNING_S)
        math = a.pipeline.math
        module = math.module
        if a.local is not None or not isinstance(module, Blocks | Ends):
            return
        self._does("measures the kernels of its layers")
        found = await choose_kernels(
            self.config.node.kernels,
            module,
            a.device,
            a.precision,
            MicroBatch(
                a.manifest.pipeline.micro_batch,
                a.manifest.model.seq_len,
                a.manifest.data.document_mask,
            ),
            self.config.home,
        )
        math.kernels = found.said
        if found.said and (found.name != "eager" or not found.problems):
            self.journal.emit("device", "kernels-chosen", f"layers are computed by {found.said}")
        for problem in found.problems:
            self.journal.emit("device", "kernels-missing", problem, "warning")

    def _does(self, step: str) -> None:
        """Report the next step of the start."""
        self.step = step

    def _enters(self, cell: CellId) -> None:
        """Enter a cell, at the start or after this peer's cell has divided."""
        if self.presence is not None and self.manifest is not None:
            self.presence.enter(cell)
            try:
                self.config.keep_cell(self.manifest.run_id, cell)
            except LocalFault as e:
                self.journal.emit("daemon", "cell-not-kept", str(e), "warning")

    def _members(self) -> set[PeerId]:
        """Peers that host a stage of the run, by the directory or the newest plan."""
        hosts = set[PeerId]()
        if self.presence:
            hosts |= set(self.presence.view.hosts)
        plan = None
        if self.assembled:
            plan = self.assembled.work.plan
        if plan:
            hosts |= {m.peer for m in plan.members}
        return hosts

    async def _meet_on_the_lan(self, manifest: Manifest, directory: Directory) -> None:
        """Announce an open run by mDNS, and try every peer that announces the same one; a private
        run is not announced."""
        if (
            not self.config.reach.lan
            or self.transport.reachable.local
            or manifest.swarm.admission != "open"
        ):
            return
        # Not loaded where nothing is announced: it takes a tenth of a second.
        from node.reach.nearby import Advert, Found, Nearby

        me = self.identity.peer_id
        met = set[PeerId]()

        def found(one: Found) -> None:
            peer = PeerId(one.peer)
            # One that was met may have other addresses now.
            welcome = peer in met or len(met) < LAN_PEERS
            if one.run_id == manifest.run_id and peer != me and welcome:
                met.add(peer)
                self.transport.p2p.book.learn(peer, one.addresses)
                directory.meet(one.addresses)

        swarm = manifest.swarm
        advert = Advert(
            manifest.run_id,
            swarm.name,
            swarm.owner,
            me,
            self.name,
            manifest.pipeline.stages,
            self.transport.ports[0],
        )
        self.lan = Nearby(self.journal, found, self._failed, advert)
        await self.lan.start()

    def _recall_change(self, a: Assembled, manifest: Manifest) -> None:
        """The owner's newest change to how cells average, as this peer last knew it; and newer ones
        are kept."""
        config = self.config
        run_id = manifest.run_id
        changes = a.training.admission.changes
        self.gate.revoked = lambda key: changes.known.revokes(key)
        if text := config.change(run_id):
            try:
                a.work.anchor.follow(a.training.change(text).outer)
            except Refused as e:
                self.journal.emit("daemon", "change-ignored", str(e), "warning")
            check_room(config, manifest, a, self.journal)

        def keep(change: str) -> None:
            try:
                config.keep_change(run_id, change)
            except LocalFault as e:
                self.journal.emit("daemon", "change-not-kept", str(e), "warning")
            check_room(config, manifest, a, self.journal)

        a.training.kit.callbacks.on_change = keep

    def _host_the_rest(self, manifest: Manifest, split: Mapping[int, Mapping[str, str]]) -> None:
        """A solo swarm: every block stage in a child of this daemon, until somebody else joins.
        ``split``: further settings of each stage, as :func:`split_between` makes them."""
        t = self.transport
        near = f"{multiaddr(t.near, t.ports[0])}/p2p/{self.identity.peer_id}"
        swarm = str(self.config.manifest_path(manifest.run_id))
        for stage in range(1, manifest.pipeline.stages + 1):
            settings = for_child(self.config, f"{self.name}-{stage}"[:32], stage, near)
            settings |= split.get(stage, {})
            home = self._child_home(stage)
            if manifest.swarm.admission == "invite":
                # The token names this one child, so it may stand on a command line.
                home.mkdir(parents=True, exist_ok=True, mode=0o700)
                guest = Identity.load_or_create(home / self.config.identity_path.name).peer_id
                settings["admission"] = admission_token(
                    self.identity, manifest.run_id, guest, self.clock.wall() + CHILD_ADMITTED_S
                ).hex()
            words = ("start", swarm, *as_flags(settings))
            environment = environment_of_child(self.config)
            child = Child(f"stage {stage}", home, words, environment=environment)
            child.start()
            self.children.append(child)
            self._loading[stage] = time.monotonic()
            self.stage_tasks.spawn(
                self._mind(child, stage), f"children {child.label}", eternal=True
            )

    def loading(self) -> Mapping[int, float]:
        """Stages of a solo swarm that have no daemon in training yet."""
        others = ()
        if self.presence:
            others = self.presence.view.others.values()
        there = {e.body.stage for e in others if e.body.state not in COMING}
        return {stage: since for stage, since in self._loading.items() if stage not in there}

    async def _mind(self, child: Child, stage: int) -> None:
        due = 0.0
        pause = RETRY_S
        while True:
            await asyncio.sleep(RETRY_S)
            now = time.monotonic()
            if child.running and now - due > CHILD_STEADY_S:
                due = 0.0
                pause = RETRY_S
                self.child_trouble.pop(child.label, None)
            elif self._is_last_keeper():
                pass  # it has obeyed the run's owner a moment before this daemon
            elif not child.running and not self.ending and now >= due:
                # One that cannot start says why in its last words, and is not started every second
                # for ever.
                due = now + pause
                pause = min(2 * pause, CHILD_PAUSE_S)
                said = re.findall(r"^tutti: (.*)", child.tail(), re.MULTILINE)
                why = said[-1] if said else ""
                text = f"the local daemon of {child.label} ended ({why or f'see {child.log}'})"
                self.child_trouble[child.label] = text
                self.journal.emit("daemon", "child-ended", f"{text}; starting it again", "warning")
                child.start()
                self._loading[stage] = now

    async def _close(self, control: ControlService) -> None:
        async with self._changing:
            await self._close_all(control)

    async def _close_all(self, control: ControlService) -> None:
        kind = ANEW if self.moved else STOPPING
        self.journal.emit("daemon", kind, self._why or "stopping", pid=os.getpid())
        a = self.assembled
        kept = True
        if a is not None:
            await self._end_training(a, self._why or "stopping")
        ask_to_end(self.children)
        if self.lan is not None:
            await self.lan.close()
        await self.stage_tasks.close()
        await self.tasks.close()
        # Nobody else's call may start new work in services that are being closed.
        await self.transport.stop_serving()
        if self.presence is not None:
            await self.presence.close(stays=self.moved and self.to_cell is None)
        if a is not None:
            always = self._is_last_keeper()
            kept = not self.moved and await keep(a, self.journal, always=always)
            await self._archive_last()
            await _close_services(a)
        if self.to_cell is not None and self.manifest is not None:
            try:
                self.config.change_cell(self.manifest.run_id, self.to_cell)
            except LocalFault as e:
                text = f"{e}; {e.next_step}; begins again in the cell it was in"
                self.journal.emit("daemon", "cell-not-left", text, "error")
        await self.transport.close()
        hasty = await asyncio.to_thread(stop_all, self.children)
        self._say_stopped(kept, hasty)
        self.pledges.close()
        await control.close()
        if control.path.parent != self.config.home:
            with contextlib.suppress(OSError):
                control.path.parent.rmdir()
        self.metrics.close()
        self.journal.close()
        self.identity.unlock()

    def _say_stopped(self, kept: bool, hasty: Sequence[Child]) -> None:
        """Report the end. ``kept``: the hosted stage is on disk, and not given up for another
        place; ``hasty``: children that had to be killed."""
        if hasty:
            labels = ", ".join(child.label for child in hasty)
            text = f"had to be killed, and may not have written what they held: {labels}"
            self.journal.emit("daemon", "children-killed", text, "error")
        if self.moved or not kept or hasty:
            return
        a = self.assembled
        writes = a is not None and a.work.local_checkpoints.writes and a.work.plan is not None
        held = ""
        if a is not None and writes:
            held = f"epoch {a.stage.version.epoch} is on disk: "
        self.journal.emit("daemon", "stopped", f"stopped: {held}it is safe to switch off")

    def signalled(self, number: int) -> None:
        """End in order; at a second Ctrl-C without clean-up."""
        # A daemon that is about to begin elsewhere was not asked to end yet.
        if self.ending and not self.moved:
            if number == signal.SIGINT:
                # Asked twice by a person: skip the clean-up.
                os._exit(int(ExitCode.INTERRUPTED))
            # A service manager signals every process of a group, a parent its children once more.
            return
        self.interrupted = number == signal.SIGINT
        self.stop(f"signal {signal.Signals(number).name}")

    # ----------------------------------------------------------- the swarm

    def _bootstrap(self) -> list[str]:
        addresses = list[str]()
        if self.invite:
            addresses += self.invite.addresses
        addresses += [p for p in self.config.node.join if p.startswith("/")]
        m = self.manifest
        mine = m is not None and m.swarm.owner == self.identity.peer_id
        if m is not None and (addresses or not mine or self.config.moved):
            # An owner that starts its swarm anew asks nobody; a peer that has joined it finds the
            # swarm without its inviter. An owner that has moved knows that others are there.
            addresses += self.config.acquaintances(m.run_id)
        return list(dict.fromkeys(a for a in addresses if not a.endswith(self.identity.peer_id)))

    def _solo(self) -> bool:
        return not self._bootstrap() and self._may_host_all()

    def _may_host_all(self) -> bool:
        """Return True for the owner of the run, unless its operator named a part of it: it hosts
        all stages while nobody else hosts one."""
        m = self.manifest
        return (
            m is not None
            and self.role == "auto"
            and self.config.stage is None
            and m.swarm.owner == self.identity.peer_id
        )

    def _child_home(self, stage: int) -> Path:
        return self.config.home / "local" / f"stage-{stage}"

    def own_children(self) -> set[PeerId]:
        """Peers that host the block stages of a solo swarm of this home, now or at an earlier
        start."""
        found = set[PeerId]()
        if not self.manifest:
            return found
        for stage in range(1, self.manifest.pipeline.stages + 1):
            with contextlib.suppress(LocalFault):  # not made yet
                key = self._child_home(stage) / self.config.identity_path.name
                found.add(Identity.load(key).peer_id)
        return found

    async def _find_manifest(self, invite: Invite) -> Manifest:
        """Ask the peers of the invite for the manifest, as long as one of them is there; hash and
        signature decide, not the peer that gave it."""
        said: dict[PeerId, LocalFault | Busy | str] = {}
        peers = {peer_of_address(a) for a in invite.addresses}
        for peer in peers:
            self.transport.learn(peer, [a for a in invite.addresses if peer_of_address(a) == peer])
        began = time.monotonic()
        retries = Retries(began)
        while True:
            asked = (self._ask_manifest(peer, invite) for peer in peers)
            for peer, found in zip(peers, await asyncio.gather(*asked), strict=True):
                if isinstance(found, Manifest):
                    self.config.remember(found, invite)
                    return found
                if isinstance(found, LocalFault) or not isinstance(said.get(peer), LocalFault):
                    said[peer] = found
            if all(isinstance(said.get(peer), LocalFault) for peer in peers):
                break
            decided = retries.handle(self._attempt(said), time.monotonic(), random.random())
            if isinstance(decided, GiveUp):
                break
            if decided.says:
                self.journal.emit("daemon", "waiting-to-join", decided.says)
            await asyncio.sleep(decided.after_s)
        refused = [fault for fault in said.values() if isinstance(fault, LocalFault)]
        if refused and all(isinstance(fault, ProtocolMismatch) for fault in refused):
            raise refused[0]
        shown = {p: why for p, why in said.items() if not refused or isinstance(why, LocalFault)}
        listed = "".join(f"\n  {peer}: {why}" for peer, why in shown.items())
        if refused:
            raise Refused(
                f"cannot join: the peers that answered do not have this run's manifest{listed}",
                "ask for a fresh invite; the swarm may have moved",
            )
        seconds = time.monotonic() - began
        raise NetworkFault(
            f"cannot join: none of {several(len(peers), 'peer')} of the invite answered "
            f"({seconds:.0f} s){listed}",
            "ask for a fresh invite, or see what is wrong with  tutti doctor net INVITE",
        )

    def _attempt(self, said: Mapping[PeerId, LocalFault | Busy | str]) -> Outcome:
        """The outcome of an attempt at all peers that have not refused."""
        busy = [answer for answer in said.values() if isinstance(answer, Busy)]
        if busy:
            return min(busy, key=lambda b: b.again_s)
        links = self.transport.p2p.links
        silent = [why for p, why in said.items() if p in links and isinstance(why, str)]
        if silent:
            return Unanswered(True, silent[0])
        return Nobody()

    async def _ask_manifest(
        self, peer: PeerId, invite: Invite
    ) -> Manifest | LocalFault | Busy | str:
        """Ask one peer for the manifest. Returns it, or the fault of the answer, the peer's queue,
        or the reason for the silence."""
        token = self.admission(invite.run_id)
        question = Ask(manifest=AskManifest(run_id=invite.run_id, admission=token))
        try:
            answer = await self.transport.ask(peer, question)
        except (PeerFault, WireError) as e:
            return str(e)
        try:
            theirs = Protocols.said(answer.oldest_protocol, answer.newest_protocol)
            if not PROTOCOLS.common(theirs):
                what = f"cannot join: the peer speaks {theirs}, this tutti {PROTOCOLS}"
                return ProtocolMismatch(what, PROTOCOLS.advice(theirs))
            if again_s := busy_s(answer):
                return Busy(answer.refusal.place, again_s)
            if answer.WhichOneof("answer") != "manifest":
                return Refused(answer.refusal.reason[:200] or "answered something else")
            manifest = Manifest.parse(answer.manifest.toml)
            manifest.verify(invite.run_id, invite.owner)
            self.told_order = self.told_order or answer.manifest.order
        except (UsageFault, Refused, WireError) as e:
            return Refused(str(e)[:200])
        return manifest

    async def _keep_dht_mode(self, directory: Directory, company: bool) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            await directory.serve(self._in_routing_tables(company))

    def _in_routing_tables(self, company: bool) -> bool:
        """Return True if others may ask this node: it is a rendezvous or can be dialled. Before
        anybody has tried to dial it, a node that starts a swarm counts. Where no peer can be
        dialled every node counts, for the peers that are connected already."""
        standing = self.transport.reachable.standing
        if self.role == "rendezvous" or standing is Standing.OPEN:
            return True
        if standing is Standing.UNKNOWN:
            return not company
        others = ()
        if self.presence:
            others = self.presence.view.everybody.values()
        return not any(e.body.reach == Standing.OPEN.value for e in others)

    async def _first_work(self, *, first: bool) -> None:
        """Let torch do its first work on the processor, if stages of this daemon work there: it
        takes memory beside any stage's. ``first``: this daemon has had no stage yet. Raises as
        :meth:`Device.pick`."""
        node = self.config.node
        device = await asyncio.to_thread(Device.pick, node.device)
        if node.local_devices == 1 and not device.is_cuda:
            set_threads(node.threads)
            await asyncio.to_thread(first_work, device)
        if first:
            # The first backward loads 480 modules of sympy. A search of their 38,000 objects for
            # garbage stops the event loop for 20 ms, so the collector leaves them out from now on.
            # It would leave out the tensors of a stage too; there has been no stage yet.
            gc.freeze()

    async def _keep_pledge(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self.pledges.renew()

    async def _keep_acquaintances(self, manifest: Manifest) -> None:
        kept: list[str] = []
        named = self.config.names(manifest.run_id)
        while True:
            await asyncio.sleep(KEEP_S)
            known = self.journal.names.everybody()
            names = {peer: name for peer, name in named.items() if peer not in known}
            names |= announced(known)
            if names != named:
                named = dict(tuple(names.items())[-MOST_NAMES:])
                await asyncio.to_thread(self.config.keep_names, manifest.run_id, named)
            found = self.open_peers()[:KEEP_PEERS]
            if found and found != kept:
                kept = found
                await asyncio.to_thread(self.config.keep_acquaintances, manifest.run_id, found)

    def _banner(self, solo: bool) -> None:
        m = self.manifest
        swarm = ""
        run_id = ""
        model = ""
        parameters = 0
        invite = ""
        only_on = ""
        if m:
            swarm = m.swarm.name
            run_id = m.run_id
            model = m.model_said()
            parameters = m.parameter_count()
        if m and m.swarm.admission == "open":
            reply = self.view.invite()
            invite = reply.invite
            only_on = reply.only_on
        said_in_json = self.config.node.log_format == "json"
        self.journal.emit(
            "daemon",
            "banner",
            f"tutti {VERSION} runs as {self.name}",
            "info" if said_in_json else "debug",
            version=VERSION,
            peer=self.identity.peer_id,
            home=str(self.config.home),
            swarm=swarm,
            run_id=run_id,
            addresses=self.transport.reachable.multiaddrs(),
            metrics_url=self.metrics_url,
            invite=invite,
            only_on=only_on,
        )
        if said_in_json:
            return
        lines = banner(
            version=VERSION,
            name=self.name,
            peer=self.identity.peer_id,
            key_path=str(self.config.identity_path),
            solo=solo,
            home=str(self.config.home),
            home_flag=self.config.home_flag,
            new_key=self._new_key,
            model=model,
            parameters=parameters,
            swarm=swarm,
            run_id=run_id,
            listening=self.transport.reachable.multiaddrs()[:2],
            metrics_url=self.metrics_url,
            invite=invite,
            only_on=only_on,
            everywhere=not self.config.transport.host,
        )
        say("\n".join(lines))


def serve_metrics(metrics: Metrics, port: int) -> str:
    """Serve the metrics page; returns its URL. Raises NetworkFault for a port that is taken."""
    try:
        return metrics.serve(port)
    except OSError as e:
        why = e.strerror or str(e)
        raise taken(HOST, port, "--metrics-port PORT", socket.SOCK_STREAM, why) from e


def announced(names: Mapping[PeerId, str]) -> dict[PeerId, str]:
    """Names that were chosen by people. A peer without one has the name of its key."""
    return {peer: name for peer, name in names.items() if name != name_of(peer)}


async def _close_services(a: Assembled) -> None:
    """End the services of a stage, its device thread and its ranks on other devices."""
    a.donor.close()
    for service in (a.meetings, a.work, a.pipeline, a.cell, a.work.engines.text):
        if service is not None:
            await service.close()
    await asyncio.to_thread(a.thread.close)
    if a.local is not None:
        await asyncio.to_thread(a.local.ranks.close)


def fault_line(fault: LocalFault) -> str:
    """The fault that ended a daemon as a line of its log in JSON."""
    fields = {"next_step": fault.next_step, "exit_code": int(fault.code)}
    return Event(time.time(), "error", "daemon", "fault", fault.what, fields).to_json()


def begin_anew(daemon: Node, run_id: RunId) -> NoReturn:
    """Replace this process by a fresh one that hosts the stage that the closed daemon moves to."""
    daemon.availability.hand_on()
    again(daemon.to_stage, run_id)


def main(config: NodeConfig, manifest: Manifest | None, invite: Invite | None) -> int:
    """Run a daemon until it ends; returns the exit code. Raises LocalFault with the next step for
    the fault that ended it."""
    keep_freed()
    # Modules stay: searching half a million objects of torch for garbage, again and again, took a
    # tenth of the processor time of a daemon.
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    # Calls may end before grpc reads their messages, and tasks be cancelled before they begin. A
    # person at the terminal could not act on that.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Add only the missing part: a parent that is nice has nice children.
    os.nice(max(0, config.node.nice - os.nice(0)))

    # p2pd counts the cores of its affinity, not quotas.
    os.environ.setdefault("GOMAXPROCS", str(cores()))

    async def body() -> Daemon:
        daemon: Daemon | None = None

        def signalled(number: int) -> None:
            # A signal arrives at the first await at the earliest, and by then there is a daemon.
            if daemon is not None:
                daemon.signalled(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores the end of the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, signalled, number)
        daemon = Daemon(config, manifest, invite)
        # Blocked by a process that has replaced itself.
        interrupts.unblock(signal.SIGINT, signal.SIGTERM)
        await daemon.run()
        return daemon

    try:
        if ":" in config.node.device and config.node.role != "rendezvous":
            # Before others are invited. The emptiest GPU is sought when there is a stage for it.
            Device.pick(config.node.device)
        daemon = uvloop.run(body())
        if daemon.moved and daemon.manifest is not None:
            begin_anew(daemon, daemon.manifest.run_id)
        if daemon.interrupted:
            return int(ExitCode.INTERRUPTED)
        return int(ExitCode.OK)
    except LocalFault as fault:
        if config.node.log_format != "json":
            raise
        print(fault_line(fault), file=sys.stderr, flush=True)
        return int(fault.code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    finally:
        interrupts.resume()
        # All is closed; searching torch for garbage would take the interpreter seconds more.
        gc.freeze()
