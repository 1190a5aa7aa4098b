"""Answers of the OpenAI API. Enters: pieces of a text. Leaves: JSON documents. Pure."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from node.core.errors import ExitCode, LocalFault
from protos.control_pb2 import Piece

STATUS = {
    ExitCode.USAGE: (400, "invalid_request_error"),
    ExitCode.NETWORK: (503, "service_unavailable"),
    ExitCode.NOT_RUNNING: (503, "service_unavailable"),
    ExitCode.TIMED_OUT: (504, "timeout"),
}
"""HTTP status and type of the error for each exit code; others are (500, "server_error")."""


def error_document(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an answer that is an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def fault_document(fault: LocalFault) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) for a fault of the daemon."""
    status, kind = STATUS.get(fault.code, (500, "server_error"))
    text = str(fault)
    if fault.next_step:
        text += f"; {fault.next_step}"
    return status, error_document(text, kind)


@dataclass
class ClientAnswer:
    """One answer as it comes. ``chat``: of a conversation, else of a text. ``missing``: block
    stages without which a part of it was made, of the ``stages`` that the run has."""

    model: str
    chat: bool
    text: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    missing: set[int] = field(default_factory=set)
    stages: int = 0
    made: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    def take(self, piece: Piece) -> str:
        """Add a piece; its text."""
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        self.tokens += piece.HasField("token")
        self.finish = piece.finish or self.finish
        if piece.HasField("missing"):
            self.missing.update(piece.missing.asked, piece.missing.dead)
            self.stages = piece.missing.stages
        self.text += piece.text
        return piece.text

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }

    def whole(self) -> dict[str, Any]:
        """The document of an answer that is not streamed."""
        finish = self.finish or "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.chat:
            kind = "chat.completion"
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            kind = "text_completion"
            choice["text"] = self.text
        return self._document(kind, [choice]) | {"usage": self.usage}

    def first(self) -> Iterator[dict[str, Any]]:
        """The chunks before the text."""
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, text: str) -> dict[str, Any]:
        """The chunk of a part of the text."""
        return self._chunk({"content": text} if self.chat else text)

    def last(self, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks behind the text."""
        yield self._chunk({} if self.chat else "", self.finish or "length")
        if with_usage:
            yield self._document(self._chunk_kind, []) | {"usage": self.usage}

    @property
    def _chunk_kind(self) -> str:
        if self.chat:
            return "chat.completion.chunk"
        return "text_completion"

    def _chunk(self, delta: Any, finish: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice["delta" if self.chat else "text"] = delta
        return self._document(self._chunk_kind, [choice])

    def _document(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        prefix = "cmpl"
        if self.chat:
            prefix = "chatcmpl"
        document: dict[str, Any] = {
            "id": f"{prefix}-{self.name}",
            "object": kind,
            "created": self.made,
            "model": self.model,
            "choices": choices,
        }
        if self.missing:
            # Clients of the API read only the fields that they know.
            document["tutti"] = {
                "missing_stages": sorted(self.missing),
                "block_stages": self.stages,
            }
        return document
