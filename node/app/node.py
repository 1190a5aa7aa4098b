"""A daemon's node as others see it: its key, its network, its admission, its record. Its actions
are in :mod:`node.app.daemon`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

from node.app.assembly import Assembled
from node.app.capacity import check_memory
from node.app.change import read
from node.app.launch import LOG
from node.app.peer import Peer
from node.app.timekeeping import ClockKeeper
from node.availability.keeper import AvailabilityKeeper
from node.checkpoint.archive.keeper import ArchiveKeeper
from node.config import NodeConfig
from node.core.clock import Since, SystemClock
from node.core.errors import (
    LocalFault,
    NetworkFault,
    OutOfResources,
    ProtocolMismatch,
    Refused,
    UsageFault,
    writing,
)
from node.core.home import expanded, pasteable
from node.core.ids import ENDS, PeerId, RunId
from node.core.memory import most_resident, resident
from node.core.version import OLDEST_PROTOCOL, PROTOCOL, VERSION, Protocols
from node.data.places import data_directory, data_file, is_directory
from node.dht.record import PeerBody
from node.identity.admission import Gate, ends_at, shown
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest
from node.orders.keeper import OrderKeeper
from node.reach.standing import Standing
from node.telemetry.events import Journal, Sink
from node.telemetry.metrics import Metrics
from node.telemetry.scalars import sink_for
from node.telemetry.sinks import JsonlSink, StreamSink
from node.transport.handshake import Facts
from node.transport.service import Transport
from protos.handshake_pb2 import Hello

if TYPE_CHECKING:
    from node.reach.nearby import Nearby

ENDS_SOON_S = 3 * 86400.0
"""Seconds before the end of its admission from which on a peer of a private run is warned."""
_STANDINGS = {s.value for s in Standing}


class Node(Peer[Assembled]):
    """The node of one daemon. ``fault``: the fault that ends it; ``child_trouble``: faults of its
    children, by their labels."""

    def __init__(
        self, config: NodeConfig, manifest: Manifest | None, invite: Invite | None
    ) -> None:
        identity = Identity.load_or_create(config.identity_path)
        sinks = list[Sink]()
        if config.node.tensorboard:
            sinks.append(sink_for(expanded(config.node.tensorboard), identity.peer_id))
        sinks += [
            JsonlSink(config.events_path),
            StreamSink(
                sys.stderr,
                config.node.log_format,
                level=config.node.log_level,
                output=config.home / LOG,
            ),
        ]
        journal = Journal(sinks, finish=partial(pasteable, home_flag=config.home_flag))
        super().__init__(config.open_to, SystemClock(), journal, manifest, self._failed)
        self.config = config
        self.invite = invite
        self.role = config.node.role
        self.started = time.monotonic()
        self._since = Since(self.clock)
        self.identity = identity
        self.name = config.node.name or self.identity.name
        self.journal.names.learn(self.identity.peer_id, self.name)
        self.metrics = Metrics()
        self.metrics_url = ""
        # Python finds no directory for temporary files on a full disk, and does not say that.
        step = "free some space there, or name another directory:  export TMPDIR=DIR"
        with writing("a daemon's sockets", step, OutOfResources):
            self.transport = Transport(
                self.identity,
                config.transport,
                self.journal,
                self.metrics,
                self._facts,
                self._admit,
                self._failed,
                config.reach,
                self._serves,
            )
        self.clocks = ClockKeeper(self.transport, self.journal)
        self.availability = AvailabilityKeeper(config.availability, config.pause_path, self.journal)
        self.archive: ArchiveKeeper | None = None
        """The copies of this peer's checkpoints; None if its operator names no place for them."""
        self.orders: OrderKeeper | None = None
        """The orders of the run's owner; None until the run is known."""
        self.lan: Nearby | None = None
        self._step = "looks for the swarm"
        self.step_since = self.started
        """Monotonic time at which the step of the start began."""
        self.memory_process = 0
        """Bytes that this process and p2pd had resident when the stage was built, without its
        parameters."""
        self.child_trouble: dict[str, str] = {}
        self.put_away = asyncio.Event()
        """Set while the daemon is paused and holds nothing of its stage any more."""
        self.given_back = ""
        """Memory that the last pause gave back, and after how long, for people."""
        self.hasty_pause = False
        """The next pause waits neither for the epoch under way nor for a hand-over."""
        self.fault: LocalFault | None = None
        self._shown = lru_cache(1)(partial(shown, me=self.identity))
        self._end = asyncio.Event()
        self._why = ""

    @property
    def step(self) -> str:
        """The step of the start that is under way."""
        return self._step

    @step.setter
    def step(self, text: str) -> None:
        self._step = text
        self.step_since = time.monotonic()

    def memory_beside(self) -> tuple[int, int]:
        """Bytes that p2pd has resident, and the most that it had; 0 while it does not run."""
        with suppress(NetworkFault):
            pid = self.transport.p2p.pid
            return resident(pid), most_resident(pid)
        return 0, 0

    def loading(self) -> Mapping[int, float]:
        """Stages that daemons of this machine are loading for this one, with the monotonic time at
        which they began."""
        return {}

    def own_children(self) -> set[PeerId]:
        """Peers that host the block stages of a solo swarm of this home, now or at an earlier
        start."""
        return set()

    def stop(self, why: str) -> None:
        """End soon, in order. The first reason counts; where it is a move, the next one makes this
        end a final one."""
        if not self.ending:
            self.ending = True
            self._why = why
            self._end.set()
        elif self.moved:
            self.moved = False
            self._why = why
            self.journal.emit("daemon", "move-ended", f"begins nowhere else: {why}")

    def _failed(self, name: str, error: BaseException) -> None:
        """A task raised an unexpected error: log it and shut down; never run with a failed
        component."""
        text = f"{name}: {type(error).__name__}: {error}"
        if self.ending:
            # A component that breaks while all are taken down is no news, and no cause of the end.
            self.journal.emit("daemon", "task-failed", text, "debug")
            return
        if isinstance(error, LocalFault):
            self.fault = error
            self.stop(str(error))
            return
        self.journal.emit("daemon", "task-failed", text, "error")
        logging.getLogger("tutti").error("task %s failed", name, exc_info=error)
        self.fault = LocalFault(
            f"internal error in {text}", f"the log has more: {self.config.events_path}"
        )
        self.stop(text)

    def refuses(self, manifest: Manifest, stage: int) -> str:
        """Reason as of the base class, or the lack of memory or of the run's text."""
        a = self.assembled
        why = super().refuses(manifest, stage)
        if not why and stage == ENDS:
            why = self._lacks_text(manifest)
        if why or a is None:
            return why
        verdict = check_memory(
            self.config,
            manifest,
            stage,
            a.memory_limit,
            a.main_memory,
            older=a.memory.older,
        )
        if verdict.ok:
            return ""
        return verdict.text

    def cannot_begin_anew(self) -> str:
        """Reason why the fresh image of this daemon would end with a fault: its settings or its run
        cannot be read any more. The daemon that runs has read them at its start."""
        if self.manifest is None:
            return ""
        run_id = self.manifest.run_id
        try:
            os.getcwd()
            known = self.config.again().remembered(run_id)
        except OSError as e:
            return f"the working directory: {e.strerror or e}"
        except LocalFault as e:
            return e.what
        if known is None:
            return f"run {run_id[:12]} was removed from {self.config.home}"
        return ""

    def _lacks_text(self, manifest: Manifest) -> str:
        """Reason why this peer cannot read a text that each peer keeps on its disk; "" if it can,
        and for a text from elsewhere."""
        kind, _, name = manifest.data.source.partition(":")
        if kind != "file":
            return ""
        places = self.config.places_of(manifest)
        find = data_directory if is_directory(name) else data_file
        try:
            path = find(name, manifest.data.sha256, places)
        except UsageFault as e:
            return e.what
        if path.exists():
            return ""
        return f"the run's text {path} is not here"

    # ----------------------------------------------------------- admission

    def _serves(self) -> str:
        if self.manifest is None:
            return ""
        return str(self.manifest.run_id)

    def _facts(self) -> Facts:
        run_id = ""
        if self.role != "rendezvous":
            run_id = self._serves()
        return Facts(run_id, self.name, VERSION, self.admission(RunId(run_id)), self.protocols())

    def protocols(self) -> Protocols:
        """Protocol versions that this node speaks and the run allows."""
        oldest = OLDEST_PROTOCOL
        if self.manifest:
            oldest = max(oldest, self.manifest.oldest_protocol)
        return Protocols(oldest, PROTOCOL)

    def _admit(self, peer: PeerId, hello: Hello) -> float:
        m = self.manifest
        if m is None or hello.run_id != m.run_id:
            raise ProtocolMismatch("we are of another run")
        return self.gate.admit(peer, hello.admission, self.clock.wall())

    @cached_property
    def gate(self) -> Gate:
        """Gate that admits peers to the run. Raises Refused while there is no run yet."""
        if self.manifest is None:
            raise Refused("this node serves no run")
        s = self.manifest.swarm
        run_id = self.manifest.run_id
        private = s.admission == "invite"
        gate = Gate(run_id, s.owner, private, s.lead == "admitted")
        with suppress(Refused):
            # By the newest change that this home has kept, until the daemon hears of newer ones.
            gate.revoked = read(self.manifest, self.config.change(run_id)).revokes
        if not private:
            gate.admit(self.identity.peer_id, self.admission(run_id), self.clock.wall())
        return gate

    def may_lead(self, peer: PeerId) -> bool:
        """Return True if this node may follow plans of ``peer``."""
        return self.gate.may_lead(peer, self.clock.wall())

    def admission(self, run_id: RunId) -> bytes:
        """Token that this peer shows to be let into a private run; empty if it has none."""
        if self.invite:
            return self._shown(self.invite.admission, run_id=run_id)
        return self._shown(self.config.admission, run_id=run_id)

    def admission_trouble(self) -> str:
        """A sentence about this peer's admission to its private run, if no other peer accepts it:
        it has ended, or it is for somebody else. Empty for a sound one, and in an open run."""
        m = self.manifest
        if m is None:
            return ""
        token = self.admission(m.run_id)
        try:
            self.gate.admit(self.identity.peer_id, token, self.clock.wall())
        except Refused as e:
            return self.admission_ended() or e.what
        return ""

    def admission_ended(self) -> str:
        """A sentence about the end of this peer's admission to its private run; empty before, and
        for a peer that was never admitted."""
        until = self._admission_end()
        if not 0.0 < until <= self.clock.wall():
            return ""
        return f"your admission to this private run ended on {_day(until)}"

    def admission_ends_soon(self) -> str:
        """A sentence about the end of this peer's admission to its private run, some days before;
        else empty."""
        until = self._admission_end()
        if not 0.0 < until - self.clock.wall() < ENDS_SOON_S:
            return ""
        return f"your admission to this private run ends on {_day(until)}"

    def _admission_end(self) -> float:
        """Unix time at which this peer's admission ends by its own words; 0.0 for none, in an open
        run, and for the owner of a run."""
        m = self.manifest
        if m is None or not self.gate.private or m.swarm.owner == self.identity.peer_id:
            return 0.0
        return ends_at(self.admission(m.run_id))

    # ----------------------------------------------------------- the record, and other peers

    def open_peers(self) -> list[str]:
        """A multiaddr of every other peer that everybody can dial, rendezvous first."""
        if self.presence is None:
            return []
        entries = sorted(
            self.presence.view.everybody.items(),
            key=lambda e: (e[1].body.role != "rendezvous", e[0]),
        )
        there = [
            [a for a in e.body.maddrs if a.endswith(p)]
            for p, e in entries
            if e.body.reach == Standing.OPEN.value
        ]
        return [addresses[0] for addresses in there if addresses]

    def body(self) -> PeerBody:
        """Its whole record in the directory."""
        t = self.transport
        spoken = self.protocols()
        return replace(
            super().body(),
            name=self.name[:64],
            started=self._since.wall(),
            protocols=(spoken.oldest, spoken.newest),
            maddrs=tuple(self.transport.reachable.multiaddrs()),
            reach=t.reachable.standing.value,
            relays=t.relays.held,
            room=t.relay.room,
            rate=t.relay.rate_left,
        )

    def _learn(self, peer: PeerId, body: PeerBody) -> None:
        self.journal.names.learn(peer, body.name)
        standing = Standing.UNKNOWN
        if body.reach in _STANDINGS:
            standing = Standing(body.reach)
        relays = [PeerId(r) for r in body.relays]
        self.transport.learn(
            peer, body.maddrs, standing=standing, relays=relays, room=body.room, rate=body.rate
        )


def _day(wall: float) -> str:
    """Unix seconds as the local date and time of day."""
    return time.strftime("%Y-%m-%d at %H:%M", time.localtime(wall))
