"""One Muon step beside the public Muons: torch, pytorch_optimizer, heavyball, optimuon.
Interleaved, one process.

    python -m benchmarks.kernels [--json -] [--minutes 10] [--rounds 7] [--quick] [--busy]
        [--compile-all]

  4 mixed    two layers of Qwen3-0.6B: q, k, v, o, gate, up, down
  4 shape    one shape at a time, small ones in the number that a model of the width has
  4 GEMM     floating-point operations done, over the measured rate of plain products in the same
             format

A step is momentum, Nesterov, five Newton-Schulz steps and the update, fp32 parameters and
gradients, no weight decay. Ours is ``Owner.step_all`` with the default settings, as a daemon does
it: checks, staging and commit included. It hands out fresh parameters where the others write over
the old ones, by the rule that is measured first. All have the format of their own choice; optimuon
also in bf16. Ratios above 1: ours is faster. Beside the medians stand the shortest times, which
company on the machine disturbs less.

A peer that takes 20 times as long as ours is stopped, within its first step; one that takes more
than 1.5 times as long as the best peer is timed once. The time left is shared among the lists that
are left, by their operations: less of it is fewer rounds. Exactness: quintic is the polynomial of
the most exact peer, with the same operations as ours by default, which is torch's.
"""

import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.report import Report, command_line, cpuinfo
from node.app.tuning import tune
from node.core.memory import keep_freed
from node.model.device import set_threads
from node.optim.kernel_rule import way
from node.optim.newton_schulz import newton_schulz_all, rule_of
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from testbed.reference.qwen3 import MODELS, split_form
from testbed.reference.swarm import step_all

Shape = tuple[int, int]
Step = Callable[[], None]
LR = 0.02
MU = 0.95
STEPS = 5
LAYERS = 2
MIXED: tuple[Shape, ...] = tuple((m.rows, m.cols) for m in split_form(MODELS["0.6B"])[: 7 * LAYERS])
SINGLES: tuple[tuple[Shape, int], ...] = (
    ((64, 64), 64),
    ((64, 256), 32),
    ((128, 128), 32),
    ((512, 128), 16),
    ((256, 256), 16),
    ((256, 1024), 8),
    ((512, 512), 8),
    ((512, 2048), 4),
    ((1024, 1024), 2),
    ((2048, 1024), 2),
    ((3072, 1024), 2),
    ((1024, 3072), 2),
)
SHORT = 1 << 21
"""Total elements up to which a step is so short that five times more steps are measured."""
OURS = "ours"
QUINTIC = "ours, quintic"
COMPILED = "heavyball, compiled"
STOP = 20
"""Multiple of our time after which a peer is stopped."""
AT_LEAST_S = 1.0
"""But not sooner: a first step makes kernels and state."""
CLOSE = 1.5
"""Times the best peer's time up to which a peer is timed more than once."""
MINUTES = 10.0
BUDGET = 0.9
"""Share of the time that is planned with: a step under way is not cut short."""


class TooSlowError(Exception):
    """A peer was stopped."""


@dataclass
class Contestant:
    """``step`` steps ``parameters`` in place or ``fresh`` gives the new ones; ``ready`` sets
    gradients, outside the clock."""

    step: Step
    ready: Step
    now: Callable[[], list[torch.Tensor]]


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for the whole table")
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="timed steps of each contestant, as long as there is time",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the mixed list and four shapes, at two threads"
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="others use this machine: one thread, processor time, not the clock",
    )
    parser.add_argument(
        "--compile-all",
        action="store_true",
        help="heavyball compiled for every shape (a minute each)",
    )
    args = parser.parse_args()
    report = Report()
    speed(
        report,
        args.rounds,
        quick=args.quick,
        busy=args.busy,
        compile_all=args.compile_all,
        minutes=args.minutes,
    )
    return report.end(args.json)


def speed(
    report: Report,
    rounds: int = 7,
    *,
    quick: bool = False,
    busy: bool = False,
    compile_all: bool = False,
    minutes: float = MINUTES,
    number: str = "4",
) -> None:
    """The rows of item ``number``, at two threads and at one, and on a GPU if there is one."""
    keep_freed()  # as a daemon does; here for all contestants
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tutti-kernels-") as folder:
        tuned = tune(Path(folder))
    report.add(
        f"{number} the rule is measured",
        round(tuned.seconds, 2),
        "s of processor time",
        str(tuned.rule),
        "<= 5",
        tuned.seconds <= 5,
    )
    threads = torch.get_num_threads()
    scenes = [
        Scene(torch.device("cpu"), f"{n} thread{'s' if n > 1 else ''}", rounds, n, busy, number)
        for n in ((1,) if busy else (2,) if quick else (2, 1))
    ]
    if torch.cuda.is_available():
        scenes.append(
            Scene(
                torch.device("cuda"), torch.cuda.get_device_name(), rounds, threads, number=number
            )
        )
    lists = [("mixed", MIXED, compile_all or not quick)]
    lists += [
        (f"{n} of {r}x{c}", ((r, c),) * n, compile_all)
        for (r, c), n in (SINGLES[::4] if quick else SINGLES)
    ]
    if quick:  # the long list last: where a peer is slow, its first step alone takes a minute
        lists.reverse()
    tables = [(scene, *each, _weight(scene, each[1])) for scene in scenes for each in lists]
    try:
        for i, (scene, name, shapes, compiled, weight) in enumerate(tables):
            left = 60 * BUDGET * minutes - (time.monotonic() - began)
            if left <= 0:
                report.add(f"{number} {name}, {scene.name}: no time was left", 0, "", holds=False)
                continue
            set_threads(scene.threads)
            scene.table(
                report,
                name,
                shapes,
                compiled,
                left * weight / sum(other[-1] for other in tables[i:]),
            )
    finally:
        torch.set_num_threads(threads)
    took = (time.monotonic() - began) / 60
    report.add(
        f"{number} the whole table", round(took, 1), "min", "", f"<= {minutes:g}", took <= minutes
    )


def _weight(scene: "Scene", shapes: Sequence[Shape]) -> float:
    """How much of the time a list gets: by its operations, and a second's worth for what does not
    depend on them."""
    return (sum(_standard(shape) for shape in shapes) + 1e10) / scene.threads


def _standard(shape: Shape) -> int:
    return STEPS * (4 * max(shape) * min(shape) ** 2 + 2 * min(shape) ** 3)


def target(name: str) -> float:
    """The least ratio that is asked for: of the mixed list by what the processor multiplies bf16
    with."""
    words = {word for line in cpuinfo() if line.startswith("flags") for word in line.split()}
    if name != "mixed" or os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return 0.95
    return 1.3 if "amx_bf16" in words else 1.2 if "avx512_bf16" in words else 0.95


@contextmanager
def at_most(seconds: float, *, busy: bool = False) -> Iterator[None]:
    """Raise TooSlowError in the block after `seconds`, between two calls of torch. `busy`: seconds
    of processor time."""

    def stop(*_: object) -> NoReturn:
        raise TooSlowError

    number, timer = (
        (signal.SIGPROF, signal.ITIMER_PROF) if busy else (signal.SIGALRM, signal.ITIMER_REAL)
    )
    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@dataclass(frozen=True)
class Scene:
    """Where and how it is measured. ``busy``: processor time of this thread instead of the
    clock."""

    device: torch.device
    name: str
    rounds: int
    threads: int
    busy: bool = False
    number: str = "4"

    def table(
        self, report: Report, name: str, shapes: Sequence[Shape], compiled: bool, seconds: float
    ) -> None:
        """Add rows of all contestants on one list of shapes: speed, orthogonality, and the share of
        the GEMM rate.

        `seconds`: time after which no further round begins.
        """
        ends = time.monotonic() + seconds
        errors: dict[str, float] = {}
        times: dict[str, list[float]] = {}
        known = contestants(shapes, self.device, compiled)
        stopped = self.first_steps(known, shapes, errors, times)
        racing = [what for what in known if what not in stopped]
        short = sum(rows * cols for rows, cols in shapes) <= SHORT
        for turn in range(5 * self.rounds if short else self.rounds):
            if turn and time.monotonic() > ends:
                break
            for what in racing:
                known[what].ready()
                times[what].append(self.timed(known[what].step))
            if not turn:
                peers = (times[what][0] for what in racing if not what.startswith(OURS))
                fastest = min(peers, default=math.inf)
                racing = [
                    what
                    for what in racing
                    if what == OURS or times[what][0] <= CLOSE * fastest and what != QUINTIC
                ]
        best = {what: statistics.median(each) for what, each in times.items()}
        peers = {what: median for what, median in best.items() if not what.startswith(OURS)}
        peer = min(peers, key=lambda what: peers[what], default="")
        told = ", ".join(
            [
                f"{what} {1e3 * median:.2f} ms (least {1e3 * min(times[what]):.2f} of "
                f"{len(times[what])})"
                for what, median in sorted(best.items(), key=lambda item: item[1])
            ]
            + [f"{what} stopped at {STOP} times ours" for what in stopped]
        )
        least, ratio, label = (
            target(name),
            # Where every peer was stopped, the best of them takes at least STOP times our time.
            peers[peer] / best[OURS] if peer else STOP,
            f"{self.number} {name}, {self.name}",
        )
        report.add(
            f"{label}, speed over the best peer",
            round(ratio, 3),
            f"times that of {peer}" if peer else "times, every peer stopped",
            told,
            f">= {least}",
            ratio >= least,
        )
        said = ", ".join(f"{what} {error:.3f}" for what, error in errors.items())
        exact = min(
            (what for what in errors if not what.startswith(OURS)),
            key=lambda what: errors[what],
            default="",
        )
        # Nothing to compare with where every peer was stopped.
        fine = None
        if exact:
            fine = errors[QUINTIC] <= 1.05 * errors[exact] and (
                "torch" not in errors or errors[OURS] <= 1.05 * errors["torch"]
            )
        asked = "quintic <= 1.05 of the most exact peer, ours <= 1.05 of torch"
        report.add(
            f"{label}, |O O^T - I| / sqrt(m)", round(errors[QUINTIC], 3), exact, said, asked, fine
        )
        self.rates(report, label, shapes, ends)

    def first_steps(
        self,
        known: dict[str, Contestant],
        shapes: Sequence[Shape],
        errors: dict[str, float],
        times: dict[str, list[float]],
    ) -> list[str]:
        """Everybody's first step, which warms up and gives ``errors``; who takes too long for one
        is given back, and left out of both."""
        stopped = []
        began = self.clock()
        errors[OURS] = _orthogonality(known[OURS], shapes)
        ours = self.clock() - began
        for what, one in known.items():
            if what != OURS:
                try:
                    # Compiling is no step.
                    with at_most(
                        3600 if what == COMPILED else max(AT_LEAST_S, STOP * ours), busy=self.busy
                    ):
                        errors[what] = _orthogonality(one, shapes)
                except TooSlowError:
                    stopped.append(what)
                    continue
            times[what] = []
        return stopped

    def rates(self, report: Report, label: str, shapes: Sequence[Shape], ends: float) -> None:
        """Our orthogonalisation alone against the best rate of plain products of the same formats,
        interleaved."""
        matrices = _numbers(shapes, self.device, 2)
        device = self.device
        kinds = {shape: flops(shape, device) for shape in dict.fromkeys(shapes)}
        done = {
            kind: sum(kinds[s][0] for s in shapes if kinds[s][1] is kind)
            for _, kind in kinds.values()
        }
        side = 1024 if device.type == "cpu" else 4096
        squares = {kind: torch.randn(4, side, side, device=device).to(kind) for kind in done}
        times: list[float] = []
        alone: dict[torch.dtype, list[float]] = {kind: [] for kind in done}
        stacked: dict[torch.dtype, list[float]] = {kind: [] for kind in done}
        for turn in range(self.rounds):
            if turn and time.monotonic() > ends:
                break
            times.append(self.timed(lambda: _ignore(newton_schulz_all(matrices, STEPS, True))))
            for kind, many in squares.items():
                alone[kind].append(self.timed(lambda x=many: _ignore([one @ one for one in x])))
                stacked[kind].append(self.timed(lambda x=many: _ignore(x @ x)))
        seconds = statistics.median(times)
        rate = {
            k: 8 * side**3 / min(statistics.median(alone[k]), statistics.median(stacked[k]))
            for k in done
        }
        ideal = sum(amount / rate[kind] for kind, amount in done.items())
        standard = sum(_standard(shape) for shape in shapes)
        said = ", ".join(f"{kind} {1e-9 * each:.0f}" for kind, each in rate.items()).replace(
            "torch.", ""
        )
        what = (
            f"{1e-9 * sum(done.values()) / seconds:.0f} GFLOP/s done, "
            f"{1e-9 * standard / seconds:.0f} by the standard count"
        )
        report.add(
            f"{label}, orthogonalising over the GEMM rate",
            round(ideal / seconds, 3),
            f"of {said} GFLOP/s",
            what,
        )

    def timed(self, step: Step) -> float:
        """Seconds it takes."""
        _wait(self.device)
        start = self.clock()
        step()
        _wait(self.device)
        return self.clock() - start

    def clock(self) -> float:
        """Seconds: of this thread's processor time on a busy machine."""
        return time.thread_time() if self.busy else time.perf_counter()


def contestants(
    shapes: Sequence[Shape], device: torch.device, compiled: bool
) -> dict[str, Contestant]:
    """All of them, on parameters and gradients of their own with equal numbers."""
    made = {OURS: _ours(shapes, device), QUINTIC: _ours(shapes, device, "quintic")}
    plain = {"lr": LR, "momentum": MU, "nesterov": True, "ns_steps": STEPS, "weight_decay": 0.0}
    made["torch"] = _peer(shapes, device, lambda ps: torch.optim.Muon(ps, **plain))
    try:
        import pytorch_optimizer

        muon = pytorch_optimizer.Muon
        made["pytorch_optimizer"] = _peer(
            shapes, device, lambda ps: muon([{"params": ps, "use_muon": True}], **plain)
        )
    except ImportError as error:
        print(f"pytorch_optimizer is left out: {error}", file=sys.stderr)
    try:
        import optimuon

        of_optimuon = {**plain, "normuon": False}
        made["optimuon"] = _peer(shapes, device, lambda ps: optimuon.Muon(ps, **of_optimuon))
        made["optimuon, bf16"] = _peer(
            shapes, device, lambda ps: optimuon.Muon(ps, ns_dtype=torch.bfloat16, **of_optimuon)
        )
    except ImportError as error:
        print(f"optimuon is left out: {error}", file=sys.stderr)
    try:
        made["heavyball"] = _heavyball(shapes, device, None)
        if compiled:
            made[COMPILED] = _heavyball(shapes, device, "max-autotune-no-cudagraphs")
        else:
            print(
                "heavyball compiled is left out here: it compiles a minute for each shape "
                "(--compile-all)",
                file=sys.stderr,
            )
    except ImportError as error:
        print(f"heavyball is left out: {error}", file=sys.stderr)
    return made


def _numbers(shapes: Sequence[Shape], device: torch.device, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(device) for shape in shapes]


def _ours(
    shapes: Sequence[Shape], device: torch.device, coefficients: str = "simple"
) -> Contestant:
    owner = Owner(
        OptimSettings(lr=LR, momentum=MU, ns_steps=STEPS, warmup=0, coefficients=coefficients), 0
    )
    names = [f"model.layers.{i}.w.weight" for i in range(len(shapes))]
    parameters = dict(zip(names, _numbers(shapes, device, 0), strict=True))
    given = dict(zip(names, _numbers(shapes, device, 1), strict=True))
    gradients: dict[str, torch.Tensor] = {}
    epoch = 0

    def ready() -> None:  # as for the others: a gradient has just been made, so it is in the cache
        gradients.update((name, gradient.clone()) for name, gradient in given.items())

    def step() -> None:
        nonlocal epoch
        parameters.update(step_all(owner, parameters, gradients, epoch))
        epoch += 1

    return Contestant(step, ready, lambda: [parameters[name] for name in names])


def _peer(
    shapes: Sequence[Shape],
    device: torch.device,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
) -> Contestant:
    parameters = [torch.nn.Parameter(p) for p in _numbers(shapes, device, 0)]
    gradients = _numbers(shapes, device, 1)
    optimizer = make(parameters)

    def ready() -> None:  # some write into the gradient
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()

    return Contestant(
        lambda: (optimizer.step(), None)[1], ready, lambda: [p.detach() for p in parameters]
    )


def _heavyball(shapes: Sequence[Shape], device: torch.device, mode: str | None) -> Contestant:
    import heavyball

    numbers = {
        "lr": LR,
        "betas": (MU, 0.99),
        "weight_decay": 0,
        "warmup_steps": 0,
        "nesterov": True,
    }
    heavyball.utils.compile_mode = mode
    made = _peer(shapes, device, lambda ps: heavyball.Muon(ps, **numbers))

    def ready() -> None:
        heavyball.utils.compile_mode = mode
        made.ready()

    return Contestant(made.step, ready, made.now)


def _orthogonality(one: Contestant, shapes: Sequence[Shape]) -> float:
    """Mean over at most seven matrices of |O O^T - I|_F / sqrt(m) of the first step's update O;
    also the warm-up."""
    before = [p.clone() for p in one.now()[:7]]
    one.ready()
    one.step()
    found = []
    for old, new, (rows, cols) in zip(before, one.now()[:7], shapes[:7], strict=True):
        update = (old - new).double().cpu() / (LR * max(1, rows / cols) ** 0.5)
        wide = update if rows <= cols else update.mT
        found.append(
            float(torch.linalg.matrix_norm(wide @ wide.mT - torch.eye(len(wide))))
            / len(wide) ** 0.5
        )
    return statistics.mean(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops(shape: Shape, device: torch.device) -> tuple[float, torch.dtype]:
    """Operations that orthogonalising one matrix of this shape takes as we do it, panels not
    counted off, and the format."""
    m, n = sorted(shape)
    chosen = way(m, n, rule_of(device))
    done = 8 * n * m * m + 28 * m**3 if chosen.gram else STEPS * (4 * n * m * m + 2 * m**3)
    return float(done), torch.bfloat16 if chosen.precision == "bf16" else torch.float32


def _ignore(_: object) -> None:
    return None


if __name__ == "__main__":
    sys.exit(main())
