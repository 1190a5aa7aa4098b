"""``tutti chat``: a conversation with the model in a terminal, or through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from node.control.text import missing_words
from node.control.words import shown
from node.core import interrupts
from node.core.errors import ExitCode, LocalFault, NotRunning
from protos.control_pb2 import ChatMessage, GenerateRequest

if TYPE_CHECKING:
    from node.control.client import ControlClient

PROMPT = "> "
HELP = "/reset begins anew, /quit leaves; Ctrl-C ends an answer, twice leaves"
KEPT = 1000
"""Lines of input that are remembered for the next time."""


class Chat:
    """A conversation: the messages so far. ``settings``: how an answer is drawn."""

    def __init__(self, client: ControlClient, settings: GenerateRequest, system: str = "") -> None:
        self._client = client
        self._settings = settings
        self._system = list[ChatMessage]()
        if system:
            self._system.append(ChatMessage(role="system", content=system))
        self._said: list[ChatMessage] = []

    def reset(self) -> None:
        """Forget all messages."""
        self._said.clear()

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer to ``text``, in pieces. The beginning of an answer that is broken off is part
        of the conversation; a question without any answer is not. Raises LocalFault."""
        question = ChatMessage(role="user", content=text)
        request = GenerateRequest()
        request.CopyFrom(self._settings)
        request.messages.extend([*self._system, *self._said, question])
        answered = ""
        try:
            for piece in self._client.generate(request):
                if piece.HasField("missing"):
                    _note(missing_words(piece.missing))
                answered += piece.text
                yield piece.text
        except BaseException:  # also a Ctrl-C
            if answered:
                self._remember(question, answered)
            raise
        self._remember(question, answered)

    def _remember(self, question: ChatMessage, answered: str) -> None:
        self._said += [question, ChatMessage(role="assistant", content=answered)]


def chat(client: ControlClient, settings: GenerateRequest, system: str, history: Path) -> ExitCode:
    """Talk until the input ends. At a terminal an answer that fails is shown and the conversation
    goes on; through a pipe it ends the command. A daemon may restart meanwhile: raises NotRunning
    when two questions one after the other find none."""
    talk = Chat(client, settings, system)
    if not sys.stdin.isatty():
        return _piped(talk)
    _note(HELP)
    found = True
    with interrupts.raising(), _remembered(history):
        while True:
            text = _asked()
            if text is None or text == "/quit":
                return ExitCode.OK
            if text == "/reset":
                talk.reset()
                _note("begun anew")
            elif text.startswith("/"):
                _note(HELP)
            elif text:
                found = _shown(talk, text, found)


def _piped(talk: Chat) -> ExitCode:
    for line in sys.stdin:
        text = line.strip()
        if text == "/quit":
            break
        if text == "/reset":
            talk.reset()
        elif text:
            _print(talk.answer(text))
    return ExitCode.OK


def _asked() -> str | None:
    """The next line of input; None at its end, and after a second Ctrl-C."""
    warned = False
    while True:
        try:
            return input(PROMPT).strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            interrupts.acted()
            print()
            if warned:
                return None
            warned = True
            _note("Ctrl-C again leaves")


def _shown(talk: Chat, text: str, found: bool) -> bool:
    """Print the answer to ``text``; a Ctrl-C ends it. Returns False where no daemon was there; with
    ``found`` False, because none was there before either, that is raised as NotRunning."""
    answer = talk.answer(text)
    try:
        _print(answer)
    except KeyboardInterrupt:
        interrupts.acted()
        answer.close()
        print()
    except LocalFault as fault:
        there = not isinstance(fault, NotRunning)
        if not there and not found:
            raise
        print()
        said = str(fault)
        if fault.next_step:
            said += f"; {fault.next_step}"
        _note(said)
        return there
    return True


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(shown(piece), end="", flush=True)
    print(flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _remembered(history: Path) -> Iterator[None]:
    """Let lines of input be edited and recalled, also lines of earlier conversations, where the
    system has a library for it."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(KEPT)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.touch(mode=0o600)
            readline.write_history_file(history)
