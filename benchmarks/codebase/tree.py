"""A tree of Python files, from a folder or from a commit, and counts in it that need no knowledge
of calls."""

import ast
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 100
FOLDERS = ("node", "testbed", "tests", "benchmarks", "protos")
"""Folders of the program, of its tests and of its measurements."""


@dataclass(frozen=True)
class Source:
    """One file: its path from the root, text and syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """ "node.core.ids" of "node/core/ids.py"; a package's name of its ``__init__``."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Tree:
    """The Python files below ``root``, by path."""

    root: Path
    files: dict[str, Source]

    def under(self, *folders: str) -> list[Source]:
        """Files in these folders and below; a file's own path is a folder of one file."""
        return [
            s
            for path, s in self.files.items()
            if any(path == f or path.startswith(f + "/") for f in folders)
        ]


def read(root: Path, folders: tuple[str, ...] = FOLDERS) -> Tree:
    """The files of ``folders`` and those at the root itself.

    :raises SyntaxError: a file is no Python."""
    paths = sorted(root.glob("*.py"))
    for folder in folders:
        paths += sorted((root / folder).rglob("*.py"))
    sources = {}
    for path in paths:
        text = path.read_text()
        name = path.relative_to(root).as_posix()
        sources[name] = Source(name, text, ast.parse(text, filename=name))
    return Tree(root, sources)


@contextmanager
def at_commit(root: Path, commit: str) -> Iterator[Tree]:
    """The same of a commit of the repository at ``root``, unpacked while the block runs.

    :raises subprocess.CalledProcessError: there is no such commit."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="tutti-base-") as folder:
        # tarfile has filters from Python 3.11.4 on.
        tar = ["tar", "--extract", "--file=-"]
        subprocess.run(tar, cwd=folder, input=archive.stdout, check=True)
        yield read(Path(folder))


def statements(node: ast.AST) -> list[ast.stmt]:
    """Every statement in it, at any depth, but docstrings and other bare constants."""
    return [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.stmt)
        and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    ]


def count(sources: list[Source]) -> int:
    """Statements of these files."""
    return sum(len(statements(s.tree)) for s in sources)


def largest_package(sources: list[Source]) -> tuple[str, int]:
    """The folder with most files of its own, ``__init__`` among them, and how many."""
    folders = Counter(s.path.rpartition("/")[0] for s in sources)
    return max(folders.items(), key=lambda item: item[1])


def shared_class_names(sources: list[Source]) -> dict[str, list[str]]:
    """Class names that stand more than once, with the files."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.path)
    return {name: where for name, where in places.items() if len(where) > 1}


def long_lines(sources: list[Source]) -> list[str]:
    """Lines of more than 100 characters, as path:line."""
    return [
        f"{s.path}:{number}"
        for s in sources
        for number, line in enumerate(s.text.splitlines(), 1)
        if len(line) > COLUMNS
    ]


def skipped_formatting(sources: list[Source]) -> list[str]:
    """Lines that the formatter is told to leave alone, as path:line."""
    return [
        f"{s.path}:{number}"
        for s in sources
        for number, line in enumerate(s.text.splitlines(), 1)
        if "# fmt: skip" in line or "# fmt: off" in line
    ]
