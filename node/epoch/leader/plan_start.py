"""The start of a plan: the version, its context, and the numbers that go on from there. Pure."""

from dataclasses import dataclass

from node.core.journey import Electorate, Version
from node.epoch.plan_context import PlanContext


@dataclass(frozen=True)
class PlanStart:
    """A plan starts from ``base``, with the context ``past``, as the next one of number ``term``;
    ``electorate``, ``loss`` and ``loss_val`` as in the plan."""

    base: Version
    past: PlanContext
    term: int
    electorate: Electorate
    loss: float
    loss_val: float
