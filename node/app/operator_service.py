"""Answers of a running daemon: to the operator through the control window, and to strangers over
libp2p."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from functools import lru_cache
from typing import TypeVar

from node.app.assembly import Assembled
from node.app.export.exporter import Exporter
from node.app.node import Node
from node.app.snapshot import SnapshotBuilder
from node.availability.machine import By
from node.availability.words import is_paused, paused_words
from node.control.naming import resolve
from node.control.service import DaemonWindow, as_event
from node.core.errors import (
    ExitCode,
    LocalFault,
    NetworkFault,
    PeerFault,
    Refused,
    UsageFault,
)
from node.core.home import pasteable
from node.core.ids import ENDS, PeerId
from node.core.journey import Losses
from node.identity.invites import Invite, fitting_addresses, only_on, peer_of_address
from node.inference import at_ends, forwarding
from node.manifest import Manifest
from node.outer.register import CellReader
from node.reach.interfaces import without_bridges
from node.reach.standing import Standing
from node.telemetry.events import Event, Journal
from node.transport.addresses import ADDRESSES_KEPT, host_of
from protos import ask_pb2 as ask
from protos import control_pb2 as pb

T = TypeVar("T", pb.Piece, pb.Evaluated)
SHOWN = 16
"""Prefixes of cells, of 64, that are read for the operator."""
PAUSED_LOOK_S = 0.05
"""Seconds between two looks at whether the memory is given back."""
CALL_S = 1.0
"""Seconds for calling a peer at a stranger's request. One call at a time, so that strangers cannot
make this peer call others much."""


class OperatorService(SnapshotBuilder, DaemonWindow):
    """The daemon behind the unix socket. ``stop`` and ``drain`` end it through its ``stop``."""

    def __init__(self, daemon: Node) -> None:
        super().__init__(daemon)
        self._calling = asyncio.Lock()
        # Writing a manifest takes 40 ms, and every newcomer asks for it.
        self._text = lru_cache(1)(Manifest.to_toml)
        self._exporting = asyncio.Lock()

    @property
    def journal(self) -> Journal:
        return self._d.journal

    # ----------------------------------------------------------- answers

    async def answer(self, peer: PeerId, question: ask.Ask) -> ask.Answer:
        """A stranger's question over libp2p. Private facts (addresses, files) are not among the
        answers.

        Raises Refused when the run is private and ``peer`` shows no token for it.
        """
        kind = question.WhichOneof("question")
        m = self._d.manifest
        if m is not None and kind in ("manifest", "peers"):
            # A stranger learns nothing of a private run, not even its members.
            self._d.gate.admit(peer, getattr(question, kind).admission, self._d.clock.wall())
        if kind == "manifest" and m is not None and question.manifest.run_id in ("", m.run_id):
            order = ""
            if self._d.orders is not None:
                order = self._d.orders.text
            return ask.Answer(manifest=ask.ManifestAnswer(toml=self._text(m), order=order))
        if kind == "peers":
            return ask.Answer(peers=await self._answer_peers(question.peers.call))
        raise LocalFault(self._why_not(kind), code=ExitCode.PROTOCOL)

    def _why_not(self, kind: str | None) -> str:
        """The reason for which a question of this kind has no answer here."""
        if kind != "manifest":
            return "this peer does not know the answer"
        if self._d.manifest is not None:
            return "this peer takes part in another run"
        if self._d.role == "rendezvous":
            return "this peer is a rendezvous without a run, so it does not know yours"
        return "this peer does not know its own run yet"

    async def _answer_peers(self, called: str) -> ask.PeersAnswer:
        answer = self.peers_in_sight()
        listed = any(line.peer == called and line.path != "self" for line in answer.peers)
        if listed and not self._calling.locked():
            async with self._calling:
                with contextlib.suppress(PeerFault):
                    await self._d.transport.ask(PeerId(called), ask.Ask(ping=ask.AskPing()), CALL_S)
                    answer.called = True
        return answer

    async def cells(self) -> pb.CellsAnswer:
        """Raises UsageFault where the run has one cell, NetworkFault before this peer is in it."""
        d = self._d
        if d.manifest is None or d.presence is None:
            raise NetworkFault("no swarm yet", "wait until tutti status shows one")
        if not d.manifest.averaging.peers:
            raise UsageFault("all peers of this run are one cell", "see  tutti peers")
        reader = CellReader(d.presence.directory)
        own = d.presence.cell
        counts = await reader.counts()
        seen = await reader.sample(f"{d.identity.peer_id}/shown", counts, SHOWN)
        lines = [
            pb.CellSeen(
                cell=cell,
                own=cell == own,
                works=r.works,
                epoch=r.version.epoch,
                tokens_per_s=r.tokens_per_s,
                replicas=r.replicas,
            )
            for cell, r in sorted(seen.items(), key=lambda one: (one[0] != own, one[0]))
        ]
        return pb.CellsAnswer(cells=max(sum(counts), len(lines)), seen=lines)

    async def ping(self, peer: str, count: int, improve: bool = False) -> pb.PingReport:
        """Round trips on the path that work takes; with ``improve`` after every better way was
        tried."""
        d = self._d
        found = self._resolve(peer)
        report = pb.PingReport(peer=found)
        if d.presence and (entry := d.presence.view.everybody.get(found)):
            report.name = entry.body.name
        try:
            if improve:
                await d.transport.lines.improve(found)
            for i in range(count):
                report.rtt_s.append(await d.transport.ping(found, 5.0))
                if i + 1 < count:
                    await asyncio.sleep(0.2)
        except PeerFault as e:
            report.error = e.reason
        link = d.transport.peers().get(found)
        report.path = d.transport.path(found)
        if link:
            report.via = link.via
            report.via_name = d.journal.names.known(link.via)
        report.tried.update(d.transport.lines.tried(found))
        return report

    def _resolve(self, text: str) -> PeerId:
        if text.startswith("/"):
            peer = peer_of_address(text)
            self._d.transport.learn(peer, [text])
            return peer
        names = dict[PeerId, str]()
        if self._d.presence:
            seen = self._d.presence.view.everybody
            names = {peer: entry.body.name for peer, entry in seen.items()}
        return resolve(text, names)

    # ----------------------------------------------------------- leaving

    def stop(self) -> None:
        """End the daemon soon."""
        self._d.stop("asked to stop")

    async def drain(self, timeout_s: float) -> None:
        """Finish the epoch under way, leave the swarm, end. Raises TimedOut."""
        await self._d.drain(timeout_s)

    async def pause(self, seconds: float | None, reason: str, now: bool) -> str:
        """Give the stage up, and answer when its memory is given back. Raises UsageFault for a
        rendezvous, NetworkFault for a daemon that ends meanwhile; a pause that is on the disk
        holds at its next start."""
        d = self._d
        if d.role == "rendezvous":
            raise UsageFault("a rendezvous holds no part of a model", "stop it:  tutti stop")
        if not d.put_away.is_set():
            d.hasty_pause = now
        kept = True
        try:
            d.availability.pause(seconds, reason)
        except OSError as e:
            kept = False
            text = f"the pause is not on the disk, so a restart forgets it: {e.strerror or e}"
            self.journal.emit("daemon", "pause-not-kept", text, "warning")
        while not d.put_away.is_set():
            if d.ending and kept and d.availability.paused is not None:
                raise NetworkFault(
                    f"this daemon is {d.state}, and will be paused when it starts again",
                    "end the pause then:  tutti resume",
                )
            if d.ending or d.availability.paused is None:
                raise NetworkFault(f"not paused: this daemon is {d.state}", "see  tutti status")
            await asyncio.sleep(PAUSED_LOOK_S)
        text = paused_words(d.availability.reason)
        if d.given_back:
            text += f": {d.given_back}"
        return pasteable(text, d.config.home_flag)

    def resume(self) -> str:
        """Work again at once, unless the run's owner pauses the run. Raises UsageFault for a daemon
        that is not paused by its own operator or rules."""
        d = self._d
        if d.availability.paused is None:
            raise UsageFault("this daemon is not paused", "see what it does with  tutti status")
        if d.availability.paused.by is By.RUN:
            raise UsageFault(
                f"the run {is_paused(d.availability.reason)}",
                "its owner lets it go on:  tutti swarm resume",
            )
        try:
            d.availability.resume()
        except OSError as e:
            raise Refused(
                f"goes on, but the pause stays on the disk: {e.strerror or e}",
                f"remove {d.config.pause_path}",
            ) from e
        if d.availability.paused is not None:
            text = f"stays {paused_words(d.availability.reason)}"
        else:
            text = "goes on: it takes a stage again; see  tutti status"
        return pasteable(text, d.config.home_flag)

    # ----------------------------------------------------------- the model

    def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.Piece]:
        """Text through the live swarm, a piece a token."""
        a = self._assembled()
        transport = self._d.transport
        if a.ends is not None:
            return at_ends.speak(a, transport, request)
        stages = a.pipeline.settings.stages
        answers = forwarding.generate(transport, self._ends(a), stages, request)
        return self._in_turn(a, self._with_name(answers))

    def evaluate(self, request: pb.EvaluateRequest) -> AsyncIterator[pb.Evaluated]:
        """Held-out loss through the live swarm, one choice of missing stages after the other."""
        a = self._assembled()
        transport = self._d.transport
        if a.ends is not None:
            return at_ends.answer(a, transport, request)
        stages = a.pipeline.settings.stages
        return self._with_name(forwarding.evaluate(transport, self._ends(a), stages, request))

    async def _in_turn(self, a: Assembled, pieces: AsyncIterator[T]) -> AsyncIterator[T]:
        """The pieces of a text, once there is a place for it."""
        async with a.texts, contextlib.aclosing(pieces):  # pyright: ignore[reportArgumentType]
            async for piece in pieces:
                yield piece

    async def _with_name(self, answers: AsyncGenerator[T, None]) -> AsyncIterator[T]:
        """The answers of an ends peer, with its name where its PeerId is."""
        async with contextlib.aclosing(answers):
            async for one in answers:
                if one.by:
                    one.by_name = self.journal.names.known(PeerId(one.by))
                yield one

    def _assembled(self) -> Assembled:
        """The stage that this daemon hosts. Raises UsageFault for a rendezvous, NetworkFault before
        it has joined."""
        if self._d.role == "rendezvous":
            raise UsageFault(
                "a rendezvous holds no part of the model",
                "ask a peer that hosts a stage; see  tutti peers",
            )
        if self._d.paused:
            step = "go on:  tutti resume"
            if self._d.availability.paused_by_run:
                step = "the run's owner lets it go on with  tutti swarm resume"
            raise NetworkFault(f"this daemon {is_paused(self._d.availability.reason)}", step)
        if self._d.assembled is None:
            raise NetworkFault(
                "the daemon has not joined yet", "try again when tutti status says ready"
            )
        return self._d.assembled

    def _ends(self, a: Assembled) -> list[PeerId]:
        """Other peers at the ends: peers with a record first; the leader, which has the most to do,
        last, and the others in an order of this peer's own, so that askers spread."""
        me = self._d.identity.peer_id
        listed = set[PeerId]()
        if self._d.presence:
            listed = set(self._d.presence.view.ends)
        planned = set[PeerId]()
        leader = None
        if plan := a.work.plan:
            planned = {m.peer for m in plan.stage(ENDS)}
            leader = a.training.member.leader

        def order(peer: PeerId) -> tuple[bool, bool, bytes]:
            own = hashlib.sha256(f"{me}/{peer}".encode()).digest()
            return peer not in listed, peer == leader, own

        return sorted((listed | planned) - {me}, key=order)

    async def export(self, request: pb.ExportRequest) -> AsyncGenerator[pb.Event, None]:
        """Gather one version of every stage and write it. Raises as :meth:`Exporter.run`, and
        UsageFault while another export is under way."""
        d = self._d
        a = self._assembled()
        if self._exporting.locked():
            raise UsageFault(
                "another export is under way at this daemon",
                "wait for its end, or end it with Ctrl-C",
            )
        exporter = Exporter(
            a, d.transport, d.config, self._hosts, request, losses=self._last_losses()
        )
        async with self._exporting, contextlib.aclosing(exporter.run()) as news:
            async for kind, text, fields in news:
                yield as_event(Event(d.clock.wall(), "info", "export", kind, text, fields))

    def _last_losses(self) -> Losses:
        """The newest losses that this peer has heard of: the first plan after a pause has none."""
        shown = self.tally.shown
        return Losses(shown.loss, shown.loss_val)

    def _hosts(self, stage: int) -> list[PeerId]:
        """Other peers that host a stage, as the directory shows them."""
        if not self._d.presence:
            return []
        return list(self._d.presence.view.replicas(stage))

    def switch(self, change: str) -> pb.SwitchReply:
        """A change to how cells average, to everybody. Raises Refused when the owner did not sign
        it, UsageFault for an old one."""
        a = self._assembled()
        if a.training.following.finished.is_set():
            raise UsageFault(
                "the run is complete, so nothing averages any more",
                "a new run begins with  tutti swarm init --from FILE",
            )
        known = a.training.admission.changes.known
        rules = a.training.change(change)
        if rules.revision < known.revision or (
            rules.revision == known.revision and change != known.change
        ):
            raise UsageFault(
                f"change {known.revision} is known here already",
                f"give the new one the number {known.revision + 1}",
            )
        return pb.SwitchReply(revision=rules.revision)

    def order(self, order: str) -> pb.OrderReply:
        """An order of the run's owner, to everybody. Raises Refused when the owner did not sign it,
        or a newer one is known, NetworkFault before this peer is in the run."""
        if self._d.orders is None:
            raise NetworkFault("no swarm yet", "wait until tutti status shows one")
        return pb.OrderReply(number=self._d.orders.give(order).number)

    def invite(self) -> pb.InviteReply:
        """The line another machine needs: how to reach this peer, and for when it is not there
        others of the run, and the peers that its operator named to begin with, a rendezvous for
        instance."""
        d = self._d
        m = self._d.manifest
        if m is None:
            raise NetworkFault("no swarm yet", "wait until tutti status shows one")
        named = [place for place in d.config.node.join if place.startswith("/")]
        own = without_bridges(d.transport.reachable.multiaddrs(), host_of)
        known = own[:ADDRESSES_KEPT] + d.open_peers() + named
        addresses = fitting_addresses(known)
        text = Invite(m.run_id, m.swarm.owner, addresses, d.config.admission).encode()
        closed = d.transport.reachable.standing is Standing.CLOSED
        limit = only_on(addresses, d.identity.peer_id if closed else None)
        return pb.InviteReply(invite=text, addresses=addresses, only_on=limit)
