"""Trials of kernels on a stage: forward and backward at the shape of its micro-batches, by each
kind beside eager's, in a thread of its own within a limit of time.

The stage itself is not touched: a twin of its modules with the same parameters computes, so other
work may go on, and a compiler that hangs holds nothing but its thread.
"""

import asyncio
import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from node.core.home import sync
from node.kernels.choice import KernelDecision, KernelTime, Kind, StageFacts, decide, tried
from node.model.device import Device, device_lost, free_cached
from node.model.kernels import EAGER, Kernels, allow_compiling, compiled, keep_compiled, liger, use
from node.model.precision import Precision
from node.model.stages import Blocks, Ends, go_on

LIMIT_S = 90.0
"""Seconds for all trials. A later start of the same stage finds most of its kernels compiled on
disk, where torch keeps them."""
ROUNDS = 5
"""Timed passes of each of two that are compared."""
ROUNDS_S = 3.0
"""Seconds after which no further round begins."""
STD = 0.02
"""Standard deviation of a drawn gradient."""
Makers = Mapping[Kind, Callable[[], Kernels]]
MAKERS: Makers = {"compile": compiled, "liger": liger}


class _Ended(Exception):
    """The trials are over: nobody waits for their result."""


class MicroBatch(NamedTuple):
    """Size of the micro-batches of a stage. ``documents``: the sequences keep documents apart."""

    sequences: int
    tokens: int
    documents: bool


class Unended:
    """Trials that a process did not live to end, kept as files in the peer's ``home``. Kernels may
    end the process, or the card's use to it: the next start must not try them again."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def known(self, kind: Kind) -> bool:
        """Return True if an earlier process with this torch did not end its trial of a kind."""
        with contextlib.suppress(OSError, ValueError):
            return self._path(kind).read_text(encoding="utf-8") == torch.__version__
        return False

    def begin(self, kind: Kind) -> None:
        """A trial begins. Its file outlives the machine, which a driver may stop."""
        path = self._path(kind)
        with contextlib.suppress(OSError):
            path.write_text(torch.__version__, encoding="utf-8")
            sync(path)
            sync(self._home)

    def end(self, kind: Kind) -> None:
        """A trial is over, or nobody waits for it."""
        with contextlib.suppress(OSError):
            self._path(kind).unlink(missing_ok=True)

    def said(self, kind: Kind) -> str:
        """The reason for which a kind is left out, and the way back."""
        path = self._path(kind)
        return f"{kind}: the process ended in its last trial; remove {path} to try it again"

    def _path(self, kind: Kind) -> Path:
        return self._home / f"kernels-tried-{kind}"


class Passes:
    """A twin of a stage that computes forward and backward of a drawn micro-batch."""

    def __init__(
        self, module: Ends | Blocks, precision: Precision, micro_batch: MicroBatch
    ) -> None:
        self.module = _twin(module)
        self._precision = precision
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._trained = [*trained.values()]
        self._norms = [i for i, name in enumerate(trained) if name.endswith("norm.weight")]
        device = next(iter((*module.parameters(), *module.buffers()))).device
        draw = torch.Generator(device).manual_seed(1)
        sequences, tokens, _ = micro_batch
        shape = (2, sequences, tokens, module.settings.d_model)
        self._x, self._dy = torch.randn(shape, generator=draw, device=device)
        draw = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(module.settings.vocab, (sequences, tokens), generator=draw)

    def __call__(self, kernels: Kernels) -> list[Tensor]:
        """The output, the gradient of the input, and those of norms. The gradients of matrices are
        computed and let go, as they take as much memory as the stage."""
        use(self.module, kernels)
        x = self._x.detach().requires_grad_()
        module = self.module
        if not isinstance(module, Ends):
            with self._precision.autocast():
                y = module(x)
            return [y.detach(), *self._gradients(y, x, STD * self._dy)]
        with self._precision.autocast():
            # The layers of the ends alone: a gradient of the whole embedding tells nothing.
            y = module.through(x)
            loss, _ = module.loss(y, self._tokens)
        return [loss.detach(), *self._gradients(loss, x, None)]

    def _gradients(self, output: Tensor, x: Tensor, dy: Tensor | None) -> list[Tensor]:
        seed = None if dy is None else dy.to(output.dtype)
        dx, *found = torch.autograd.grad(output, [x, *self._trained], seed, allow_unused=True)
        kept = (dx, *(found[i] for i in self._norms))
        return [gradient for gradient in kept if gradient is not None]


class KernelTrials:
    """Measurements of one stage; :meth:`run` is called in a thread. ``times``: of the kinds that
    are done."""

    def __init__(self, device: Device, makers: Makers, unended: Unended) -> None:
        self.times: dict[Kind, KernelTime] = {}
        self.made: dict[Kind, Kernels] = {}
        self.running: Kind | None = None
        self._device = device
        self._makers = makers
        self._unended = unended
        self._stop = Event()

    def stop(self) -> None:
        """Begin nothing more; a pass that is under way goes on to its end."""
        self._stop.set()

    def run(self, kinds: Sequence[Kind], make: Callable[[], Passes]) -> None:
        """Measure these kinds, one after the other. An error of one is its ``problem``."""
        self._device.make_current()
        passes = make()
        truth = self._pass(passes, EAGER)
        for kind in kinds:
            if self._stop.is_set():
                return
            self.running = kind
            self._unended.begin(kind)
            try:
                self._measure(kind, passes, truth)
            except _Ended:
                # Where nobody waits any more, a trial may have begun after the last look at it.
                self._unended.end(kind)
                return
            except Exception as e:  # noqa: BLE001 - a compiler raises errors of any kind
                self.times[kind] = KernelTime(problem=_short(e))
                if device_lost(e):
                    self.running = None
                    return
            self._unended.end(kind)
            self.running = None
            free_cached()  # not in the handler: the exception keeps tensors alive

    def _measure(self, kind: Kind, passes: Passes, truth: list[Tensor]) -> None:
        if kind == "compile":
            allow_compiling()
        kernels = self._makers[kind]()
        error = _difference(self._pass(passes, kernels), truth)
        ratio = self._ratio(passes, kernels)
        self.made[kind] = kernels
        self.times[kind] = KernelTime(ratio, error)

    def _ratio(self, passes: Passes, kernels: Kernels) -> float:
        """Eager's time over that of ``kernels``, in turns."""
        seconds: dict[str, list[float]] = {EAGER.name: [], kernels.name: []}
        began = time.perf_counter()
        for _ in range(ROUNDS):
            for one in (EAGER, kernels):
                start = time.perf_counter()
                self._pass(passes, one)
                seconds[one.name].append(time.perf_counter() - start)
            if time.perf_counter() - began > ROUNDS_S:
                break
        return median(seconds[EAGER.name]) / median(seconds[kernels.name])

    def _pass(self, passes: Passes, kernels: Kernels) -> list[Tensor]:
        if self._stop.is_set():
            raise _Ended
        found = passes(kernels)
        self._device.synchronise()
        return found


async def choose_kernels(
    asked: str,
    module: Ends | Blocks,
    device: Device,
    precision: Precision,
    micro_batch: MicroBatch,
    home: Path,
    makers: Makers = MAKERS,
    limit_s: float = LIMIT_S,
) -> KernelDecision:
    """Measure the kernels that can be had on a stage, and let the stage compute by the fastest.
    ``asked``: the operator's setting; ``home``: a directory of this peer. Never fails, and takes
    ``limit_s`` seconds at most: the stage goes on with torch's own operations otherwise."""
    facts = StageFacts(
        asked,
        device.is_cuda,
        precision.format,
        micro_batch.documents,
        find_spec("triton") is not None,
        find_spec("liger_kernel") is not None,
    )
    wanted, problems = tried(facts)
    unended = Unended(home)
    problems += [unended.said(kind) for kind in wanted if unended.known(kind)]
    kinds: list[Kind] = [kind for kind in wanted if not unended.known(kind)]
    if not kinds:
        return decide(facts, {}, problems)
    trials = KernelTrials(device, makers, unended)
    make = partial(Passes, module, precision, micro_batch)
    try:
        problem = await _within(limit_s, partial(trials.run, kinds, make))
    finally:
        trials.stop()
        running = trials.running
        if running is not None:
            unended.end(running)
    if problem:
        problems.append(f"{running or EAGER.name}: {problem}")
    found = decide(facts, dict(trials.times), problems)
    if found.name != "eager":
        use(module, trials.made[found.name])
    if found.name == "compile":
        keep_compiled()
    return found


async def _within(seconds: float, act: Callable[[], None]) -> str:
    """Run ``act`` in a thread that nobody waits for at the end of the process: why it is not done
    after ``seconds``, or its error; "" if it is done."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def tell(problem: str) -> None:
        if not done.done():
            done.set_result(problem)

    def work() -> None:
        problem = ""
        try:
            act()
        except Exception as e:  # noqa: BLE001 - memory that ran out, a card that is gone
            problem = _short(e)
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, problem)

    Thread(target=work, name="kernels", daemon=True).start()
    try:
        return await asyncio.wait_for(done, seconds)
    except TimeoutError:
        return f"not done after {seconds:.0f} s"


def _twin(module: Ends | Blocks) -> Ends | Blocks:
    """A copy of the modules of a stage with the very same parameters, buffers and 16-bit copies,
    which never pauses for other work."""
    held = (*module.parameters(), *module.buffers())
    shared: dict[int, object] = {id(kept): kept for kept in (*held, module.copies)}
    if (pause := vars(module).get("pause")) is not None:
        shared[id(pause)] = go_on
    return copy.deepcopy(module, shared)


def _difference(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest |difference| / |truth|; infinite for numbers that are not finite."""
    errors = [
        float(
            torch.linalg.vector_norm(f.double() - t.double()) / torch.linalg.vector_norm(t.double())
        )
        for f, t in zip(found, truth, strict=True)
    ]
    if any(map(math.isnan, errors)):
        return math.inf
    return max(errors)


def _short(error: BaseException) -> str:
    """The first line of an error, for people."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
