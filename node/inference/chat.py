"""Prompts of conversations, and stop texts. Enters: messages, the model's chat template and special
tokens, text in pieces. Leaves: the prompt of the next answer, text that can be shown. Never:
torch."""

from collections.abc import Sequence

from node.core.errors import UsageFault
from node.data.tokenizer_files import TokenizerFiles
from node.wire.limits import MESSAGES

ROLES = ("system", "user", "assistant", "tool")
MAX_CHAT = 1 << 16
"""Bytes of a conversation."""


def chat_prompt(files: TokenizerFiles, messages: Sequence[tuple[str, str]]) -> str:
    """The text from which the model goes on with the assistant's next answer, as its chat template
    writes it. Blocks. ``messages``: (role, content). Raises UsageFault where the model has no
    template, where the template refuses the messages, and where it fails or takes too much."""
    check_messages(messages)
    prompts = files.prompts
    if prompts is None:
        raise UsageFault(
            "this model has no chat template",
            "ask for a text that goes on from a prompt:  tutti generate , or /v1/completions",
        )
    listed = [{"role": role, "content": content} for role, content in messages]
    return prompts.render(listed)


def check_messages(messages: Sequence[tuple[str, str]]) -> None:
    """Raise UsageFault for a conversation that nobody answers."""
    if not messages:
        raise UsageFault("a conversation without messages", "give at least one message")
    if len(messages) > MESSAGES:
        raise UsageFault(
            f"the conversation has {len(messages):,} messages",
            f"give at most {MESSAGES}: begin a new one",
        )
    for role, _ in messages:
        if role not in ROLES:
            raise UsageFault(f"no role is called {role[:50]!r}", f"give one of {', '.join(ROLES)}")
    size = sum(len(content.encode()) for _, content in messages)
    if size > MAX_CHAT:
        raise UsageFault(
            f"the conversation has {size:,} bytes", f"give at most {MAX_CHAT:,}: begin a new one"
        )


class StopTexts:
    """Finds the first stop text in a text that comes in pieces, and holds back an end that may
    become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that can be shown now. Nothing follows a stop text."""
        if self.found:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        places = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if places:
            self.found = True
            self._held = ""
            return whole[: min(places)]
        keep = max(_begun(whole, stop) for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def rest(self) -> str:
        """The text that was held back, where no stop text came of it."""
        held = self._held
        self._held = ""
        return held


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
