"""Every link from one page to another leads somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
)


def anchors(page: Path) -> set[str]:
    """Anchors of a page that a link may name: its headings as GitHub spells them, and its own
    marks."""
    text = page.read_text()
    headings = (re.sub(r"\]\([^)]*\)", "", h) for h in re.findall(r"^#+ (.*)$", text, re.M))
    spelled = (re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)
    return {*spelled, *re.findall(r'<a id="([^"]+)">', text)}


def test_every_link_between_pages_leads_to_a_place():
    lost = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, place = link.partition("#")
            there = page.parent / name if name else page
            if "://" not in link and not (
                there.exists() and (not place or place in anchors(there))
            ):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 20
    assert not lost
