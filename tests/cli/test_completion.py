"""Completion of lines in real shells, by the script that `tutti completion` prints."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from node.commands.about import SHELLS
from node.commands.line import completing
from tests.cli.conftest import ROOT, refused

BASH = """
complete_line() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    COMPREPLY=()
    _tutti_completion tutti
    echo "${COMPREPLY[*]}"
}
"""
LINES = [
    (("tutti", "st"), "start stop status"),
    (("tutti", "swarm", "v"), "validate"),
    (("tutti", "start", "--role", ""), "auto ends stage rendezvous"),
    (("tutti", "--home", "/x", "start", "--rol"), "--role"),
    (("tutti", "start", "--home", "/x", "--role", "e"), "ends"),
    (("tutti", "status", "--ho"), "--home"),
    (("tutti", "start", "--role", "nope", "--log-format", "j"), "json"),
    (("tutti", "help", "swarm", "i"), "init inspect invite"),
    (("tutti", "completion", "z"), "zsh"),
]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Environment of a shell that finds `tutti` in its PATH."""
    program = tmp_path / "bin" / "tutti"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tutti.py"}" "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}


def shell(words: list[str], environment: dict[str, str], where: Path) -> str:
    """Output of a shell that has run a program; fails if anything was said on stderr."""
    done = subprocess.run(
        words, env=environment, cwd=where, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_bash_completes_a_line(installed, tmp_path):
    quoted = [" ".join(f"'{word}'" for word in words) for words, _ in LINES]
    calls = "\n".join(f"complete_line {words}" for words in quoted)
    program = f"source <(tutti completion bash)\n{BASH}\n{calls}"
    said = shell(["bash", "--norc", "-c", program], installed, tmp_path)
    assert said.splitlines() == [expected for _, expected in LINES]


def test_bash_leaves_names_of_files_to_itself(installed, tmp_path):
    program = (
        "source <(tutti completion bash)\n"
        'compopt() { echo "$@"; }\n'
        f"{BASH}\n"
        "complete_line tutti swarm validate ''\n"
        "complete_line tutti start --config ''\n"
        "complete_line tutti export ''\n"
        "complete_line tutti status --home ''\n"
    )
    said = shell(["bash", "--norc", "-c", program], installed, tmp_path)
    assert said.split() == ["-o", "default"] * 2 + ["-o", "dirnames"] * 2


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_completes_a_line(installed, tmp_path):
    (tmp_path / "swarm-7.toml").touch()
    program = (
        "tutti completion fish | source\n"
        "complete -C 'tutti st'\n"
        "complete -C 'tutti --home /x start --role e'\n"
        "complete -C 'tutti swarm validate swarm-'\n"
    )
    said = shell(["fish", "--no-config", "-c", program], installed, tmp_path)
    words = [line.partition("\t")[0] for line in said.splitlines()]
    assert words == ["start", "status", "stop", "ends", "swarm-7.toml"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_completes_a_line(installed, tmp_path):
    """Its completion works in a line editor only, so its script is run with what it calls."""
    program = (
        "compdef() { }\n"
        "source <(tutti completion zsh)\n"
        "_describe() { print -l -- ${(P)3} }\n"
        "compadd() { print -l -- ${(P)argv[-1]} }\n"
        "_path_files() { print -- files $1 }\n"
        "complete_line() { words=($@); CURRENT=$#; _tutti_completion }\n"
        "complete_line tutti st\n"
        "complete_line tutti --home /x start --role e\n"
        "complete_line tutti swarm validate sw\n"
        "complete_line tutti status --home /\n"
    )
    said = shell(["zsh", "-f", "-c", program], installed, tmp_path)
    words = [line.partition(":")[0] for line in said.splitlines()]
    assert words == ["start", "stop", "status", "ends", "files -f", "files -/"]


def test_every_shell_that_is_offered_has_a_script(tutti):
    assert set(SHELLS) == set(completing.SHELLS)
    for name in SHELLS:
        assert "_TUTTI_COMPLETE" in tutti("completion", name).good()
    refused(tutti("completion", "csh"), 2, "'csh'", "bash, zsh, fish")


def test_a_question_of_no_known_shell_is_refused_quietly(tutti, monkeypatch):
    for question in ("csh_complete", "bash_nothing", "bash"):
        monkeypatch.setenv("_TUTTI_COMPLETE", question)
        shown = tutti("status")
        assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", "")
