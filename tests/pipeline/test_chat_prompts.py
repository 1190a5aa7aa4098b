"""Prompts of conversations, and stop texts."""

import asyncio

import pytest

from node.app.run_files import ModelFiles
from node.core.errors import UsageFault
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
        ("{% for %}", [("user", "hi")], "does not take"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_refused(template, messages, why):
    with pytest.raises(UsageFault, match=why) as refused:
        chat_prompt(files(template), messages)
    assert refused.value.next_step


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
