"""Requests of the OpenAI API as requests of the daemon. Enters: JSON of a client. Leaves:
GenerateRequest. Never: a setting that is ignored in silence although it changes the answer."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.control_pb2 import ChatMessage, GenerateRequest

CHAT_TOKENS, TEXT_TOKENS = 1024, 16
"""Most tokens of an answer where the client names no number; of a text, as OpenAI has it."""
MOST_TOKENS = 4096
"""Most tokens of an answer."""
MOST_STOPS = 16
"""Stop texts of one request."""
TEMPERATURE = 1.0
"""Temperature where the client names none."""
REFUSED = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "best_of",
    "chat_template",
    "continue_final_message",
    "dry_multiplier",
    "dynatemp_range",
    "echo",
    "frequency_penalty",
    "function_call",
    "functions",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "json_schema",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "logprobs",
    "min_p",
    "min_tokens",
    "mirostat",
    "n_predict",
    "presence_penalty",
    "prompt_logprobs",
    "repeat_penalty",
    "repetition_penalty",
    "response_format",
    "stop_token_ids",
    "structured_outputs",
    "suffix",
    "tfs_z",
    "tools",
    "top_logprobs",
    "top_n_sigma",
    "truncate_prompt_tokens",
    "typical_p",
    "use_beam_search",
    "xtc_probability",
)
"""Fields of the OpenAI API, and of servers that speak it (vLLM, llama.cpp), that would change the
answer and are not supported, unless they have a value of :data:`IDLE`."""
IDLE: tuple[Any, ...] = (None, False, 0, [], {}, "", {"type": "text"})
_OFF = {
    "best_of": 1,
    "length_penalty": 1,
    "n_predict": -1,
    "repeat_penalty": 1,
    "repetition_penalty": 1,
    "tfs_z": 1,
    "top_n_sigma": -1,
    "typical_p": 1,
}
"""Further values that change nothing: programs send all their settings, also those not in use."""


class BadRequest(Exception):
    """A request that cannot be answered: the reason, and the field that is wrong."""

    def __init__(self, reason: str, param: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.param = reason, param


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a client. ``with_usage``: a stream ends with the numbers of tokens."""

    generate: GenerateRequest
    stream: bool
    with_usage: bool


def read_chat(body: Mapping[str, Any]) -> ClientRequest:
    """A request of /v1/chat/completions. Raises BadRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    most = body.get("max_completion_tokens")
    if most is None:
        most = body.get("max_tokens")
    generate = _drawing(body, _most_tokens(most, CHAT_TOKENS))
    generate.messages.extend(_message(i, message) for i, message in enumerate(messages))
    return _question(body, generate)


def read_prompt(body: Mapping[str, Any]) -> ClientRequest:
    """A request of /v1/completions. Raises BadRequest."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise BadRequest("prompt must be one text", "prompt")
    generate = _drawing(body, _most_tokens(body.get("max_tokens"), TEXT_TOKENS))
    generate.prompt = prompt
    return _question(body, generate)


def _question(body: Mapping[str, Any], generate: GenerateRequest) -> ClientRequest:
    stream = body.get("stream") or False
    options = body.get("stream_options") or {}
    if not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", "stream")
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return ClientRequest(generate, stream, bool(options.get("include_usage")))


def _drawing(body: Mapping[str, Any], most: int) -> GenerateRequest:
    """The settings that both kinds of requests have."""
    if body.get("n") not in (None, 1):
        raise BadRequest("n must be 1: ask again for another answer", "n")
    for name in REFUSED:
        value = body.get(name)
        if value not in (*IDLE, _OFF.get(name)):
            raise BadRequest(f"{name} is not supported", name)
    seed = body.get("seed")
    if seed is None:
        seed = secrets.randbits(63)
    elif not isinstance(seed, int) or isinstance(seed, bool):
        raise BadRequest("seed must be a whole number", "seed")
    # 1 keeps all tokens, 0 the likeliest one; the daemon has 0 for all.
    top_p = max(_number(body, "top_p", 1.0, 0.0, 1.0), 1e-9)
    if top_p >= 1.0:
        top_p = 0.0
    return GenerateRequest(
        max_tokens=most,
        temperature=_number(body, "temperature", TEMPERATURE, 0.0, 2.0),
        top_p=top_p,
        top_k=_top_k(body.get("top_k")),
        seed=seed % (1 << 63),
        stop=_stops(body.get("stop")),
    )


def _number(body: Mapping[str, Any], name: str, usual: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return usual
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name} must be a number from {least:g} to {most:g}", name)
    return float(value)


def _top_k(value: Any) -> int:
    """Number of the likeliest tokens from which one is drawn; 0 for all, for which clients also
    send -1."""
    if value in (None, -1):
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadRequest("top_k must be a whole number, 0 or -1 for all tokens", "top_k")
    return min(value, (1 << 32) - 1)


def _most_tokens(value: Any, usual: int) -> int:
    if value is None:
        return usual
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest("max_tokens must be a whole number above 0", "max_tokens")
    return min(value, MOST_TOKENS)


def _stops(value: Any) -> list[str]:
    if value is None:
        return []
    stops = value
    if isinstance(value, str):
        stops = [value]
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest("stop must be a text or a list of texts", "stop")
    if len(stops) > MOST_STOPS or any(len(stop) > 100 for stop in stops):
        raise BadRequest(f"stop takes at most {MOST_STOPS} texts of 100 characters", "stop")
    return stops


def _message(i: int, message: Any) -> ChatMessage:
    if not isinstance(message, dict):
        raise BadRequest(f"message {i} is no object", "messages")
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest(f"message {i} has no role", "messages")
    # Newer clients call the system message so.
    if role == "developer":
        role = "system"
    return ChatMessage(role=role, content=_content(i, message.get("content")))


def _content(i: int, content: Any) -> str:
    """A text, or a list of parts that are texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if _is_text(part)]
        if len(texts) == len(content):
            return "".join(texts)
    raise BadRequest(f"message {i} has content that is no text", "messages")


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
