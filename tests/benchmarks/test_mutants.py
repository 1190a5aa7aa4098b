"""Mutations: small faults, each in one place of a file."""

import ast

from benchmarks.codebase.mutations import mutations
from benchmarks.codebase.tree import Source

TEXT = '''
"""A module."""

LIMIT = 7


def decide(x: int, names: list[str]) -> int | None:
    """A text with a number, 3."""
    if x < LIMIT and not names:
        names.append(f"{x + 1}")
        return x + 1
    assert x > 0
    return None
'''


def test_every_fault_is_in_one_place_and_leaves_python() -> None:
    source = Source("one.py", TEXT, ast.parse(TEXT))
    found = mutations(source)
    assert len({str(m) for m in found}) == len(found)
    for mutation in found:
        after = mutation.applied(TEXT)
        assert after != TEXT
        ast.parse(after)
        assert TEXT.splitlines()[mutation.line - 1] != after.splitlines()[mutation.line - 1]


def test_faults_are_those_that_people_make() -> None:
    source = Source("one.py", TEXT, ast.parse(TEXT))
    found = {(m.before, m.after) for m in mutations(source)}
    assert found == {
        ("x < LIMIT and not names", "(not (x < LIMIT and (not names)))"),
        ("x < LIMIT and not names", "(x < LIMIT or not names)"),
        ("x < LIMIT", "(x <= LIMIT)"),
        ("not names", "(names)"),
        ('names.append(f"{x + 1}")', "pass"),
        ("return x + 1", "return None"),
        ("x + 1", "(x - 1)"),
        ("1", "(1 + 1)"),
    }
