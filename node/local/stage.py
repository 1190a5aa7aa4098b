"""Rank 0's side of a stage: the pipeline, the averaging and the optimizer see it like a stage on
one device. And its start: the choice of devices, the threads of each, the processes.

Every call sends its command first, then does rank 0's part of the program that the other ranks run
(worker.py). The whole parameters are kept on the CPU beside the cut ones, to be fetched, averaged
and saved.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from node.core.errors import DeviceLost
from node.local.optimizer import CutSteps
from node.local.program import Program, local_part
from node.local.ranks import Handle, Ranks
from node.local.split import cut_of
from node.model.device import Device, gpu_number, gpus
from node.model.documents import NO_TARGET, for_loss
from node.model.settings import ModelSettings
from node.model.stages import Ends
from node.optim.settings import OptimSettings
from node.pipeline.gradients import EpochSum, GradientSum, Share
from node.pipeline.guard import NotFinite
from node.pipeline.visit_buffers import Autocast, StageMath
from node.telemetry.resources import cores


class LocalStage:
    """A stage on all devices of this box. ``module``: the whole of it on the CPU; nothing is
    computed with it. ``steps``: the optimizer's, over all ranks."""

    def __init__(
        self,
        ranks: Ranks,
        program: Program,
        module: nn.Module,
        settings: ModelSettings,
        steps: CutSteps,
    ) -> None:
        self.ranks = ranks
        self.program = program
        self.module = module
        self.settings = settings
        self.steps = steps
        self.gradients = CutSum(ranks, program)

    def math(self, module: nn.Module, wire: str, autocast: Autocast) -> StageMath:
        """Arithmetic of the stage for the pipeline; every rank uses ``autocast`` of its own."""
        return CutMath(self.ranks, self.program, self.settings, wire)

    def place(self, whole: Mapping[str, Tensor]) -> None:
        """Distribute these whole parameters to the ranks. Waits for a micro-batch that is being
        computed. Raises DeviceLost."""
        with self.ranks.command("load"):
            self.program.load(whole)


class CutShare(dict[str, Tensor]):
    """Rank 0's part of a micro-batch's parameter gradients; ``handle``: the key under which the
    other ranks keep theirs."""

    def __init__(self, parts: Mapping[str, Tensor], handle: Handle) -> None:
        super().__init__(parts)
        self.handle = handle


class CutMath(StageMath):
    """The arithmetic of a visit, over all ranks. A micro-batch with invalid numbers is refused
    before a command is sent."""

    def __init__(self, ranks: Ranks, program: Program, settings: ModelSettings, wire: str) -> None:
        super().__init__(program.module, wire)
        self.ranks = ranks
        self.program = program
        self.settings = settings
        self._ends = CutEndsMath(self)
        self._trained = {}
        self._device = program.here.device.device
        self._graphs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._made = CutShare({}, Handle(0))

    @property
    def caches_texts(self) -> bool:
        """False: keys and values are kept on one device only, so texts are computed whole here."""
        return False

    def pausing(self, pause: Callable[[], None]) -> None:
        """Do nothing: all ranks are at the same place of a program."""

    def hidden(self, x: Tensor) -> Tensor:
        """``x``, if it is hidden states [B, T, D] fp32; raises ValueError."""
        if x.ndim != 3 or x.shape[-1] != self.settings.d_model or x.dtype != torch.float32:
            raise ValueError(
                f"hidden states are {x.dtype} {tuple(x.shape)}, not fp32 [B, T, "
                f"{self.settings.d_model}]"
            )
        return x

    def ids(self, tokens: Tensor) -> Tensor:
        """``tokens``, if they are token ids; raises IndexError for one outside the vocabulary."""
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.settings.vocab:
            raise IndexError("a token id is outside the vocabulary")
        return tokens

    def told(
        self, what: str, x: Tensor, compute: Callable[[Tensor], Tensor], **words: Any
    ) -> Tensor:
        """Send ``x`` to all ranks and return rank 0's result of ``compute``. The ranks keep their
        graphs as long as the output lives; without gradients they keep none."""
        if torch.is_grad_enabled():
            handle = self.ranks.handle()
        else:
            handle = Handle(0)
        with self.ranks.command(what, keep=handle.number, shape=list(x.shape), **words):
            output = compute(self.program.here.share(x))
        if handle.number:
            self._graphs[output] = handle
        return output

    def _shrink(self, sequences: int) -> bool:
        # A rank that ran out of memory has ended, and all of them with it.
        return False

    def _module(self, x: Tensor, document_ends: tuple[int, ...]) -> Tensor:
        if isinstance(self.module, Ends):
            return self._ends.embed(x, document_ends)
        return self.told(
            "forward",
            self.hidden(x),
            lambda x: self.program.forward(x, document_ends),
            document_ends=document_ends,
        )

    def _grad(
        self, output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        graph = cast(Handle | None, self._graphs.pop(output, None))
        if graph is None:
            raise RuntimeError("the graph was freed, or gone through before")
        if gradient is not None and self.hidden(gradient).shape != output.shape:
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} for an output of "
                f"{tuple(output.shape)}"
            )
        handle = self.ranks.handle()
        shape = None
        if gradient is not None:
            shape = list(gradient.shape)
        with self.ranks.command("backward", graph=graph.number, keep=handle.number, shape=shape):
            seed = None
            if gradient is not None:
                seed = self.program.here.share(gradient.contiguous())
            found, share, finite = self.program.gradients(output, inputs, seed)
        if not finite:
            raise NotFinite("a parameter gradient is not finite")
        self._made = CutShare(share, handle)
        return tuple(found)

    def _share(self, grads: Sequence[Tensor | None]) -> tuple[Share, Tensor | None]:
        # All ranks have checked their parts.
        share = self._made
        self._made = CutShare({}, Handle(0))
        return share, None

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """Storage at rank 0: only its memory is counted."""
        return local_part(tensor).untyped_storage()


class CutEndsMath:
    """Arithmetic of stage 0, over all ranks."""

    def __init__(self, math: CutMath) -> None:
        self._math = math
        self._program = math.program

    def embed(self, tokens_BT: Tensor, document_ends: Sequence[int] = ()) -> Tensor:
        """As :meth:`Ends.embed`."""
        return self._math.told(
            "embed",
            self._math.ids(tokens_BT).contiguous(),
            lambda tokens: self._program.embed(tokens, document_ends),
            document_ends=document_ends,
        )

    def loss(self, h_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, int]:
        """As :meth:`Ends.loss`."""
        self._math.hidden(h_BTD)
        targets_BT = for_loss(targets_BT)
        tokens = self._math.ids(targets_BT[targets_BT != NO_TARGET]).numel()
        if targets_BT.shape != h_BTD.shape[:2]:
            raise ValueError(
                f"targets of shape {tuple(targets_BT.shape)} for hidden states of "
                f"{tuple(h_BTD.shape)}"
            )
        shared = targets_BT.to(h_BTD.device)
        total = self._math.told(
            "loss",
            h_BTD,
            lambda h: self._program.loss(h, self._program.here.share(shared.contiguous())),
        )
        return total, tokens

    def logits(self, h_BTD: Tensor) -> Tensor:
        """As :meth:`Ends.logits`."""
        return self._math.told("logits", self._math.hidden(h_BTD), self._program.logits)


class CutGradients(Mapping[str, Tensor]):
    """Sums of gradients in pieces at the ranks. A sum is gathered on the CPU when it is read, and
    not kept. ``handle``: key of the pieces at the other ranks. A read blocks, so do not make it on
    the event loop. Raises DeviceLost.
    """

    def __init__(
        self, ranks: Ranks, program: Program, parts: Mapping[str, Tensor], handle: Handle
    ) -> None:
        self._ranks = ranks
        self._program = program
        self._parts = parts
        self._handle = handle

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        if cut_of(name) is None:
            return part.cpu()
        with self._ranks.command("gather", number=self._handle.number, name=name):
            return self._program.whole(self._parts, [name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class CutSum(GradientSum):
    """The sum of sharded gradient shares; each rank sums its own parts. The other ranks begin an
    epoch with its first share."""

    def __init__(self, ranks: Ranks, program: Program) -> None:
        super().__init__()
        self._ranks = ranks
        self._program = program
        self._heard = 1
        """Number of the epoch of the last share that the other ranks have added. Changed in their
        turn alone."""

    def whole(self) -> tuple[Mapping[str, Tensor], int]:
        """As for one device. Gradients are gathered on the CPU one at a time. Raises DeviceLost."""
        epoch = self._drained()
        with epoch.lock:
            parts = dict(epoch.sums)
            tokens = epoch.tokens
        if not parts:
            return {}, tokens
        handle = self._ranks.handle()
        with self._ranks.turn():
            if epoch.number != self._heard:
                # The epoch has begun anew meanwhile: the others have other sums, or none.
                return {}, 0
            with self._ranks.command("take", round=epoch.number, number=handle.number):
                return CutGradients(self._ranks, self._program, parts, handle), tokens

    def _add(self, share: Share, epoch: EpochSum) -> None:
        with self._ranks.turn():
            if epoch.number < self._heard:
                return  # the others add shares of a later epoch, and would forget them
            self._heard = epoch.number
            number = cast(CutShare, share).handle.number
            with self._ranks.command("add", round=epoch.number, share=number):
                super()._add(share, epoch)


# Opening one
# ------------------------------------------------------------


def device_names(name: str, count: int) -> list[str]:
    """``count`` devices from the one called ``name`` on: GPUs in the order of their numbers, or the
    CPU ``count`` times.

    "auto" takes GPUs where there are any. Raises UsageFault for another name, OutOfResources for
    more than this machine has.
    """
    wanted = name.strip().lower()
    if wanted == "cpu" or (wanted == "auto" and not gpus()):
        return ["cpu"] * count
    first = 0
    if wanted not in ("auto", "cuda"):
        first = gpu_number(wanted)
    names = [f"cuda:{first + i}" for i in range(count)]
    gpu_number(names[-1])
    return names


def threads_each(threads: int, devices: Sequence[str]) -> int:
    """CPU threads of each device's process: ``threads``, or if that is 0 the cores shared between
    them."""
    return threads or max(1, cores() // len(devices))


async def open_stage(
    devices: Sequence[str],
    device: Device,
    threads: int,
    module: nn.Module,
    model: ModelSettings,
    stages: int,
    stage: int,
    folder: Path,
    on_error: Callable[[str, BaseException], None],
    *,
    optimizer: OptimSettings,
    epochs: int,
) -> LocalStage:
    """Start the processes and cut ``stage`` over them; ``module`` is the whole of it, ``device``
    this process's, the first. ``epochs``: of the run, for the optimizer's schedule.

    ``on_error`` is called on this loop when a device is gone. Raises DeviceLost when one does not
    come up. Call it on the main thread: a process ends with the thread that started it.
    """
    loop = asyncio.get_running_loop()

    def lost(fault: DeviceLost) -> None:
        loop.call_soon_threadsafe(on_error, "local devices", fault)

    ranks = Ranks(folder, lost)
    try:
        ranks.start(devices, model, stages, stage, threads, optimizer=optimizer, epochs=epochs)
        here = await loop.run_in_executor(None, ranks.meet, device)
        program = await loop.run_in_executor(None, Program, here, model, stages, stage)
        steps = CutSteps(ranks, program, optimizer, epochs)
        return LocalStage(ranks, program, module, model, steps)
    except BaseException:  # also cancelled: the processes must not stay
        await asyncio.to_thread(ranks.close)
        raise
