"""Rules of the house that no tool knows, read from the syntax trees. Each rule is also shown a violation."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Rule = Callable[[ast.AST], Iterator[str]]
SPAWN = {"create_task", "ensure_future"}
UNPICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def name_of(node: ast.AST) -> str:
    """ "torch.load" of that expression; empty when it is not made of names."""
    if isinstance(node, ast.Attribute):
        inner = name_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def spawns(node: ast.AST) -> Iterator[str]:
    """Only node/core/tasks.py makes tasks: elsewhere they have a parent and a name."""
    if isinstance(node, ast.Call):
        word = node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
        if word in SPAWN:
            yield f"calls {word}"


def runs_foreign_code(node: ast.AST) -> Iterator[str]:
    """Nothing that can turn data into code."""
    for module in imported(node):
        if module.split(".")[0] in UNPICKLE:
            yield f"imports {module}"
    if isinstance(node, ast.Call):
        word = name_of(node.func)
        if word in ("eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "numpy.load", "np.load"):
            safe = word.endswith("p.load") and not any(k.arg == "allow_pickle" for k in node.keywords)
            if not (safe or (word == "numpy.load" and not any(k.arg == "allow_pickle" for k in node.keywords))):
                yield f"calls {word}"


def asserts(node: ast.AST) -> Iterator[str]:
    """Checks that vanish under ``python -O`` are no checks."""
    if isinstance(node, ast.Assert):
        yield "asserts"


def calls_without_timeout(node: ast.AST) -> Iterator[str]:
    """A call on something named ``…stub``, or on a ``XStub(…)`` made on the spot, says how long it waits."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    on = node.func.value
    made = name_of(on.func) if isinstance(on, ast.Call) else ""
    kept = on.attr if isinstance(on, ast.Attribute) else name_of(on)
    if (made.endswith("Stub") or kept.lower().endswith("stub")) and not any(k.arg == "timeout" for k in node.keywords):
        yield f"calls {node.func.attr} without a timeout"


def puts_off(node: ast.AST) -> Iterator[str]:
    """Nothing is left for later: what is there works."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if name_of(raised) == "NotImplementedError":
            yield "raises NotImplementedError"


RULES: dict[Rule, list[str]] = {
    spawns: ["asyncio.create_task(f())", "loop.create_task(f())", "group.create_task(f())", "ensure_future(f())"],
    runs_foreign_code: [
        "import pickle", "from dill import loads", "torch.load(p)", "eval(s)", "exec(s)", "np.load(f, allow_pickle=True)",
    ],
    asserts: ["assert x > 0, 'bad'"],
    calls_without_timeout: ["stub.Fetch(request)", "await self._stub.Tell(n)", "StateStub(channel).Describe(r)", "pb.XStub(c).Y(r, wait=1)"],
    puts_off: ["raise NotImplementedError", "raise NotImplementedError('later')"],
}  # fmt: skip
FINE = [
    "tasks.spawn(f(), 'name')", "module.eval()", "json.load(f)", "np.load(f)", "stub.Fetch(request, timeout=3)",
    "StateStub(await t.channel(p)).Describe(r, timeout=5)", "os.execv(a, b)", "raise WireError('x')", "re.compile(p)",
]  # fmt: skip


def findings(rule: Rule, source: str) -> list[str]:
    return [f"line {getattr(n, 'lineno', 0)}: {what}" for n in ast.walk(ast.parse(source)) for what in rule(n)]


@pytest.fixture(scope="session")
def sources(root: Path) -> dict[str, str]:
    files = [root / "cli.py", *sorted((root / "node").rglob("*.py"))]
    return {str(f.relative_to(root)): f.read_text() for f in files}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_rule_holds(sources: dict[str, str], rule: Rule) -> None:
    allowed = {"node/core/tasks.py"} if rule is spawns else set()
    broken = {file: found for file, text in sources.items() if file not in allowed and (found := findings(rule, text))}
    assert broken == {}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_rule_would_notice(rule: Rule) -> None:
    for violation in RULES[rule]:
        assert findings(rule, f"async def f():\n    {violation}\n"), violation
    for line in FINE:
        assert not findings(rule, f"async def f():\n    {line}\n"), line


def test_there_are_remote_calls_for_the_rule_to_see(sources: dict[str, str]) -> None:
    def with_timeout(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Call):
            node.keywords = [k for k in node.keywords if k.arg != "timeout"]
        yield from calls_without_timeout(node)

    assert sum(len(findings(with_timeout, text)) for text in sources.values()) >= 3


def test_opening_a_room_loads_nothing(root: Path) -> None:
    for file in (root / "node").rglob("__init__.py"):
        tree = ast.parse(file.read_text())
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)], file
        assert ast.get_docstring(tree), f"{file}: what it is, what enters, what never does"


def test_the_words_shared_by_all_need_the_standard_library_only(root: Path) -> None:
    for file in (root / "node/core").glob("*.py"):
        for module in (m for n in ast.walk(ast.parse(file.read_text())) for m in imported(n)):
            assert module.split(".")[0] in sys.stdlib_module_names or module.startswith("node.core"), f"{file}: {module}"


def test_rooms_are_one_floor_deep(root: Path) -> None:
    deep = [f for f in (root / "node").rglob("*.py") if len(f.relative_to(root).parts) > 3]
    assert deep == []


def test_nothing_waits_to_be_done(sources: dict[str, str]) -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert [f for f, text in sources.items() if any(word in text for word in words)] == []


def test_the_command_line_starts_without_the_heavy_ones() -> None:
    script = "import sys, cli; print([m for m in ('torch', 'hivemind', 'libp2p', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
