"""The demo on a terminal: a picture that is drawn anew with every poll, or lines in a pipe."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.text import Text

from node.app.demo.writing import PROMPT, Written
from node.control.text import swarm_picture
from node.control.words import clean
from protos.control_pb2 import Snapshot

MOST_WRITTEN = 3
"""Samples that the picture shows: the first one and the newest."""


@dataclass(frozen=True)
class Scene:
    """Everything that one picture shows. ``starting``: label of each daemon and what it does, until
    the swarm trains; ``page``: address of the page, "" without one."""

    snapshots: Sequence[Snapshot]
    note: str
    starting: Sequence[tuple[str, str]] = ()
    written: Sequence[Written] = ()
    page: str = ""


Show = Callable[[Scene], None]
"""Called with every poll; draws, or says a line now and then."""


def say(text: str) -> None:
    """A line for the person, not for a program that reads the result."""
    print(text, file=sys.stderr, flush=True)


class PlainProgress:
    """Progress for pipes and logs: each daemon that has begun to work, a line for each tenth of the
    epochs, and each sample."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._said = -1
        self._written = 0
        self._starting: dict[str, str] = {}

    def __call__(self, scene: Scene) -> None:
        for label, activity in scene.starting:
            # The reasons of a wait change every second.
            does = activity.partition(":")[0]
            if self._starting.get(label) != does:
                self._starting[label] = does
                say(f"{label}: {does}")
        for sample in scene.written[self._written :]:
            say(f"epoch {sample.epoch} writes: {PROMPT}{clean(sample.text)}")
        self._written = len(scene.written)
        ahead = max(scene.snapshots, key=lambda s: s.epoch, default=None)
        if ahead is None or not ahead.loss:
            return
        tenth = 10 * ahead.epoch // max(1, self._epochs)
        if tenth <= self._said:
            return
        self._said = tenth
        held_out = ""
        if ahead.loss_val:
            held_out = f", held-out {ahead.loss_val:.3f}"
        say(
            f"epoch {ahead.epoch}/{self._epochs}  loss {ahead.loss:.3f}{held_out}  "
            f"{ahead.tokens_per_s:,.0f} tok/s  {scene.note}"
        )


@contextlib.contextmanager
def picture(epochs: int, lines: bool) -> Iterator[Show]:
    """Draws on the terminal, or says ``lines`` where that is asked for or there is none."""
    if lines or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield PlainProgress(epochs)
        return
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=False) as live:

        def draw(scene: Scene) -> None:
            live.update(drawing(scene, min(console.width, 120), min(console.height, 36) - 1))

        yield draw


def drawing(scene: Scene, width: int, height: int) -> Group:
    """The picture, at most ``width`` columns and ``height`` lines."""
    if scene.starting:
        lines = [Text("the swarm comes up", "bold"), Text("")]
        lines += [
            Text(f"  {label:<14}", "bold").append(clean(does), "") for label, does in scene.starting
        ]
        lines += [Text(""), Text(scene.note, "bold yellow")]
        return _cut(lines, width, height)
    chosen = list(scene.written)
    if len(chosen) > MOST_WRITTEN:
        chosen = [chosen[0], *chosen[1 - MOST_WRITTEN :]]
    below = [
        Text(f"epoch {sample.epoch:<4} ", "dim").append(PROMPT + clean(sample.text), "italic")
        for sample in chosen
    ]
    if scene.page:
        below.append(Text(f"in a browser: {scene.page}", "dim"))
    room = max(8, height - len(below))
    above = swarm_picture(scene.snapshots, width=width, height=room, note=scene.note)
    return Group(above, _cut(below, width, height - 8))


def _cut(lines: Sequence[Text], width: int, height: int) -> Group:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines[: max(0, height)])
