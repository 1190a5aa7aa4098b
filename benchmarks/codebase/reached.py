"""Functions of `node` that the program can reach, by syntax trees alone.

The start is everything in the files at the root: `cli.py`, and `tutti.py`, which loads it. A module
that reached code imports runs its top level. A name is followed through imports to its definition.
`x.name` with an unknown `x` reaches the methods of this name in every reached class. That errs
towards "reached": a reported function has no caller that could be found by name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.codebase.tree import Source, Tree

Place: TypeAlias = tuple[str, str]
"""A module and a name in it: "f", "C", "C.method", or "" for the module's top level."""
INERT_BASES = {
    *(
        "ABC",
        "Enum",
        "Exception",
        "Flag",
        "Generic",
        "IntEnum",
        "IntFlag",
        "NamedTuple",
        "Protocol",
    ),
    *("RuntimeError", "StrEnum", "TypedDict", "ValueError", "object"),
}
"""Bases outside of ``node`` that call none of a class's public methods by themselves."""
INERT_DECORATORS = {
    *("abstractmethod", "asynccontextmanager", "cache", "cached_property", "classmethod"),
    *("contextmanager", "dataclass", "final", "functools.cache", "functools.lru_cache"),
    *("lru_cache", "no_grad", "overload", "override", "property", "setter", "staticmethod"),
    *("torch.inference_mode", "torch.no_grad", "total_ordering", "wraps"),
}
"""Decorators that register nothing: a decorated function is reached by its name alone."""


@dataclass
class Part:
    """A function, a class without its methods, or a module's top level."""

    place: Place
    line: int = 0
    names: set[Place] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    registered: bool = False
    """Called by who decorates it, or by a base class that is not ours: as soon as its owner is."""


@dataclass
class Parts:
    """Everything defined in a tree's modules."""

    parts: dict[Place, Part] = field(default_factory=dict)
    methods: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """Methods by bare name."""
    owners: dict[Place, list[Place]] = field(default_factory=lambda: defaultdict(list))
    """A class's methods, a module's definitions."""
    aliases: dict[Place, Place] = field(default_factory=dict)
    """Name that a module imports, and its place of definition."""
    protocols: set[Place] = field(default_factory=set)


def unreached(
    tree: Tree,
    also: Collection[str] = (),
    *,
    roots: Collection[str] = ("cli", "tutti"),
    within: str = "node",
) -> list[str]:
    """Public functions and methods of `within` that are named by nothing that can be reached from
    the modules `roots`, as "module.name" in order. `also`: parts of the names of functions that are
    called from outside too. A protocol's methods are a promise, not code: they are never among the
    results."""
    tops = {*roots, within, "protos"}
    program = (s for s in tree.files.values() if s.module.split(".")[0] in tops)
    known = collect(program)
    more = [p for p in known.parts if any(word in f"{p[0]}.{p[1]}" for word in also)]
    found = reach(known, roots, more)
    return sorted(
        f"{module}.{name}"
        for (module, name), part in known.parts.items()
        if (module, name) not in found
        and module.split(".")[0] == within
        and name
        and not _is_class(known, (module, name))
        and not any(word.startswith("_") for word in name.split("."))
        and (module, name.rpartition(".")[0]) not in known.protocols
    )


def _is_class(known: Parts, place: Place) -> bool:
    return place in known.owners


def reach(known: Parts, roots: Collection[str], also: Iterable[Place] = ()) -> set[Place]:
    """Everything reached from the places `also` and from any function of the modules `roots`."""
    found: set[Place] = set()
    attributes: set[str] = set()
    open_: list[Place] = [
        *((root, "") for root in roots),
        *(p for p in known.parts if p[0] in roots),
        *also,
    ]
    while open_:
        place = _real(known, open_.pop())
        if place in found or place not in known.parts:
            continue
        found.add(place)
        part = known.parts[place]
        open_ += part.names
        open_ += ((module, "") for module in part.modules)
        fresh = part.attributes - attributes
        attributes |= fresh
        open_ += (m for word in fresh for m in known.methods[word] if _owner(m) in found)
        for inner in known.owners.get(place, ()):
            word = inner[1].rpartition(".")[2]
            dunder = word.startswith("__") and word.endswith("__")
            if dunder or word in attributes or known.parts[inner].registered:
                open_.append(inner)
        if not place[1]:
            open_ += (p for p in known.owners.get(place, ()) if known.parts[p].registered)
    return found


def _owner(method: Place) -> Place:
    return method[0], method[1].rpartition(".")[0]


def _real(known: Parts, place: Place) -> Place:
    """Where a name that was imported and imported again is defined."""
    for _ in range(8):
        if place in known.parts or place not in known.aliases:
            break
        place = known.aliases[place]
    return place


def collect(sources: Iterable[Source]) -> Parts:
    """Every definition with its references."""
    listed = list(sources)
    modules = {s.module for s in listed}
    known = Parts()
    for source in listed:
        _Module(source, modules, known).read()
    return known


class _Module:
    """One file, read into :class:`Parts`."""

    def __init__(self, source: Source, modules: set[str], known: Parts) -> None:
        self.source = source
        self.modules = modules
        self.known = known
        self.imported: dict[str, Place] = {}
        """Local names; a module itself is (module, "")."""
        self.defined: set[str] = set()

    def read(self) -> None:
        module = self.source.module
        for node in _outside_functions(self.source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, place in self._imports(node):
                    self.imported[name] = place
                    self.known.aliases[module, name] = place
        top = Part((module, ""))
        self.known.parts[module, ""] = top
        self.defined = {n.name for n in self.source.tree.body if isinstance(n, _DEFINES)}
        top.modules.add(module.rpartition(".")[0])
        for node in self.source.tree.body:
            if isinstance(node, ast.ClassDef):
                self._class(node, top)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._function(node, node.name, top.place)
                self._refer(top, [*node.decorator_list, *_defaults(node)])
            else:
                self._refer(top, [node])

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Place]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or whole, (whole, "")
            return
        base = node.module or ""
        if node.level:
            here = self.source.module.split(".")
            if not self.source.path.endswith("__init__.py"):
                here = here[:-1]
            here = here[: len(here) - node.level + 1]
            base = ".".join([*here, base]) if base else ".".join(here)
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            place = (whole, "") if whole in self.modules else (base, alias.name)
            yield alias.asname or alias.name, place

    def _class(self, node: ast.ClassDef, top: Part) -> None:
        place = (self.source.module, node.name)
        part = self.known.parts[place] = Part(place, node.lineno)
        self.known.owners[place] = self.known.owners.get(place, [])
        bases = {_words(b) for b in node.bases}
        if bases & {"Protocol", "typing.Protocol"}:
            self.known.protocols.add(place)
        foreign = any(self._is_foreign(b) for b in node.bases)
        decorated = any(_decorator(d) not in INERT_DECORATORS for d in node.decorator_list)
        if decorated:
            part.registered = True
            self.known.owners[top.place].append(place)
        self._refer(part, [*node.bases, *(k.value for k in node.keywords)])
        self._refer(top, node.decorator_list)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                self._function(inner, f"{node.name}.{inner.name}", place, foreign=foreign)
                self._refer(part, [*inner.decorator_list, *_defaults(inner)])
            else:
                self._refer(part, [inner])

    def _is_foreign(self, base: ast.expr) -> bool:
        """Return True for a base class that is neither defined in `node` nor one that calls no
        methods."""
        word = _words(base.value if isinstance(base, ast.Subscript) else base)
        if word.rpartition(".")[2] in INERT_BASES or word in self.defined:
            return False
        module = self.imported.get(word.split(".")[0], ("", ""))[0]
        return module.split(".")[0] != "node"

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        name: str,
        owner: Place,
        *,
        foreign: bool = False,
    ) -> None:
        place = (self.source.module, name)
        part = self.known.parts.setdefault(place, Part(place, node.lineno))
        decorated = any(_decorator(d) not in INERT_DECORATORS for d in node.decorator_list)
        part.registered = part.registered or foreign or decorated
        if "." in name:
            self.known.methods[node.name].append(place)
            self.known.owners[owner].append(place)
        elif decorated:
            self.known.owners[owner].append(place)
        outside = self.imported
        self.imported = outside | {
            name: place
            for inner in ast.walk(node)
            if isinstance(inner, ast.Import | ast.ImportFrom)
            for name, place in self._imports(inner)
        }
        self._refer(part, node.body, hidden=_locals(node))
        self.imported = outside

    def _refer(
        self, part: Part, nodes: Iterable[ast.AST], hidden: frozenset[str] = frozenset()
    ) -> None:
        """Add the references of these nodes to the part; annotations refer to nothing that runs."""
        for node in nodes:
            for inner in _running(node):
                self._one(part, inner, hidden)

    def _one(self, part: Part, node: ast.AST, hidden: frozenset[str]) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, (module, name) in self._imports(node):
                part.modules.add(module)
                if isinstance(node, ast.Import):
                    part.modules.update(alias.name for alias in node.names)
                if name and module not in self.modules:
                    part.modules.add(f"{module}.{name}")
        elif isinstance(node, ast.Attribute):
            self._attribute(part, node, hidden)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in hidden:
                return
            module, name = self.imported.get(node.id, (self.source.module, node.id))
            part.names.add((module, name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in self.modules:  # python -m node.local.worker
                part.modules.add(node.value)
        elif isinstance(node, ast.Call) and _words(node.func) in ("getattr", "hasattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                part.attributes.add(str(node.args[1].value))

    def _attribute(self, part: Part, node: ast.Attribute, hidden: frozenset[str]) -> None:
        word = _words(node.value)
        first = word.split(".")[0]
        if word and first not in hidden and first in self.imported:
            module, name = self.imported[first]
            rest = word.split(".")[1:]
            while rest and not name and f"{module}.{rest[0]}" in self.modules:
                module = f"{module}.{rest[0]}"
                rest = rest[1:]
            if not name and not rest and module in self.modules:
                whole = f"{module}.{node.attr}"
                part.names.add((whole, "") if whole in self.modules else (module, node.attr))
                return
        part.attributes.add(node.attr)


_DEFINES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """All in it but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _outside_functions(child)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all in it but annotations and what stands under ``if TYPE_CHECKING``."""
    if isinstance(node, ast.If) and _words(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        nodes: list[ast.AST] = list(node.orelse)
    else:
        yield node
        nodes = [
            child
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "returns")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
    for child in nodes:
        yield from _running(child)


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [d for d in [*node.args.defaults, *node.args.kw_defaults] if d is not None]


def _locals(node: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Names that the function itself assigns, which hide the module's names."""
    names = {a.arg for n in ast.walk(node) if isinstance(n, ast.arguments) for a in _arguments(n)}
    names |= {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
    }
    return frozenset(names)


def _arguments(node: ast.arguments) -> list[ast.arg]:
    rest = [a for a in (node.vararg, node.kwarg) if a]
    return [*node.posonlyargs, *node.args, *node.kwonlyargs, *rest]


def _decorator(node: ast.expr) -> str:
    """ "dataclass" of ``@dataclass(frozen=True)``, "setter" of ``@x.setter``."""
    word = _words(node.func if isinstance(node, ast.Call) else node)
    return "setter" if word.endswith(".setter") else word


def _words(node: ast.AST) -> str:
    """ "a.b.c" of that expression; empty when it is not made of names."""
    if isinstance(node, ast.Attribute):
        inner = _words(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    if isinstance(node, ast.Subscript):
        return _words(node.value)
    return node.id if isinstance(node, ast.Name) else ""
