"""The page in a real browser, where playwright and Chromium are installed."""

import asyncio
import contextlib
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.web.command import freeze
from node.web.hub import Hub, PageOffer
from node.web.samples import TextSample
from node.web.view import State, document
from protos import control_pb2 as pb
from testbed.fakes.canned_crowd import CannedCrowd
from tests.web.conftest import Canned, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        words = ["--no-sandbox", "--disable-gpu"]  # a container has no user namespaces
        made = driver.chromium.launch(executable_path=CHROMIUM, args=words)
        yield made
        made.close()


class Opened:
    """A page, with its messages and the requests that it made."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#tiles .value", timeout=60_000)


@contextlib.contextmanager
def server(canned: Canned, token: str = "", port: int = 0) -> Iterator[str]:
    """A server in a thread of its own, for playwright blocks this one."""
    found = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def run() -> None:
        hub = Hub(canned, PageOffer(prompt="The ", chat=True))
        async with serving(hub, canned, token, port) as where:
            found.append(where)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Canned]]:
    """A server, and the daemon behind it."""
    canned = Canned(CannedCrowd(), str(tmp_path))
    with server(canned) as where:
        yield where, canned


@pytest.fixture
def url(served: tuple[str, Canned]) -> str:
    return served[0]


@pytest.mark.parametrize("width", [1280, 390])
def test_200_peers_are_drawn_and_hostile_names_do_nothing(browser, url, width):
    opened = Opened(browser, url, width)
    page = opened.page
    page.click("#peers-more summary")
    assert page.locator("#peers tbody tr").count() > 150
    assert page.locator("#map tbody tr").count() == 12
    assert page.locator("#loss-chart canvas").count() == 1
    assert "<img src=x" in page.locator("#peers").inner_text()
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("({}).polluted") is None
    assert opened.said == [], "no error, no dialog, nothing that the policy refused"
    assert all(asked.startswith(url) for asked in opened.asked)


def test_a_chat_answers(browser, url):
    page = Opened(browser, url).page
    page.click("#to-chat")
    page.fill("#words", "hello")
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])", timeout=60_000)
    words = page.locator("#talk p").all_inner_texts()
    assert words[0] == "you: hello"
    assert words[1].startswith("model: ")
    assert len(words[1]) > 10


class Talk:
    """The chat of a page, with ``canned`` for its daemon."""

    def __init__(self, browser: Any, served: tuple[str, Canned]) -> None:
        url, self.canned = served
        self.page = Opened(browser, url).page
        self.page.click("#to-chat")

    def send(self, words: str) -> None:
        self.page.fill("#words", words)
        self.page.click("#send")

    def ended(self) -> None:
        """Wait for the end of an answer."""
        self.page.wait_for_selector("#send:not([disabled])", timeout=60_000)

    def begun(self) -> str:
        """Wait for the first letters of an answer that stands still, and return them."""
        answer = self.page.locator("#talk p", has_text=re.compile("^model: .{4}"))
        answer.wait_for(timeout=60_000)
        return answer.inner_text().removeprefix("model: ")

    def asked(self) -> list[tuple[str, str]]:
        """Messages of the newest question."""
        return [(m.role, m.content) for m in self.canned.requests[-1].messages]


def test_the_model_knows_what_was_shown_of_an_answer_that_was_stopped(browser, served):
    talk = Talk(browser, served)
    talk.canned.stands_at = 4
    talk.send("hello")
    begun = talk.begun()
    talk.page.click("#halt")
    talk.ended()
    talk.canned.stands_at = 0
    talk.send("go on")
    talk.ended()
    assert talk.asked() == [("user", "hello"), ("assistant", begun), ("user", "go on")]


def test_a_new_conversation_ends_the_answer_of_the_old_one(browser, served):
    talk = Talk(browser, served)
    talk.canned.stands_at = 4
    talk.send("hello")
    talk.begun()
    talk.page.click("#fresh")
    talk.ended()
    assert talk.page.locator("#talk p").count() == 0
    talk.canned.stands_at = 0
    talk.send("another")
    talk.ended()
    assert talk.asked() == [("user", "another")]


def test_missing_stages_are_said_beside_the_answer(browser, served):
    talk = Talk(browser, served)
    talk.canned.missing = pb.Missing(dead=[2], stages=5)
    talk.send("hello")
    talk.ended()
    notes = talk.page.locator("#talk p.fault").all_inner_texts()
    assert notes == ["note: without block stage 2, of 5"]


def test_a_page_goes_to_the_entrance_of_a_server_that_began_anew(browser, tmp_path):
    canned = Canned(CannedCrowd(9, 1, 3), str(tmp_path))
    page = browser.new_context().new_page()
    with server(canned, "some-words") as where:
        page.goto(where)
        page.fill("input[name=token]", "some-words")
        page.keyboard.press("Enter")
        page.wait_for_selector("#tiles .value", timeout=60_000)
    with server(canned, "some-words", int(where.rpartition(":")[2])):
        page.wait_for_selector("input[name=token]", timeout=60_000)


def test_an_export_opens_from_the_disk(browser, tmp_path):
    window = CannedCrowd(9, 1, 3)
    samples = [TextSample(120, 5, "<b>once</b>")]
    state = State(
        at=9.0,
        snapshot=window.said,
        answer=window.seen,
        past=window.past.epochs,
        samples=samples,
        prompt="The ",
    )
    freeze(document(state), tmp_path / "page")
    opened = Opened(browser, (tmp_path / "page" / "index.html").as_uri(), scheme="dark")
    assert opened.page.locator("#samples p").inner_text() == "The <b>once</b>"
    assert opened.page.locator("#loss-chart canvas").count() == 1
    assert opened.page.is_hidden("#views")
    assert opened.said == []
    assert all(asked.startswith("file:") for asked in opened.asked)
