"""What a leader of a test knows of its run: small numbers, and the product's pure functions."""

from dataclasses import fields
from typing import Any

from node.core.ids import PeerId
from node.data.order import Sampler
from node.scheduler.paths import assign_paths
from node.scheduler.quotas import quotas
from node.training.protocol.facts import PlanFunctions, RunFacts, Waits, WorkSizes


def assign(stage: int, cell: Any, previous: Any) -> dict[str, PeerId]:
    """One part a stage, at its first peer."""
    return {f"s{stage}": min(p for p, _ in cell)}


def paths(ends: Any, stages: Any, samples: Any) -> Any:
    return assign_paths(sorted(quotas(len(samples), ends).items()), stages, samples)


def facts(**kw: Any) -> RunFacts:
    """A run of two block stages. ``kw``: fields of the facts, or of their values, by name."""
    given: dict[str, Any] = {
        "stages": 2,
        "epochs": 100,
        "target_batch": 8,
        "micro_batch": 4,
        "min_replicas": 1,
        "eval_every": 0,
        "epoch_s": 20.0,
        "round_s": 6.0,
        "late_s": 20.0,
        "sequence": 16,
        "assign": assign,
        "assign_paths": paths,
        "sampler": Sampler,
        "cursor": Sampler.cursor,
    } | kw

    def value(of: Any) -> Any:
        return of(**{f.name: given.pop(f.name) for f in fields(of) if f.name in given})

    return RunFacts(
        waits=value(Waits),
        make=value(PlanFunctions),
        sizes=value(WorkSizes),
        **given,
    )
