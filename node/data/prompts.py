"""Prompts of conversations, by the chat template of a model. Enters: templates of strangers,
messages. Never: a template that this process itself compiles or renders.
"""

import json
from collections.abc import Mapping, Sequence

from node.core.errors import UsageFault
from node.data.confined.process import KEPT, Confined, Pool, explained, printable

CPU_S = 5
"""Seconds of processor time for one prompt. A usual one takes a millisecond, and a template is
compiled in a tenth of a second."""


def load_template(process: Confined, template: str, special_tokens: Mapping[str, str]) -> None:
    """Make ``process`` keep a chat template for the calls that follow. Raises ParseFault for a text
    that is no template, and for one that takes too much to compile."""
    head = {"op": "template", "special": dict(special_tokens)}
    step = "the run needs a tokenizer with another chat template"
    said = process.call(head, template.encode("utf-8", "replace"))
    list(explained(said, "cannot read the chat template", step))


class PromptRenderer:
    """Renders prompts by one chat template, in confined processes that are kept for the next
    prompts. Any thread may use it."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: bos_token, eos_token, … as the template knows them."""

        def load(process: Confined) -> None:
            load_template(process, template, special_tokens)

        self._pool = Pool(load, CPU_S, most=KEPT)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Text of a conversation with the beginning of the next answer. Blocks. ``messages``: each
        with ``role`` and ``content``.

        Raises UsageFault for messages that the template refuses; ParseFault for a text that is no
        template, and for a template that takes too much memory or processor time.
        """
        found = self._pool.call({"op": "prompt"}, json.dumps(messages).encode())
        what = "the chat template cannot write this conversation"
        step = "ask for a text that goes on from a prompt:  tutti generate , or /v1/completions"
        answer = b"".join(explained(found, what, step))
        text = answer[1:].decode("utf-8", "replace")
        if answer[:1] == b"+":
            return text
        raise UsageFault(
            f"the chat template does not take these messages: {printable(text)}",
            "most templates want an optional system message, then user and assistant by turns",
        )
