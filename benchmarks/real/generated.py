"""SmolLM2 through a swarm of one box: tokens a second of generated text beside ``transformers``,
equal tokens, several texts at once, from a stage peer, and with a stage that is killed."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import transformers

from benchmarks.real.moby_dick import moby_dick
from benchmarks.real.pretrained import smollm2
from benchmarks.report import Report
from node.control.client import ControlClient
from node.core.home import control_socket
from node.identity.keys import Identity
from node.manifest import read_manifest
from node.reach.interfaces import free_port
from protos.control_pb2 import GenerateRequest
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Hang, Peer, named

STAGES = 2
THREADS = 2
PROMPT, TOKENS = 500, 200
"""Tokens of the prompt, and of the text that is generated."""
GUESSED = 8
"""Tokens of a draft of the library."""
AT = 5000
"""Token of the novel with which its prompt begins."""
TEXTS = 4
ROUNDS = 3
KILLED_AT = 100
TURNS, EPOCHS = 3, 2
"""Turns of training alone and of training beside texts; epochs of each."""
SETTINGS = {
    "model.seq_len": 256,
    "training.target_batch": 4,
    "pipeline.micro_batch": 2,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.epochs": 1,
    "training.epoch_timeout_s": 600,
    "optimizer.name": "adamw",
    "optimizer.adam_lr": 1e-9,
    "optimizer.warmup": 0,
}
WAIT_S = 900.0
STORY = (
    "The keeper of the lighthouse wrote down the weather of every evening, the ships that passed "
    "and the names of their captains, as far as he could read them through his glass. "
)


def rows(report: Report, root: Path) -> None:
    """Rows of a run that is over, so that nothing trains beside the texts."""
    torch.set_num_threads(THREADS)
    there = smollm2()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(there)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    ids = tokenizer(STORY * 40)["input_ids"][:PROMPT]
    prompt = tokenizer.decode(ids)
    passage = tokenizer.decode(tokenizer(moby_dick().read_text())["input_ids"][AT : AT + PROMPT])
    novel = tokenizer(passage)["input_ids"]
    box, peers = swarm(root, there)
    try:
        _at_rest(report, box, model, novel, passage, "of a novel")
        _at_rest(report, box, model, ids, prompt, "that repeat themselves")
        _together(report, peers[0], prompt)
        _killed(report, peers, model, ids, prompt)
    finally:
        box.clean_up()
    _while_training(report, root / "training", there, prompt)


def _at_rest(report: Report, box: Box, model: Any, ids: list[int], prompt: str, what: str) -> None:
    """Texts of a swarm that does nothing else. ``what``: the words of the prompt."""
    ours: list[float] = []
    theirs: list[float] = []
    wanted: list[int] = []
    found: dict[str, list[int]] = {}
    guessing: list[float] = []
    for _ in range(ROUNDS):
        seconds, wanted = _library(model, ids)
        theirs.append(TOKENS / seconds)
        seconds, _ = _library(model, ids, prompt_lookup_num_tokens=GUESSED)
        guessing.append(TOKENS / seconds)
        for home in ("ends-0", named(1, "0")):
            said = _said(box, home, prompt)
            found[home] = said["tokens"]
            if home == "ends-0":
                ours.append(said["tokens_per_s"])
    ratio = median(ours) / median(theirs)
    report.add(
        f"3 tokens a second, {TOKENS} after {len(ids)} {what}",
        ratio,
        f"times those of transformers: {median(ours):.1f} and {median(theirs):.1f}",
        f"transformers.generate with its cache, {THREADS} threads",
        "at least 0.8",
        holds=ratio >= 0.8,
    )
    report.add(
        f"3 the same beside drafts of {GUESSED} tokens from the prompt",
        median(ours) / median(guessing),
        f"times those of transformers: {median(ours):.1f} and {median(guessing):.1f}",
        "transformers.generate with prompt_lookup_num_tokens",
    )
    for home, tokens in found.items():
        equal = sum(a == b for a, b in zip(tokens, wanted, strict=False))
        report.add(
            f"3 equal greedy tokens after {len(ids)} {what}, asked at {home}",
            equal,
            f"of {TOKENS}",
            "transformers.generate",
            str(TOKENS),
            holds=tokens == wanted,
        )


def _together(report: Report, ends: Peer, prompt: str) -> None:
    """Several texts at once, beside each of them alone. One that repeats itself has several tokens
    in a pass when it is alone already."""
    one, four = _rates(ends, prompt, 1.0)
    report.add(
        f"3 tokens a second of {TEXTS} drawn texts at once",
        four / one,
        f"times those of one: {four:.1f} and {one:.1f}",
        "the same texts, each alone",
        "at least 2",
        holds=four >= 2 * one,
    )
    one, four = _rates(ends, prompt, 0.0)
    report.add(
        f"3 tokens a second of {TEXTS} texts that repeat themselves at once",
        four / one,
        f"times those of one: {four:.1f} and {one:.1f}",
        "the same texts, each alone",
    )


def _killed(report: Report, peers: list[Peer], model: Any, ids: list[int], prompt: str) -> None:
    """The replica of stage 1 that has the text is killed in the middle of it."""
    _, wanted = _library(model, ids)
    tokens: list[int] = []
    longest = 0.0
    with ControlClient(control_socket(peers[0].home)) as client:
        last = time.monotonic()
        for piece in client.generate(_request(prompt, TOKENS)):
            if not piece.HasField("token"):
                continue
            longest = max(longest, time.monotonic() - last)
            tokens.append(piece.token)
            if len(tokens) == KILLED_AT:
                busy = [p for p in peers if p.label.startswith("stage-1") and p.status().texts]
                (busy or peers[1:2])[-1].kill()
            last = time.monotonic()
    report.add(
        f"3 equal greedy tokens, a stage killed at token {KILLED_AT}",
        sum(a == b for a, b in zip(tokens, wanted, strict=False)),
        f"of {TOKENS}; longest wait {longest:.1f} s",
        "transformers.generate",
        str(TOKENS),
        holds=tokens == wanted,
    )


def _while_training(report: Report, root: Path, there: Path, prompt: str) -> None:
    """Texts one after the other while the swarm trains, in turns with training alone."""
    settings = {"training.min_replicas": 1, "training.eval_every": 0, "training.epochs": 100_000}
    box = made(root, there, settings)
    peers = peers_of(box, (1, 1, 1), THREADS)
    alone: list[float] = []
    beside: list[float] = []
    tokens = 0
    seconds = 0.0
    try:
        box.start(*peers)
        box.wait("the first epochs", lambda: len(commits(peers[0])) >= 2, WAIT_S)
        for _ in range(TURNS):
            alone.append(epochs_a_second(box, peers[0], EPOCHS))
            with Reading(peers[0], prompt) as reading:
                beside.append(epochs_a_second(box, peers[0], EPOCHS))
            tokens += reading.tokens
            seconds += reading.seconds
    finally:
        box.clean_up()
    rate = tokens / seconds
    report.add(
        "3 tokens a second while the swarm trains",
        rate,
        f"tokens a second, of one text of a prompt of {PROMPT} after the other",
        "",
        "at least 3",
        holds=rate >= 3,
    )
    slower = 1 - median(a / b for a, b in zip(beside, alone, strict=True))
    report.add(
        "3 share of its speed that training loses by these texts",
        slower,
        f"{median(alone):.4f} epochs a second alone",
        "",
        "at most 0.15",
        holds=slower <= 0.15,
    )


class Reading:
    """Texts that are asked for one after the other inside of the block. ``tokens`` and
    ``seconds``: of them, from the first token of each text to its last. The end of the block raises
    what reading a text raised."""

    def __init__(self, peer: Peer, prompt: str) -> None:
        self._peer = peer
        self._prompt = prompt
        self.tokens = 0
        self.seconds = 0.0
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> "Reading":
        self._reading = self._pool.submit(self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self._reading.result()

    def _read(self) -> None:
        with ControlClient(control_socket(self._peer.home)) as client:
            while not self._over.is_set():
                self._one(client)

    def _one(self, client: ControlClient) -> None:
        began = 0.0
        for piece in client.generate(_request(self._prompt, TOKENS)):
            if not piece.HasField("token"):
                continue
            if began:
                self.tokens += 1
            began = began or time.monotonic()
            if self._over.is_set():
                break
        if began:
            self.seconds += time.monotonic() - began


def commits(ends: Peer) -> list[float]:
    """Unix times of the epochs that were committed."""
    return [t.at for t in ends.told() if t.kind == COMMITTED]


def epochs_a_second(box: Box, ends: Peer, epochs: int) -> float:
    """Speed of a swarm that trains, from the next commit on over ``epochs``."""
    before = len(commits(ends))
    box.wait("an epoch", lambda: len(commits(ends)) > before, WAIT_S)
    box.wait("more epochs", lambda: len(commits(ends)) > before + epochs, WAIT_S)
    at = commits(ends)[before : before + epochs + 1]
    return epochs / (at[-1] - at[0])


def _library(model: Any, ids: list[int], **more: Any) -> tuple[float, list[int]]:
    """Seconds and tokens of the library; ``more``: settings of its generation."""
    began = time.monotonic()
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            **more,
        )
    return time.monotonic() - began, out[0, len(ids) :].tolist()


def _said(box: Box, home: str, prompt: str) -> dict[str, Any]:
    words = ["generate", prompt, "--max-tokens", str(TOKENS), "--temperature", "0", "--json"]
    done = box.tutti(*words, home=home, timeout=WAIT_S)
    if done.returncode:
        raise Hang(f"nothing was generated: {done.stderr}")
    return json.loads(done.stdout)


def _request(prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, max_tokens=tokens, temperature=temperature, seed=seed)


def _rates(ends: Peer, prompt: str, temperature: float) -> tuple[float, float]:
    """Tokens a second of one of :data:`TEXTS` texts alone, on average, and of all of them while
    they are all under way. One that has few tokens in a pass goes on when the others have ended:
    that is no longer a time of several texts."""
    alone: list[float] = []
    together: list[float] = []
    for _ in range(ROUNDS):
        each = [_tokens_of(ends, prompt, [seed], temperature) for seed in range(TEXTS)]
        alone.append(mean(_rate(one) for one in each))
        together.append(_rate(_tokens_of(ends, prompt, range(TEXTS), temperature)))
    return median(alone), median(together)


def _rate(texts: Sequence[Sequence[float]]) -> float:
    """Tokens a second while all the texts, of tokens at these times, are under way."""
    began = max(times[0] for times in texts)
    ended = min(times[-1] for times in texts)
    return sum(began < at <= ended for times in texts for at in times) / (ended - began)


def _tokens_of(
    peer: Peer, prompt: str, seeds: Sequence[int], temperature: float
) -> list[list[float]]:
    """The times of the tokens of each of the texts of these seeds, which are asked for at once and
    wait for each other's first token."""
    begun = threading.Barrier(len(seeds))

    def one(client: ControlClient, seed: int) -> list[float]:
        times: list[float] = []
        for piece in client.generate(_request(prompt, TOKENS // 2, temperature, seed)):
            if not piece.HasField("token"):
                continue
            if not times:
                begun.wait(WAIT_S)
            times.append(time.monotonic())
        return times

    with ControlClient(control_socket(peer.home)) as client, ThreadPoolExecutor(len(seeds)) as pool:
        running = [pool.submit(one, client, seed) for seed in seeds]
        return [future.result() for future in running]


def swarm(root: Path, there: Path, **changes: Any) -> tuple[Box, list[Peer]]:
    """Start the ends, two peers of stage 1 and one of stage 2, and wait for the end of their run.
    Each process has :data:`THREADS` threads, as transformers has."""
    box = made(root, there, SETTINGS | changes)
    peers = peers_of(box, (1, 2, 1), THREADS)
    try:
        box.start(*peers)
        box.wait(
            "the end of the run",
            lambda: all(p.status().state == "finished" for p in peers),
            WAIT_S,
        )
    except Hang:
        box.clean_up()
        raise
    return box, peers


def made(root: Path, there: Path, settings: Mapping[str, Any], *more: str) -> Box:
    """Write the manifest of a run that begins from the model in the directory ``there``. ``more``:
    words of the command instead of the number of stages. Raises Hang where ``tutti swarm init``
    refuses."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root)
    file = root / "swarm.toml"
    words = ["swarm", "init", str(file), "--from", str(there)]
    words += more or ("--stages", str(STAGES))
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    done = box.tutti(*words, home="ends-0", timeout=WAIT_S)
    if done.returncode:
        raise Hang(f"no manifest: {done.stderr}")
    box.manifest = read_manifest(file)
    return box


def peers_of(box: Box, nodes: Sequence[int], threads: int) -> list[Peer]:
    """The peers of a run that :func:`made` wrote, ``nodes`` of each stage, not started."""
    key = Identity.load(box.root / "ends-0" / "identity.key").peer_id
    door = f"/ip4/127.0.0.1/tcp/{free_port(['127.0.0.1'])}/p2p/{key}"
    return [
        _peer(box, door, stage, str(number), threads)
        for stage, count in enumerate(nodes)
        for number in range(count)
    ]


def _peer(box: Box, door: str, stage: int, number: str, threads: int) -> Peer:
    where = ["--join", door] if stage else ["--p2p-port", door.split("/")[4]]
    role = ["--role", "stage", "--stage", str(stage)] if stage else ["--role", "ends"]
    label = named(stage, number)
    return box.bare(
        label,
        "start",
        str(box.root / "swarm.toml"),
        *role,
        *where,
        "--name",
        label,
        "--threads",
        str(threads),
    )


if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "benchmarks.real", "--only", "3"]))
