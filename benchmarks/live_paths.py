"""Epochs of live swarms over a wide-area network: planned paths with a third of the stages left
out, beside paths in turns.

    python -m benchmarks.live_paths [--json -] [--epochs 20] [--only planned-33,turns]
        [--curve FILE]

Eight daemons in network namespaces: two at the ends, three block stages of two. Daemon i is at
place i of SkipPipe's setting A; its links have the published delays and the published bandwidths
over ``SCALE``, so that a small model's activations take as long on the way, relative to its
computation, as theirs. One peer, of the middle stage, is stopped for two thirds of the time. Every
swarm trains from the same parameters on the same samples; an epoch is measured from commit to
commit, in the last five. Needs root. The machine's other work is in every figure.
"""

import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report, chosen, command_line
from benchmarks.shared import curve as drawing
from benchmarks.shared.places import PLACES, link
from testbed.daemons.books import PLANNED, commits
from testbed.daemons.fleet import Box, Hang, Peer
from testbed.daemons.told import Chronicle, Told
from testbed.networks.wan import Wan, why_not

NODES = (2, 2, 2, 2)
EPOCHS = 20
MEASURED = 5
SCALE = 40.0
"""Published bandwidth over ours."""
SLOW = "stage-2-1"
STOPPED_S = 0.10
RUNS_S = 0.05
MODEL: dict[str, Any] = {
    "model.layers": 3,
    "model.d_model": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.d_ff": 64,
    "model.seq_len": 128,
    "pipeline.stages": 3,
    "pipeline.micro_batch": 8,
    "training.target_batch": 96,
    "training.epochs": 100_000,
    "training.eval_every": 0,
    "training.rebalance_every_s": 0.0,
    "training.epoch_timeout_s": 180.0,
    "averaging.round_timeout_s": 60.0,
    "optimizer.warmup": 2,
    "pipeline.forward_timeout_s": 60.0,
    "data.source": "builtin:pydoc",
}
"""Twelve micro-batches of 128 KiB in an epoch, six for each ends peer as published."""
NODE = (
    "checkpoint.every=0",
    "limits.in_flight=3",
    "directory.refresh_s=5",
    "transport.keepalive_timeout_s=20",
    "transport.dial_timeout_s=30",
)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "planned-33": (
        "planned paths, a third left out",
        {"scheduler.paths": "planned", "scheduler.skip": 0.34, "pipeline.may_skip": 0.34},
    ),
    "turns": (
        "round robin over all stages",
        {"scheduler.paths": "round-robin", "scheduler.skip": 0.0},
    ),
    "planned-full": (
        "planned paths, nothing left out",
        {"scheduler.paths": "planned", "scheduler.skip": 0.0},
    ),
    "turns-33": (
        "round robin, a third left out",
        {"scheduler.paths": "round-robin", "scheduler.skip": 0.34, "pipeline.may_skip": 0.34},
    ),
}
TARGET = 0.65
LOAD_S, EPOCH_S = 600.0, 60.0
"""Bounds: eight daemons that load torch on two busy cores; an epoch."""


@dataclass(frozen=True)
class Measured:
    """One swarm. ``seconds``: between the last commits; ``run_s``: of that, from plan to the last
    micro-batch; ``curve``: (tokens counted, training loss) by epoch."""

    seconds: tuple[float, ...]
    run_s: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]
    dropped: int
    predicted_s: tuple[float, ...] = field(default=())

    @property
    def epoch_s(self) -> float:
        return median(self.seconds)


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--epochs",
        type=int,
        default=EPOCHS,
        help=f"of every swarm; the last {MEASURED} are measured",
    )
    parser.add_argument("--only", default=",".join(SETTINGS), help=f"some of {', '.join(SETTINGS)}")
    parser.add_argument(
        "--curve",
        metavar="FILE",
        type=Path,
        help="write the training curves as SVG, and as JSON beside it",
    )
    args = parser.parse_args()
    report = Report()
    rows(report, args.epochs, chosen(parser, args.only, SETTINGS), args.curve)
    return report.end(args.json)


def rows(
    report: Report,
    epochs: int = EPOCHS,
    only: Sequence[str] = tuple(SETTINGS),
    curve: Path | None = None,
) -> None:
    """The rows of item 4. Without the right to make network namespaces: one row that says so, and
    does not hold."""
    if why := why_not():
        report.add("4 live swarms", 0, "swarms measured", why, "4", False)
        return
    found: dict[str, Measured] = {}
    for name in only:
        said, changes = SETTINGS[name]
        got = found[name] = measure(changes, epochs)
        spread = (
            f"{min(got.seconds):.2f} to {max(got.seconds):.2f} s in {len(got.seconds)} "
            "epochs, median; micro-batches "
        )
        spread += f"{median(got.run_s):.2f} s of it; {got.dropped} dropped"
        if got.predicted_s:
            spread += f"; predicted {median(got.predicted_s):.2f} s"
        report.add(f"4 epoch, {said}", got.epoch_s, "s", spread)
    ours = found.get("planned-33")
    for name in ("turns", "planned-full", "turns-33"):
        if ours is None or name not in found:
            continue
        other = found[name]
        said = SETTINGS[name][0]
        ratio = ours.epoch_s / other.epoch_s
        text = (
            f"{ours.epoch_s:.2f} s over {other.epoch_s:.2f} s; micro-batches alone "
            f"{median(ours.run_s) / median(other.run_s):.3f}"
        )
        wanted = (f"at most {TARGET}", ratio <= TARGET) if name == "turns" else ("", None)
        report.add(
            f"4 planned, a third left out, over {said}",
            ratio,
            "x of epoch times",
            text,
            *wanted,
        )
    _losses(report, found)
    if curve:
        lines = {
            SETTINGS[name][0]: [(float(t), loss) for t, loss in got.curve]
            for name, got in found.items()
        }
        curve.write_text(
            drawing.curves(
                "Training loss by tokens, eight daemons", "tokens", "nats per token", lines
            )
        )
        curve.with_suffix(".json").write_text(json.dumps(lines))


def _losses(report: Report, found: dict[str, Measured]) -> None:
    """Both curves at the same tokens: with and without skipping."""
    a = found.get("planned-33")
    b = found.get("turns") or found.get("planned-full")
    if a is None or b is None:
        return
    theirs = dict(b.curve)
    both = [(tokens, loss, theirs[tokens]) for tokens, loss in a.curve if tokens in theirs]
    if not both:
        return
    points = [
        both[i] for i in sorted({len(both) // 4, len(both) // 2, 3 * len(both) // 4, len(both) - 1})
    ]
    text = ", ".join(
        f"{tokens} tokens {mine:.3f} and {other:.3f}" for tokens, mine, other in points
    )
    tokens, mine, other = points[-1]
    report.add(
        f"4 training loss after {tokens} tokens, a third left out over all stages",
        mine / other,
        "ratio",
        text,
    )


def measure(changes: dict[str, Any], epochs: int) -> Measured:
    """Start a swarm on the shaped network, let it commit ``epochs`` epochs, take it down. Raises
    Hang when it does not."""
    with contextlib.ExitStack() as stack:
        root = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tutti-paths-", ignore_cleanup_errors=True)
            )
        )
        wan = stack.enter_context(Wan(sum(NODES)))
        shape(wan, PLACES[: sum(NODES)])
        box = Box(root, tuple(wan.host(i) for i in range(sum(NODES))), NODE)
        stack.callback(box.clean_up)
        peers = {p.label: p for p in box.swarm(NODES, **{**MODEL, **changes})}
        chronicle = Chronicle()
        stack.callback(chronicle.close)
        try:
            for peer in peers.values():
                peer.start()

            def told() -> list[Told]:
                for label, peer in peers.items():
                    if not peer.running:
                        raise Hang(f"{label} ended: {peer.child.tail(3)}")
                    chronicle.follow(label, peer.events_path)
                return chronicle.read()

            def committed() -> list[Told] | None:
                found = commits(told())
                return found if len(found) >= epochs else None

            box.wait("the first plan", lambda: any(e.kind == PLANNED for e in told()), LOAD_S)
            stack.enter_context(slowed(peers[SLOW]))
            return digest(box.wait(f"{epochs} epochs", committed, EPOCH_S * epochs)[:epochs])
        except Hang:
            print(box.story(), file=sys.stderr)
            raise


def digest(commits: Sequence[Told]) -> Measured:
    """Figures from the leaders' commits."""
    last = commits[-MEASURED - 1 :]
    tokens = 0
    curve = list[tuple[int, float]]()
    for e in commits:
        tokens += e.get("tokens")
        curve.append((tokens, e.get("loss")))
    return Measured(
        tuple(b.at - a.at for a, b in zip(last, last[1:], strict=False)),
        tuple(e.get("run_s") for e in last[1:]),
        tuple(curve),
        sum(e.get("dropped") for e in last[1:]),
        tuple(p for e in last[1:] if (p := e.get("predicted_s"))),
    )


def shape(wan: Wan, places: Sequence[str], scale: float = SCALE) -> None:
    """The published links between the places of all hosts, their bandwidths over ``scale``."""
    for i, here in enumerate(places):
        for j, there in enumerate(places[:i]):
            delay_ms, rate = link(there, here)
            wan.shape(i, j, delay_s=delay_ms / 1000, rate_bps=rate * 2**20 * 8 / scale)


@contextlib.contextmanager
def slowed(peer: Peer) -> Iterator[None]:
    """A machine that has a third of its time for us."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(RUNS_S):
            peer.signal(signal.SIGSTOP)
            over.wait(STOPPED_S)
            peer.signal(signal.SIGCONT)

    thread = threading.Thread(target=work, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        peer.signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
