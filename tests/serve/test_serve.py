"""``tutti serve`` by the real client of the OpenAI API."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from node.core.errors import ExitCode, LocalFault, NetworkFault, UsageFault
from node.reach.interfaces import check_free
from node.serve.command import listen
from node.serve.requests import REFUSED, BadRequest, read_chat, read_prompt
from protos.control_pb2 import Missing
from tests.serve.conftest import serving

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def openai() -> Any:
    import openai  # takes its time to load

    return openai


def client_of(url: str, key: str = "none") -> Any:
    import openai  # takes its time to load

    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


@pytest.fixture
async def client(url):
    async with client_of(url) as made:
        yield made


async def test_the_model_is_the_run(client, openai):
    assert [m.id async for m in client.models.list()] == ["letters"]
    assert (await client.models.retrieve("letters")).owned_by == "tutti"
    with pytest.raises(openai.NotFoundError, match="letters"):
        await client.models.retrieve("gpt-4")


async def test_a_chat_is_answered(client, letters):
    answer = await client.chat.completions.create(
        model="letters",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        seed=4,
        stop=["x", "y"],
        max_tokens=50,
        n=1,
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 5, 12)
    [asked] = letters.asked
    assert [(m.role, m.content) for m in asked.messages] == [
        (m["role"], m["content"]) for m in HELLO
    ]
    assert (asked.temperature, asked.top_p, asked.seed) == (0.5, 0.9, 4)
    assert (list(asked.stop), asked.max_tokens) == (["x", "y"], 50)


async def test_a_chat_streams(client):
    stream = await client.chat.completions.create(
        model="any",
        messages=HELLO,
        stream=True,
        max_completion_tokens=3,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta.content for c in chunks if c.choices]
    assert [d for d in deltas if d] == ["h", "e", "l"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 3
    assert len({c.id for c in chunks}) == 1


async def test_stages_that_are_missing_are_said_in_a_field_of_its_own(client, letters):
    answer = await client.chat.completions.create(model="any", messages=HELLO)
    assert "tutti" not in answer.model_extra
    letters.missing = (2, Missing(dead=[5, 3], stages=8))
    said = {"missing_stages": [3, 5], "block_stages": 8}
    answer = await client.chat.completions.create(model="any", messages=HELLO)
    assert answer.choices[0].message.content == "hello"
    assert answer.model_extra == {"tutti": said}
    answer = await client.completions.create(model="any", prompt="abc")
    assert answer.model_extra == {"tutti": said}
    stream = await client.chat.completions.create(model="any", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello"
    # From the letter on that is made without them: a role and two letters come before.
    assert [c.model_extra.get("tutti") for c in chunks] == [None] * 3 + [said] * 4


async def test_a_text_goes_on_streamed_or_not(client, letters):
    answer = await client.completions.create(model="any", prompt="abc")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
    assert letters.asked[0].max_tokens == 16
    stream = await client.completions.create(model="any", prompt=["abc"], stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "abc"
    assert letters.asked[0].seed != letters.asked[1].seed, "another answer each time"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(client, letters, changes, param, openai):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{"model": "any", "messages": HELLO} | changes)
    assert refused.value.param == param
    assert not letters.asked


@pytest.mark.parametrize("read", [read_chat, read_prompt])
@pytest.mark.parametrize("name", [*REFUSED, "top_k"])
def test_settings_of_other_servers_are_refused_by_name(read: Any, name: str) -> None:
    body = {"messages": HELLO, "prompt": "abc", name: "different"}
    with pytest.raises(BadRequest) as refused:
        read(body)
    assert refused.value.param == name
    for idle in (None, 0):
        read(body | {name: idle})


async def test_a_refused_sampler_answers_400_with_its_name(client, letters, openai):
    for more in ({"min_p": 0.1}, {"repetition_penalty": 1.1}, {"top_k": 2.5}, {"top_k": -2}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="any", prompt="abc", extra_body=more)
        assert [refused.value.param] == list(more)
    assert not letters.asked


def test_the_likeliest_tokens_are_taken_over() -> None:
    for said, asked in ((40, 40), (0, 0), (-1, 0), (None, 0), (1 << 40, (1 << 32) - 1)):
        body = {"messages": HELLO, "top_k": said, "repetition_penalty": 1.0, "n_predict": -1}
        assert read_chat(body).generate.top_k == asked


async def test_idle_settings_and_parts_of_text_are_taken(client, letters):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await client.chat.completions.create(
        model="any",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
        ],
        presence_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        top_p=1,
        user="somebody",
    )
    assert answer.choices[0].message.content == "ab"
    assert (letters.asked[0].messages[0].role, letters.asked[0].top_p) == ("system", 0.0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ExitCode.USAGE, "BadRequestError"),
        (ExitCode.NETWORK, "InternalServerError"),
        (ExitCode.TIMED_OUT, "InternalServerError"),
    ],
)
async def test_a_fault_before_the_text_is_an_http_error(client, letters, code, kind, openai):
    letters.fault = (0, LocalFault("no template", "use /v1/completions", code))
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind), match="no template; use /v1/completions"):
            await client.chat.completions.create(model="any", messages=HELLO, stream=stream)


async def test_a_fault_within_a_stream_is_an_event(client, letters, openai):
    letters.fault = (2, LocalFault("stage 2 is gone", "wait", ExitCode.NETWORK))
    stream = await client.chat.completions.create(model="any", messages=HELLO, stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="stage 2 is gone"):
        await read()
    assert "".join(seen) == "he"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_text(url, letters, stream, monkeypatch):
    monkeypatch.setattr("node.serve.app.LOOK_S", 0.01)
    letters.gate.clear()
    async with client_of(url) as client:
        asking = client.chat.completions.create(model="any", messages=HELLO, stream=stream)
        task = asyncio.ensure_future(asking)
        await letters.arrived.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(60):
        await letters.ended.wait()
    assert letters.under_way == 0


async def test_thirty_two_clients_at_once_are_answered(url, letters):
    letters.gate.clear()
    async with client_of(url) as client:
        tasks = [
            asyncio.ensure_future(
                client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": f"text {i}"}]
                )
            )
            for i in range(32)
        ]
        for _ in range(32):
            await letters.arrived.acquire()
        letters.gate.set()
        found = [answer.choices[0].message.content for answer in await asyncio.gather(*tasks)]
    assert found == [f"text {i}" for i in range(32)]


async def test_a_token_is_asked_for(letters, openai):
    async with serving(letters, token="secret") as url:
        async with client_of(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(url, "secret") as client:
            assert [m.id async for m in client.models.list()] == ["letters"]
    with pytest.raises(UsageFault, match="no token"):
        listen("0.0.0.0", 0, "")
    for token in ("gehe\u00efm", "two\nlines", " spaces "):
        with pytest.raises(UsageFault, match="cannot carry"):
            listen("127.0.0.1", 0, token)
    listen("0.0.0.0", 0, "secret").close()


def test_a_taken_port_is_the_same_fault_as_of_a_daemon():
    with listen("127.0.0.1", 0, "") as first:
        port = first.getsockname()[1]
        with pytest.raises(NetworkFault, match=f"cannot listen on tcp port {port} of 127") as said:
            listen("127.0.0.1", port, "", "web")
        assert "--port PORT" in said.value.next_step
        with pytest.raises(NetworkFault) as of_a_daemon:
            check_free("127.0.0.1", port, "transport.p2p_port")
        assert said.value.what == of_a_daemon.value.what
        assert said.value.code == of_a_daemon.value.code


async def test_a_web_page_cannot_ask(url, letters):
    body = json.dumps({"messages": HELLO})
    async with httpx.AsyncClient() as http:
        simple = await http.post(
            f"{url}/chat/completions", content=body, headers={"content-type": "text/plain"}
        )
        rebound = await http.get(f"{url}/models", headers={"host": "evil.example"})
        unknown = await http.get(f"{url}/nothing")
        torn = await http.post(
            f"{url}/completions", content="{", headers={"content-type": "application/json"}
        )
    assert (simple.status_code, rebound.status_code) == (400, 400)
    assert (unknown.status_code, torn.status_code) == (404, 400)
    assert unknown.json()["error"]["type"] == "invalid_request_error"
    assert torn.json()["error"]["message"] == "the request is no JSON"
    assert not letters.asked


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.2:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("", 400),
        ("[::1", 400),
        ("[::1].evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("192.168.1.2:8000", 400),
        ("[2001:db8::1]:8000", 400),
    ],
)
async def test_only_requests_that_name_this_machine_are_taken(url, host, status):
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{url}/models", headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "\ud800"}),
        ("completions", {"prompt": "a", "stop": "\udfff"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        ("chat/completions", {"messages": [{"role": "\ud800", "content": "a"}]}),
    ],
)
async def test_half_a_character_is_a_bad_request(url, letters, path, body):
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{url}/{path}",
            content=json.dumps(body),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400
    assert "Unicode" in answer.json()["error"]["message"]
    assert not letters.asked
