"""The counters of `benchmarks.codebase` on a made-up tree: each sees the case it was made for."""

import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.codebase import large, reading
from benchmarks.codebase import tree as source
from benchmarks.codebase.__main__ import UNWIRED
from benchmarks.codebase.reached import unreached
from benchmarks.codebase.tree import Tree
from benchmarks.codebase.walks import check, read_walk
from benchmarks.report import ROOT

FILES = {
    "cli.py": """
        from node import app
        def main():
            from node.jobs import Job
            app.start(Job())
        """,
    "node/__init__.py": "",
    "node/app.py": '''
        """What the program starts."""
        from typing import TYPE_CHECKING, Protocol
        if TYPE_CHECKING:
            from node.dead import helper
        class Port(Protocol):
            def promised(self) -> None: ...
        def start(job: "Job") -> None:
            """Two statements below, one here."""
            helper = 3
            job.run()
        def never() -> None:
            helper()
        ''',
    "node/jobs.py": """
        from textual import App
        class Job:
            def run(self):
                return self._work()
            def _work(self):
                return [1]
            def unused(self):
                return {"a": "# fmt: skip"}
        class Screen(App):
            def on_key(self):
                pass
        class Local:
            def run(self):
                pass
        SCREEN = Screen()
        """,
    "node/dead.py": """
        class Job:
            def run(self):
                pass
        def helper():
            return 1
        """,
    "tests/test_a.py": "from node.dead import helper\nassert helper() == 1\n",
}


def made(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return source.read(root)


def test_what_only_tests_call_is_found(tmp_path: Path) -> None:
    """Neither an import for types, a local variable of the name nor a method of that name in a
    class nobody makes reaches anything; a library's base class reaches what overrides it."""
    assert unreached(made(tmp_path, FILES)) == [
        "node.app.never",
        "node.dead.Job.run",
        "node.dead.helper",
        "node.jobs.Job.unused",
        "node.jobs.Local.run",
    ]


@pytest.fixture(scope="module")
def project() -> source.Tree:
    """All files of this repository, read once."""
    return source.read(ROOT)


def test_what_waits_to_be_wired_in_is_still_unreached(project: source.Tree) -> None:
    loose = unreached(project)
    assert {what: [f for f in loose if word in f] for what, word in UNWIRED.items()} == {
        "merging shares of samples": ["node.core.samples.merged"]
    }


def test_docstrings_and_bare_constants_are_no_statements(tmp_path: Path) -> None:
    tree = made(tmp_path, {"node/a.py": '"""Doc."""\nx = 1\ndef f():\n    """Doc."""\n    ...\n'})
    assert source.count(tree.under("node")) == 2


def written(root: Path, text: str) -> list[source.Source]:
    return made(root, {"node/a.py": text}).under("node")


def test_a_sentence_that_names_nothing_stumbles(tmp_path: Path) -> None:
    text = '''
        """What a peer says. The speed of a peer, in tokens a second: whose it is."""
        # Plans are signed by their leader.
        # Of every kind.
        x = 1
        """As many as wanted."""
        '''
    found = [(one.text, bool(one.stumble)) for one in reading.sentences(written(tmp_path, text))]
    assert sorted(found) == [
        ("As many as wanted.", True),
        ("Of every kind.", True),
        ("Plans are signed by their leader.", False),
        ("The speed of a peer, in tokens a second:", False),
        ("What a peer says.", True),
        ("whose it is.", True),
    ]


def test_swaps_and_results_of_calls_are_no_parallel_assignments(tmp_path: Path) -> None:
    text = "a, b = 1, 2\na, b = b, a\nc, d = divmod(7, 2)\nx.y, z = z, x.y + 1\n"
    assert reading.parallel_assignments(written(tmp_path, text)) == ["node/a.py:1"]


def test_large_functions_and_classes_are_named(tmp_path: Path) -> None:
    names = [f"a{i}" for i in range(reading.PARAMETERS)]
    fields = "".join(f"    f{i}: int\n" for i in range(reading.ATTRIBUTES))
    text = (
        f"def fits(self, {', '.join(names)}): return 1 if a0 else 2\n"
        f"def large({', '.join(names)}, *, more): pass\n"
        f"class Fits:\n{fields}"
        f"class Large:\n{fields}    def set(self): self.more = 1\n"
    )
    there = written(tmp_path, text)
    assert len(reading.conditional_expressions(there)) == 1
    assert [str(one) for one in reading.long_signatures(there)] == ["node/a.py:2 large (9)"]
    assert [str(one) for one in reading.large_classes(there)] == ["node/a.py:16 Large (13)"]


def test_a_method_is_named_with_its_class(tmp_path: Path) -> None:
    names = ", ".join(f"a{i}" for i in range(reading.PARAMETERS + 1))
    text = f"class A:\n    class B:\n        def make(self, {names}): pass\n"
    (one,) = reading.long_signatures(written(tmp_path, text))
    assert (one.path, one.name, one.count) == ("node/a.py", "A.B.make", reading.PARAMETERS + 1)


def test_a_large_class_needs_a_reason_and_a_reason_a_large_class() -> None:
    here = reading.Large("node/app/a.py", 3, "A", 13)
    core = reading.Large("node/outer/b.py", 5, "B", 14)
    reason = large.Excuse("node/app/a.py", "A", "one field each")
    assert large.judge([here], [reason]).wrong == ()
    assert large.judge([here], []).unexcused == ("node/app/a.py:3 A (13)",)
    for excuse in (replace(reason, reason=""), replace(reason, name="C")):
        assert large.judge([here], [excuse]).unexcused == ("node/app/a.py:3 A (13)",)
    assert large.judge([here], [reason, reason]).unexcused == ("node/app/a.py:3 A (13)",)
    assert large.judge([], [reason]).stale == ("node/app/a.py A: no reason is needed",)
    excused = large.judge([core], [large.Excuse("node/outer/b.py", "B", "one field each")])
    assert excused.forbidden == ("node/outer/b.py:5 B (14)",)
    assert excused.stale == ("node/outer/b.py B: no reason is needed",)


@pytest.mark.parametrize(
    ("count", "excuses"),
    [(reading.large_classes, large.CLASSES), (reading.long_signatures, large.FUNCTIONS)],
    ids=["classes", "signatures"],
)
def test_every_large_thing_has_a_reason_and_every_reason_is_needed(
    count: Callable[[list[source.Source]], list[reading.Large]],
    excuses: tuple[large.Excuse, ...],
    project: source.Tree,
) -> None:
    code = project.under("node", "cli.py")
    judged = large.judge(count([one for one in code if "_pb2" not in one.path]), excuses)
    assert (judged.unexcused, judged.stale) == ((), ())


def test_shared_names_long_lines_and_packages_are_counted(tmp_path: Path) -> None:
    tree = made(tmp_path, {**FILES, "node/sub/long.py": "x = 1  # " + "é" * 92 + "\n" + "#" * 100})
    node = tree.under("node")
    assert source.shared_class_names(node) == {"Job": ["node/dead.py", "node/jobs.py"]}
    assert source.long_lines(node) == ["node/sub/long.py:1"]
    assert source.skipped_formatting(node) == ["node/jobs.py:9"]
    assert source.largest_package(node) == ("node", 4)


def test_a_walk_follows_imports_and_calls(tmp_path: Path) -> None:
    page = "# A\n## Down\n1. `cli.py`: starts\n2. `node/app.py`\n\ntext `x.py`\n## Up\n1. `z.py`\n"
    tree = made(tmp_path, FILES)
    assert read_walk(page, "Down") == ("cli.py", "node/app.py")
    assert read_walk(page, "Sideways") == ()
    assert check(tree, ("cli.py", "node/app.py", "node/jobs.py")).sound
    assert not check(tree, ()).sound
    assert check(tree, ("cli.py", "z.py")).missing == ("z.py",)
    assert check(tree, ("cli.py", "node/dead.py")).unlinked == (("cli.py", "node/dead.py"),)
