"""Mutations of a Python file: small faults such as people make, each in one place of its text."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.codebase.tree import Source

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SILENT = (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Nodes that are left as they are: assertions, and texts for people."""


@dataclass(frozen=True)
class Mutation:
    """One fault: in ``path`` at ``line``, the bytes from ``start`` to ``end`` are ``after`` instead
    of ``before``. ``statement``: first line of the statement around it."""

    path: str
    line: int
    statement: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before = " ".join(self.before.split())
        return f"{self.path}:{self.line}: {before} -> {self.after}"

    def applied(self, text: str) -> str:
        """The text of the file with the fault."""
        raw = text.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()


def mutations(source: Source) -> list[Mutation]:
    """Every mutation of a file, in the order of its text."""
    raw = source.text.encode()
    begins = [0]
    for line in raw.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = []
    for statement, node, after in _faults(source.tree):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = raw[start:end].decode()
        found.append(Mutation(source.path, node.lineno, statement, start, end, before, after))
    return sorted(found, key=lambda m: (m.start, m.end, m.after))


def _faults(tree: ast.Module) -> Iterator[tuple[int, ast.expr | ast.stmt, str]]:
    """Nodes inside of functions, each with the first line of its statement before it, and a text in
    its place behind it."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                if not _is_text(statement):
                    yield from _of(statement, statement.lineno)


def _of(node: ast.AST, line: int) -> Iterator[tuple[int, ast.expr | ast.stmt, str]]:
    if isinstance(node, (*SILENT, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if isinstance(node, ast.stmt):
        line = node.lineno
        for other, after in _of_statement(node):
            yield line, other, after
    elif isinstance(node, ast.expr):
        for other, after in _of_expression(node):
            yield line, other, after
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _of(child, line)


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Return) and node.value is not None:
        if not isinstance(node.value, ast.Constant):
            yield node, "return None"
    elif isinstance(node, ast.If | ast.While):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.AugAssign):
        yield node, "pass"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    elif isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple):
        yield node, "pass"


def _of_expression(node: ast.expr) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if other := COMPARISONS.get(type(operator)):
                changed = copy.deepcopy(node)
                changed.ops[place] = other()
                yield node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.And()
        if isinstance(node.op, ast.And):
            changed.op = ast.Or()
        yield node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp):
        if (operator := OPERATORS.get(type(node.op))) and not _of_texts(node):
            changed = copy.deepcopy(node)
            changed.op = operator()
            yield node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node.value, int | float):
            yield node, f"({node.value!r} + 1)"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of_texts(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str))
        for s in sides
    )
