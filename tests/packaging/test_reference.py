"""The pages of docs/reference are what the code says today, and other pages name nothing else."""

import re
from pathlib import Path

import pytest

from node.config import KNOWN
from node.config import SECTIONS as NODE_SECTIONS
from node.core.tables import settings_of
from node.manifest import GONE, SECTIONS
from tools import reference

NAMED = re.compile(r"`([a-z]+\.[a-z_0-9]+)(?: = [^`]*)?`")
FILES = {"py", "md", "toml", "json", "txt", "yml", "png", "svg", "out", "proto", "zst", "gz"}


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = (reference.FOLDER / name).read_text()
    assert page == reference.PAGES[name](), "run  make reference"


def test_no_other_page_is_there() -> None:
    assert {file.name for file in reference.FOLDER.iterdir()} == {*reference.PAGES}


def test_the_pages_have_every_setting_and_every_command() -> None:
    for name, sections in (("manifest.md", SECTIONS), ("settings.md", {})):
        page = (reference.FOLDER / name).read_text()
        for setting in settings_of(sections) or KNOWN:
            assert f"| `{setting}` |" in page
    page = (reference.FOLDER / "cli.md").read_text()
    for command in ("start", "join", "swarm invite", "data", "id new", "simulate", "help"):
        assert f"\n### tutti {command}\n" in page


def test_pages_name_only_settings_and_metrics_that_there_are(root: Path) -> None:
    settings = {*settings_of(SECTIONS), *KNOWN, *GONE}
    metrics = {*re.findall(r"tutti_\w+", (reference.FOLDER / "metrics.md").read_text())}
    unknown = list[str]()
    for file in [root / "README.md", *(root / "docs").glob("*.md")]:
        text = file.read_text()
        for name in NAMED.findall(text):
            section, _, key = name.partition(".")
            if section in {*SECTIONS, *NODE_SECTIONS} and key not in FILES:
                unknown += [f"{file.name}: {name}"] if name not in settings else []
        unknown += [
            f"{file.name}: {m}" for m in re.findall(r"`(tutti_\w+)`", text) if m not in metrics
        ]
    assert unknown == []


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a ``name`` | or <DIR>", "a `name` \\| or &lt;DIR>"),
        ("some_name _not_ *this*", "some_name \\_not\\_ \\*this\\*"),
        ("`_kept_ * as it is`", "`_kept_ * as it is`"),
    ],
)
def test_text_of_the_program_is_no_markup(text: str, written: str) -> None:
    assert reference.prose(text) == written


def test_what_is_typed_shows_its_bars_in_a_table() -> None:
    assert reference.code("[INVITE|<DIR>]") == "<code>[INVITE&#124;&lt;DIR&gt;]</code>"
    assert reference.code("--name TEXT") == "`--name TEXT`"
