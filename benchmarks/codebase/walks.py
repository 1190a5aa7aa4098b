"""The walks of docs/architecture.md: files in the order in which a value passes them. Each must
exist and be linked to the one before it, by an import, by a call or by a protocol."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.codebase.tree import Source, Tree

TELLING = 4  # files that may define a name for a call of it to say which file is meant


@dataclass(frozen=True)
class Walk:
    """One list of files, with its faults."""

    files: tuple[str, ...]
    missing: tuple[str, ...]
    unlinked: tuple[tuple[str, str], ...]

    @property
    def sound(self) -> bool:
        """There is a list, all its files exist, each is linked to the one before."""
        return bool(self.files) and not self.missing and not self.unlinked


def read_walk(page: str, title: str) -> tuple[str, ...]:
    """The files of the section with that heading: the first `path.py` of every numbered line.
    Empty without such a section."""
    section = re.search(rf"^#+ {re.escape(title)}\s*$(.*?)(?=^#|\Z)", page, re.M | re.S)
    return tuple(re.findall(r"^\s*\d+\. `([^`]+\.py)`", section[1], re.M)) if section else ()


def check(tree: Tree, files: tuple[str, ...]) -> Walk:
    """The walk over these files of ``tree``; a file that stands twice is one file."""
    missing = tuple(f for f in files if f not in tree.files)
    there = [f for f in files if f in tree.files]
    defined = _defined(tree)
    unlinked = tuple(
        (a, b)
        for a, b in zip(there, there[1:], strict=False)
        if not _linked(tree.files[a], tree.files[b], defined)
    )
    return Walk(tuple(dict.fromkeys(files)), missing, unlinked)


def _linked(a: Source, b: Source, defined: dict[str, set[str]]) -> bool:
    """One imports the other, names it as what stands behind one of its protocols, or calls a
    function that the other defines and few others do."""
    return any(
        other.module in _imports(one)
        or any(other.module in text for text in _protocols(one))
        or any(
            other.path in defined[name] and len(defined[name]) <= TELLING for name in _calls(one)
        )
        for one, other in ((a, b), (b, a))
    )


def _defined(tree: Tree) -> dict[str, set[str]]:
    """Files of ``node`` and ``cli.py`` by the public functions they define, at any depth."""
    found: dict[str, set[str]] = defaultdict(set)
    for source in tree.under("node", "cli.py"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("_"):
                    found[node.name].add(source.path)
    return found


def _imports(source: Source) -> set[str]:
    """Modules that the file imports anywhere, also for their types."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _protocols(source: Source) -> Iterator[str]:
    """Docstrings of the file's protocols."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
        ):
            yield ast.get_docstring(node) or ""


def _calls(source: Source) -> set[str]:
    """Names of the functions that the file calls or hands on as ``x.name``."""
    return {n.attr for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)}
