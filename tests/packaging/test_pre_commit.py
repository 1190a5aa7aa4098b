"""Hooks of pre-commit: those of `make check`, without a download."""

import re
from pathlib import Path

import yaml


def test_the_hooks_are_what_make_check_runs(root: Path) -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (root / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checked = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    config = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == checked
    # Each tool reads its own settings for the whole tree; the file that was staged does not matter.
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}
