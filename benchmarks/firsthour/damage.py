"""Damage: every file of a peer's home altered, cut, emptied and removed, one at a time, with real
daemons.

The files are those that a home has after it joined a run by an invite, with settings of its own,
and trained: whatever is there is damaged. Each case begins with the home as it was, damages one
file, and starts the daemon with a bare ``tutti start``.
"""

import contextlib
import hashlib
import itertools
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report
from node.coordinator.credit.book import RECEIPTS
from testbed.daemons.fleet import START_S, WORKING, Box, Hang, Peer

LIMIT_S = 600.0
"""Bound in s of all cases together; the row names the cases that were not tried."""
CASE_S = 120.0
"""Bound in s after which a daemon that neither takes part nor ends is stuck."""
VICTIMS = 2
"""Damaged and started at the same time, each in a home of its own."""
HARNESS = {"daemon.out"}
"""Files that this benchmark writes itself."""
GROWS = {"events.jsonl", RECEIPTS}
"""Names of files that are only ever appended to."""
OWN = {"ports", "peers", "identity.key.lock", "votes", "names.json"}
"""Names of files that are written anew by every start, or while a peer takes part."""
SETTINGS = """
name = "{name}"
role = "stage"
stage = "1"
threads = 1
[checkpoint]
every = 2
keep = 1000
"""


def altered(path: Path) -> None:
    """Eight bytes in its middle become others."""
    raw = bytearray(path.read_bytes())
    at = max(0, len(raw) // 2 - 4)
    raw[at : at + 8] = bytes(b ^ 0xA5 for b in raw[at : at + 8])
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def removed(path: Path) -> None:
    path.unlink()


RARELY = "checkpoint.every=100000"
DAMAGE: tuple[Callable[[Path], None], ...] = (altered, cut, emptied, removed)


@dataclass
class Found:
    """Outcomes of the cases so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    tried: int = 0


def rows(report: Report, root: Path) -> None:
    with boxed(root / "files") as box:
        every_file(report, box)
    with boxed(root / "newest") as box:
        newest_checkpoints(report, box)
    full_disk(report, root / "full")


# ------------------------------------------------------------ every file of a home


def every_file(report: Report, box: Box) -> None:
    ends, keeper = box.swarm(
        (1, 1), pipeline__stages=1, training__epochs=10**6, training__min_replicas=1
    )
    box.start(ends, keeper)
    victims = [joined(box, f"victim-{i}", ends) for i in range(VICTIMS)]
    files = listed(victims[0].home)
    cases: queue.SimpleQueue[tuple[int, Callable[[Path], None]]] = queue.SimpleQueue()
    # Each kind of damage goes over all files: when time runs out, every file has had some.
    for how, index in itertools.product(DAMAGE, range(len(files))):
        cases.put((index, how))
    total = cases.qsize()
    found = Found()
    lock = threading.Lock()
    began = time.monotonic()
    epoch = keeper.status().epoch

    def work(victim: Peer) -> None:
        pristine = victim.home.with_name(f"{victim.label}.pristine")
        while time.monotonic() - began < LIMIT_S:
            try:
                index, how = cases.get_nowait()
            except queue.Empty:
                return
            shutil.rmtree(victim.home)
            shutil.copytree(pristine, victim.home)
            one_case(victim, listed(victim.home)[index], how, found, lock)

    with ThreadPoolExecutor(VICTIMS) as pool:
        for done in [pool.submit(work, v) for v in victims]:
            done.result()
    spent = time.monotonic() - began
    passed = keeper.status().epoch - epoch
    said = "; ".join(f"{n} x {what}" for what, n in found.outcomes.most_common())
    report.add(
        "4 files of a home that joined and trained", len(files), "files", " ".join(files)[:1500]
    )
    report.add(
        "4 cases tried",
        found.tried,
        "cases",
        f"in {spent:.0f} s: {said}"[:1500],
        f"{total}",
        holds=found.tried == total,
    )
    report.add(
        "4 neither started nor ended",
        len(found.stuck),
        "cases",
        brief(found.stuck),
        "0",
        holds=not found.stuck,
    )
    report.add(
        "4 ended without one clear error",
        len(found.unclear),
        "cases",
        brief(found.unclear),
        "0",
        holds=not found.unclear,
    )
    report.add(
        "4 other files lost or changed",
        len(found.lost),
        "files",
        brief(found.lost),
        "0",
        holds=not found.lost,
    )
    healthy = ends.running and keeper.running and box.agree(of=[ends, keeper])
    report.add(
        "4 epochs of the other peers meanwhile",
        passed,
        "epochs",
        "",
        "20",
        holds=passed >= 20 and healthy,
    )


def joined(box: Box, label: str, giver: Peer) -> Peer:
    """A peer that joined by an invite, trained, has its two newest checkpoints, and was stopped; a
    copy of its home is kept."""
    home = box.root / label
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text(SETTINGS.format(name=label))
    first = box.newcomer(label, giver).start()
    box.until_training(first)
    box.wait(
        f"checkpoints of {label}",
        lambda: len(list(home.rglob("manifest.json"))) >= 2,
        START_S,
        (first,),
    )
    box.wait(
        f"peers that {label} has met", lambda: list(home.glob("swarms/*/peers")), START_S, (first,)
    )
    first.end()
    kept = sorted({p.parent for p in home.rglob("manifest.json")}, key=lambda p: epoch_in(str(p)))
    for older in kept[:-2]:
        shutil.rmtree(older)
    shutil.copytree(
        home, home.with_name(f"{label}.pristine"), ignore=shutil.ignore_patterns("*.sock")
    )
    return box.bare(label, "start")


def listed(home: Path) -> list[str]:
    """Every file of a home but this benchmark's own, newest checkpoints first."""
    found = [str(p.relative_to(home)) for p in home.rglob("*") if p.is_file()]
    return sorted((name for name in found if name not in HARNESS), key=lambda n: (-epoch_in(n), n))


def epoch_in(name: str) -> int:
    return next(
        (
            int(part.removeprefix("epoch-"))
            for part in Path(name).parts
            if part.startswith("epoch-")
        ),
        0,
    )


def one_case(
    victim: Peer, name: str, how: Callable[[Path], None], found: Found, lock: threading.Lock
) -> None:
    how(victim.home / name)
    case = f"{name} {how.__name__}"
    before = contents(victim.home)
    (victim.home / "daemon.out").write_bytes(b"")
    began = time.monotonic()
    outcome, unclear, stuck = started(victim)
    print(
        f"  {case}: {outcome} ({time.monotonic() - began:.1f} s) {unclear}{stuck}",
        file=sys.stderr,
        flush=True,
    )
    lost = [f"{case}: {gone}" for gone in missing(victim.home, before, name)]
    with lock:
        found.tried += 1
        found.outcomes[outcome] += 1
        found.unclear += [f"{case}: {unclear}"] if unclear else []
        found.stuck += [f"{case}: {stuck}"] if stuck else []
        found.lost += lost


def started(victim: Peer) -> tuple[str, str, str]:
    """(how it ended, why that is not clear, why it is stuck); the latter two mostly empty. It runs
    no more."""
    victim.start()
    deadline = time.monotonic() + CASE_S
    while time.monotonic() < deadline and victim.running:
        if victim.status().state in WORKING:
            code = victim.end()
            return "takes part", f"stopping it gave exit code {code}" if code else "", ""
        time.sleep(0.2)
    if victim.running:
        s = victim.status()
        victim.kill()
        return "stuck", "", f"{s.state} after {CASE_S:.0f} s: {s.reason or 'no reason'}"
    code = victim.wait()
    lines = victim.said().splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("tutti: ")]
    clear = code > 1 and len(heads) == 1 and "Traceback" not in victim.said()
    clear = clear and any(line.startswith("  ") for line in lines[heads[0] + 1 :])
    return (
        f"exit code {code}",
        "" if clear else f"exit code {code}: {' | '.join(lines[-4:])}"[:400],
        "",
    )


def contents(home: Path) -> dict[str, bytes]:
    """Identity of each file: its hash, or its contents where it only grows."""
    return {
        name: raw if p.name in GROWS else hashlib.sha256(raw).digest()
        for p in home.rglob("*")
        if p.is_file() and (name := str(p.relative_to(home))) not in HARNESS
        for raw in [p.read_bytes()]
    }


def missing(home: Path, before: dict[str, bytes], damaged: str) -> Iterator[str]:
    """Files that changed, except the damaged one; and the damaged one if it was a checkpoint's and
    is gone."""
    after = contents(home)
    left = set(after.values())
    for name, was in before.items():
        file = Path(name).name
        if file in OWN or (name == damaged and "ckpt" not in name):
            continue
        now = after.get(name)
        same = now is not None and (now.startswith(was) if file in GROWS else now == was)
        # A directory that could not be read may have been set aside: its files go on existing under
        # another name.
        if not same and (file in GROWS or was not in left):
            yield f"{name} is {'gone' if now is None else 'changed'}"


# ------------------------------------------------------------ the newest checkpoint of everybody


def newest_checkpoints(report: Report, box: Box) -> None:
    """All peers stop, eight bytes of the newest parameters of each are changed, all start again."""
    box.settings = ("checkpoint.every=2",)
    peers = box.swarm((1, 2), pipeline__stages=1, training__epochs=10**6)
    box.start(*peers)
    box.wait(
        "checkpoints",
        lambda: all(len(list(p.home.rglob("manifest.json"))) >= 2 for p in peers) or None,
        START_S,
        tuple(peers),
    )
    reference = peers[0].status().loss_first
    codes = set(box.stop_all().values())
    late = [e["text"] for p in peers for e in p.events() if "not finished in" in e["text"]]
    report.add(
        "4 SIGTERM: lines that say a micro-batch was not finished in time",
        len(late),
        "lines",
        "",
        "0",
        holds=not late,
    )
    whole: list[set[int]] = []
    for peer in peers:
        epochs = {epoch_in(str(p)): p for p in peer.home.rglob("parameters.safetensors")}
        altered(epochs[max(epochs)])
        whole.append(set(epochs) - {max(epochs)})
    newest = max(set.intersection(*whole), default=0)
    for peer in peers:  # the status warns until the peer has written a newer checkpoint
        rarely = (a.replace("checkpoint.every=2", RARELY) for a in peer.child.arguments)
        peer.child.arguments = (*rarely, "--set", "checkpoint.within_s=0")
    began = time.monotonic()
    box.start(*peers)
    told: set[str] = set()

    def tells(peer: Peer) -> bool:
        return bool(peer.events("restore-failed")) and any(
            "cannot be used" in w for w in peer.status().warnings
        )

    def look() -> bool:
        told.update(p.label for p in peers if p.label not in told and tells(p))
        return len(told) == len(peers)

    def goes_on() -> int | None:
        look()
        return peers[0].status().epoch > newest or None

    box.wait("the epoch after", goes_on, START_S, tuple(peers))
    with contextlib.suppress(Hang):
        box.wait("the status to say so", look, 30.0, tuple(peers))
    first = min(e["fields"]["epoch"] for e in peers[0].events("restored"))
    report.add(
        "4 newest checkpoint of all three altered: epoch they go on from",
        first,
        "",
        f"ended with {codes}",
        f"{newest}",
        holds=first == newest and codes == {0},
    )
    report.add("4 the same: until the next epoch is committed", time.monotonic() - began, "s")
    report.add(
        "4 the same: peers whose journal and status say so",
        len(told),
        "peers",
        " ".join(sorted(told)),
        "3",
        holds=len(told) == 3,
    )
    again = peers[0].status().loss_first
    report.add(
        "4 reference loss after the restart",
        again,
        "nats",
        f"before: {reference:.4f}",
        "equal",
        holds=again == reference,
    )


# ------------------------------------------------------------ a full disk


def full_disk(report: Report, root: Path) -> None:
    """A home on a file system of its own, filled while the peer trains, and emptied again."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(root))
        except (OSError, subprocess.CalledProcessError) as e:
            reason = f"no file system of its own can be mounted: {e}"
            report.unmeasured("4 full disk: until status says so", "60 s", reason[:300])
            return
        filled(report, stack.enter_context(boxed(root / "box")))


def filled(report: Report, box: Box) -> None:
    box.settings = ("checkpoint.every=2",)
    (peer, other) = box.swarm(
        (1, 1), pipeline__stages=1, training__epochs=10**6, training__min_replicas=1
    )
    box.start(peer, other)
    box.wait(
        "a checkpoint",
        lambda: list(peer.home.rglob("manifest.json")) or None,
        START_S,
        (peer, other),
    )
    filler = box.root / "filler"
    began = time.monotonic()
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(1 << 16))
    box.wait(
        "the status to say so",
        lambda: any(map(says_full, peer.status().warnings)) or None,
        60.0,
        (peer, other),
    )
    report.add(
        "4 full disk: until status says so",
        time.monotonic() - began,
        "s",
        peer.status().warnings[0],
        "60 s",
        holds=True,
    )
    epoch = peer.status().epoch
    box.wait(
        "epochs on a full disk",
        lambda: peer.status().epoch >= epoch + 4 or None,
        60.0,
        (peer, other),
    )
    code = peer.end()
    began = time.monotonic()
    box.start(peer)
    where = f"stopped with exit code {code}"
    report.add(
        "4 full disk: a daemon starts and takes part after",
        time.monotonic() - began,
        "s",
        where,
        "stopped with exit code 0",
        holds=code == 0,
    )
    kept = {p: p.read_bytes() for p in peer.home.rglob("manifest.json")}
    filler.unlink()
    began = time.monotonic()
    box.wait(
        "the status to be quiet",
        lambda: not any(map(says_full, peer.status().warnings)) or None,
        60.0,
        (peer, other),
    )
    report.add(
        "4 space is back: until status says nothing of it",
        time.monotonic() - began,
        "s",
        "",
        "60 s",
        holds=True,
    )
    more = box.wait(
        "another checkpoint",
        lambda: len(set(peer.home.rglob("manifest.json")) - set(kept)) or None,
        60.0,
        (peer, other),
    )
    report.add(
        "4 space is back: checkpoints written since",
        more,
        "",
        f"{len(kept)} before",
        "1 or more",
        holds=more >= 1,
    )


def says_full(warning: str) -> bool:
    return "disk is full" in warning or "no room to write" in warning


@contextlib.contextmanager
def small_disk(root: Path) -> Iterator[None]:
    """A file system of 24 MiB at ``root``. Raises OSError and CalledProcessError where this user
    may not mount."""
    root.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tutti-damage", str(root)],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True, capture_output=True)


@contextlib.contextmanager
def boxed(root: Path) -> Iterator[Box]:
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root)
    try:
        yield box
    except Hang:
        print(box.story())
        raise
    finally:
        box.clean_up()


def brief(found: Sequence[str]) -> str:
    return "; ".join(found[:6])[:1500]
