"""A test leader's facts of its run: small numbers, and the product's pure functions."""

from dataclasses import fields
from typing import Any

from node.core.ids import PeerId
from node.epoch.facts import (
    EvaluationFacts,
    GlobalBatch,
    PlanFunctions,
    RunFacts,
    Waits,
    WorkSizes,
)
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings


def assign(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
    """Assign one part a stage to its first peer."""
    return {f"s{stage}": min(p for p, _ in cell)}


def facts(**kw: Any) -> RunFacts:
    """Facts of a run of two block stages. `kw`: fields of the facts, or of their values, by
    name; `spare`: block stages that plans may leave out."""
    stages = kw.get("stages", 2)
    settings = SchedulerSettings("round-robin", skip=kw.pop("spare", 0) / stages)
    given: dict[str, Any] = {
        "stages": stages,
        "epochs": 100,
        "target_batch": 8,
        "micro_batch": 4,
        "min_replicas": 1,
        "eval_every": 0,
        "reference": False,
        "warmup": 0,
        "advice": "",
        "epoch_s": 20.0,
        "round_s": 6.0,
        "late_s": 20.0,
        "sequence": 16,
        "assign": assign,
        "scheduler": settings,
        "router": lambda: Router(settings, stages),
    } | kw

    def value(of: Any) -> Any:
        return of(**{f.name: given.pop(f.name) for f in fields(of) if f.name in given})

    return RunFacts(
        batch=value(GlobalBatch),
        evaluation=value(EvaluationFacts),
        waits=value(Waits),
        make=value(PlanFunctions),
        sizes=value(WorkSizes),
        **given,
    )
