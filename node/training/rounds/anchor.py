"""What this peer gives to an outer round and makes of its result; anchor and outer momentum, where
the run has them. Enters: parameters in place, what a round averaged, versions that are adopted,
settled or undone. Leaves: the next parameters. Never: a round (that is :mod:`node.averaging`'s), a
file.

Parameters: they travel, and are replaced by their mean. Deltas (DiLoCo): what they moved by since
the anchor travels, and every member makes the same outer step from the same anchor; without a
barrier servers step, and what comes back is the next anchor. State: everybody steps by itself
first; anchor and momentum travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from node.averaging.exchange.request import RoundOutcome, Step
from node.averaging.strategies.diloco import OuterState, mixed, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.fetch import FetchTimeouts, fetch
from node.checkpoint.state import StateKind
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.training.protocol.meetings import number
from node.training.protocol.rules import LEVEL
from node.training.rounds.error_feedback import WORDS, feedback_of
from node.training.rounds.merging import MOMENTUM
from node.training.rounds.serving import Serving
from node.training.state.engines import Engines
from node.training.state.stage import StageState
from node.wire.tensors import digest

SAVED = "#outer"
"""A part's anchor and outer momentum in a checkpoint, and what is owed of it, behind the part's
name."""
PATIENCE = FetchTimeouts(describe_s=20.0, stall_s=5.0, request_s=120.0, tries=2)
WAIT_SHARE = 0.3
"""An outer round waits for an anchor on its way for so much of its deadline."""


class Anchor:
    """Of one stage. ``state`` None where parameters are averaged, and while a newcomer does not
    have it yet. ``ahead`` are the settings in force, ``settings`` those of the round at hand:
    others where a change comes into force."""

    def __init__(
        self,
        stage: StageState,
        settings: OuterSettings,
        epochs: int,
        engines: Engines,
        tasks: Tasks,
        me: PeerId,
    ) -> None:
        self._stage, self._engines, self._tasks, self._me = stage, engines, tasks, me
        self.settings = self.ahead = settings
        self._epochs = epochs
        self.state: OuterState | None = OuterState.begin(stage.parameters()) if self.kept else None
        self.residual = feedback_of(settings)
        self.serving: Serving[Tensor] = Serving()
        self.carried = frozenset(stage.parameters())
        """The parts that the round at hand carries."""
        self.mixing = 0.0
        """Share of the local parameters that stays in these."""
        self.history = object()
        """Another one whenever the parameters in place came from elsewhere."""
        self._before: OuterState | None = None
        self._named: tuple[OuterState | None, str] = (None, "")
        self._moved = False
        self._fetching: asyncio.Task[None] | None = None

    def follow(self, settings: OuterSettings, level: bool) -> None:
        """Go by these settings from now on; ``level``: they come into force in this plan, after all
        cells have averaged parameters."""
        if level:
            self.serving.forget()
        if level or settings.codec != self.residual.codec:
            self.residual = feedback_of(settings)
        self.settings, self.ahead = LEVEL if level else settings, settings
        if level:
            self._stop()

    @property
    def kept(self) -> bool:
        """Whether this run has anchors at all."""
        meets = self.ahead.every > 0 or self.ahead.windows
        return meets and self.ahead.carries in ("deltas", "state")

    @property
    def name(self) -> str:
        """Digest of anchor and momentum, where those of all cells must be equal; empty while there
        are none, or :meth:`names_itself` has not been called since they changed."""
        state, name = self._named
        return name if state is not None and state is self.state else ""

    def names_itself(self) -> None:
        """Work out :attr:`name`, which reads all of both."""
        state = self.state
        if state is not None and self.ahead.windows and self.ahead.carries == "deltas":
            self._named = state, digest(_flat(state))

    @property
    def _owes(self) -> bool:
        """Whether all replicas of a cell owe the same: each may be asked for what the cell says."""
        return self.ahead.windows and self.ahead.feedback

    @property
    def lacking(self) -> bool:
        """This peer should have an anchor and has none."""
        return self.kept and self.state is None and self.settings is not LEVEL

    @property
    def believes(self) -> bool:
        """Whether the result of a round means something here: differences do not, without the
        anchor they are from."""
        return self.settings.pushes or not (self.lacking and self.settings.carries == "deltas")

    def due(self, epoch: int) -> int:
        """The number of the outer round that the epoch from version ``epoch`` is, 0 for none."""
        return number(epoch, self.ahead.gap, self._epochs)

    # ----------------------------------------------------------- a round

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Of what travels."""
        if self.settings.carries != "state":
            return dict(shapes)
        return {**shapes, **{name + MOMENTUM: shape for name, shape in shapes.items()}}

    def owners(self, owners: Mapping[str, PeerId]) -> dict[str, PeerId]:
        """Who averages what of it."""
        if self.settings.carries != "state":
            return dict(owners)
        return {**owners, **{name + MOMENTUM: peer for name, peer in owners.items()}}

    def in_place(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Parameters of this version, which nobody writes into."""
        here = self._stage.parameters()
        return {name: here[name].detach() for name in names}

    def gives(self, of: Mapping[str, Tensor] | None = None) -> dict[str, Tensor] | None:
        """This peer's contribution, fp32 on the CPU, by these parameters or those in place; None
        without an anchor."""
        local = (
            self._local(self.carried)
            if of is None
            else {name: t.to("cpu", torch.float32) for name, t in of.items()}
        )
        if not self.kept or self.settings is LEVEL:
            return local
        if self.state is None:
            return None
        if self.settings.carries == "deltas":
            return pseudo_gradient(self.state, local)
        stepped = outer_step(self.state, pseudo_gradient(self.state, local), self.settings)
        return {**stepped.anchor, **{name + MOMENTUM: t for name, t in stepped.momentum.items()}}

    def says(self, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what is said of a contribution, its bytes): with error feedback other numbers; without,
        those given and no bytes."""
        whole = self.residual.catches_up(given) if self.settings.quorum else dict(given)
        return self.residual.says(whole) if self.settings.feedback else (whole, {})

    @property
    def makes(self) -> Step | None:
        """What an averager gives of the means it has made, before they are rounded; None: these."""
        return self.residual.makes if self.settings.feedback else None

    def heard(
        self,
        outcome: RoundOutcome,
        cell: Collection[PeerId],
        of: Mapping[str, Tensor] | None = None,
    ) -> None:
        """What a round has brought, before it is taken. ``cell``: the members of this peer's;
        ``of``: as for :meth:`gives`."""
        if not (self.settings.feedback or self.settings.quorum):
            return
        late: dict[str, Tensor] = {}
        if self.settings.quorum and self.state is not None:
            without = [
                n for n, part in outcome.parts.items() if not set(part.contributors) & set(cell)
            ]
            late = pseudo_gradient(
                self.state, self._local(without) if of is None else {n: of[n] for n in without}
            )
        self.residual.ended(
            outcome.parts, outcome.fresh, self._me, self._me in outcome.refused, late
        )

    def takes(self, mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The next parameters, from what the round averaged. Anchor and momentum are the new ones
        until that is undone.

        Raises ValueError for numbers that are not finite, and for differences where there is no
        anchor.
        """
        self.residual.moved()
        self._stop()  # an anchor that is on its way is from before this round
        if self.settings is LEVEL:
            # Everybody has the same now: anchors that are kept from here on begin equal.
            self._replace(OuterState.begin(mean) if self.kept else None)
            return dict(mean)
        if not self.kept:
            return dict(mean)
        if self.settings.pushes:
            self._replace(OuterState.begin(mean))
            return dict(mean)
        if self.settings.carries == "state" or self.settings.windows:
            anchor = {name: t for name, t in mean.items() if not name.endswith(MOMENTUM)}
            momentum = {name: mean[name + MOMENTUM] for name in anchor}
            if self.state is not None:  # of the parts that were not carried it stays
                anchor, momentum = self.state.anchor | anchor, self.state.momentum | momentum
            after = OuterState(anchor, momentum)
        elif self.state is not None:
            after = outer_step(self.state, mean, self.settings)
        else:
            raise ValueError("differences from an anchor that is not here")
        self._replace(after)
        return self._landed(after)

    def _local(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: t.to("cpu", torch.float32) for name, t in self.in_place(names).items()}

    def _landed(self, state: OuterState) -> dict[str, Tensor]:
        """The next parameters: of what the round carried those after the outer step, of the rest
        those in place."""
        rest = self._stage.parameters().keys() - self.carried
        stepped = {name: state.anchor[name] for name in self.carried}
        return {
            **self._local(rest),
            **(mixed(self._local(self.carried), state, self.mixing) if self.mixing else stepped),
        }

    def pulled(self, name: str) -> Tensor:
        """What the cell pulled last of a part, or else has, to begin to serve it with."""
        here = self._stage.parameters()[name] if self.state is None else self.state.anchor[name]
        return here.detach().to("cpu", torch.float32, copy=True)

    def begin_here(self) -> None:
        """Nobody in the group has an anchor: what is in place is one."""
        self.state = OuterState.begin(self._stage.parameters())

    def begin_with(self, parameters: Mapping[str, Tensor]) -> None:
        """Nobody in the cell has an anchor: these parameters are one."""
        self.state = OuterState.begin(parameters)

    # ----------------------------------------------------------- versions

    def settled(self) -> None:
        """What is in place is final."""
        self._before, self._moved = None, False
        self.residual.settled()
        self.serving.settled()

    def rolled_back(self) -> None:
        """The last version was undone."""
        if self._moved:
            self.state, self._before, self._moved = self._before, None, False
        self.residual.rolled_back()
        self.serving.undone()

    def forget(self) -> None:
        """The parameters in place came from elsewhere."""
        self.state, self._before, self._moved = None, None, False
        self.residual, self.history = feedback_of(self.ahead), object()
        self.serving.forget()
        self._stop()

    def _replace(self, state: OuterState | None) -> None:
        if not self._moved:
            self._before, self._moved = self.state, True
        self.state = state

    # ----------------------------------------------------------- from and to others, and the disk

    def describe(self, epoch: int | None, history: str) -> tuple[Version, dict[str, Tensor]] | None:
        """Anchor and momentum that go with a version that is here, as "<part>/<which>"."""
        residual = self.residual
        for version, state, owed in (
            (self._stage.version, self.state, residual.words),
            (self._stage.settled, self._before if self._moved else self.state, residual.owed),
        ):
            if (
                state is not None
                and epoch in (None, version.epoch)
                and history in ("", version.lineage)
            ):
                zeros = state.momentum if self._owes else {}
                words = {
                    f"{name}/{WORDS}": owed[name] if name in owed else torch.zeros_like(t)
                    for name, t in zeros.items()
                }
                return version, _flat(state) | words
        return None

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint keeps of it, part by part; empty where there is nothing."""
        state = self.state
        if state is None:
            return {}
        return {
            name + SAVED: {
                "anchor": state.anchor[name],
                "momentum": state.momentum[name],
                **self.residual.saved(name),
            }
            for name in state.anchor
        }

    def restored(self, found: Mapping[str, Mapping[str, Tensor]]) -> None:
        """What a checkpoint had of it; one that lacks a part has none."""
        self.forget()
        names = self._stage.parameters()
        if self.kept and all(
            found.get(name + SAVED, {}).keys() >= {"anchor", "momentum"} for name in names
        ):
            parts = {name: found[name + SAVED] for name in names}
            for name, part in parts.items():
                self.residual.restored(name, part, tuple(names[name].shape))
            self.state = OuterState(
                {n: p["anchor"] for n, p in parts.items()},
                {n: p["momentum"] for n, p in parts.items()},
            )

    def look_for(self, plan: Plan) -> None:
        """Fetch it while the epoch runs, from the own cell, else from anybody of the stage: another
        cell's is better than none."""
        me = plan.member(self._me)
        if (
            not self.lacking
            or me is None
            or (self._fetching is not None and not self._fetching.done())
        ):
            return
        cell = [m.peer for m in plan.cell(me.stage, me.cell) if m.current and m.peer != self._me]
        stage = [m.peer for m in plan.stage(me.stage) if m.current and m.peer != self._me]
        where = [stage] if self.settings.carries == "deltas" else [cell, stage]
        if self.settings.pushes:
            where = [cell]  # differences from what another cell has pulled are none of this one's
        self._fetching = self._tasks.spawn(
            self._fetch_for(plan, [donors for donors in where if donors]), "anchor"
        )

    async def arrived(self, deadline_s: float) -> None:
        """Wait a while for what is on its way."""
        if self._fetching is not None and not self._fetching.done():
            await asyncio.wait([self._fetching], timeout=WAIT_SHARE * deadline_s)

    async def copy(self, donors: Sequence[PeerId], version: Version) -> None:
        """Parameters of ``version`` are being copied from ``donors``: what goes with them. Without
        it this peer lacks it again."""
        self.residual.copied(self._stage.parameters().keys())
        if self.kept or self.settings is LEVEL:
            self._replace(await self._fetch(donors, version) if self.kept else None)

    async def lands(self, donors: Sequence[PeerId], version: Version) -> dict[str, Tensor]:
        """The next parameters, by the outer step that ``donors`` have made on the way to
        ``version``. Raises PeerFault.

        Of the parts that the round has not carried everybody's anchor is as it was: who has one
        asks for the others only."""
        here = self.state
        found = await self._fetch(donors, version, self.carried if here is not None else None)
        if found is None:
            raise PeerFault(
                donors[0], "and the others that have made the outer step gave no anchor of it"
            )
        if here is not None:
            found = OuterState(here.anchor | found.anchor, here.momentum | found.momentum)
        self.residual.copied(self.carried)
        self._replace(found)
        return self._landed(found)

    async def _fetch_for(self, plan: Plan, where: Sequence[Sequence[PeerId]]) -> None:
        found = None
        for donors in where:
            found = found or await self._fetch(donors, plan.base)
        # Of an anchor from before an outer round nobody can make use after it.
        if self.state is None and not any(
            self.due(e) for e in range(plan.epoch, self._stage.epoch)
        ):
            self.state = found

    async def _fetch(
        self, donors: Sequence[PeerId], version: Version, names: Collection[str] | None = None
    ) -> OuterState | None:
        """Anchor and momentum of these parts (None: of all) at ``version``; None when nobody gave
        them, which is said."""
        e, here = self._engines, self._stage.parameters()
        shapes = {n: tuple(here[n].shape) for n in (here if names is None else names)}
        wanted = {
            f"{name}/{which}": shape
            for name, shape in shapes.items()
            for which in ("anchor", "momentum", *((WORDS,) if self._owes else ()))
        }
        try:
            found = await fetch(
                e.transport,
                list(donors),
                self._stage.stage,
                StateKind.OUTER,
                version.epoch,
                wanted,
                lineage=version.lineage,
                settings=e.store.settings,
                patience=PATIENCE,
            )
        except PeerFault as error:
            e.journal.emit(
                "training",
                "anchor-not-here",
                f"no anchor yet: {error}",
                "warning",
                epoch=version.epoch,
            )
            return None
        e.journal.emit(
            "training",
            "anchor-fetched",
            f"has the anchor of epoch {version.epoch}",
            epoch=version.epoch,
        )
        if self._owes:
            self.residual.takes_over({n: found.tensors[f"{n}/{WORDS}"] for n in shapes})
        return OuterState(
            {n: found.tensors[f"{n}/anchor"] for n in shapes},
            {n: found.tensors[f"{n}/momentum"] for n in shapes},
        )

    def _stop(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
        self._fetching = None


def _flat(state: OuterState) -> dict[str, Tensor]:
    pairs = (("anchor", state.anchor), ("momentum", state.momentum))
    return {
        f"{name}/{which}": tensor for which, tensors in pairs for name, tensor in tensors.items()
    }
