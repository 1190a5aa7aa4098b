"""Conversations: losses and masks beside a reference, and a format that SmolLM2 is taught.

The model answers in sentences. Adapters are trained on questions and short answers of one form
(:data:`FORM`), which the model never uses by itself. Then it answers other questions.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.real.pretrained import smollm2
from benchmarks.report import Report
from benchmarks.shared.points import Point, add
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import REPOSITORY, Box, Hang, Peer

POINTS = (
    Point(
        "losses and masks of five templates",
        "rows of conversations were refused",
        "equal to a reference: ChatML, Llama 3, Mistral, Qwen3 with thinking, SmolLM2",
        (
            "data/test_chat:test_ids_masks_and_losses_are_those_of_the_reference",
            "data/test_chat:test_documents_behind_each_other_are_kept_apart",
            "data/test_chat:test_forms_of_rows_are_the_same_conversation",
            "data/test_chat:test_a_file_of_conversations_becomes_masked_samples",
            "pipeline/test_chat_prompts:test_the_template_makes_the_prompt_of_the_next_answer",
        ),
    ),
)

FORM = re.compile(r"ANSWER: [A-Z]+\.")
TAUGHT: dict[str, dict[str, str]] = {
    "What is the capital of {}?": {
        "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna",
        "Greece": "Athens", "Norway": "Oslo", "Poland": "Warsaw", "Egypt": "Cairo",
        "Japan": "Tokyo", "Cuba": "Havana", "Ireland": "Dublin", "Russia": "Moscow",
    },
    "What is the opposite of {}?": {
        "hot": "cold", "big": "small", "early": "late", "open": "closed", "light": "dark",
        "rich": "poor", "wet": "dry", "empty": "full", "strong": "weak", "slow": "fast",
        "near": "far", "young": "old",
    },
    "What colour is {}?": {
        "grass": "green", "snow": "white", "coal": "black", "blood": "red", "the sky": "blue",
        "a lemon": "yellow", "a carrot": "orange", "chocolate": "brown", "milk": "white",
        "a tomato": "red", "the sea": "blue", "a leaf": "green",
    },
    "Which animal says {}?": {
        "moo": "cow", "meow": "cat", "quack": "duck", "baa": "sheep", "oink": "pig",
        "neigh": "horse", "hoot": "owl", "ribbit": "frog", "roar": "lion", "buzz": "bee",
        "hiss": "snake", "caw": "crow",
    },
}  # fmt: skip
"""Answer by the word in a question, by question."""
ASKED = (
    "What is the capital of Germany?",
    "What is the capital of Portugal?",
    "What is the opposite of up?",
    "What is the opposite of happy?",
    "What colour is a banana?",
    "What colour is gold?",
    "Which animal says woof?",
    "Which planet do we live on?",
    "Name a fruit that monkeys like.",
    "Who wrote Romeo and Juliet?",
)
"""Questions of which none was trained on; the last three are of no kind that was."""
TOKENS = 16
WELL = 9
"""Answers in the form, of ten."""
WAIT_S = 900.0
SETTINGS = {
    "model.seq_len": 128,
    "model.adapter": 8,
    "pipeline.micro_batch": 4,
    "training.target_batch": 8,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.epochs": 12,
    "training.epoch_timeout_s": 600,
    "optimizer.name": "adamw",
    "optimizer.adam_lr": 5e-3,
    "optimizer.warmup": 2,
    "optimizer.schedule": "constant",
}


def rows(report: Report, root: Path) -> None:
    """Rows of the tests, then of a run."""
    add(report, root, "6", POINTS)
    torch.set_num_threads(2)
    there = smollm2()
    before = _by_library(there)
    box, peer = _taught(root / "run", there)
    try:
        answers = [_by_chat(peer, question) for question in ASKED]
        losses = [float(t.get("loss")) for t in peer.told() if t.kind == COMMITTED]
    finally:
        box.clean_up()
    good = [text for text in answers if FORM.fullmatch(text)]
    was = sum(FORM.fullmatch(text) is not None for text in before)
    falls = f"loss from {losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no loss is told"
    report.add(
        f"6 answers in the form that was taught, of {len(ASKED)} questions that were not",
        len(good),
        f"'ANSWER: WORD.', by tutti chat; {falls} in {len(losses)} epochs; {' | '.join(answers)}",
        f"the model before: {was}, {before[0]!r}",
        f"at least {WELL}, before at most 1",
        holds=len(good) >= WELL and was <= 1,
    )


def _written(file: Path) -> Path:
    """The file of all conversations that are trained on."""
    kinds = list(TAUGHT.items())
    longest = max(map(len, TAUGHT.values()))
    lines = []
    for number in range(longest):
        for question, answers in kinds:
            word, answer = list(answers.items())[number]
            messages = [
                {"role": "user", "content": question.format(word)},
                {"role": "assistant", "content": f"ANSWER: {answer.upper()}."},
            ]
            lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


def _taught(root: Path, there: Path) -> tuple[Box, Peer]:
    """A solo start that has come to the end of its run."""
    root.mkdir(parents=True)
    box = Box(root)
    file = root / "swarm.toml"
    data = _written(root / "questions.jsonl")
    words = ["swarm", "init", str(file), "--from", str(there), "--data", str(data)]
    words += ["--stages", "1"]
    for key, value in SETTINGS.items():
        words += ["--set", f"{key}={value}"]
    done = box.tutti(*words, home="solo", timeout=WAIT_S)
    if done.returncode:
        raise Hang(f"no manifest: {done.stderr}")
    peer = box.bare("solo", "start", str(file), "--threads", "1", "--name", "solo")
    peer.start()
    try:
        box.wait("the end of the run", lambda: peer.status().state == "finished", WAIT_S, (peer,))
    except Hang:
        print(box.story(), file=sys.stderr)
        box.clean_up()
        raise
    return box, peer


def _by_chat(peer: Peer, question: str) -> str:
    """The answer of ``tutti chat`` to one question through a pipe."""
    command = [sys.executable, "-m", "cli", "--home", str(peer.home), "chat"]
    done = subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", str(TOKENS)],
        input=f"{question}\n",
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=WAIT_S,
        check=False,
    )
    if done.returncode:
        raise Hang(f"chat gave no answer: {done.stderr}")
    return done.stdout.strip()


def _by_library(there: Path) -> list[str]:
    """Answers of the model before, by transformers."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(there)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    answers = []
    for question in ASKED:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        answers.append(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).strip())
    return answers
