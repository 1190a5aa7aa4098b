"""Prompts of conversations, and stop texts."""

import asyncio
import contextlib
import os

import pytest

from node.app.run_files import ModelFiles
from node.core.errors import UsageFault
from node.data import prompts
from node.data.chat import Template
from node.data.confined import process
from node.data.confined.process import Confined
from node.data.tokenizer_files import TokenizerFiles
from node.inference.chat import MAX_CHAT, StopTexts, chat_prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def files(template: str) -> TokenizerFiles:
    return TokenizerFiles({"chat_template.jinja": template.encode()})


def test_the_template_makes_the_prompt_of_the_next_answer():
    assert chat_prompt(files(CHATML), [("system", "be brief"), ("user", "hi")]) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (CHATML, [], "without messages"),
        (CHATML, [("narrator", "hi")], "no role"),
        (CHATML, [("n" * 10_000, "hi")], "^.{,99}$"),
        (CHATML, [("user", "hi")] * 257, "257 messages"),
        (CHATML, [("user", "x" * (MAX_CHAT + 1))], "bytes"),
        ("{{ raise_exception('roles must alternate') }}", [("user", "hi")], "must alternate"),
        ("{{ ''.__class__.__mro__ }}", [("user", "hi")], "does not take"),
        ("{{ raise_exception('a\x1b[2J') }}", [("user", "hi")], r"a \[2J$"),
        ("{% for %}", [("user", "hi")], "cannot be read"),
        ("x" * (128 * 1024 + 1), [("user", "hi")], "more than 131072 characters"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_refused(template, messages, why):
    with pytest.raises(UsageFault, match=why) as refused:
        chat_prompt(files(template), messages)
    assert refused.value.next_step


def test_prompts_of_one_model_are_written_in_one_process(monkeypatch):
    began = list[None]()
    begin = Confined.__init__
    monkeypatch.setattr(Confined, "__init__", lambda *given: (began.append(None), begin(*given))[1])
    model = files("{{ raise_exception('no') if messages[0].content == '?' else messages }}")
    for content in ("hi", "?", "hi"):
        with contextlib.suppress(UsageFault):
            assert content in chat_prompt(model, [("user", content)])
    assert len(began) == 1


def test_a_template_runs_in_no_process_of_this_program(monkeypatch):
    def refuses(*_: object) -> None:
        raise AssertionError("a template of a stranger, here")

    monkeypatch.setattr(Template, "__init__", refuses)
    assert chat_prompt(files("{{ messages[0].content }}"), [("user", "naïve 🤖")]) == "naïve 🤖"


LOOPS = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set a = namespace(b='ab') %}{% for i in range(99) %}{% set a.b = a.b ~ a.b %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOPS, "more than 1 s of processor time"),
        ("{{ 9 ** (9 ** 9) }}", "more than 1 s of processor time"),
        pytest.param(
            DOUBLES,
            "cannot write this conversation.*MemoryError",
            marks=pytest.mark.skipif(not os.path.exists("/proc"), reason="Linux bounds addresses"),
        ),
    ],
)
def test_a_template_that_takes_too_much_is_refused(monkeypatch, template, why):
    monkeypatch.setattr(prompts, "CPU_S", 1)
    monkeypatch.setattr(process, "MEMORY", 512 << 20)
    model = files("{% if messages[0].content == '?' %}" + template + "{% endif %}hi")
    with pytest.raises(UsageFault, match=why) as refused:
        chat_prompt(model, [("user", "?")])
    assert "tutti generate" in refused.value.next_step
    assert chat_prompt(model, [("user", "!")]) == "hi"  # and the next one is answered


def test_a_model_without_a_template_says_what_else_to_ask():
    with pytest.raises(UsageFault, match="no chat template") as refused:
        chat_prompt(TokenizerFiles(), [("user", "hi")])
    assert "/v1/completions" in refused.value.next_step


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["xy"], ["ax", "yb", "c"], ["a", "", "", ""], True),
        (["xy"], ["ax", "b"], ["a", "xb", ""], False),
        (["xy"], ["ax"], ["a", "x"], False),
        (["b", "abc"], ["zabc"], ["z", ""], True),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], True),
        (["", "x"], ["ax"], ["a", ""], True),
    ],
)
def test_a_stop_text_ends_a_text_wherever_pieces_end(stops, pieces, shown, found):
    seen = StopTexts(stops)
    assert [*(seen.feed(piece) for piece in pieces), seen.rest()] == shown
    assert seen.found is found


async def test_the_files_are_read_once_and_again_after_a_failure():
    calls: list[int] = []

    async def read() -> TokenizerFiles:
        calls.append(1)
        await asyncio.sleep(0)
        if len(calls) == 1:
            raise UsageFault("not here", "wait")
        return TokenizerFiles()

    there = ModelFiles(read)
    with pytest.raises(UsageFault):
        await there()
    one, other = await asyncio.gather(there(), there())
    assert one is other
    assert len(calls) == 2
