"""The guide as its reader types it: every command of docs/guide.md, on three machines, which are
network namespaces; its output beside the guide's. Needs root.

A line `A$ command` is typed at machine A. The lines after it are its output, where `…` stands for
anything in a line, and alone for any lines. A command is repeated until its output matches, as a
reader would who waits. Behind `&` it goes on running. The invite in a command is the one that was
printed.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.report import ROOT, Report
from node.data.readers import pydoc
from testbed.networks.wan import Wan, why_not

GUIDE = ROOT / "docs" / "guide.md"
PATIENCE_S, ONCE_S = 180.0, 120.0
"""Bounds in s: for a command to print the promised output, over all its tries; for one try."""
_INVITE = re.compile(r"tutti2\w+")


@dataclass
class Step:
    """One command of the guide."""

    machine: str
    command: str
    expected: list[str] = field(default_factory=list)

    def matches(self, output: str) -> bool:
        """Return True if this is the output that the guide promises."""
        pattern = "".join(
            r"(?:.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
            for line in self.expected
        )
        return re.fullmatch(pattern, output.rstrip() + "\n") is not None or not self.expected


def steps(text: str) -> Iterator[Step]:
    """The commands, in order."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        step: Step | None = None
        for line in block.splitlines():
            if found := re.fullmatch(r"([A-Z])\$ (.*)", line):
                if step is not None:
                    yield step
                step = Step(found[1], found[2])
            elif step is not None:
                step.expected.append(line)
        if step is not None:
            yield step


def rows(report: Report, root: Path) -> None:
    """One row, and one for each command that says something else."""
    if why := why_not():
        report.add("7 commands of the guide", 0, "that were typed", why, "all", False)
        return
    todo = list(steps(GUIDE.read_text()))
    names = sorted({step.machine for step in todo})
    right = 0
    with Wan(len(names)) as wan:
        machines = {name: Machine(root / name, wan.host(i).through) for i, name in enumerate(names)}
        given(machines["A"].home)
        invite = ""
        try:
            for step in todo:
                said = machines[step.machine].type(step, invite)
                if found := _INVITE.search(said):
                    invite = found[0]
                if step.matches(said):
                    right += 1
                    continue
                name = f"7 {step.machine}$ {step.command}"
                report.add(name[:120], 0, f"said {said[-300:]!r}", "", "what it says", False)
        finally:
            for machine in machines.values():
                machine.close()
    report.add(
        "7 commands of the guide that say what it says",
        right,
        f"of {len(todo)}, on {len(names)} machines",
        "docs/guide.md",
        f"{len(todo)}",
        holds=right == len(todo),
    )


@dataclass
class Machine:
    """A user's home, and how to run a command at this machine."""

    home: Path
    through: tuple[str, ...]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)

    def type(self, step: Step, invite: str) -> str:
        """Type a command and return its output; "" for one that goes on running."""
        command = _INVITE.sub(invite, step.command.replace("tutti2…", "tutti2x"))
        if command.endswith("&"):
            with (self.home / "out").open("ab") as out:
                words = [*self.through, *shlex.split(command[:-1])]
                self.running.append(
                    subprocess.Popen(
                        words, cwd=self.home, env=self.environment, stdout=out, stderr=out
                    )
                )
            return ""
        until = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(
                [*self.through, *shlex.split(command)],
                cwd=self.home,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=ONCE_S,
                check=False,
            )
            if (done.returncode == 0 and step.matches(done.stdout)) or time.monotonic() >= until:
                return done.stdout
            time.sleep(2.0)

    @property
    def environment(self) -> Mapping[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "TUTTI_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        return {**kept, "HOME": str(self.home), "PATH": path, "NO_COLOR": "1", "COLUMNS": "120"}

    def close(self) -> None:
        """End the processes that still run, by SIGTERM first."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(40.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def given(home: Path) -> None:
    """Make the files of the guide's reader: a small Qwen3 with a tokenizer of its own, and a
    text."""
    (home / "book.txt").write_bytes(pydoc()[: 1 << 18])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(home / "book.txt")], trainer)
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        "qwen3",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home / "model")
    tokenizer.save(str(home / "model" / "tokenizer.json"))
