"""Anchor, outer momentum and error feedback of a stage, where the run has them. Enters: parameters
in place, the result of a window, versions that are adopted, settled or undone. Leaves: the anchor
state of a version. Never: a partner, a file.

The content that travels between cells depends on ``outer.carries``. parameters: the parameters, and
there is no anchor. deltas (DiLoCo): the difference of the parameters from the anchor; every cell
makes the same outer step from the same anchor. state: anchor and momentum after each cell's own
outer step.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from node.averaging.strategies.diloco import OuterState
from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.errors import NoDonor
from node.checkpoint.state import StateKind
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.outer.merging import (
    MOMENTUM,
    STEP,
    TAKEN,
    WORDS,
    Named,
    Pushed,
    WindowState,
    pushed_by,
)
from node.stage.engines import Engines
from node.stage.outer_port import SAVED
from node.stage.state import StageState
from node.wire.tensors import digest

WAIT_SHARE = 0.3
"""Share of a window's time for which it waits for an anchor that is being fetched."""


class _Before(NamedTuple):
    """The state of a window at the version before the one in place."""

    state: OuterState | None
    words: Named
    step: int
    pushed: Pushed


@dataclass
class _Search:
    """A search for the anchor at other replicas of the stage, ``donors``. ``nobody``: all of them
    said that they have none."""

    donors: frozenset[PeerId]
    task: asyncio.Task[None] | None = None
    nobody: bool = False

    @property
    def over(self) -> bool:
        return self.task is None or self.task.done()


class Anchor(WindowState):
    """The anchor of one stage. ``state``: None where parameters are averaged, and while a newcomer
    has not fetched it. ``settings``: the settings in force. All replicas of a cell have the same
    error feedback."""

    def __init__(
        self,
        stage: StageState,
        settings: OuterSettings,
        engines: Engines,
        tasks: Tasks,
        me: PeerId,
    ) -> None:
        self.stage = stage
        self._engines = engines
        self._tasks = tasks
        self._me = me
        self.settings = settings
        super().__init__(OuterState.begin(stage.parameters()) if self.kept else None)
        self._before: _Before | None = None
        """The state at the version before, until the one in place is settled."""
        self._named: tuple[OuterState | None, str] = (None, "")
        self._search: _Search | None = None

    def follow(self, settings: OuterSettings) -> None:
        """Use these settings from now on."""
        if settings.codec != self.settings.codec:
            self.words = {}
        self.settings = settings
        if not self.kept:
            self.state = None
            self.stop()

    @property
    def kept(self) -> bool:
        """True if this run has anchors at all."""
        return self.settings.windows and self.settings.carries in ("deltas", "state")

    @property
    def name(self) -> str:
        """Digest of anchor and momentum, if they must be equal in all cells; empty while there are
        none, or :meth:`names_itself` has not been called since they changed."""
        state, name = self._named
        if state is None or state is not self.state:
            return ""
        return name

    def names_itself(self) -> None:
        """Compute :attr:`name`, which reads all of anchor and momentum."""
        state = self.state
        if state is not None and self.settings.carries == "deltas":
            self._named = state, digest(_flat(state))

    @property
    def lacking(self) -> bool:
        """True if this peer should have an anchor and has none."""
        return self.kept and self.state is None

    @property
    def nobody_has_one(self) -> bool:
        """True if no other replica of the stage can give an anchor: there is no other one, or all
        have said that they have none."""
        return self._search is None or self._search.nobody

    # ----------------------------------------------------------- a round

    def takes(self, mean: Named, owes: Named | None) -> None:
        """Take anchor and momentum from the mean; this can be undone until the next version is
        settled. Parts that the window did not carry keep theirs; a cell without an anchor takes
        none from a window that did not carry all parts. ``owes``: the new error feedback, None to
        keep it as it is."""
        if self.state is None and not self.stage.parameters().keys() <= mean.keys():
            return
        anchor = {name: mean[name] for name in self.stage.parameters() if name in mean}
        momentum = {
            name: mean.get(name + MOMENTUM, torch.zeros_like(t)) for name, t in anchor.items()
        }
        step = self.step
        if STEP in mean:
            step = int(mean[STEP])
        if self.state is not None:
            anchor = self.state.anchor | anchor
            momentum = self.state.momentum | momentum
        if owes is None:
            owes = self.words
        pushed = self.pushed
        if TAKEN in mean:
            pushed = pushed_by(mean, pushed)
        self._replace(OuterState(anchor, momentum), owes, step, pushed)

    async def begin_with(self, parameters: Mapping[str, Tensor]) -> None:
        """Use these parameters as the anchor, because nobody in the cell has one."""
        state = await self._engines.aside(OuterState.begin, parameters)
        if self.lacking:  # one may have come meanwhile
            self.state = state

    # ----------------------------------------------------------- versions

    def settled(self) -> None:
        """The version in place is final."""
        self._before = None

    def rolled_back(self) -> None:
        """The last version was undone."""
        if self._before is not None:
            self.state, self.words, self.step, self.pushed = self._before
        self._before = None

    def begin(self) -> None:
        """The parameters in place are the ones that the run begins from."""
        self.forget()
        if self.kept:
            self.state = OuterState.begin(self.stage.parameters())

    def forget(self) -> None:
        """Forget anchor and error feedback: the parameters in place came from elsewhere."""
        self.state = None
        self.words = {}
        self.pushed = {}
        self._before = None
        self.stop()

    def _replace(self, state: OuterState | None, words: Named, step: int, pushed: Pushed) -> None:
        self._before = self._before or _Before(self.state, self.words, self.step, self.pushed)
        self.state = state
        self.words = words
        self.step = step
        self.pushed = pushed

    # ----------------------------------------------------------- from and to others, and the disk

    def describe(self, epoch: int | None, history: str) -> tuple[Version, dict[str, Tensor]] | None:
        """Anchor and momentum of a version that is here, named "<part>/<which>"; None for any other
        version."""
        for version in (self.stage.version, self.stage.settled):
            state, owed, *_ = self._at(version)
            if (
                state is not None
                and epoch in (None, version.epoch)
                and history in ("", version.lineage)
            ):
                zeros = state.momentum if self.settings.feedback else {}
                words = {
                    f"{name}/{WORDS}": owed[name] if name in owed else torch.zeros_like(t)
                    for name, t in zeros.items()
                }
                return version, _flat(state) | words
        return None

    def _at(self, version: Version) -> _Before:
        """The state of the version in place or the one before."""
        now = _Before(self.state, self.words, self.step, self.pushed)
        # The anchor changes before the parameters do. Until they follow, or the change is undone,
        # the anchor before the change belongs to the parameters in place.
        if version == self.stage.settled:
            return self._before or now
        return now

    def saved(self, version: Version) -> dict[str, dict[str, Tensor]]:
        """The part of a checkpoint of ``version``, which is in place or the one before: tensors by
        part; empty where the run has no anchor."""
        state, words, *_ = self._at(version)
        if state is None:
            return {}
        return {
            name + SAVED: {
                "anchor": state.anchor[name],
                "momentum": state.momentum[name],
                **({WORDS: words[name]} if name in words else {}),
            }
            for name in state.anchor
        }

    def step_at(self, version: Version) -> int:
        """The server's step of the version in place or the one before."""
        return self._at(version).step

    def restored(self, found: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take anchor, momentum and error feedback of each part from a checkpoint, and the server's
        ``step``. If one of the parts lacks them, there is no anchor."""
        self.forget()
        self.step = step
        names = self.stage.parameters()
        if self.kept and all(
            found.get(name + SAVED, {}).keys() >= {"anchor", "momentum"} for name in names
        ):
            parts = {name: found[name + SAVED] for name in names}
            self.words = {
                name: part[WORDS]
                for name, part in parts.items()
                if WORDS in part and part[WORDS].shape == names[name].shape
            }
            self.state = OuterState(
                {n: p["anchor"] for n, p in parts.items()},
                {n: p["momentum"] for n, p in parts.items()},
            )

    def look_for(self, plan: Plan) -> None:
        """Fetch the anchor from other replicas of the stage while the epoch runs. Nobody waits for
        a replica that is not in ``plan`` any more."""
        here = plan.stage(self.stage.stage)
        donors = frozenset(m.peer for m in here if m.current and m.peer != self._me)
        search = self._search
        if search is not None and not search.donors & donors:
            self.stop()
        if donors and self.lacking and (self._search is None or self._search.over):
            search = self._search = _Search(donors)
            search.task = self._tasks.spawn(self._fetch_for(plan, search), "anchor")

    async def arrived(self, deadline_s: float) -> None:
        """Wait for an anchor that is being fetched, for a share of ``deadline_s``."""
        search = self._search
        if search is not None and search.task is not None and not search.over:
            await asyncio.wait([search.task], timeout=WAIT_SHARE * deadline_s)

    async def copy(self, donors: Sequence[PeerId], version: Version) -> None:
        """Fetch the anchor of ``version`` from ``donors``, from which its parameters were copied.
        If nobody gives it, this peer has none."""
        if self.kept:
            self.stop()  # what is being fetched is from before this version
            state = None
            words = self.words
            with suppress(PeerFault):
                state, words = await self._fetch(donors, version)
            self._replace(state, words, self.step, self.pushed)

    async def _fetch_for(self, plan: Plan, search: _Search) -> None:
        try:
            state, words = await self._fetch(sorted(search.donors), plan.base)
        except PeerFault as e:
            if isinstance(e, NoDonor):
                search.nobody = all(map(e.holds_nothing, search.donors))
            return
        if self.state is None:
            self.state = state
            self.words = words

    async def _fetch(self, donors: Sequence[PeerId], version: Version) -> tuple[OuterState, Named]:
        """Anchor and momentum of all parts at ``version``, and their error feedback. Raises
        PeerFault, after a line in the journal, if nobody gave them."""
        e = self._engines
        shapes = self.stage.shapes
        wanted = {
            f"{name}/{which}": shape
            for name, shape in shapes.items()
            for which in ("anchor", "momentum", *((WORDS,) if self.settings.feedback else ()))
        }
        try:
            found = await e.fetch(donors, self.stage.stage, StateKind.OUTER, version, wanted)
        except PeerFault as error:
            e.journal.emit(
                "training",
                "anchor-not-here",
                f"no anchor yet: {error}",
                "warning",
                epoch=version.epoch,
            )
            raise
        e.journal.emit(
            "training",
            "anchor-fetched",
            f"has the anchor of epoch {version.epoch}",
            epoch=version.epoch,
        )

        def of(which: str) -> dict[str, Tensor]:
            return {name: found.tensors[f"{name}/{which}"] for name in shapes}

        words = self.words
        if self.settings.feedback:
            words = of(WORDS)
        return OuterState(of("anchor"), of("momentum")), words

    def stop(self) -> None:
        """Stop fetching the anchor."""
        if self._search is not None and self._search.task is not None:
            self._search.task.cancel()
        self._search = None


def _flat(state: OuterState) -> dict[str, Tensor]:
    return {f"{name}/anchor": t for name, t in state.anchor.items()} | {
        f"{name}/momentum": t for name, t in state.momentum.items()
    }
