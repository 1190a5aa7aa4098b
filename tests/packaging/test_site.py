"""The site of docs/: its order, its links, and what its pages may load. `make docs` builds it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.site import BESIDE, HOME, linked, loaded_from_elsewhere


def pages_in(nav: Any) -> Iterator[str]:
    """Files of a navigation, in its order."""
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from pages_in(entry)


@pytest.fixture(scope="module")
def config(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "mkdocs.yml").read_text())


def test_the_order_is_what_a_newcomer_wants(config: dict[str, Any]) -> None:
    assert [heading for part in config["nav"] for heading in part] == [
        "Home",
        "Tutorial",
        "Guides",
        "Reference",
        "Explanation",
    ]


def test_every_page_has_its_place(root: Path, config: dict[str, Any]) -> None:
    placed = [*pages_in(config["nav"])]
    docs = root / "docs"
    there = {str(file.relative_to(docs)) for file in docs.rglob("*.md")}
    assert sorted(placed) == sorted(there | {*BESIDE})
    assert [file for file in BESIDE.values() if not (root / file).is_file()] == []


def test_links_lead_to_pages_of_the_site(root: Path) -> None:
    """What is left of links between files are pages, pictures, and other hosts."""
    docs = root / "docs"
    written = {str(f.relative_to(docs)): f for f in docs.rglob("*.md")}
    written |= {page: root / file for page, file in BESIDE.items()}
    lost = list[str]()
    for page, file in written.items():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", linked(file.read_text(), page)):
            there = (docs / page).parent / target
            name = str(there.resolve().relative_to(docs)) if "://" not in target else HOME
            if name not in written and not there.is_file():
                lost.append(f"{page}: {target}")
    assert lost == []


@pytest.mark.parametrize(
    ("page", "text", "moved"),
    [
        ("guide.md", "[a](../README.md)", "[a](index.md)"),
        ("optimizer.md", "[a](../CONTRIBUTING.md#tests)", "[a](contributing.md#tests)"),
        ("changelog.md", "[a](docs/protocol.md#limits)", "[a](protocol.md#limits)"),
        ("decisions/001.md", "[a](../protocol.md)", "[a](../protocol.md)"),
        ("decisions/001.md", "[a](../../SECURITY.md)", "[a](../security.md)"),
        ("protocol.md", "[x/test_y.py](../tests/x/test_y.py): `z`", "x/test_y.py: `z`"),
        ("guide.md", "[a](https://arxiv.org/x) [b](#here)", "[a](https://arxiv.org/x) [b](#here)"),
        ("guide.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_a_link_is_moved(page: str, text: str, moved: str) -> None:
    assert linked(text, page) == moved


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<img alt=a src=//cdn.example/x.png>",
        '<link rel="stylesheet" href="https://fonts.example/css">',
        "@font-face{src:url(https://fonts.example/x.woff2)}",
        '@import "https://fonts.example/css";',
    ],
)
def test_what_comes_from_another_host_is_found(text: str) -> None:
    (found,) = loaded_from_elsewhere(text)
    assert ".example/" in found


def test_links_and_own_files_are_no_loads() -> None:
    text = '<a href="https://arxiv.org/x">x</a><script src="a.js"></script><img src="../b.svg">'
    assert loaded_from_elsewhere(text + "a{background:url(data:image/svg+xml;x)}") == []


def test_the_site_is_built_of_what_is_pinned(root: Path) -> None:
    """The site's environment is apart: nothing of it is in the program's."""
    pinned = re.compile(r"([\w.-]+)==[\w.]+")
    lines = (root / "docs" / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in wanted if pinned.fullmatch(line) is None] == []
    names = {line.partition("==")[0].lower() for line in wanted}
    assert {"mkdocs", "mkdocs-material", "pymdown-extensions"} <= names
    assert "mkdocs" not in (root / "constraints.txt").read_text()
