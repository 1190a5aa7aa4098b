"""Completion of the installed command in the shells of this machine."""

import os
import shutil
from pathlib import Path

from benchmarks.installed.setting import ITEM, clean, installed, ran
from benchmarks.report import Report

BASH = """
source <(tutti completion bash)
COMP_WORDS=(tutti service in); COMP_CWORD=2
_tutti_completion tutti
echo "${COMPREPLY[*]}"
"""
ZSH = """
autoload -Uz compinit && compinit -D
source <(tutti completion zsh)
print -- ${_comps[tutti]}
_describe() { print -l -- ${(P)3} }
words=(tutti service in); CURRENT=3
_tutti_completion
"""
FISH = """
tutti completion fish | source
complete -C 'tutti service in'
"""
SHELLS = {
    "bash": (("bash", "--norc", "-c", BASH), "install"),
    "zsh": (("zsh", "-f", "-c", ZSH), "install"),
    "fish": (("fish", "--no-config", "-c", FISH), "install"),
}
"""Shell to its command line and the word that it must offer."""


def rows(report: Report, root: Path) -> None:
    """A row for each shell; a shell that is not here is said."""
    bin_dir = installed().program.parent
    path = os.pathsep.join([str(bin_dir), clean()["PATH"]])
    for name, (command, word) in SHELLS.items():
        if shutil.which(name) is None:
            report.unmeasured(f"{ITEM} shells: {name} completes a line", word, f"no {name} here")
            continue
        done = ran(command, root, {"PATH": path, "HOME": str(root)})
        words = [line.partition("\t")[0].partition(":")[0] for line in done.out.splitlines()]
        report.add(
            f"{ITEM} shells: {name} completes a line",
            " ".join(words),
            "",
            done.err.strip()[:120],
            word,
            word in words and not done.code and not done.err,
        )
