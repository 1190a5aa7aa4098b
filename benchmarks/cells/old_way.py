"""The rest of plans that led several cells at once, beside the last commit without cells that lead
themselves. Needs the repository's history."""

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.codebase import tree as source
from benchmarks.codebase.tree import Tree
from benchmarks.report import ROOT, Report

BASE = "b65c514"
"""The last commit without cells that lead themselves."""
GONE = ("Unit", "OuterRound", "OuterNews", "Meetings", "columns", "in_cell", "of_cell")
"""Names of the definitions that made several cells under one leader."""
FIELDS = {
    "Plan": ("worked", "senders", "mass", "fragment", "sends", "spread", "since"),
    "PlanMember": ("cell", "group"),
}
"""Fields of a plan about other cells than its own."""
COORDINATION = ("node/consensus", "node/epoch", "node/outer", "node/stage", "node/coordinator")
WHERE = ("node/core", "node/averaging", "node/training", *COORDINATION)
"""Folders of both trees, some of them in one alone."""


def rows(report: Report, root: Path, base: str = BASE) -> None:
    """One row. Raises CalledProcessError where ``base`` is not in the history."""
    now = source.read(ROOT)
    with source.at_commit(ROOT, base) as before:
        old = sorted(_old(before))
    stay = sorted(_old(now))
    report.add(
        "10 definitions and fields of the old way",
        len(stay),
        "",
        f"before {len(old)}: {', '.join(old)}",
        "0",
        holds=not stay and bool(old),
    )


def _old(tree: Tree) -> Iterator[str]:
    for file in tree.under(*WHERE):
        for made in file.tree.body:
            name = _name(made)
            if name in GONE:
                yield name
            if isinstance(made, ast.ClassDef):
                for field in made.body:
                    if (said := _name(field)) in FIELDS.get(name, ()):
                        yield f"{name}.{said}"


def _name(made: ast.stmt) -> str:
    """Name of a definition or of an assignment's target, "" for anything else."""
    match made:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""
