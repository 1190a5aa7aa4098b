"""The page of ``tutti web``: size, first data, cost of viewers, equal figures at two nodes.

  python -m benchmarks.window [--only 1] [--seconds 20] [--json -]

1  bytes before the chart library; first data and cost of five viewers, beside a canned daemon of
   200 peers in 12 cells and beside a real one; hostile names in Chromium (where it and playwright
   are installed); the same epoch and curve at two nodes of a swarm that trains

Other parts of the window are benchmarks of their own: 2 ``pauses``, 3 ``ledger``, 5 ``installed``,
6 ``demo``, 7 ``firsthour``.
"""

import contextlib
import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import ROOT, Report, chosen, command_line
from benchmarks.shared.parts import FAILURES
from node.web.app import LIBRARY, STATIC
from testbed.daemons.fleet import TINY, Box, Peer, folder

PARTS = ("1",)
VIEWERS = 5
BYTES = 150_000
"""Bytes of the page before the chart library, as asked."""
FIRST_S = 1.0
COST = 0.01
"""Share of a core that five viewers may cost."""
HOSTILE = "1 hostile names that did more than stand there"
NAMES = ("<img src=x", "</script>", "javascript:")
"""Parts of three of the hostile names of the canned daemon's peers."""
LOADS = 9
"""Times that the page is loaded."""
EPOCHS = 150
LOOKS = 10
LOOK_S = 2.5
"""Seconds between two looks, more than a page's tick, so that each look asks the daemon."""


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="which parts")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of cost")
    asked = parser.parse_args()
    chosen(parser, asked.only, PARTS)
    report = Report()
    sizes(report)
    for part in (canned, swarm):
        with folder() as root:
            try:
                part(report, root, asked.seconds)
            except FAILURES as e:
                report.add(
                    f"1 {part.__name__} did not come to its end: {e}"[:300], 0, "", holds=False
                )
    return report.end(asked.json)


def sizes(report: Report) -> None:
    """Bytes of the files that a browser loads."""
    own = sum(file.stat().st_size for file in STATIC.iterdir() if file.name not in LIBRARY)
    library = sum((STATIC / name).stat().st_size for name in LIBRARY)
    report.add(
        "1 bytes of the page before the chart library",
        own,
        "bytes",
        f"the library has {library:,}",
        f"<= {BYTES:,}",
        own <= BYTES,
    )


# ------------------------------------------------------------------ a canned daemon


def canned(report: Report, root: Path, seconds: float) -> None:
    """200 peers in 12 cells, an epoch every two seconds."""
    with started("-m", "testbed.fakes.canned_crowd", str(root)) as daemon:
        with page(root, "--sample", "never") as (server, url):
            first = [loaded(url) for _ in range(LOADS)]
            report.add(
                "1 first data, 200 peers in 12 cells",
                statistics.median(first),
                "s",
                f"worst of {LOADS}: {max(first):.2f} s",
                f"<= {FIRST_S:g} s",
                max(first) <= FIRST_S,
            )
            both = [psutil.Process(daemon.pid), psutil.Process(server.pid)]
            unit = "of a core, canned daemon and server of the page"
            cost_row(report, ", 200 peers in 12 cells", unit, both, url, seconds)
            hostile_names(report, url)


def hostile_names(report: Report, url: str) -> None:
    """Names that did anything but stand there, in a real browser."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        report.unmeasured(HOSTILE, "0", "no Chromium with playwright here")
        return
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    said: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda r: said.append(r.url) if not r.url.startswith(url) else None)
        tab.goto(url)
        tab.wait_for_selector("#tiles .value", timeout=60_000)
        tab.click("#peers-more summary")
        tab.wait_for_selector("#peers tbody tr", timeout=60_000)  # it is drawn when it is opened
        shown = tab.locator("#peers").inner_text()
        made = tab.locator("main img, main script, main iframe").count()
        browser.close()
    tell_names(report, shown, made, said)


def tell_names(report: Report, shown: str, made: int, said: Sequence[str]) -> None:
    """The row of the hostile names. ``shown``: text of the table of peers; ``made``: elements that
    the names made; ``said``: dialogs, messages, errors and requests elsewhere."""
    there = sum(part in shown for part in NAMES)
    bad = len(said) + made
    report.add(
        HOSTILE,
        bad,
        "names",
        f"{there} of {len(NAMES)} stand there as text; {said[:2]}",
        f"0, and {len(NAMES)} stand there",
        holds=bad == 0 and there == len(NAMES),
    )


# ------------------------------------------------------------------ a swarm


def swarm(report: Report, root: Path, seconds: float) -> None:
    """Three daemons, pages at two of them."""
    box = Box(root)
    try:
        changes = TINY | {
            "training.epochs": EPOCHS,
            "training.min_replicas": 1,
            "training.target_batch": 64,
        }
        peers = box.swarm((1, 1, 1), **changes)
        box.start(*peers)
        box.until_training(*peers)
        one = peers[0]
        other = peers[2]
        with page(one.home) as (_, url), page(other.home, "--sample", "never") as (_, second):
            same_epoch(report, (url, second))
            box.wait("the last epoch", lambda: finished(peers), 300.0)
        idle_cost(report, one, seconds)
    finally:
        box.clean_up()


def same_epoch(report: Report, urls: Sequence[str]) -> None:
    """Look at both pages at once, several times while the swarm trains."""
    apart: list[int] = []
    seen: list[int] = []
    for _ in range(LOOKS):
        epochs = [document(url)["run"]["epoch"] for url in urls]
        apart.append(abs(epochs[0] - epochs[1]))
        seen.append(max(epochs))
        time.sleep(LOOK_S)
    curves = [document(url)["curve"] for url in urls]
    common = curves[0].keys() & curves[1].keys()
    # Tokens and losses are of the plans, which both have; seconds are each node's own.
    unequal = [epoch for epoch in common if curves[0][epoch][:2] != curves[1][epoch][:2]]
    report.add(
        "1 epochs between the pages of two nodes at one moment",
        max(apart),
        "epochs, at most",
        f"{LOOKS} looks from epoch {seen[0]} to {seen[-1]}",
        "<= 1",
        max(apart) <= 1 and seen[-1] > seen[0],
    )
    report.add(
        "1 points of the curve that differ between two nodes",
        len(unequal),
        f"of {len(common)} common ones",
        target="0",
        holds=not unequal and len(common) >= 5,
    )


def idle_cost(report: Report, peer: Peer, seconds: float) -> None:
    """Measure the cost of five viewers at a daemon after the end of its run: nothing else moves."""
    with page(peer.home, "--sample", "never") as (server, url):
        first = [loaded(url) for _ in range(LOADS)]
        report.add(
            "1 first data of a daemon",
            statistics.median(first),
            "s",
            f"worst of {LOADS}: {max(first):.2f} s",
            f"<= {FIRST_S:g} s",
            max(first) <= FIRST_S,
        )
        for name, process in (("the daemon", peer.pid), ("the server of the page", server.pid)):
            one = [psutil.Process(process)]
            cost_row(report, f" at {name}", "of a core", one, url, seconds)


def finished(peers: Sequence[Peer]) -> bool:
    """True once every daemon has the run's last epoch."""
    return all(peer.status().epoch >= EPOCHS for peer in peers)


# ------------------------------------------------------------------ pages and viewers


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of this tree."""
    child = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


@contextlib.contextmanager
def page(home: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``tutti web`` beside the daemon of this home: its process, and its address."""
    for _ in range(600):
        if (home / "ctl.sock").exists():
            break
        time.sleep(0.1)
    with started("tutti.py", "--home", str(home), "web", "--port", "0", *words) as child:
        if child.stderr is None:
            raise RuntimeError("no output")
        line = child.stderr.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise RuntimeError(f"no page: {line}{child.stderr.read()}")
        yield child, found[0]


def document(url: str) -> dict[str, Any]:
    """The document of the page now."""
    with urllib.request.urlopen(f"{url}document.json", timeout=30) as answer:
        return json.load(answer)


def loaded(url: str) -> float:
    """Seconds until a client has the page, its files and the first document."""
    began = time.monotonic()
    for name in ("", "page.css", "page.js", *LIBRARY[:2]):
        with urllib.request.urlopen(url + name, timeout=30) as answer:
            answer.read()
    with urllib.request.urlopen(f"{url}stream", timeout=30) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                break
    return time.monotonic() - began


def cost_row(
    report: Report,
    where: str,
    unit: str,
    processes: Sequence[psutil.Process],
    url: str,
    seconds: float,
) -> None:
    """Add the row of :func:`cost_of_viewers`. It does not hold where a viewer saw nothing."""
    cost, events = cost_of_viewers(processes, url, seconds)
    report.add(
        f"1 cost of {VIEWERS} viewers{where}",
        cost,
        unit,
        f"{events} events of each viewer in {seconds:g} s",
        f"<= {COST}, each has events",
        holds=cost <= COST and events > 0,
    )


def cost_of_viewers(
    processes: Sequence[psutil.Process], url: str, seconds: float
) -> tuple[float, int]:
    """(share of a core that the viewers cost these processes together, events of the viewer that
    has fewest)."""
    time.sleep(5.0)  # earlier viewers are gone
    alone = busy(processes, seconds)
    end = threading.Event()
    events = [0] * VIEWERS
    threads = [threading.Thread(target=view, args=(url, end, events, i)) for i in range(VIEWERS)]
    for thread in threads:
        thread.start()
    time.sleep(5.0)  # each has the whole document
    events[:] = [0] * VIEWERS
    with_them = busy(processes, seconds)
    seen = min(events)
    end.set()
    for thread in threads:
        thread.join(30)
    return max(0.0, with_them - alone), seen


def busy(processes: Sequence[psutil.Process], seconds: float) -> float:
    """Processor seconds of these processes for each second."""
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    time.sleep(seconds)
    return (sum(sum(p.cpu_times()[:2]) for p in processes) - before) / seconds


def view(url: str, end: threading.Event, events: list[int], number: int) -> None:
    """Read the stream until the end is set."""
    with urllib.request.urlopen(f"{url}stream", timeout=30) as stream:
        for line in stream:
            events[number] += line.startswith(b"event: ")
            if end.is_set():
                return


if __name__ == "__main__":
    sys.exit(main())
