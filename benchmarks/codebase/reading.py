"""Counts of stumbling blocks for a reader: sentences that name nothing, several assignments in one,
conditional expressions, long parameter lists, classes of many attributes.

A count is a hint. A flagged sentence may be right, and one that is not flagged may be unreadable.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.codebase.tree import Source

SHORTEST = 12
"""Characters below which a piece of text is no sentence."""
PARAMETERS = 8
"""Parameters of a function beside ``self`` and ``cls``, at most."""
ATTRIBUTES = 12
"""Attributes of a class, at most."""

_END_OF_SENTENCE = re.compile(r"(?<=[.!?;:])\s+")

_STUMBLES = {
    "opens with a question word": re.compile(r"^(?:What|Who|Whom|Whose|Whether|Which)\b"),
    "a preposition and no verb": re.compile(
        r"^(?:Of|By|To|From|With|Within|Beside)\b"
        r"(?!.*\b(?:is|are|was|were|has|have|does|do|may|must|can|will)\b)"
    ),
    "a pronoun for a noun": re.compile(
        r"\b(?:whom|whose|that of|those of|of one that|of what|who is|who has"
        r"|what (?:is|was|it|they|has|comes))\b",
        re.IGNORECASE,
    ),
    "an amount for a number": re.compile(
        r"\b(?:so (?:many|much|long|often)|as (?:many|much|far as))\b", re.IGNORECASE
    ),
}


@dataclass(frozen=True)
class Sentence:
    """One sentence of a docstring or comment. ``stumble``: the reason to look at it, or ""."""

    path: str
    line: int
    text: str
    stumble: str


def sentences(sources: list[Source]) -> list[Sentence]:
    """The sentences of all docstrings and comments, in order."""
    found: list[Sentence] = []
    for source in sources:
        for line, text in _texts(source):
            plain = " ".join(text.split())
            for sentence in _END_OF_SENTENCE.split(plain):
                if len(sentence) >= SHORTEST:
                    found.append(Sentence(source.path, line, sentence, _stumble(sentence)))
    return found


def _stumble(sentence: str) -> str:
    reasons = (why for why, pattern in _STUMBLES.items() if pattern.search(sentence))
    return next(reasons, "")


def _texts(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, also of attributes, and of each block of comment lines."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value
    block: list[str] = []
    start = 0
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield start, " ".join(block)
            block = []
        if not block:
            start = line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield start, " ".join(block)


def _nodes(sources: list[Source]) -> Iterator[tuple[Source, ast.AST]]:
    for source in sources:
        for node in ast.walk(source.tree):
            yield source, node


def parallel_assignments(sources: list[Source]) -> list[str]:
    """Assignments of several values at once, as path:line. A swap, which needs one statement, and
    the result of a call are none."""
    found: list[str] = []
    for source, node in _nodes(sources):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and not _is_swap(target, node.value):
            found.append(f"{source.path}:{node.lineno}")
    return found


def _is_swap(target: ast.Tuple, value: ast.Tuple) -> bool:
    """Return True if a name on the left is read on the right."""
    written = {ast.unparse(one) for one in target.elts}
    read = {
        ast.unparse(node)
        for one in value.elts
        for node in ast.walk(one)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    }
    return bool(written & read)


def conditional_expressions(sources: list[Source]) -> list[str]:
    """Every ``a if b else c``, as path:line."""
    return [
        f"{source.path}:{node.lineno}"
        for source, node in _nodes(sources)
        if isinstance(node, ast.IfExp)
    ]


@dataclass(frozen=True)
class Large:
    """A large class or a long signature. ``name``: with the names of the classes around it;
    ``count``: of its attributes or parameters."""

    path: str
    line: int
    name: str
    count: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name} ({self.count})"


def _named(node: ast.AST, around: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The classes and functions below ``node``, by their names with the classes around them."""
    for child in ast.iter_child_nodes(node):
        within = around
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield around + child.name, child
        if isinstance(child, ast.ClassDef):
            within = f"{around}{child.name}."
        yield from _named(child, within)


def long_signatures(sources: list[Source]) -> list[Large]:
    """Functions of more than :data:`PARAMETERS` parameters."""
    found: list[Large] = []
    for source in sources:
        for name, node in _named(source.tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            given = node.args
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len([each for each in names if each not in ("self", "cls")])
            if count > PARAMETERS:
                found.append(Large(source.path, node.lineno, name, count))
    return found


def large_classes(sources: list[Source]) -> list[Large]:
    """Classes of more than :data:`ATTRIBUTES` attributes: the annotated fields of the body and the
    names that methods assign to ``self``."""
    found: list[Large] = []
    for source in sources:
        for name, node in _named(source.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            fields = {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            fields |= {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and isinstance(one.value, ast.Name)
                and one.value.id == "self"
            }
            if len(fields) > ATTRIBUTES:
                found.append(Large(source.path, node.lineno, name, len(fields)))
    return found
