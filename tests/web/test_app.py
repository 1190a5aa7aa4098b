"""The page over HTTP: who may see it, what a browser is allowed to do with it, its stream."""

import re
from urllib.parse import quote

import httpx
import pytest

from node.core.errors import UsageFault
from node.web import door
from node.web.app import LIBRARY, POLICY, STATIC
from node.web.command import listen
from node.web.door import Door, Entry
from node.web.hub import Hub
from tests.web.conftest import Canned, Viewer, serving

OWN = sorted(file for file in STATIC.iterdir() if file.name not in LIBRARY)
BYTES = 150_000
"""Bytes of the page before the chart library, as asked."""


async def test_the_page_and_its_files_are_there(http: httpx.AsyncClient):
    page = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"page.css", "page.js", "icon.svg", *LIBRARY} == set(named)
    for name in named:
        file = await http.get(f"/{name}")
        assert file.status_code == 200
        assert file.content == (STATIC / name).read_bytes()
    assert (await http.get("/nothing.js")).status_code == 404
    assert (await http.get("/..%2fapp.py")).status_code == 404


async def test_every_answer_has_the_policy(http: httpx.AsyncClient):
    for path in ("/", "/page.js", "/document.json", "/nothing", "/v1/models", "/v1/nothing"):
        headers = (await http.get(path)).headers
        assert headers["content-security-policy"] == POLICY, path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_the_page_is_small_and_has_nothing_inline_or_from_elsewhere():
    assert sum(file.stat().st_size for file in OWN) < BYTES
    for file in OWN:
        text = file.read_text()
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), file
        assert "https://" not in text, file
        assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", text), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert re.findall(r"<script(?![^>]*\bsrc=)", (STATIC / "index.html").read_text()) == []


def test_the_chart_library_has_its_licence():
    assert "MIT License" in (STATIC / "uPlot-LICENSE.txt").read_text()


async def test_the_document_and_the_stream_agree(http: httpx.AsyncClient, canned: Canned):
    document = (await http.get("/document.json")).json()
    assert document["run"]["epoch"] == 120
    async with http.stream("GET", "/stream") as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        viewer = Viewer(stream.aiter_text())
        await viewer.event()
        assert viewer.document["curve"] == document["curve"]
        canned.window.step()
        await viewer.until(121)
        assert "change" in viewer.kinds


async def test_a_viewer_that_hangs_up_is_gone(http: httpx.AsyncClient, hub: Hub):
    async with http.stream("GET", "/stream") as stream:
        await Viewer(stream.aiter_text()).event()
        assert hub.viewers == 1
    async with httpx.AsyncClient(base_url=http.base_url) as another:
        while hub.viewers:
            await another.get("/page.css")


async def test_too_many_viewers_are_told_to_come_later(http: httpx.AsyncClient, hub, monkeypatch):
    monkeypatch.setattr("node.web.hub.MOST_VIEWERS", 0)
    busy = await http.get("/stream")
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "15")


async def test_pages_of_other_sites_cannot_ask(http: httpx.AsyncClient, canned: Canned):
    elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    for path in ("/stream", "/document.json", "/v1/models", "/page.js"):
        assert (await http.get(path, headers=elsewhere)).status_code == 403
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await http.get("/", headers=followed)).status_code == 200
    assert (await http.post("/enter", headers=followed)).status_code == 403
    assert (await http.get("/", headers={"host": "evil.example"})).status_code == 400
    assert canned.asked == 0


async def test_the_chat_is_the_endpoint_of_serve(http: httpx.AsyncClient, canned: Canned):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["object"] == "chat.completion"
    assert canned.prompts == ["hello"]
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == "crowd"


async def test_nothing_can_be_changed(http: httpx.AsyncClient, canned: Canned):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/document.json", "/stream", "/page.js"):
            assert (await http.request(method, path)).status_code in (404, 405)
    assert not canned.window.stopped.is_set()


# ------------------------------------------------------------------ with a token


async def test_a_token_is_asked_for(canned: Canned, hub: Hub):
    async with (
        serving(hub, canned, token="secret") as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        for path in ("/document.json", "/stream", "/page.js", "/v1/models"):
            assert (await http.get(path)).status_code == 401
        entrance = await http.get("/", follow_redirects=True)
        assert "<form" in entrance.text
        assert 'type="password"' in entrance.text
        wrong = await http.post("/enter", content="token=guess")
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers
        right = await http.post("/enter", content="token=secret")
        assert (right.status_code, right.headers["location"]) == (303, "/")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert "secret" not in cookie
        assert (await http.get("/document.json")).json()["run"]["epoch"] == 120
        assert (await http.get("/v1/models")).status_code == 200
        async with httpx.AsyncClient(base_url=url) as another:
            shown = {"authorization": "Bearer secret"}
            assert (await another.get("/document.json", headers=shown)).status_code == 200
            for bad in ("Bearer wrong", "secret", "Basic secret"):
                shown = {"authorization": bad}
                assert (await another.get("/document.json", headers=shown)).status_code == 401


@pytest.mark.parametrize("form", ["", "token=", "other=1", "token=" + "x" * 9000, "%ff", "&" * 99])
async def test_a_form_that_is_none_opens_nothing(canned: Canned, hub: Hub, form: str):
    async with (
        serving(hub, canned, token="secret") as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.post("/enter", content=form)).status_code == 401


def test_guessing_is_slow():
    made = Door("secret word", "name")
    for n in range(0, door.TRIES, 2):
        assert made.enter(f"guess {n}", "203.0.113.5", float(n)) is Entry.WRONG
        assert made.admits(f"Bearer {n}", "", "203.0.113.5", float(n)) is Entry.WRONG
    assert made.enter("secret word", "203.0.113.5", 11.0) is Entry.LATER
    assert made.admits("Bearer secret word", "", "203.0.113.5", 11.0) is Entry.LATER
    cookie = made.cookie().partition(";")[0]
    assert made.admits("Bearer wrong", cookie, "203.0.113.5", 11.0) is Entry.RIGHT
    assert made.enter("secret word", "203.0.113.5", door.TRIES_S + 0.5) is Entry.RIGHT


def test_who_guesses_locks_out_nobody_else():
    made = Door("secret word", "name")
    for n in range(door.TRIES):
        assert made.enter("guess", f"2001:db8::{n}", 1.0) is Entry.WRONG
        assert made.admits("Basic YTpi", "", "203.0.113.5", 1.0) is Entry.WRONG
    assert made.enter("secret word", "2001:db8::ffff", 1.0) is Entry.LATER
    assert made.enter("secret word", "2001:db8:0:1::1", 1.0) is Entry.RIGHT
    assert made.enter("secret word", "203.0.113.5", 1.0) is Entry.RIGHT


def test_clients_that_guess_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(door, "MOST_CLIENTS", 3)
    made = Door("secret word", "name")
    for n in range(9):
        made.enter("guess", f"203.0.113.{n}", 1.0)
    assert list(made._wrong) == ["203.0.113.6", "203.0.113.7", "203.0.113.8"]


async def test_wrong_tokens_in_headers_are_counted(canned: Canned, hub: Hub):
    async with (
        serving(hub, canned, token="secret") as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        for _ in range(door.TRIES):
            shown = {"authorization": "Bearer guess"}
            assert (await http.get("/document.json", headers=shown)).status_code == 401
        shown = {"authorization": "Bearer secret"}
        assert (await http.get("/document.json", headers=shown)).status_code == 429
        assert (await http.post("/enter", content="token=secret")).status_code == 429


@pytest.mark.parametrize("cookies", ["", "name=", "name=x", "name", '"', "name=\u00e9", ";" * 999])
def test_other_cookies_open_nothing(cookies: str):
    made = Door("secret", "name")
    assert made.admits("", cookies, "", 1.0) is Entry.WRONG
    assert made.admits("Bearer " + quote("\u00e9"), cookies, "", 1.0) is Entry.WRONG
    own = made.cookie().partition(";")[0]
    assert made.admits("", own, "", 1.0) is Entry.RIGHT
    assert made.admits("", f'{cookies}; a[b]=c; {{"x": 1}}; {own}', "", 1.0) is Entry.RIGHT


def test_others_reach_it_only_with_a_token():
    with pytest.raises(UsageFault, match="no token is set") as refused:
        listen("0.0.0.0", 0, "")
    assert "tutti web --token" in refused.value.next_step
    listen("0.0.0.0", 0, "secret").close()
