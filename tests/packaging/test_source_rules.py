"""Rules of the house that no tool knows, read from the syntax trees. Each rule is also shown a
violation."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Rule = Callable[[ast.AST], Iterator[str]]
SPAWN = {"create_task", "ensure_future"}
UNPICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def name_of(node: ast.AST) -> str:
    """Dotted name of that expression, such as "torch.load"; empty when it is not made of names."""
    if isinstance(node, ast.Attribute):
        inner = name_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def spawns(node: ast.AST) -> Iterator[str]:
    """Only node/core/tasks.py makes tasks, so that each has a parent and a name."""
    if isinstance(node, ast.Call):
        word = node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
        if word in SPAWN:
            yield f"calls {word}"


def runs_foreign_code(node: ast.AST) -> Iterator[str]:
    """The code calls nothing that can turn data into code."""
    for module in imported(node):
        if module.split(".")[0] in UNPICKLE:
            yield f"imports {module}"
    if isinstance(node, ast.Call):
        word = name_of(node.func)
        pickled = any(k.arg == "allow_pickle" for k in node.keywords)
        if word in ("eval", "exec", "compile", "__import__", "torch.load", "yaml.load") or pickled:
            yield f"calls {word}"


def asserts(node: ast.AST) -> Iterator[str]:
    """Checks that vanish under ``python -O`` are no checks."""
    if isinstance(node, ast.Assert):
        yield "asserts"


bounded: set[ast.AST] = set()
"""Every node inside an `asyncio.timeout` block of the parsed trees."""


def parsed(source: str) -> ast.AST:
    tree = ast.parse(source)
    if "asyncio.timeout" not in source:
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith) and any(
            "asyncio.timeout" in ast.unparse(item) for item in node.items
        ):
            bounded.update(inner for statement in node.body for inner in ast.walk(statement))
    return tree


def calls_without_timeout(node: ast.AST) -> Iterator[str]:
    """A call on something named `…stub`, or on a new `XStub(…)`, has a timeout, or stands in an
    `async with asyncio.timeout(…)`."""
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or node in bounded
    ):
        return
    on = node.func.value
    made = name_of(on.func) if isinstance(on, ast.Call) else ""
    kept = on.attr if isinstance(on, ast.Attribute) else name_of(on)
    if (made.endswith("Stub") or kept.lower().endswith("stub")) and not any(
        k.arg == "timeout" for k in node.keywords
    ):
        yield f"calls {node.func.attr} without a timeout"


def reads_as_the_locale_says(node: ast.AST) -> Iterator[str]:
    """Text in files is UTF-8, whatever the terminal's encoding."""
    if not isinstance(node, ast.Call):
        return
    word = node.func.attr if isinstance(node.func, ast.Attribute) else name_of(node.func)
    named = any(k.arg == "encoding" for k in node.keywords)
    if word in ("read_text", "write_text") and not named:
        yield f"calls {word} without an encoding"
    words = [one.value for a in node.args for one in ast.walk(a) if isinstance(one, ast.Constant)]
    modes = [mode for mode in words if mode in MODES]
    opens = name_of(node.func) in ("open", "os.fdopen") or (word == "open" and modes)
    if opens and not named and not any("b" in mode for mode in modes):
        yield f"calls {word} without an encoding"


def changes_a_machine(node: ast.AST) -> Iterator[str]:
    """Every input of a leader or a member is an event: nobody assigns its attributes."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return
    each = [one for target in targets for one in getattr(target, "elts", [target])]
    for target in each:
        if isinstance(target, ast.Attribute):
            on = target.value
            kept = on.attr if isinstance(on, ast.Attribute) else name_of(on)
            if kept in ("leader", "member"):
                yield f"assigns {kept}.{target.attr}"


MODES = {mode + kind for mode in ("r", "w", "a", "x", "r+", "w+") for kind in ("", "b")} | {"rb+"}
RULES: dict[Rule, list[str]] = {
    spawns: [
        "asyncio.create_task(f())",
        "loop.create_task(f())",
        "group.create_task(f())",
        "ensure_future(f())",
    ],
    runs_foreign_code: [
        "import pickle",
        "from dill import loads",
        "torch.load(p)",
        "eval(s)",
        "exec(s)",
        "np.load(f, allow_pickle=True)",
    ],
    asserts: ["assert x > 0, 'bad'"],
    reads_as_the_locale_says: [
        "path.read_text()",
        "path.write_text(text)",
        "open(path)",
        "open(path, 'w')",
        "path.open('a')",
        "os.fdopen(fd, 'w')",
    ],
    calls_without_timeout: [
        "stub.Fetch(request)",
        "await self._stub.Tell(n)",
        "StateStub(channel).Describe(r)",
        "pb.XStub(c).Y(r, wait=1)",
    ],
    changes_a_machine: [
        "self.leader.resigning = True",
        "t.member.term += 1",
        "leader.waiting, n = None, 0",
    ],
}
FINE = [
    "tasks.spawn(f(), 'name')",
    "module.eval()",
    "json.load(f)",
    "np.load(f)",
    "stub.Fetch(request, timeout=3)",
    "StateStub(await t.channel(p)).Describe(r, timeout=5)",
    "async with asyncio.timeout(3): await stub.Fetch(r)",
    "os.execv(a, b)",
    "raise WireError('x')",
    "re.compile(p)",
    "path.read_text(encoding='utf-8')",
    "open(path, 'rb')",
    "os.fdopen(fd, 'wb')",
    "self.open(request)",
    "self.leader = None",
    "term = self.member.term",
]


def findings(rule: Rule, tree: ast.AST) -> list[str]:
    return [f"line {getattr(n, 'lineno', 0)}: {what}" for n in ast.walk(tree) for what in rule(n)]


@pytest.fixture(scope="session")
def sources(root: Path) -> dict[str, str]:
    files = [root / "cli.py", root / "tutti.py", *sorted((root / "node").rglob("*.py"))]
    return {str(f.relative_to(root)): f.read_text() for f in files}


@pytest.fixture(scope="session")
def trees(sources: dict[str, str]) -> dict[str, ast.AST]:
    return {file: parsed(text) for file, text in sources.items()}


# a served call is one task, which the simulated network begins in the loop of another process;
# one exchange runs in the timeout of the function that tries again
EXCEPT: dict[Rule, set[str]] = {
    spawns: {"node/core/tasks.py", "node/sim/world/network.py"},
    calls_without_timeout: {"node/averaging/exchange/member.py"},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_rule_holds(trees: dict[str, ast.AST], rule: Rule) -> None:
    broken = {file: found for file, tree in trees.items() if (found := findings(rule, tree))}
    assert broken.keys() <= EXCEPT.get(rule, set()), broken


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_rule_would_notice(rule: Rule) -> None:
    for violation in RULES[rule]:
        assert findings(rule, parsed(f"async def f():\n    {violation}\n")), violation
    for line in FINE:
        assert not findings(rule, parsed(f"async def f():\n    {line}\n")), line


def test_there_are_remote_calls_for_the_rule_to_see(sources: dict[str, str]) -> None:
    """Without their timeouts the calls are found: the rule knows how this code writes them."""
    calling = [text for text in sources.values() if "stub" in text.lower()]
    untimed = [re.sub(r"\btimeout=", "ignored=", text) for text in calling]
    assert sum(bool(findings(calls_without_timeout, ast.parse(text))) for text in untimed) >= 3


def test_importing_a_package_loads_nothing(root: Path) -> None:
    for file in (root / "node").rglob("__init__.py"):
        tree = ast.parse(file.read_text())
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)], file
        assert ast.get_docstring(tree), f"{file}: what it is, what enters, what never does"


def test_the_words_shared_by_all_need_the_standard_library_only(root: Path) -> None:
    for file in (root / "node/core").glob("*.py"):
        for module in (m for n in ast.walk(ast.parse(file.read_text())) for m in imported(n)):
            assert module.split(".")[0] in sys.stdlib_module_names or module.startswith(
                "node.core"
            ), f"{file}: {module}"


def test_benchmarks_are_imported_by_their_own_tests_only(root: Path) -> None:
    importing = set[str]()
    for file in (root / "tests").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "benchmarks" not in text:
            continue
        modules = [m for n in ast.walk(ast.parse(text)) for m in imported(n)]
        if any(m.partition(".")[0] == "benchmarks" for m in modules):
            importing.add(file.relative_to(root / "tests").parts[0])
    assert importing == {"benchmarks"}


def test_packages_are_two_deep_and_hold_few_files(root: Path) -> None:
    """node/package/part.py, or node/package/subject/part.py."""
    files = [f.relative_to(root) for f in (root / "node").rglob("*.py")]
    assert [f for f in files if len(f.parts) > 4] == []
    held = Counter(f.parent for f in files)
    assert [p for p, count in held.items() if count > 20] == []


def test_nothing_waits_to_be_done(sources: dict[str, str]) -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert [f for f, text in sources.items() if any(word in text for word in words)] == []
