"""This peer's own checkpoints of its stage: written in the background, read back by version; what
is wrong with them and with their disk, for the operator."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from node.checkpoint.store import Checkpoint
from node.core.errors import LocalFault, OutOfResources, Refused
from node.core.ids import PeerId
from node.core.journey import Plan, Version, lineage
from node.core.mass import parse_books
from node.core.samples import parse_cursor, rows
from node.core.tasks import Tasks
from node.optim.state_replica import StateReplica
from node.training.protocol.bounds import Bounds
from node.training.protocol.plan_context import PlanContext
from node.training.state.engines import Engines

TOLD = 3
"""Checkpoints that cannot be used are named in the status up to so many, the others are counted."""


class LocalCheckpoints:
    """One at a time is written, and a disk that is full stops nobody: once it has room again, the
    next epoch is written."""

    def __init__(
        self,
        engines: Engines,
        stage: int,
        tasks: Tasks,
        bounds: Bounds,
        size: int,
    ) -> None:
        """``size``: bytes that a checkpoint has at least."""
        self._engines, self._stage, self._tasks, self._bounds = engines, stage, tasks, bounds
        self._store, self._journal = engines.store, engines.journal
        self._saving: asyncio.Task[None] | None = None
        self._metas: dict[int, dict[str, Any]] | None = None
        self._bad: list[tuple[str, str]] = []
        self._told: set[tuple[str, str]] = set()
        self._failed, self._residual = "", False
        self._size = size

    def due(self, epoch: int) -> bool:
        """Whether a checkpoint of this epoch is to be written: it is its turn, or the last one
        found no room and now there is."""
        every = self._store.settings.every
        return bool(every) and (epoch % every == 0 or (self._residual and self._lacks() == ""))

    def troubles(self) -> list[str]:
        """Sentences for the operator: why nothing is written, which checkpoints cannot be used.
        Looks at the disk's free space."""
        lacks = self._lacks() if self.writes else ""
        found = (
            [self._failed]
            if self._failed and (lacks or not self._residual)
            else [lacks]
            if lacks
            else []
        )
        if self._bad:
            more = f" and {len(self._bad) - TOLD} more" if len(self._bad) > TOLD else ""
            named = "; ".join(f"{name}: {why}" for name, why in self._bad[:TOLD])
            found.append(f"checkpoints that cannot be used stay where they are: {named}{more}")
        return found

    def _lacks(self) -> str:
        """A sentence when the disk has no room for the next checkpoint, by the size of the last
        one."""
        try:
            free = self._store.free()
        except OSError as e:
            return f"the disk of {self._store.root} does not answer: {e.strerror or e}"
        if free > self._size:
            return ""
        return (
            f"the disk is full: a checkpoint has {self._size:,} bytes, and {free:,} are free "
            f"under {self._store.root}"
        )

    @property
    def writes(self) -> bool:
        """Whether any is ever written."""
        return bool(self._store.settings.every)

    def versions(self) -> tuple[Version, ...]:
        """Versions on the disk, oldest first; one that was written without its lineage has none."""
        said = sorted(self._said().items(), key=lambda item: item[0])
        return tuple(Version(e, line) for e, meta in said if (line := _lineage(meta)) is not None)

    def recall(self, version: Version) -> PlanContext | None:
        """Cursor of the sampler, owners and tokens as the checkpoint of ``version`` has them; None
        without one."""
        meta = self._said().get(version.epoch, {})
        if _lineage(meta) != version.lineage:
            return None
        try:
            cursor, owners = parse_cursor(meta["cursor"]), meta["owners"]
            return PlanContext(
                cursor,
                {str(k): PeerId(v) for k, v in owners.items()},
                self.tokens(version.epoch, meta),
                str(meta.get("change", "")),
                books=parse_books(meta["books"]) if "books" in meta else None,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None

    def tokens(self, epoch: int, meta: Mapping[str, Any]) -> int:
        """Tokens counted in the history of a checkpoint; 0 when it does not say, and no more than
        there can be: others would take that for a fault of this peer."""
        value = meta.get("tokens")
        return self._bounds.counted(epoch, value) if type(value) is int and value >= 0 else 0

    async def load(self, version: Version, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
        """The checkpoint of ``version``, verified. Raises Refused when there is none, or it is of
        another model."""
        try:
            found = await self._engines.aside(self._store.load, self._stage, version.epoch)
            copies_of(found.meta)
            if {name: tuple(t.shape) for name, t in found.parameters.items()} != dict(shapes) or {
                name.partition("#")[0] for name in found.optimizer
            } - shapes.keys():
                raise Refused(
                    f"the checkpoint of epoch {version.epoch} is of another model",
                    "use another directory",
                )
        except Refused as e:
            # Nobody is told any more that this peer could go back to it.
            self._store.distrust(self._stage, version.epoch, e.what)
            self._metas = None
            raise
        if _lineage(found.meta) != version.lineage:
            raise Refused(
                f"the checkpoint of epoch {version.epoch} is of another history",
                "use another epoch",
            )
        return found

    def save(
        self,
        epoch: int,
        plan: Plan | None,
        parameters: Mapping[str, Tensor],
        optimizer: Mapping[str, Mapping[str, Tensor]],
        copies: Mapping[str, StateReplica],
        colleagues: Collection[PeerId] = (),
    ) -> None:
        """Write a checkpoint in the background; ``plan`` starts from it and says what goes with it,
        ``colleagues`` with whom this peer has worked.

        ``copies``: of other owners' parts, so that what comes back of a swarm has the state of
        those who do not.
        """
        if self._saving is not None and not self._saving.done():
            text = f"epoch {epoch}: the one before is still being written"
            self._journal.emit("checkpoint", "checkpoint-skipped", text, "warning")
            return
        meta: dict[str, Any] = {
            "epoch": epoch,
            "copies": {n: [c.version.epoch, c.version.lineage] for n, c in copies.items()},
        }
        state = dict(optimizer) | {n: c.state for n, c in copies.items()}
        size = sum(t.nbytes for part in (parameters, *state.values()) for t in part.values())
        self._size = max(self._size, size)
        if plan is not None and plan.epoch == epoch:
            meta |= {
                "lineage": plan.lineage,
                "tokens": plan.tokens,
                "cursor": rows(plan.cursor),
                "owners": plan.owners,
                "change": plan.change,
                "colleagues": sorted(colleagues),
            }
            if plan.window.books is not None:
                meta["books"] = plan.window.books.rows()

        def write() -> tuple[str, dict[int, dict[str, Any]], list[tuple[str, str]]]:
            path = str(self._store.save(self._stage, epoch, parameters, state, meta))
            return path, self._store.metas(self._stage), self._store.problems(self._stage)

        async def saving() -> None:
            try:
                path, self._metas, bad = await asyncio.to_thread(write)
                self._found(bad)
                text = f"epoch {epoch} is on disk"
                if self._failed:
                    self._journal.emit(
                        "checkpoint",
                        "checkpoint-again",
                        f"checkpoints are written again: {text}",
                        epoch=epoch,
                    )
                self._failed, self._residual = "", False
                self._journal.emit(
                    "checkpoint", "checkpoint-written", text, "debug", epoch=epoch, path=path
                )
            except LocalFault as error:
                # A quota leaves the disk itself with room: then the usual turn is waited for.
                self._failed = error.what
                self._residual = isinstance(error, OutOfResources) and bool(self._lacks())
                self._journal.emit(
                    "checkpoint",
                    "checkpoint-failed",
                    f"{error}; {error.next_step}",
                    "error",
                    epoch=epoch,
                )

        self._saving = self._tasks.spawn(saving(), "checkpoint")

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if any. Who is cancelled meanwhile leaves
        it to be written."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    def _said(self) -> dict[int, dict[str, Any]]:
        """What the checkpoints on the disk say of themselves; read again only after one was
        written."""
        if self._metas is None:
            try:
                self._metas = self._store.metas(self._stage)
                self._found(self._store.problems(self._stage))
            except LocalFault as error:
                self._metas = {}
                self._found([(f"stage-{self._stage}", f"{error}; {error.next_step}")])
        return self._metas

    def _found(self, bad: list[tuple[str, str]]) -> None:
        """These cannot be used: each is said once. What was set aside is in nobody's way and no
        trouble of today."""
        self._bad = [(name, why) for name, why in bad if ".aside-" not in name]
        for name, why in bad:
            if (name, why) not in self._told:
                self._told.add((name, why))
                self._journal.emit(
                    "checkpoint",
                    "checkpoint-ignored",
                    f"{name} of stage {self._stage} is not used and stays where it is: {why}",
                    "warning",
                    name=name,
                )


def colleagues_of(meta: Mapping[str, Any]) -> tuple[PeerId, ...]:
    """With whom the peer had worked that wrote a checkpoint; nobody when it does not say."""
    said = meta.get("colleagues")
    return tuple(PeerId(p) for p in said if isinstance(p, str)) if isinstance(said, list) else ()


def copies_of(meta: Mapping[str, Any]) -> dict[str, Version]:
    """Parts whose state in a checkpoint is a copy of another owner's, each with its version. Raises
    Refused."""
    try:
        return {
            name: Version(int(epoch), lineage(line))
            for name, (epoch, line) in meta.get("copies", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as e:
        raise Refused(
            "the checkpoint does not say whose optimizer state it has", "use another epoch"
        ) from e


def _lineage(meta: Mapping[str, Any]) -> str | None:
    try:
        return lineage(meta.get("lineage", ""))
    except ValueError:
        return None
