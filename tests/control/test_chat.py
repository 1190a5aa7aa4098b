"""`tutti chat`: the messages that the model gets, and how a conversation goes on and ends."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.control import chat as chat_module
from node.control.chat import chat
from node.core import interrupts
from node.core.errors import ExitCode, LocalFault, NotRunning
from protos.control_pb2 import GenerateRequest, Piece

SETTINGS = GenerateRequest(max_tokens=9, temperature=0.5, seed=3)


class Echo:
    """A daemon that answers in capital letters. `raises` is the number of a letter and the error
    raised before it."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.raises: tuple[int, BaseException] | None = None

    def generate(self, request: GenerateRequest) -> Iterator[Piece]:
        assert (request.max_tokens, request.temperature, request.seed) == (9, 0.5, 3)
        self.asked.append([(m.role, m.content) for m in request.messages])
        for i, letter in enumerate(request.messages[-1].content.upper()):
            if self.raises is not None and self.raises[0] == i:
                raise self.raises[1]
            yield Piece(text=letter)


class Terminal:
    """Lines that a user types; a KeyboardInterrupt among them is a Ctrl-C."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = list(lines)

    def input(self, prompt: str) -> str:
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Any:
    def run(daemon: Echo, *lines: str | BaseException, system: str = "") -> tuple[ExitCode, str]:
        class Typed(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setattr("sys.stdin", Typed())
        monkeypatch.setattr("builtins.input", Terminal(*lines).input)
        code = chat(daemon, SETTINGS, system, tmp_path / "history")  # pyright: ignore
        return code, capsys.readouterr().out

    return run


def test_the_model_is_told_what_was_said(talk):
    daemon = Echo()
    code, shown = talk(daemon, "ab", "", "cd", "/reset", "ef", "/quit", "gh", system="be brief")
    assert (code, shown) == (ExitCode.OK, "AB\nCD\nEF\n")
    system = ("system", "be brief")
    assert daemon.asked == [
        [system, ("user", "ab")],
        [system, ("user", "ab"), ("assistant", "AB"), ("user", "cd")],
        [system, ("user", "ef")],
    ]


def test_a_ctrl_c_ends_an_answer_and_what_came_of_it_was_said(talk):
    daemon = Echo()
    daemon.raises = (2, KeyboardInterrupt())
    lines = ["abcd"]
    code, shown = talk(daemon, *lines)
    assert (code, shown) == (ExitCode.OK, "AB\n\n")
    assert not interrupts._State.arrived
    daemon.raises = None

    class Once(Echo):
        def generate(self, request: GenerateRequest) -> Iterator[Piece]:
            self.raises = (2, KeyboardInterrupt()) if not self.asked else None
            return super().generate(request)

    daemon = Once()
    talk(daemon, "abcd", "ef")
    assert daemon.asked[1] == [("user", "abcd"), ("assistant", "AB"), ("user", "ef")]


def test_two_ctrl_c_leave_and_one_does_not(talk):
    daemon = Echo()
    stop = KeyboardInterrupt()
    code, shown = talk(daemon, stop, "ab", stop, stop, "cd")
    assert code == ExitCode.OK
    assert len(daemon.asked) == 1


def test_a_fault_is_shown_and_the_question_may_be_asked_again(talk):
    class Once(Echo):
        def generate(self, request: GenerateRequest) -> Iterator[Piece]:
            fault = LocalFault("no way", "wait", ExitCode.NETWORK)
            self.raises = (0, fault) if not self.asked else None
            return super().generate(request)

    daemon = Once()
    code, _ = talk(daemon, "ab", "ab")
    assert code == ExitCode.OK
    assert daemon.asked == [[("user", "ab")]] * 2


def test_a_conversation_outlives_a_restart_of_the_daemon(talk):
    class Restarts(Echo):
        def generate(self, request: GenerateRequest) -> Iterator[Piece]:
            gone = NotRunning("gone", "start it")
            self.raises = (1, gone) if len(self.asked) == 1 else None
            return super().generate(request)

    daemon = Restarts()
    code, shown = talk(daemon, "ab", "cd", "ef", "/quit")
    assert (code, shown) == (ExitCode.OK, "AB\nC\nEF\n")
    assert daemon.asked[2] == [
        ("user", "ab"),
        ("assistant", "AB"),
        ("user", "cd"),
        ("assistant", "C"),
        ("user", "ef"),
    ]


def test_a_conversation_ends_when_the_daemon_does_not_come_back(talk):
    daemon = Echo()
    daemon.raises = (0, NotRunning("gone", "start it"))
    with pytest.raises(NotRunning):
        talk(daemon, "ab", "cd", "ef")
    assert len(daemon.asked) == 2


def test_an_answer_without_a_token_was_not_said(talk):
    class Slow(Echo):
        def generate(self, request: GenerateRequest) -> Iterator[Piece]:
            self.raises = None if self.asked else (0, KeyboardInterrupt())
            return super().generate(request)

    daemon = Slow()
    talk(daemon, "ab", "cd")
    assert daemon.asked[1] == [("user", "cd")]


def test_a_pipe_gets_answers_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\ncd\n/reset\nef\n/quit\ngh\n"))
    daemon = Echo()
    assert chat(daemon, SETTINGS, "", tmp_path / "history") == ExitCode.OK  # pyright: ignore
    said = capsys.readouterr()
    assert (said.out, said.err) == ("AB\nCD\nEF\n", "")
    assert len(daemon.asked[1]) == 3
    assert len(daemon.asked[2]) == 1
    daemon.raises = (1, LocalFault("no way", "wait", ExitCode.NETWORK))
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    with pytest.raises(LocalFault):
        chat(daemon, SETTINGS, "", tmp_path / "history")  # pyright: ignore


def test_escape_sequences_of_the_model_do_not_reach_the_terminal(talk):
    assert talk(Echo(), "a\x1b[2Jb", "/quit")[1] == "A\ufffd[2JB\n"


def test_lines_are_remembered_for_the_next_time(talk, tmp_path, monkeypatch):
    readline = pytest.importorskip("readline")
    readline.clear_history()
    readline.add_history("an earlier one")
    talk(Echo(), "ab")
    assert "an earlier one" in (tmp_path / "history").read_text()
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    assert chat_module.KEPT == 1000
