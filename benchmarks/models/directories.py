"""Random small models as transformers saves them, in several files: a run begins from each, of one
daemon with the ends and the directory, and two daemons with a block stage that fetch theirs."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report import Report
from node.identity.keys import Identity
from node.manifest import read_manifest
from node.reach.interfaces import free_port
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Hang, named
from testbed.models.directories import KINDS, made
from testbed.reference.swarm import Reference

STAGES = 2
STEPS = 20
CLOSE, LOSSES = 1e-5, 1e-5
"""Largest difference of a logit that is the same number in another order of additions; of a loss,
relative, after twenty steps of that."""
AGAIN = {"qwen2": "layers", "qwen3": "stage"}
"""Setting of `limits.recompute` for these families' stages."""
SETTINGS = {
    "training.target_batch": 16,
    "pipeline.micro_batch": 4,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "optimizer.warmup": 2,
    "optimizer.name": "adamw",
}
STILL = {"training.epochs": 1, "optimizer.adam_lr": 0.0, "optimizer.weight_decay": 0.0}
PROMPT = "three volunteers and a router"
DRAWN = 24


def rows(report: Report, root: Path) -> None:
    """Four rows of each kind."""
    torch.set_num_threads(1)
    for kind in KINDS:
        there = made(kind, root / f"{kind}-hf")
        with_box(report, kind, there, root / kind)


def with_box(report: Report, kind: str, there: Path, root: Path) -> None:
    """Two runs from one directory: one that changes nothing, and one that trains."""
    box = swarm(root / "still", there, STILL)
    try:
        ours, chances = generated(box)
        theirs = judged(transformers.AutoModelForCausalLM.from_pretrained(there), ours)
        apart = max(abs(a - b) for a, b in zip(chances, theirs, strict=True))
        fetched = sum(len(p.events("state-fetched")) for p in box.live)
    finally:
        box.clean_up()
    report.add(
        f"1 {kind}: largest difference of {DRAWN} log-probabilities, generated through two stages",
        apart,
        f"nats; {fetched} stages were fetched from the daemon with the directory",
        "transformers on the same directory",
        f"at most {CLOSE:g}",
        holds=apart <= CLOSE and fetched == STAGES,
    )
    again = f"limits.recompute={AGAIN.get(kind, 'auto')}"
    box = swarm(root / "trains", there, {"training.epochs": STEPS}, again=again)
    try:
        chief = box.made["ends-0"]
        live = {
            int(t.get("epoch")): float(t.get("loss")) for t in chief.told() if t.kind == COMMITTED
        }
        ours, chances = generated(box)
        out = root / "exported"
        done = box.tutti("export", str(out), home="ends-0")
        if done.returncode:
            raise Hang(f"no export: {done.stderr}")
    finally:
        box.clean_up()
    twin = Reference(box.manifest, root, there)
    alone = {e.epoch + 1: e.loss for e in twin.train(STEPS)}
    worst = max(abs(live[e] / alone[e] - 1) for e in alone) if live.keys() == alone.keys() else 1.0
    report.add(
        f"1 {kind}: largest difference of the losses of {STEPS} epochs",
        worst,
        f"relative; from {live[1]:.4f} to {live[STEPS]:.4f} nats per token",
        "one process, the same samples",
        f"at most {LOSSES:g}",
        holds=worst <= LOSSES,
    )
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    apart = max(abs(a - b) for a, b in zip(chances, judged(exported, ours), strict=True))
    report.add(
        f"1 {kind}: largest difference of {DRAWN} log-probabilities after {STEPS} epochs",
        apart,
        "nats",
        "transformers on the exported directory",
        f"at most {CLOSE:g}",
        holds=apart <= CLOSE,
    )
    tokens = torch.arange(64)[None] * 7 % 259
    with torch.no_grad():
        differ = float((exported(tokens).logits - twin.model(tokens)).abs().max())
    report.add(
        f"1 {kind}: largest difference of a logit of the exported model",
        differ,
        "absolute",
        "the model of one process after as many epochs",
        f"at most {CLOSE:g}",
        holds=differ <= CLOSE,
    )


def swarm(
    root: Path,
    there: Path,
    changes: dict[str, Any],
    nodes: Sequence[int] = (1, 1, 1),
    again: str = "limits.recompute=auto",
) -> Box:
    """Run `nodes` daemons, of the ends and of each block stage, to the end of their run. The
    manifest is made as a user makes it."""
    root.mkdir(parents=True)
    box = Box(root, settings=(again,))
    file = root / "swarm.toml"
    words = ["swarm", "init", str(file), "--from", str(there), "--stages", str(STAGES)]
    words += ["--tokenizer", "bytes", "--data", "synthetic:7"]
    for key, value in {**SETTINGS, **changes}.items():
        words += ["--set", f"{key}={value}"]
    done = box.tutti(*words, home="ends-0")
    if done.returncode:
        raise Hang(f"no manifest: {done.stderr}")
    box.manifest = read_manifest(file)
    key = Identity.load(root / "ends-0" / "identity.key").peer_id
    box.doors[named(0, "0")] = f"/ip4/127.0.0.1/tcp/{free_port(['127.0.0.1'])}/p2p/{key}"
    peers = [box.member(s, str(i)) for s, count in enumerate(nodes) for i in range(count)]
    try:
        box.start(*peers)
        box.wait("the end of the run", lambda: all(p.status().state == "finished" for p in peers))
    except Hang:
        print(box.story())
        box.clean_up()
        raise
    return box


def generated(box: Box) -> tuple[list[int], list[float]]:
    """Token ids and their log-probabilities, through the live swarm."""
    words = ["generate", PROMPT, "--max-tokens", str(DRAWN), "--temperature", "1", "--json"]
    done = box.tutti(*words, home="ends-0")
    if done.returncode:
        raise Hang(f"nothing was generated: {done.stderr}")
    said = json.loads(done.stdout)
    return said["tokens"], said["logprobs"]


def judged(model: Any, drawn: Sequence[int]) -> list[float]:
    """The log-probabilities that a model of transformers gives these tokens."""
    prompt = list(PROMPT.encode())
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(drawn)])).logits[0].double()
    chances = torch.log_softmax(logits, -1)
    found = [float(chances[len(prompt) + i - 1, token]) for i, token in enumerate(drawn)]
    if any(map(math.isnan, found)):
        raise RuntimeError("transformers gave no number")
    return found
