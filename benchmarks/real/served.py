"""SmolLM2 behind ``tutti serve``, asked by the real client of the OpenAI API."""

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.real.generated import swarm
from benchmarks.real.pretrained import smollm2
from benchmarks.report import Report
from testbed.daemons.fleet import REPOSITORY, Hang

CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Name three rivers of Europe."},
]
TOKENS = 40
CLIENTS = 32
SECONDS = 60.0
SHORT = 8
"""Tokens of an answer to one of many clients."""


def rows(report: Report, root: Path) -> None:
    """Rows of a run that is over."""
    torch.set_num_threads(2)
    there = smollm2()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(there)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    wanted = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
    box, peers = swarm(root, there)
    command = [sys.executable, "-m", "cli", "--home", str(peers[1].home), "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = re.search(r"http://\S+/v1", server.stderr.readline())
        if found is None:
            raise Hang("tutti serve says no address")
        asyncio.run(_rows(report, found[0], wanted, len(prompt)))
    finally:
        server.terminate()
        server.wait(30)
        box.clean_up()


async def _rows(report: Report, url: str, wanted: str, prompt: int) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        how: dict[str, Any] = {
            "model": "any",
            "messages": CHAT,
            "temperature": 0,
            "max_tokens": TOKENS,
        }
        whole = await client.chat.completions.create(**how)
        stream: Any = await client.chat.completions.create(**how, stream=True)
        parts = [c.choices[0].delta.content or "" async for c in stream]
        said = (whole.choices[0].message.content, "".join(parts))
        usage = whole.usage.prompt_tokens if whole.usage else 0
        report.add(
            "4 answers equal to those of the library",
            sum(text == wanted for text in said),
            f"of 2, whole and streamed; {usage} tokens of the prompt, there {prompt}",
            "apply_chat_template and generate of transformers, greedy",
            "2",
            holds=said == (wanted, wanted) and usage == prompt,
        )
        done, failed = await _many(client)
        report.add(
            f"4 failed requests of {CLIENTS} clients in {SECONDS:.0f} s, at a stage peer",
            len(failed),
            f"of {done + len(failed)}" + "".join(f"; {why[:100]}" for why in failed[:3]),
            "",
            "0",
            holds=not failed and done >= CLIENTS,
        )


async def _many(client: Any) -> tuple[int, list[str]]:
    """Requests that were answered, and the errors of the others."""
    until = time.monotonic() + SECONDS
    failed: list[str] = []
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        asked = 0
        while time.monotonic() < until:
            asked += 1
            text = f"Write the number {number} and then the number {asked}."
            try:
                await client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": text}],
                    max_tokens=SHORT,
                    timeout=300.0,
                )
                done += 1
            except Exception as e:  # noqa: BLE001 - counted, and shown
                failed.append(repr(e))

    await asyncio.gather(*(one(i) for i in range(CLIENTS)))
    return done, failed
