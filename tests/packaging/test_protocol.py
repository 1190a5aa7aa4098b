"""Every clause of docs/protocol.md has a note, and every note names tests that exist."""

import ast
import re
from pathlib import Path

UNBUILT = "## 7. Not built yet"
"""Section whose paragraphs promise nothing."""
_NOTE = re.compile(r"\[\^([\w-]+)\](?!:)")
_DEFINED = re.compile(r"^\[\^([\w-]+)\]:(.*(?:\n    .*)*)", re.MULTILINE)
_NAMED = re.compile(r"\[(\S+)\]\((\S+)\):\s+((?:`test_\w+`,?\s*)+)(?:;|$)")
_ITEM = re.compile(r"\s*(\*|\d+\.) |\s*<a id=")


def clauses(page: str) -> list[str]:
    """Paragraphs, list items and table rows of all sections that promise something. A table whose
    head has a note is one clause."""
    found = list[str]()
    for section in re.split(r"^(?=## )", _DEFINED.sub("", page), flags=re.MULTILINE)[1:]:
        if section.startswith(UNBUILT):
            continue
        _, _, body = section.partition("\n")
        for block in re.split(r"\n\s*\n", body):
            found += _parts([line for line in block.splitlines() if line.strip()])
    return found


def _parts(lines: list[str]) -> list[str]:
    if not lines or lines[0].startswith("#") or re.fullmatch(r'<a id="[^"]+"></a>', lines[0]):
        return _parts(lines[1:]) if lines else []
    if lines[0].startswith("|"):
        head, _, *rows = lines
        return [head] if _NOTE.search(head) else rows
    found = list[str]()
    for line in lines:
        if found and not _ITEM.match(line):
            found[-1] += " " + line.strip()
        else:
            found.append(line.strip())
    return found


def without_note(page: str) -> list[str]:
    return [clause for clause in clauses(page) if not _NOTE.search(clause)]


def notes(page: str) -> dict[str, list[tuple[str, str]]]:
    """Files and tests that each note names; no tests if it is written in another way."""
    found = dict[str, list[tuple[str, str]]]()
    for label, text in _DEFINED.findall(page):
        body = " ".join(text.split())
        named = _NAMED.findall(body)
        whole = _NAMED.sub("", body).strip() == ""
        found[label] = [
            (link, test)
            for short, link, tests in named
            for test in re.findall(r"`(\w+)`", tests)
            if whole and link == f"../tests/{short}"
        ]
    return found


def missing(page: str, folder: Path) -> list[str]:
    """Notes that name no test, and tests that do not exist; links begin at ``folder``."""
    found = list[str]()
    known = dict[Path, set[str]]()
    for label, named in notes(page).items():
        if not named:
            found.append(label)
        for link, test in named:
            file = folder / link
            if file not in known:
                known[file] = functions_of(file)
            if test not in known[file]:
                found.append(f"{label}: {link} {test}")
    return found


def functions_of(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, functions)}


def page_of(root: Path) -> str:
    return (root / "docs" / "protocol.md").read_text()


def test_every_clause_has_a_note(root: Path) -> None:
    page = page_of(root)
    assert len(clauses(page)) > 150
    assert without_note(page) == []


def test_every_note_names_tests_that_exist(root: Path) -> None:
    assert missing(page_of(root), root / "docs") == []


def test_every_note_is_used_and_defined_once(root: Path) -> None:
    page = page_of(root)
    defined = [label for label, _ in _DEFINED.findall(page)]
    assert sorted(defined) == sorted({*defined})
    assert {*_NOTE.findall(page)} == {*defined}


MADE_UP = """# A page

What it is about.

## 1. First

A paragraph[^a]
of two lines.

* An item.[^a]
* An item without a note

| a | b |
|---|---|
| 1 | 2[^b] |
| 3 | 4 |

<a id="mark"></a>

| a[^b] | b |
|---|---|
| 5 | 6 |

## 7. Not built yet

Nothing.

[^a]: [x/test_y.py](../tests/x/test_y.py): `test_here`,
    `test_gone`; [x/test_z.py](../tests/x/test_z.py): `test_here`
[^b]: words
"""


def test_what_has_no_note_or_no_test_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests" / "x").mkdir(parents=True)
    (tmp_path / "tests" / "x" / "test_y.py").write_text("async def test_here(): pass\n")
    assert without_note(MADE_UP) == ["* An item without a note", "| 3 | 4 |"]
    assert len(clauses(MADE_UP)) == 6
    assert missing(MADE_UP, tmp_path / "docs") == [
        "a: ../tests/x/test_y.py test_gone",
        "a: ../tests/x/test_z.py test_here",
        "b",
    ]
