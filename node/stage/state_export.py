"""Optimizer state outlives its owner: the state that this peer gives to others, takes over, and
keeps as copies.

A part's state belongs to one version of the parameters. A new owner finds it with the peer that
owned the part before, or as a copy at that owner's buddy; a leaving peer stays until it has been
fetched.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from node.checkpoint.state import StateKind, by_part
from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.core.journey import Plan, Version
from node.core.numbers import several
from node.core.tasks import Tasks
from node.optim.settings import OptimSettings
from node.optim.state_replica import Spares, VersionTrail, wards
from node.optim.steps import HeldState
from node.stage.engines import Engines
from node.stage.state import StageState
from node.stage.state_import import Parts, StateImport
from node.wire.remote import HeldTensor

DIVIDED_S = 30.0
"""Seconds for which a peer that stays in a dividing cell gives the new cell its optimizer state:
the new cell has a leader to find, and its members have to hear of each other."""


class StateExport:
    """The state of one stage's parts at one peer. ``owned``: the parts it stepped, or was to step,
    in the last round."""

    def __init__(
        self,
        stage: StageState,
        engines: Engines,
        optimizer: OptimSettings,
        buddy_every: int,
        me: PeerId,
        tasks: Tasks,
    ) -> None:
        self.stage = stage
        self.engines = engines
        self.me = me
        self._every = buddy_every
        self._tasks = tasks
        self.spares = Spares()
        self._trail = VersionTrail()
        self._parts = Parts(stage, engines, optimizer)
        self.taking = StateImport(
            self._parts, engines, self.spares, self._trail, stage.stage, me, tasks
        )
        self.owned: frozenset[str] | None = None
        self._plan: Plan | None = None
        self._copying: tuple[PeerId, asyncio.Task[None]] | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._given: dict[tuple[Version, str], int] = {}
        self._count = 0
        self._kept: dict[Version, tuple[float, Mapping[str, HeldState]]] = {}
        """The state of versions at which the cell has divided, each with the end of the time for
        which it is given."""
        self._news = asyncio.Event()

    # ----------------------------------------------------------- state for others

    def describe(
        self, kind: StateKind, epoch: int | None, lineage: str
    ) -> tuple[Version, dict[str, HeldTensor]] | None:
        """OPTIMIZER or SPARE state at a version, as "<part>/<state>"; the newest that is final when
        ``epoch`` is None."""
        if kind is StateKind.SPARE:
            if epoch is None:
                return None
            return self.spares.at(epoch, lineage)
        # A peer that asks for the version in place has a plan that starts from it: the update that
        # made it is final.
        here = self.stage.version, self.stage.settled
        for version in here[1:] if epoch is None else (*here, *self._kept):
            if epoch in (None, version.epoch) and lineage in ("", version.lineage):
                # On their device: a request names some of them, and only these are copied down.
                state = self.held_at(version) if version in here else self._kept[version][1]
                flat = {f"{n}/{k}": t for n, s in state.items() for k, t in s.items()}
                if not flat:
                    return None
                return version, flat
        return None

    def listing(self, kind: StateKind) -> dict[str, Version]:
        """Part to the version of the OPTIMIZER or SPARE state held."""
        if kind is StateKind.SPARE:
            return self.spares.versions()
        settled = self.stage.settled
        return {
            name: settled
            for name in self.engines.owner.names()
            if self.taking.has(name, settled.epoch)
        }

    def state_at(self, version: Version) -> dict[str, HeldState]:
        """The state of every part this peer owned when ``version`` was made, of exactly that
        version."""
        after = self.engines.owner.after
        return {name: after(name, version.epoch - 1) for name in self._held(version)}

    def held_at(self, version: Version) -> dict[str, HeldState]:
        """The state of :meth:`state_at`, with the tensors that are held, on the device that has
        them."""
        after = self.engines.owner.held_after
        return {name: after(name, version.epoch - 1) for name in self._held(version)}

    def _held(self, version: Version) -> dict[str, tuple[str, ...]]:
        """The keys of :meth:`state_at`, by part."""
        owner = self.engines.owner
        final = version == self.stage.settled
        # Of an update that is not final, only the parts count that the last attempt left with this
        # peer; an earlier attempt may have stepped more.
        names = owner.names() if final else sorted(self.owned or ())
        found = {name: owner.keys_after(name, version.epoch - 1) for name in names}
        return {name: keys for name, keys in found.items() if keys}

    # ----------------------------------------------------------- the epoch

    def begin(self, plan: Plan, listener: bool) -> None:
        """A plan is in force: look for the state of gained parts while the epoch runs."""
        self.taking.forget()
        self._news.set()
        self._plan = plan
        owner = self.engines.owner
        if listener:
            # A listener's state is not the swarm's, and may be of a later epoch than the swarm has
            # gone back to.
            self.hold_nothing()
            return
        self._stand(plan.base)
        if plan.founds or self._kept:
            now = self.engines.pipeline.clock.now()
            self._kept = {v: k for v, k in self._kept.items() if now <= k[0]}
            if plan.founds:
                self._kept[plan.base] = now + DIVIDED_S, self.state_at(plan.base)
        for name in owner.names():
            if plan.epoch and not self.taking.has(name, plan.epoch):
                # Loaded for an attempt that failed: still the copy it was before.
                self._set_aside(name)
        self.taking.expect(
            plan,
            [n for n in self._parts.shapes if plan.owners.get(n) == self.me],
            (),
        )

    def opens(self, plan: Plan, owners: Mapping[str, PeerId], dead: Collection[PeerId]) -> None:
        """A round begins: parts of dead owners may be this peer's now, and copies for others have
        to wait."""
        self._quiet.clear()
        self.owned = frozenset(name for name, owner in owners.items() if owner == self.me)
        self.taking.expect(plan, sorted(self.owned), dead)

    async def hold(self, plan: Plan, dead: Collection[PeerId], deadline_s: float) -> None:
        """An outer round leaves optimizer state as it is: the state of this peer's parts goes on to
        the next version. Waits shortly for state on its way."""
        self.opens(plan, {name: plan.owners[name] for name in self._parts.shapes}, dead)
        try:
            await self.taking.ready(self.owned or (), deadline_s)
            self.engines.owner.hold(sorted(self.owned or ()), plan.epoch)
        finally:
            self.closes()

    def adopted(self) -> None:
        """Fresh parameters are in place."""
        self._news.set()

    def closes(self) -> None:
        """The round is over."""
        self._quiet.set()

    def settled(self, epoch: int, plan: Plan | None) -> None:
        """The version ``epoch`` is final, and ``plan`` starts from it."""
        self.taking.settled()
        owner = self.engines.owner
        owner.commit(epoch - 1, self.owned)
        if self.owned is not None:
            for name in set(owner.names()) - self.owned:
                # Its new owner has stepped it; until the new owner's buddy has a copy, this is the
                # newest beside it.
                self._set_aside(name)
            self.spares.drop(self.owned)
        if plan is None or plan.epoch != epoch or plan.member(self.me) is None:
            return
        self._stand(plan.base)
        mine = wards(self.me, [m.peer for m in plan.stage(self.stage.stage) if m.current])
        versions = self.spares.versions()
        self.spares.drop(
            [
                n
                for n, v in versions.items()
                if plan.owners.get(n) not in mine and epoch - v.epoch > 2 * self._every
            ]
        )
        if self._every and epoch and epoch % self._every == 0 and not plan.last:
            self._keep_copies(plan, mine)

    def finished(self, plan: Plan) -> None:
        """The run is complete: nobody steps any more."""
        self.taking.forget()
        self._plan = plan

    def stood(self, version: Version) -> None:
        """``version`` is in place, and nobody has stepped a part of this stage since the one
        before: the state here belongs to it too."""
        owner = self.engines.owner
        owner.hold(owner.names(), version.epoch - 1)
        owner.commit(version.epoch - 1, None)
        self.went_to(version)

    def went_to(self, version: Version) -> None:
        """Another version than the last epoch's is in place."""
        self.taking.forget()
        self._stand(version)

    def hold_nothing(self) -> None:
        """Drop all state here: it belongs to no version that counts."""
        self.taking.forget()
        self.engines.owner.clear()
        self.spares.clear()
        self._trail.forget()
        self.owned = None

    def _set_aside(self, name: str) -> None:
        owner = self.engines.owner
        if self._every and owner.through(name) >= 0:
            self.spares.put(name, self._trail.at(owner.through(name) + 1), owner.state(name))
        owner.drop(name)

    def _stand(self, version: Version) -> None:
        self._trail.stand(version)
        self.spares.keep_only(self._trail)

    # ----------------------------------------------------------- keeping copies for others

    def _keep_copies(self, plan: Plan, mine: Sequence[PeerId]) -> None:
        if self._copying is not None and not self._copying[1].done():
            if self._copying[0] in mine:
                # on a slow line an older copy that is whole is worth more than many that were begun
                return
            self._copying[1].cancel()
        for ward in mine:
            self._copying = ward, self._tasks.spawn(self._copy(plan, ward), "spare")

    async def _copy(self, plan: Plan, ward: PeerId) -> None:
        """Copy the state of the parts ``ward`` owns, each at its newest version, in the background
        and between the rounds."""
        held = await self._parts.listing(ward, StateKind.OPTIMIZER)
        names = [n for n in sorted(self._parts.shapes) if plan.owners.get(n) == ward and n in held]
        version = plan.base
        done = 0
        say = self.engines.journal.emit
        for batch in self._parts.batches(names):
            try:
                snapshot = await self._parts.fetch(
                    ward, StateKind.OPTIMIZER, None, batch, gate=self._quiet
                )
            except PeerFault as error:
                say(
                    "optim",
                    "spare-failed",
                    f"no copy of {several(len(names) - done, 'part')} of {short(ward)}: {error}",
                    "debug",
                    peer=ward,
                )
                return
            version = snapshot.version
            for name, state in by_part(snapshot.tensors).items():
                if self._plan is not None and self._plan.owners.get(name) != self.me:
                    self.spares.put(name, version, state)
                    done += 1
        if done:
            say(
                "optim",
                "spare-kept",
                f"keeps a copy of the optimizer state of {several(done, 'part')} of {short(ward)}, "
                f"epoch {version.epoch}",
                "debug",
                parts=done,
                epoch=version.epoch,
                peer=ward,
            )

    # ----------------------------------------------------------- leaving

    def served(self, kind: StateKind, version: Version, name: str) -> None:
        """A tensor has been sent to another peer."""
        if kind is StateKind.OPTIMIZER:
            self._count += 1
            self._given = {
                key: n for key, n in self._given.items() if key[0].epoch >= version.epoch - 1
            }
            self._given[version, name] = self._count
            self._news.set()

    async def handed_over(self, timeout_s: float) -> bool:
        """Wait until others have fetched the state of every part held here. Return False if that
        does not happen.

        Patience ends ``timeout_s`` after the last news: a tensor that was sent, or an epoch that
        still counts on this peer.
        """
        say = self.engines.journal.emit
        began = self._count
        while True:
            self._news.clear()
            plan = self._plan
            held = self._held(self.stage.version)
            if plan is None or plan.last:
                return True  # a run that has not begun, or is complete, needs none of it
            if not any(m.peer != self.me for m in plan.stage(self.stage.stage)):
                text = f"nobody else is here to take the state of {several(len(held), 'part')}"
                say("optim", "not-handed-over", text, "warning", parts=len(held))
                return False
            left = [name for name, keys in held.items() if not self._is_given(name, keys, began)]
            working = plan.epoch >= self.stage.version.epoch
            if not left and not (working and not held):
                if held:
                    parts = several(len(held), "part")
                    text = f"others have the optimizer state of {parts}, all of them"
                    epoch = self.stage.version.epoch
                    say("optim", "handed-over", text, parts=len(held), epoch=epoch)
                return True
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                if not left:
                    return True
                of = several(len(held), "part")
                text = f"nobody fetched the optimizer state of {len(left)} of {of}"
                say("optim", "not-handed-over", text, "warning", parts=len(left))
                return False

    def _is_given(self, name: str, kinds: Sequence[str], began: int) -> bool:
        """Return True if all state of a part was fetched: of the version in place, or, in case the
        swarm undoes that, since ``began`` of the one before.

        Of the version an epoch starts from, a buddy may have had a copy all along: the state that
        counts is the one it ends with.
        """
        here = self.stage.version
        before = self.stage.settled
        least = 1 if here != before else began + 1
        keys = [f"{name}/{kind}" for kind in kinds]
        now = all(self._given.get((here, k), 0) >= least for k in keys)
        return now or all(self._given.get((before, k), 0) > began for k in keys)
