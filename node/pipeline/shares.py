"""Shares of the parameter gradients that count, on their way from the visit that made them to the
sum of an epoch."""

import asyncio
from collections import ChainMap
from collections.abc import Mapping

from torch import Tensor

from node.core.errors import OutOfResources
from node.model.device import out_of_memory
from node.pipeline.device import Priority
from node.pipeline.events import Crossing, Key
from node.pipeline.gradients import GradientSum
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.stash import Stash
from node.pipeline.origin import Origin
from node.wire.sketch import Sketch


class CountedShares:
    """Adds the shares that count to ``gradients``, on the device thread."""

    def __init__(
        self, host: PipelineHost, stash: Stash, origin: Origin, gradients: GradientSum
    ) -> None:
        self._host = host
        self._stash = stash
        self._origin = origin
        self._gradients = gradients
        self.tokens: dict[int, int] = {}
        """Tokens of each micro-batch of the plan that counts here."""
        self.sketches: dict[int, Mapping[Crossing, Sketch]] = {}
        """Sketches of the tensors of these micro-batches."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this epoch with a share that counts here."""
        return self._gradients.micro_batches

    def reset(self) -> None:
        """Forget the shares of the former plan."""
        self.tokens.clear()
        self.sketches.clear()
        self._gradients.reset()

    def commit(self, key: Key) -> None:
        """Count the share of a visit."""
        work = self._stash.get(key)
        if work is None:
            return
        # At the origin, the visit at the end of the route computed the loss and knows the tokens.
        last = None if key.position else self._origin.at_last(key)
        ends = (work,) if last is None else (last, work)
        shares = [w.share for w in ends if w.share is not None]
        work.share = None
        self.tokens[key.index] = ends[0].tokens
        self.sketches[key.index] = dict(ChainMap(*(w.sketches for w in ends)))
        self._gradients.offer(shares, ends[0].tokens)
        adding = self._host.device.enqueue(Priority.COMMIT, self._gradients.drain)
        asyncio.wrap_future(adding).add_done_callback(self._added)

    def _added(self, adding: asyncio.Future[None]) -> None:
        if not adding.cancelled() and (error := adding.exception()) is not None:
            self._host.telemetry.emit(
                "gradients-not-added",
                f"gradients could not be added, which is tried again: {error}",
                "error",
            )

    async def whole(self) -> tuple[Mapping[str, Tensor], int]:
        """Return (sums of the counted shares by parameter name, number of tokens in them). Raises
        OutOfResources if there is no memory for the sums."""
        try:
            return await asyncio.to_thread(self._gradients.whole)
        except (RuntimeError, MemoryError) as e:
            if not out_of_memory(e):
                raise
            raise OutOfResources(
                f"no memory for the gradients of an epoch: {e}",
                "free memory of the device, or host another stage (--stage)",
            ) from e
