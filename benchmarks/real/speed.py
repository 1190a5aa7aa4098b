"""Adapters of SmolLM2 trained by three daemons of one box, beside PEFT in one process: tokens a
second, in fp32 and in bf16.

The daemons (ends and two block stages) and PEFT take turns: the daemons stand still (SIGSTOP) while
PEFT trains. Both have the same threads in all, samples of the same size and the same number format.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import peft
import torch
import transformers

from benchmarks.real.generated import WAIT_S, commits, epochs_a_second, made, peers_of
from benchmarks.real.pretrained import smollm2
from benchmarks.report import Report
from node.model.device import set_threads
from node.telemetry.resources import bf16_units
from testbed.daemons.fleet import Peer

RANK = 8
ALPHA = 16
SEQUENCE, MICRO_BATCH, BATCH = 256, 2, 16
"""Tokens of a sequence; sequences of a micro-batch and of an epoch."""
SETTINGS: dict[str, Any] = {
    "model.adapter": RANK,
    "model.adapter_alpha": ALPHA,
    "model.seq_len": SEQUENCE,
    "training.target_batch": BATCH,
    "pipeline.micro_batch": MICRO_BATCH,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.epochs": 100_000,
    "training.epoch_timeout_s": 600,
    "optimizer.name": "adamw",
    "optimizer.adam_lr": 1e-4,
}
ROUNDS = 5
EPOCHS = 2
"""Epochs of a turn."""
LEAST = 0.9


def rows(report: Report, root: Path) -> None:
    """A row for each number format."""
    _format(report, root / "fp32", bf16=False)
    if bf16_units():
        _format(report, root / "bf16", bf16=True)
    else:
        report.add("2 tokens a second in bf16", 0, "this processor has no units for it")


def _format(report: Report, root: Path, *, bf16: bool) -> None:
    there = smollm2()
    threads = len(os.sched_getaffinity(0))
    set_threads(threads)  # and the same library of products as the daemons
    step = _peft(there, bf16=bf16)
    step()
    box = made(root, there, SETTINGS | {"training.mixed_precision": bf16})
    # The ends and the two stages work by turns, so each may use all cores.
    peers = peers_of(box, (1, 1, 1), threads)
    ours: list[float] = []
    theirs: list[float] = []
    try:
        box.start(*peers)
        box.wait("the first epochs", lambda: len(commits(peers[0])) >= 2, WAIT_S)
        for _ in range(ROUNDS):
            ours.append(epochs_a_second(box, peers[0], EPOCHS) * BATCH * SEQUENCE)
            with _standing(peers):
                theirs.append(_rate(step))
        formats = {p.label: p.status().precision for p in peers}
    finally:
        box.clean_up()
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    report.add(
        f"2 tokens a second by adapters in {'bf16' if bf16 else 'fp32'}",
        ratio,
        f"times those of PEFT: {median(ours):.0f} and {median(theirs):.0f}; {formats}",
        f"PEFT and AdamW in one process with {threads} threads",
        f"at least {LEAST}",
        holds=ratio >= LEAST,
    )


class _standing:
    """Peers that stand still inside of the block."""

    def __init__(self, peers: list[Peer]) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        for peer in self._peers:
            peer.signal(signal.SIGSTOP, family=True)

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.signal(signal.SIGCONT, family=True)


def _rate(step: Callable[[], None]) -> float:
    """Tokens a second of PEFT."""
    began = time.perf_counter()
    for _ in range(EPOCHS):
        step()
    return EPOCHS * BATCH * SEQUENCE / (time.perf_counter() - began)


def _peft(there: Path, *, bf16: bool) -> Callable[[], None]:
    """A step of PEFT's adapters on random tokens, in micro-batches as the daemons have them."""
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"])
    model: Any = peft.get_peft_model(base, config)
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    dice = torch.Generator().manual_seed(1)
    context: Callable[[], AbstractContextManager[object]] = (
        partial(torch.autocast, "cpu", dtype=torch.bfloat16) if bf16 else nullcontext
    )

    def step() -> None:
        adam.zero_grad()
        for _ in range(BATCH // MICRO_BATCH):
            shape = (MICRO_BATCH, SEQUENCE + 1)
            ids = torch.randint(base.config.vocab_size, shape, generator=dice)
            with context():
                logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
            )
            loss.backward()
        adam.step()

    return step
