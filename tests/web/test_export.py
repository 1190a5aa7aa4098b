"""The page as files, and the command line."""

import json
import re

import pytest

from node.control.service import ControlService
from node.core.errors import LocalFault, UsageFault
from node.web.app import LIBRARY
from node.web.command import FROZEN, PageDaemon, export, freeze
from node.web.view import State, document
from testbed.fakes.canned_crowd import HOSTILE, CannedCrowd


def frozen(text: str) -> dict:
    """The document in a data.js."""
    found = re.fullmatch(r"globalThis\.tuttiFrozen = JSON\.parse\((.*)\);\n", text)
    assert found
    return json.loads(json.loads(found[1]))


def made() -> dict:
    window = CannedCrowd()
    return document(State(at=9.0, snapshot=window.said, answer=window.seen))


def test_an_export_is_a_page_that_asks_nobody(tmp_path):
    files = freeze(made(), tmp_path / "deep" / "page")
    assert set(files) == {"index.html", "page.css", "page.js", "icon.svg", FROZEN, *LIBRARY}
    there = tmp_path / "deep" / "page"
    html = (there / "index.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert html.index(FROZEN) < html.index("page.js")
    assert frozen((there / FROZEN).read_text()) == made()
    for name in re.findall(r'(?:src|href)="([^"#]+)"', html):
        assert (there / name).is_file(), name


def test_names_stay_inside_of_their_literal(tmp_path):
    hostile = made() | {"prompt": "\u2028</script>`${x}" + "".join(HOSTILE)}
    freeze(hostile, tmp_path)
    text = (tmp_path / FROZEN).read_text(encoding="ascii")
    assert text.count("\n") == 1
    assert frozen(text)["prompt"] == hostile["prompt"]


def test_an_export_replaces_an_export(tmp_path):
    freeze(made() | {"prompt": "old"}, tmp_path)
    freeze(made() | {"prompt": "new"}, tmp_path)
    assert frozen((tmp_path / FROZEN).read_text())["prompt"] == "new"


@pytest.fixture
async def service(tmp_path):
    window = CannedCrowd(9, 1, 3)
    window.said.home = str(tmp_path)
    window.journal.emit("training", "epoch-committed", "epoch 120 committed")
    made = ControlService(window, tmp_path / "ctl.sock")
    await made.start()
    yield made
    await made.close(0.0)


async def test_an_export_is_of_the_daemon(tmp_path, service):
    await export(service.path, tmp_path / "page", "The ")
    found = frozen((tmp_path / "page" / FROZEN).read_text())
    assert found["run"]["epoch"] == 120
    assert len(found["curve"]) == 120
    assert not found["chat"]
    assert ((tmp_path / "page" / FROZEN).stat().st_mode & 0o777) == 0o644
    await export(service.path, tmp_path / "page", "The ")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("mine")
    with pytest.raises(UsageFault, match="other files"):
        await export(service.path, tmp_path / "mine", "The ")
    with pytest.raises(UsageFault, match="other files"):
        await export(service.path, tmp_path / "mine" / "index.html", "The ")


async def test_an_export_has_no_addresses_and_paths(tmp_path, service):
    said = service._window.said
    said.healthy = False
    said.reason = "cannot reach 203.0.113.5"
    said.next_step = "look at /home/anna/log"
    said.warnings.append("the disk is full under /home/anna/swarms")
    service._window.journal.emit("net", "lost", "lost 203.0.113.5", level="warning")
    await export(service.path, tmp_path / "page", "The ")
    text = (tmp_path / "page" / FROZEN).read_text()
    assert "degraded" in text
    assert "203.0.113.5" not in text
    assert "/home/anna" not in text


async def test_no_export_without_an_answer(tmp_path, service):
    await export(service.path, tmp_path / "page", "The ")
    before = (tmp_path / "page" / FROZEN).read_bytes()
    await service.close(0.0)
    with pytest.raises(LocalFault):
        await export(service.path, tmp_path / "page", "The ")
    assert (tmp_path / "page" / FROZEN).read_bytes() == before


async def test_a_site_with_data_of_its_own_is_no_export(tmp_path, service):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / FROZEN).write_text("mine")
    (tmp_path / "link").mkdir()
    freeze(made(), tmp_path / "page")
    (tmp_path / "link" / FROZEN).symlink_to(tmp_path / "page" / FROZEN)
    for name in ("mine", "link"):
        with pytest.raises(UsageFault, match="other files"):
            await export(service.path, tmp_path / name, "The ")
    assert (tmp_path / "mine" / FROZEN).read_text() == "mine"


async def test_the_daemon_is_asked_for_what_is_new(service):
    daemon = PageDaemon(service.path)
    whole = await daemon.history(0, 0)
    assert [line.epoch for line in whole.epochs] == list(range(1, 121))
    assert list(whole.stage_bytes) == [(2 + stage) << 30 for stage in range(4)]
    assert [line.epoch for line in (await daemon.history(118, 1)).epochs] == [119, 120]
    assert len((await daemon.history(118, 0)).epochs) == 120
    await daemon.close()
