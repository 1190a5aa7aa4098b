"""The table of features names tests that exist, and each feature once in both tables."""

import re
from pathlib import Path

import pytest

NAMED = re.compile(r"`(\w+/test_\w+):(test_\w+)`")


def table(text: str, first: str) -> list[list[str]]:
    """Cells of the table whose heading begins with these columns, row by row."""
    lines = text.partition(f"\n{first}")[2].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs/features.md").read_text()


def test_every_feature_is_proven_by_tests_that_exist(root: Path, text: str) -> None:
    rows = table(text, "| feature | how | tests |")
    assert len(rows) > 20
    for feature, _, tests in rows:
        named = NAMED.findall(tests)
        assert named, feature
        assert NAMED.sub("", tests).strip(", ") == "", feature
        for file, test in named:
            path = root / "tests" / f"{file}.py"
            assert path.is_file(), file
            assert re.search(rf"(?m)^(async )?def {test}\(", path.read_text()), test


def test_both_tables_have_the_same_features_and_known_words(text: str) -> None:
    own = [row[0] for row in table(text, "| feature | how | tests |")]
    beside = table(text, "| feature | tutti |")
    assert [row[0] for row in beside] == own
    assert len(set(own)) == len(own)
    for row in beside:
        assert len(row) == 8
        assert all(re.fullmatch(r"(yes|partly|no)\??|–", cell) for cell in row[1:]), row
