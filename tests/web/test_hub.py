"""One document for all viewers."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from node.core.errors import NotRunning
from node.web import hub as module
from node.web.hub import Hub, PageOffer
from node.web.samples import SampleFile, TextSample
from node.web.view import MOST_BYTES
from tests.web.conftest import Canned, Viewer


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if true():
                return
            await asyncio.sleep(0.01)


async def test_nobody_looks_and_the_daemon_is_not_asked(hub: Hub, canned: Canned):
    for _ in range(20):
        await asyncio.sleep(0)
    assert canned.asked == 0


async def test_a_viewer_gets_the_whole_once_and_then_changes(hub: Hub, canned: Canned):
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        await viewer.event()
        assert viewer.kinds == ["whole"]
        assert viewer.document["run"]["epoch"] == 120
        canned.window.step()
        await viewer.until(121)
        assert set(viewer.kinds[1:]) == {"change"}
        assert viewer.document == await hub.now()
        assert viewer.document["curve"]["121"][2] == 0.0


async def test_a_change_has_only_what_is_new(hub: Hub, canned: Canned):
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        await viewer.event()
        await viewer.event()
        canned.window.said.loss = 1.0
        while viewer.document["tiles"]["loss"][1] != "1.000":
            found = await viewer.event()
        assert found.keys() - {"at", "samples", "sampling"} == {"tiles"}


async def test_five_viewers_cost_one_question_a_tick(hub: Hub, canned: Canned, monkeypatch):
    made = []
    document = module.document
    monkeypatch.setattr(module, "document", lambda state: made.append(0) or document(state))
    async with contextlib.AsyncExitStack() as held:
        streams = [contextlib.aclosing(hub.stream()) for _ in range(5)]
        viewers = [Viewer(await held.enter_async_context(stream)) for stream in streams]
        await asyncio.gather(*(viewer.event() for viewer in viewers))
        first = canned.asked
        for _ in range(4):
            canned.window.step()
            epoch = canned.window.said.epoch
            await asyncio.gather(*(viewer.until(epoch) for viewer in viewers))
        assert hub.viewers == 5
        events = sum(len(viewer.kinds) for viewer in viewers) - 5
        assert canned.asked == len(made)
        assert events >= 5 * 4
        assert (canned.asked - first) <= hub.latest.version
        assert all(viewer.document == viewers[0].document for viewer in viewers)
    await until(lambda: hub.viewers == 0)
    asked = canned.asked
    await until(lambda: not hub._looking)  # pyright: ignore[reportPrivateUsage]
    assert canned.asked <= asked + 1, "nobody looks any more"


async def test_many_questions_at_once_are_one(canned: Canned):
    hub = Hub(canned, PageOffer(when="never", tick_s=60.0))
    found = await asyncio.gather(*(hub.now() for _ in range(20)))
    assert canned.asked == 1
    assert all(one is found[0] for one in found)
    await hub.close()


async def test_a_late_viewer_begins_with_the_same_document(hub: Hub, canned: Canned):
    async with contextlib.aclosing(hub.stream()) as stream:
        first = Viewer(stream)
        await first.event()
        async with contextlib.aclosing(hub.stream()) as another:
            second = Viewer(another)
            await second.event()
            canned.window.step()
            await asyncio.gather(first.until(121), second.until(121))
    assert first.document == second.document


async def test_a_viewer_that_fell_behind_gets_the_whole_again(hub: Hub, canned: Canned):
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        await viewer.event()
        seen = hub.latest.version
        await until(lambda: hub.latest.version > seen + 3)
        await viewer.event()
        assert viewer.kinds == ["whole", "whole"]


async def test_viewers_are_counted(hub: Hub, monkeypatch):
    monkeypatch.setattr(module, "MOST_VIEWERS", 1)
    async with contextlib.aclosing(hub.stream()) as stream:
        await Viewer(stream).event()
        assert hub.crowded
        assert [event async for event in hub.stream()] == []
    assert not hub.crowded


async def test_a_daemon_that_ends_is_said_and_comes_back(hub: Hub, canned: Canned):
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        await viewer.event()
        canned.fault = NotRunning("the daemon went away", "tutti start")
        while viewer.document["health"]["ok"]:
            await viewer.event()
        assert viewer.document["health"]["reason"] == "the daemon went away"
        assert viewer.document["run"]["epoch"] == 120, "the rest stays"
        canned.fault = None
        while not viewer.document["health"]["ok"]:
            await viewer.event()


async def test_a_page_before_the_daemon_answers_has_the_fault(hub: Hub, canned: Canned):
    canned.fault = NotRunning("no daemon is running", "tutti start")
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        await viewer.event()
        assert viewer.document["health"]["step"] == "tutti start"


async def test_samples_are_taken_while_somebody_looks_and_kept(hub: Hub, canned: Canned, tmp_path):
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        while not viewer.document.get("samples"):
            await viewer.event()
        assert canned.prompts == ["The "]
        tokens, text = viewer.document["samples"]["120"]
        assert tokens == canned.window.said.tokens
        assert text
    kept = SampleFile(tmp_path, canned.window.said.swarm.run_id, "The ")
    await until(lambda: bool(kept.read()))
    again = Hub(canned, PageOffer(prompt="The ", when="never", kept=True))
    assert "120" in (await again.now())["samples"]
    await again.close()
    assert canned.prompts == ["The "], "the same epoch is not sampled twice"


@pytest.mark.parametrize(("state", "run"), [("joining", 120), ("starting", 0), ("ready", 0)])
async def test_kept_samples_outlive_a_daemon_without_parameters(canned: Canned, state, run):
    said = canned.window.said
    kept = SampleFile(Path(said.home), said.swarm.run_id, "The ")
    samples = [TextSample(epoch, 1000 * epoch, "text") for epoch in (4, 40, 80)]
    kept.write(samples)
    said.epoch = 0
    said.swarm.epoch = run
    said.state = state
    hub = Hub(canned, PageOffer(prompt="The ", when="always", tick_s=0.02))
    assert list((await hub.now())["samples"]) == ["4", "40", "80"]
    await asyncio.sleep(0)  # a sample would begin
    assert canned.prompts == []
    await hub.close()
    assert kept.read() == samples


async def test_samples_can_be_off_and_can_go_on_alone(canned: Canned):
    quiet = Hub(canned, PageOffer(prompt="The ", when="never"))
    assert "never" in (await quiet.now())["sampling"]
    await quiet.close()
    assert canned.prompts == []
    always = Hub(canned, PageOffer(prompt="The ", when="always", tick_s=0.02))
    always.begin()
    await until(lambda: canned.prompts == ["The "])
    await always.close()


async def test_a_model_that_cannot_be_asked_is_said(hub: Hub, canned: Canned, monkeypatch):
    async def generate(request):
        raise NotRunning("no peer hosts stage 2")
        yield

    monkeypatch.setattr(canned, "generate", generate)
    async with contextlib.aclosing(hub.stream()) as stream:
        viewer = Viewer(stream)
        while not viewer.document.get("sampling"):
            await viewer.event()
        assert "no peer hosts stage 2" in viewer.document["sampling"]


async def test_closing_ends_the_streams(hub: Hub):
    stream = hub.stream()
    await Viewer(stream).event()
    await hub.close()
    async with asyncio.timeout(60):
        await anext(stream, None)
        assert await anext(stream, None) is None
    assert hub.viewers == 0


async def test_an_event_is_bounded(canned: Canned):
    hub = Hub(canned, PageOffer(prompt="The ", when="never"))
    stream = hub.stream()
    assert await anext(stream) == b"retry: 3000\n\n"
    assert len(await anext(stream)) < MOST_BYTES
    await stream.aclose()
    await hub.close()
