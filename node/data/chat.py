"""Conversations to text: the chat template of a tokenizer, and the parts of its text that the
assistant wrote. Enters: templates and rows of strangers. Never: a file, torch.

A template is a program of somebody else. It runs in Jinja's sandbox, and its output is bounded. The
sandbox bounds neither time nor memory: only confined processes (``node/data/confined``) compile and
render templates.
"""

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from node.data.marks import Conversation

MOST_TEXT = 4 << 20
"""Characters of one rendered conversation."""
MOST_MESSAGES = 1000
"""Messages of one conversation."""
MOST_RENDERED = 128 << 20
"""Characters that are rendered to find the turns of one conversation."""
MOST_TEMPLATE = 128 << 10
"""Characters of a template. The largest that models come with have some tens of KiB. Compiling
takes up to 4 KB of memory for each character: half a gigabyte for the longest template."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles of the form ``from`` and ``value``."""
FIELDS = ("messages", "conversations", "conversation")
"""Fields that hold the messages of a conversation."""
_DATE = datetime.date(2024, 7, 26)
"""The day that a template is told: peers that render a text at other times must get the same."""
_ENDS = secrets.token_hex(8)
_BEGIN = f"\ue000{_ENDS}\ue001"
_STOP = f"\ue002{_ENDS}\ue003"
_MARK = re.compile(f"{_BEGIN}|{_STOP}")
_HAS_BLOCKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Misfit(Exception):
    """A row is no conversation, or the template cannot write it; the reason as a sentence."""


class BadTemplate(Exception):
    """A template that no row can be written with; the reason as a sentence."""


class _Generation(Extension):
    """The block ``{% generation %}``, by which a template marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_STOP}"


@jinja2.pass_context
def _unchanged(context: object, value: Any) -> Any:
    """The value of an expression as the template writes it: ``value`` itself."""
    return value


class Template:
    """A chat template, compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: bos_token, eos_token, … as the template knows them. Raises
        BadTemplate for a text that is no template."""
        if len(source) > MOST_TEMPLATE:
            raise BadTemplate(f"the chat template has more than {MOST_TEMPLATE} characters")
        extensions = [_Generation, loopcontrols]
        # jinja2 computes constants when it compiles, such as 9**(9**9). ``optimized=False`` turns
        # that off inside statements, and a ``finalize`` that needs the context inside expressions.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_unchanged,
            extensions=extensions,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _DATE.strftime
        try:
            tree = environment.parse(source)
            _check_escaping(tree)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as e:
            raise BadTemplate(f"the chat template cannot be read: {_said(e)}") from e
        self.has_blocks = _HAS_BLOCKS.search(source) is not None
        """True if the template marks the assistant's text itself."""
        self._special = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
    ) -> str:
        """Text of a conversation. ``add_generation_prompt``: with the beginning of an answer.
        Raises Misfit for messages that the template refuses, or of which it makes too much."""
        return _MARK.sub("", self._rendered(messages, add_generation_prompt, tools))

    def _rendered(self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: Any) -> str:
        given = self._special | {
            "messages": [dict(m) for m in messages],
            "add_generation_prompt": prompt,
            "tools": tools,
            "documents": None,
        }
        parts = list[str]()
        length = 0
        try:
            for part in self._template.generate(given):
                parts.append(part)
                length += len(part)
                if length > MOST_TEXT:
                    raise Misfit(f"the template writes more than {MOST_TEXT} characters")
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise Misfit(f"the template refuses it: {_said(e)}") from e
        except (AttributeError, NameError, RecursionError) as e:  # jinja2 writes 1e999 as a name
            raise Misfit(f"the template fails: {_said(e)}") from e
        return "".join(parts)

    def conversations(
        self, messages: Sequence[Mapping[str, Any]], first: int = 0, tools: Any = None
    ) -> list[Conversation]:
        """The text of a conversation, of which the turns of the assistant from the message
        ``first`` on are trained on.

        Without blocks in the template a turn begins behind the rendering of the messages before it
        and the generation prompt, and ends with its own rendering, where these begin the whole
        text. A template that writes a turn otherwise once others follow it, such as one that
        leaves earlier thinking out, gives a text for each turn: the messages up to it, as the
        model will see them when it answers. Raises Misfit.
        """
        if len(messages) > MOST_MESSAGES:
            raise Misfit(f"more than {MOST_MESSAGES} messages")
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        if not turns:
            raise Misfit("no turn of the assistant")
        if self.has_blocks and not first:
            return [_by_blocks(self._rendered(messages, False, tools))]
        whole = self.render(messages, tools=tools)
        if len(turns) * len(whole) > MOST_RENDERED:
            raise Misfit("too many turns for a text of this length")
        each = [self._turn(messages, i, tools) for i in turns]
        if all(whole.startswith(text) for text, _ in each):
            return [Conversation(whole, tuple((start, len(text)) for text, start in each))]
        return [Conversation(text, ((start, len(text)),)) for text, start in each]

    def _turn(self, messages: Sequence[Mapping[str, Any]], i: int, tools: Any) -> tuple[str, int]:
        """Text of the messages up to the ``i``-th, and where that begins in it."""
        text = self.render(messages[: i + 1], tools=tools)
        before = self.render(messages[:i], add_generation_prompt=True, tools=tools)
        if not text.startswith(before):
            raise Misfit(
                "the template writes an answer that does not begin where its prompt ends, so that "
                "nobody can tell what the assistant wrote"
            )
        return text, len(before)


def conversations(row: Any, column: str, template: Template | None) -> list[Conversation]:
    """Conversations of a row: messages in the field ``column``, or, where that is "text", in one of
    :data:`FIELDS`, or ``prompt`` and ``completion``. Without a template only a prompt and a
    completion that are texts can be written. Raises Misfit."""
    if not isinstance(row, Mapping):
        raise Misfit("a row that is no object")
    names = FIELDS
    if column != "text":
        names = (column,)
    given = next((row[name] for name in names if row.get(name) is not None), None)
    tools = _tools(row.get("tools"))
    if given is not None:
        if template is None:
            raise Misfit("messages, and the tokenizer has no chat template")
        return template.conversations(_messages(given), 0, tools)
    prompt = row.get("prompt")
    completion = row.get("completion")
    if column != "text" or prompt is None or completion is None:
        raise Misfit(f"no messages in {' or '.join(map(repr, names[:2]))}{_fields(row)}")
    if template is None:
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise Misfit("messages, and the tokenizer has no chat template")
        text = prompt + completion
        return [Conversation(text, ((len(prompt), len(text)),), open=True)]
    before = _messages(prompt, "user")
    whole = [*before, *_messages(completion, "assistant")]
    return template.conversations(whole, len(before), tools)


def looks_like_chat(row: Any) -> bool:
    """Return True for a row with a conversation and without a text."""
    if not isinstance(row, Mapping) or isinstance(row.get("text"), str):
        return False
    if row.get("prompt") is not None and row.get("completion") is not None:
        return True
    return any(isinstance(row.get(name), list) for name in FIELDS)


def _messages(given: Any, role: str = "") -> list[dict[str, Any]]:
    """Messages with a role and a content. A text is one message of ``role``."""
    if role and isinstance(given, str):
        return [{"role": role, "content": given}]
    if isinstance(given, str):  # a table of texts
        given = _parsed(given, "messages")
    if not isinstance(given, list):
        raise Misfit("messages that are no list")
    if not given:
        raise Misfit("a conversation without messages")
    return [_message(message) for message in given]


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise Misfit("a message that is no object")
    # Tables fill in what a row does not have.
    found = {str(name): value for name, value in given.items() if value is not None}
    if "role" not in found and "from" in found:
        said = str(found.pop("from"))
        if said not in ROLES:
            raise Misfit(f"a message from {said[:40]!r}")
        found = {"role": ROLES[said], "content": found.pop("value", None), **found}
    role = found.get("role")
    content = found.get("content")
    if not isinstance(role, str):
        raise Misfit("a message without a role")
    if isinstance(content, list):
        content = _joined(content)
    if content is None and found.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise Misfit("a message without a text")
    return found | {"content": content}


def _joined(parts: Sequence[Any]) -> str:
    """Text of a content in parts."""
    texts = [p.get("text") if isinstance(p, Mapping) else None for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Misfit("a message with parts that are no text")
    return "".join(map(str, texts))


def _tools(given: Any) -> Any:
    """Tools of a row, which may be written as JSON."""
    if isinstance(given, str):
        given = _parsed(given, "tools")
    return given or None


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Misfit(f"{what} that are no JSON") from None


def _fields(row: Mapping[str, Any]) -> str:
    names = ", ".join(str(name)[:40] for name in list(row)[:8])
    if not names:
        return ""
    return f"; its fields are {names}"


def _check_escaping(tree: nodes.Template) -> None:
    """Raise BadTemplate where ``{% autoescape %}`` has more than a constant behind it: jinja2
    computes it when it compiles."""
    for block in tree.find_all(nodes.EvalContextModifier):
        if not all(isinstance(option.value, nodes.Const) for option in block.options):
            raise BadTemplate("the chat template computes whether it escapes its text")


def _by_blocks(marked: str) -> Conversation:
    """Conversation from the output of a template with generation blocks: ``marked`` has
    :data:`_BEGIN` and :data:`_STOP` around each. Raises Misfit for blocks inside each other, and
    for none."""
    text = list[str]()
    trained = list[tuple[int, int]]()
    at = length = start = 0
    opened = False
    for found in _MARK.finditer(marked):
        piece = marked[at : found.start()]
        text.append(piece)
        length += len(piece)
        at = found.end()
        begins = found[0] == _BEGIN
        if begins == opened:
            raise Misfit("the template has generation blocks inside each other")
        opened = begins
        if begins:
            start = length
        elif length > start:
            trained.append((start, length))
    text.append(marked[at:])
    if opened or not trained:
        raise Misfit("the template marks nothing as generated")
    return Conversation("".join(text), tuple(trained))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes for web pages: it replaces < and >.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message)[:200])


def _said(e: Exception) -> str:
    return f"{str(e)[:200] or type(e).__name__}"
