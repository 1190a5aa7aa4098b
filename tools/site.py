"""Hooks of mkdocs for the site of docs/: pages that stand beside docs/, links between all of them,
and an end to a build whose pages would load anything from another host.

mkdocs is installed in .venv-docs alone, so only the functions that it calls import it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

BESIDE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "examples.md": "examples/README.md",
    "gpu.md": "benchmarks/gpu.md",
}
"""Pages of the site that are written outside docs/, and their files."""
HOME = "index.md"
"""Page of the site that stands for the README."""
_PAGES = {file: page for page, file in BESIDE.items()} | {"README.md": HOME}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b[^>]*\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|\burl\([\"']?((?:https?:)?//[^\"')\s]+)"
    r"|@import\s+[\"']((?:https?:)?//[^\"']+)",
    re.IGNORECASE,
)


def linked(text: str, page: str) -> str:
    """Markdown of a page with its links as the site needs them. A link to a file that is no page of
    the site, such as a test, keeps its text and loses its target."""
    pieces = list[str]()
    end = 0
    for fence in _FENCE.finditer(text):
        pieces += [_relinked(text[end : fence.start()], page), fence[0]]
        end = fence.end()
    return "".join([*pieces, _relinked(text[end:], page)])


def _relinked(text: str, page: str) -> str:
    written = BESIDE.get(page, f"docs/{page}")

    def moved(link: re.Match[str]) -> str:
        target, mark, place = link[2].partition("#")
        if not target or "://" in target:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(written), target))
        if file.startswith("docs/"):
            there = file.removeprefix("docs/")
        elif file in _PAGES:
            there = _PAGES[file]
        else:
            return link[1]
        path = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"[{link[1]}]({path}{mark}{place})"

    return _LINK.sub(moved, text)


def loaded_from_elsewhere(text: str) -> list[str]:
    """Addresses of other hosts that a browser asks when it shows this page or style sheet."""
    return [next(filter(None, found)) for found in _LOADED.findall(text)]


def on_config(config: Any) -> Any:
    """Spell anchors as GitHub does, so that a link to a heading holds on both."""
    from pymdownx.slugs import slugify  # pyright: ignore[reportMissingImports]

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are written outside docs/."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    root = Path(config.config_file_path).parent
    for page, file in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(root / file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the page, moved."""
    return linked(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """End the build if a page, style sheet or picture would load anything from another host."""
    from mkdocs.exceptions import Abort  # pyright: ignore[reportMissingImports]

    site = Path(config.site_dir)
    for file in sorted(f for f in site.rglob("*") if f.suffix in (".html", ".css", ".svg")):
        found = loaded_from_elsewhere(file.read_text(encoding="utf-8"))
        if found:
            raise Abort(f"{file.relative_to(site)} loads {found[0]} from another host")
