"""Training runs in one process, beside which the swarm's run is judged.

Such a run takes up to an hour. Its loss is kept in the cache of this user, so that an interrupted
benchmark goes on with the other runs.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.cache import cache
from benchmarks.real.moby_dick import moby_dick
from benchmarks.real.pretrained import smollm2
from benchmarks.report import commit, machine
from node.manifest import Manifest, amended
from node.model.device import Format, set_threads
from testbed.reference.swarm import Reference

VERSION = 1
"""Raised when the plain run computes something else than before."""
TOO_FAR = 3.0
"""Times the spread between the orders of one rate."""

Run = tuple[float, int]
"""Rate, and seed of the order of the text."""


@dataclass(frozen=True)
class Kept:
    """A run that is over: held-out loss in nats, and where and when it ran."""

    rate: float
    seed: int
    loss: float
    kind: Format
    commit: str
    machine: str
    date: str


def runs_of(
    manifest: Manifest, home: Path, kind: Format, factors: Sequence[float], seeds: Sequence[int]
) -> tuple[dict[Run, float], str]:
    """Held-out loss in nats of AdamW in one process for these factors of the manifest's rate and
    these orders of the text, chosen by :func:`compare`, and its sentence about omitted runs. One
    process with one thread for each core."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:

        def losses(runs: Sequence[Run]) -> dict[Run, float]:
            futures = {run: pool.submit(loss_of, manifest, home, kind, *run) for run in runs}
            return {run: future.result() for run, future in futures.items()}

        return compare(losses, manifest.optimizer.adam_lr, factors, seeds)


def compare(
    losses: Callable[[Sequence[Run]], dict[Run, float]],
    usual: float,
    factors: Sequence[float],
    seeds: Sequence[int],
) -> tuple[dict[Run, float], str]:
    """Losses of runs with these factors of the ``usual`` rate and these seeds, one at least; and a
    sentence about runs that were left out.

    The orders of one rate differ by some spread. Further behind the best rate than ``TOO_FAR``
    times this spread, another rate cannot have the best run: only its first order is run.
    """
    rates = [factor * usual for factor in factors]
    first, *others = seeds
    # The usual rate is likely to be the best one; its other orders fill the cores.
    found = losses([*((rate, first) for rate in rates), *((usual, seed) for seed in others)])
    rates.sort(key=lambda rate: found[rate, first])
    best = rates[0]
    found |= losses([(best, seed) for seed in others if (best, seed) not in found])
    of_best = [found[best, seed] for seed in seeds]
    spread = max(of_best) - min(of_best)
    left_out = ""
    for rate in rates[1:]:
        missing = [(rate, seed) for seed in others if (rate, seed) not in found]
        behind = found[rate, first] - found[best, first]
        if not missing:
            continue
        if behind > TOO_FAR * spread:
            left_out += (
                f"; other orders of {rate:.2g} left out: {behind:.3f} behind, where orders "
                f"of one rate differ by {spread:.4f}"
            )
        else:
            found |= losses(missing)
    return found, left_out


def loss_of(manifest: Manifest, home: Path, kind: Format, rate: float, seed: int) -> float:
    """Held-out loss in nats after the manifest's epochs in one process, with this rate and this
    order of the text; from the cache after an earlier run."""
    changed = amended(manifest, {"optimizer.adam_lr": rate, "data.seed": seed})
    key = key_of(changed, kind)
    place = cache() / "alone" / f"{key}.json"
    if not place.is_file():
        loss = _trained(changed, home, kind)
        date = time.strftime("%Y-%m-%d", time.gmtime())
        kept = Kept(rate, seed, loss, kind, commit(), machine(), date)
        place.parent.mkdir(parents=True, exist_ok=True)
        # A process that dies while it writes leaves no half of a record.
        scratch = place.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(kept)))
        scratch.rename(place)
    kept = Kept(**json.loads(place.read_text()))
    where = f"at {kept.commit} on {kept.machine}, {kept.date}"
    print(f"rate {rate:.2g}, order {seed}: {kept.loss:.4f} {where}", file=sys.stderr, flush=True)
    return kept.loss


def key_of(manifest: Manifest, kind: Format) -> str:
    """Hash of all that decides the loss of a run in one process: not the swarm's name and keys, nor
    where its files lie on this machine."""
    counted: dict[str, Any] = {
        part: asdict(getattr(manifest, part)) for part in ("model", "optimizer", "training", "data")
    }
    for name in ("source", "tokenizer"):
        del counted["data"][name]
    counted |= {"micro_batch": manifest.pipeline.micro_batch, "kind": kind, "version": VERSION}
    counted["torch"] = torch.__version__.partition("+")[0]
    text = json.dumps(counted, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _trained(manifest: Manifest, home: Path, kind: Format) -> float:
    set_threads(1)
    tokenizer = smollm2() / "tokenizer.json"
    place = {"data.source": f"file:{moby_dick()}", "data.tokenizer": str(tokenizer)}
    twin = Reference(amended(manifest, place), home, smollm2(), kind=kind)
    for _ in twin.train(manifest.training.epochs):
        pass
    return twin.evaluate()
