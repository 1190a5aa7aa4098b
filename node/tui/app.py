"""The monitor: a full screen view of a running daemon through its control socket. Leaving it leaves
the daemon running."""

import asyncio
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Static

from node.control.client import ControlClient
from node.control.commands import local_time
from node.control.text import (
    ABSENT,
    TITLES,
    WHOLE,
    by_trouble,
    cover_words,
    event_line,
    has_cells,
    loss_words,
    paths_words,
    peer_cells,
    run_epoch,
    state_words,
    time_bar,
    warmup_words,
)
from node.control.words import chart, clean, count, span
from node.core import interrupts
from node.core.errors import ExitCode, LocalFault
from node.core.home import advice
from node.core.ids import ENDS, PeerId, named, short_cell
from node.core.numbers import human, plural, several
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import CellLine, Event, Snapshot

SMALLEST = (64, 20)
"""Columns and rows below which the boxes would lie."""
LOW = 24
"""Rows below which there is no room for the curve."""
COLUMNS = ("PEER", "NAME", *TITLES[:-2])
WITH_CELLS = (*COLUMNS[:2], "CELL", *COLUMNS[2:])
"""Where cells lead themselves."""
HELP = """[b]tutti monitor[/b]

q   detach: the node goes on training
p   pause: give the memory back, keep the place; once more: go on
d   drain: finish, hand over, leave the swarm, stop the node
?   this help          arrows, page keys: scroll peers and events

[b]peers[/b]   * this node  + the leader; first these two, then who needs a look
[b]time[/b]    [green]█[/] compute  [blue]▓[/] wire  [bright_black]░[/] wait  [magenta]▒[/] round
[b]cover[/b]   live peers of every stage (of this cell); red: nobody, yellow: only one

any key closes this"""


class Question(ModalScreen[bool]):
    """A text over the screen; a str is markup. With ``yes`` that key answers True; every other key
    answers False."""

    def __init__(self, text: str | Text, yes: str = "") -> None:
        super().__init__()
        self._text, self._yes = text, yes

    def compose(self) -> ComposeResult:
        yield Static(self._text)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.dismiss(bool(self._yes) and event.key == self._yes)


class Monitor(App[str]):
    """Asks for the status every ``every_s`` seconds and listens to the events. Returns a last word
    to print."""

    CSS_PATH = "monitor.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "detach", "Detach"),
        Binding("p", "pause", "Pause"),
        Binding("d", "drain", "Drain"),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]

    def __init__(self, client: ControlClient, every_s: float = 1.0) -> None:
        super().__init__()
        self._ask, self._every_s = client, every_s
        self._leaving = threading.Event()
        self._snapshot, self._answer = Snapshot(), PeersAnswer()

    def compose(self) -> ComposeResult:
        with Horizontal(id="top"):
            yield Static(id="node", classes="box")
            yield Static(id="swarm", classes="box")
        yield Static(id="why")
        yield Static(id="loss", classes="box")
        yield DataTable(id="peers", classes="box", cursor_type="none", zebra_stripes=False)
        yield RichLog(id="events", classes="box", max_lines=1000, wrap=False, min_width=20)
        yield Static(id="small")
        yield Footer()

    def on_mount(self) -> None:
        for name, title in (
            ("node", "this node"),
            ("swarm", "swarm"),
            ("loss", "loss"),
            ("peers", "peers"),
            ("events", "events"),
        ):
            self.query_one(f"#{name}").border_title = title
        self.query_one("#peers", DataTable).add_columns(*COLUMNS)
        # The terminal sends a Ctrl-C as a key; this one comes from another process.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.exit, None, ExitCode.INTERRUPTED)
        self._poll()
        self._listen()

    def on_unmount(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        interrupts.resume()
        # Ends the two readers' calls: the program would wait for their threads otherwise.
        self._leaving.set()
        self._ask.close()

    def on_resize(self, event: events.Resize) -> None:
        columns, rows = event.size
        self.screen_stack[0].set_class(columns < SMALLEST[0] or rows < SMALLEST[1], "small")
        self.query_one("#small", Static).update(
            f"this terminal has {columns}x{rows}, the monitor needs {SMALLEST[0]}x{SMALLEST[1]}\n"
            + advice("enlarge it, or leave with q and use\ntutti status --watch")
        )
        self.call_after_refresh(self._draw)
        self.call_after_refresh(self.query_one("#events", RichLog).scroll_end, animate=False)

    def action_detach(self) -> None:
        self.exit("detached; the node goes on. See it again with  tutti monitor")

    def action_help(self) -> None:
        self.push_screen(Question(HELP))

    def action_drain(self) -> None:
        name = clean(self._snapshot.name, 24) or "this node"
        text = (
            f"Drain {name}?\n\nIt finishes what is in flight, hands over, leaves the swarm\nand "
            "stops.\n\n[y] drain    any other key: go back"
        )

        def answered(yes: bool | None) -> None:
            if yes:
                self._drain()

        self.push_screen(Question(Text(text), yes="y"), answered)

    def action_pause(self) -> None:
        if self._snapshot.paused:
            self._pause(True)
            return
        name = clean(self._snapshot.name, 24) or "this node"
        text = (
            f"Pause {name}?\n\nIt leaves the training and gives its memory back, until you press\n"
            "p once more.\n\n[y] pause    any other key: go back"
        )

        def answered(yes: bool | None) -> None:
            if yes:
                self._pause(False)

        self.push_screen(Question(Text(text), yes="y"), answered)

    @work(thread=True, group="poll")
    def _poll(self) -> None:
        while not self._leaving.is_set():
            try:
                snapshot, answer = self._ask.status(), self._ask.peers(everybody=True)
            except LocalFault as fault:
                self._tell(self._lost, fault)
            else:
                self._tell(self._show, snapshot, answer)
            self._leaving.wait(self._every_s)

    @work(thread=True, group="listen")
    def _listen(self) -> None:
        last = 100
        while not self._leaving.is_set():
            try:
                for event in self._ask.events(follow=True, last=last):
                    self._tell(self._write, event)
            except LocalFault:
                last = 0  # what was shown is not told again when the daemon is back
            self._leaving.wait(self._every_s)

    @work(thread=True, group="drain")
    def _drain(self) -> None:
        try:
            for _ in self._ask.drain(600.0):
                pass  # the journal tells the same, and the events box shows it
        except LocalFault as fault:
            self._tell(self._refused, fault)
        else:
            self._tell(self.exit, "drained; the node has left the swarm")

    @work(thread=True, group="pause")
    def _pause(self, paused: bool) -> None:
        """Pause the node, or let it go on if it is ``paused``."""
        try:
            if paused:
                said = self._ask.resume()
            else:
                said = self._ask.pause(None, "", now=False)
        except LocalFault as fault:
            self._tell(self._refused, fault, "not possible")
        else:
            self._tell(partial(self.notify, said, markup=False))

    def _tell(self, what: Callable[..., object], *args: object) -> None:
        """Call back into the screen from a reader's thread, unless the screen is going away."""
        if not self._leaving.is_set():
            self.call_from_thread(self.tell, what, *args)

    def tell(self, what: Callable[..., object], *args: object) -> None:
        """Call ``what`` on the screen; do nothing once the screen's parts are being removed.

        The parts go one by one before ``on_unmount`` is called.
        """
        if self.is_running:
            what(*args)

    def _refused(self, fault: LocalFault, title: str = "drain failed") -> None:
        self.notify(
            f"{fault.what}\n{fault.next_step}",
            title=title,
            severity="error",
            timeout=15,
            markup=False,
        )

    def _lost(self, fault: LocalFault) -> None:
        node = self.query_one("#node", Static)
        node.set_class(True, "trouble")
        node.update(
            Group(
                Text("no answer", "bold yellow"),
                Text(clean(fault.what)),
                Text(clean(fault.next_step)),
                Text("asking again…"),
            )
        )

    def _show(self, snapshot: Snapshot, answer: PeersAnswer) -> None:
        self._snapshot, self._answer = snapshot, answer
        self._draw()

    def _write(self, event: Event) -> None:
        self.query_one("#events", RichLog).write(event_line(event, local_time(event.at)))

    def _draw(self) -> None:
        s, answer = self._snapshot, self._answer
        if not s.peer:
            return
        self.query_one("#top").set_class(s.HasField("cell"), "cells")
        node = self.query_one("#node", Static)
        # The screen takes a plain str for markup, and these words come from outside.
        name = named(PeerId(clean(s.peer, 64)), clean(s.name, 20))
        node.border_title = Text(f"this node {name}")
        node.border_subtitle = Text(clean(s.device, 30))
        node.set_class(not s.healthy, "trouble")
        node.update(_stack(node_lines(s, node.content_size.width)))
        why = self.query_one("#why", Static)
        why.display = bool(s.reason)
        rows = self.size.height
        # The curve makes room for the reason and the peers.
        self.screen_stack[0].set_class(rows < LOW or (bool(s.reason) and rows < LOW + 4), "low")
        why.update(why_lines(s))
        swarm = self.query_one("#swarm", Static)
        health = "healthy" if s.healthy else "degraded"
        run = clean(s.swarm.run_id, 64)[:6]
        swarm.border_title = Text(f"{clean(s.swarm.name, 14)} {run} {health}")
        swarm.update(_stack(swarm_lines(s, answer)))
        loss = self.query_one("#loss", Static)
        title = "loss"
        if s.loss_history:
            title = f"{'; '.join(loss_words(s))}; last {len(s.loss_history)} epochs"
        loss.border_title = title
        subtitle = ""
        if warmup := warmup_words(s):
            subtitle = f"warm-up, {warmup}"
        loss.border_subtitle = subtitle
        loss.update(
            loss_rows(s, max(10, loss.content_size.width), max(1, loss.content_size.height))
        )
        self._draw_peers(answer, warning(s))

    def _draw_peers(self, answer: PeersAnswer, trouble: str) -> None:
        table = self.query_one("#peers", DataTable)
        hidden = len(answer.peers) - max(0, table.size.height - 1)
        more = ""
        if hidden > 0:
            more = f", +{hidden} more: arrow keys"
        table.border_title = f"peers ({len(answer.peers)}{more})"
        table.border_subtitle = Text(trouble[:70])
        at, cells = table.scroll_y, has_cells(answer)
        columns = WITH_CELLS if cells else COLUMNS
        table.clear(columns=len(columns) != len(table.columns))
        if not table.columns:
            table.add_columns(*columns)
        for line in by_trouble(answer):
            table.add_row(*peer_cells(line, answer.swarm.stages, cells=cells)[: len(columns)])
        table.scroll_to(y=at, animate=False)


def _stack(lines: list[Text]) -> Group:
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


# ------------------------------------------------------------ the words inside the boxes


def node_lines(s: Snapshot, width: int) -> list[Text]:
    """Describe this node in five lines."""
    place = f"{s.stage}/{s.swarm.stages}"
    if s.role == "rendezvous":
        place = "rendezvous"
    elif not s.placed and not s.layers:
        place = "not chosen yet"
    elif s.stage == ENDS:
        place = "ends"
    replicas = ""
    if s.replicas:
        replicas = f"  {several(s.replicas, 'replica')}"
    work = "no micro-batch yet"
    if s.micro_batches:
        done = plural(s.micro_batches, "micro-batch")
        work = f"{count(s.micro_batches)} {done}, last {span(s.last_work_s)} ago"
    return [
        _row("state", "").append_text(state_words(s)).append(f"  up {span(s.up_s)}"),
        _row("stage", f"{place} {clean(s.layers, 18)}{replicas}"),
        _row("work", work),
        _row(
            "net",
            f"{paths_words(s.paths_to) or 'nobody yet'}  ↑{_brief(s.bytes_sent)} "
            f"↓{_brief(s.bytes_received)}",
        ),
        _row("time", "").append_text(time_bar(s.time_s, max(8, width - 7))),
    ]


def why_lines(s: Snapshot) -> Text:
    """The reason for which this node does not train, and the next step."""
    text = Text().append(clean(s.reason, WHOLE), "cyan" if s.healthy else "bold yellow")
    if s.next_step:
        return text.append(f"\n→ {clean(s.next_step, WHOLE)}")
    return text


def swarm_lines(s: Snapshot, answer: PeersAnswer) -> list[Text]:
    """The swarm in five lines, or six where cells lead themselves."""
    loss = f"{s.loss:.3f}" if s.loss else "-"
    if s.loss and (first := s.loss_before or s.loss_first):
        arrow = "↓" if s.loss < first else "↑"
        loss += f" {arrow} {first:.3f}"
    if s.loss_val:
        loss += f" held out {s.loss_val:.3f}"
    lines = [
        _row("epoch", _done(s)),
        _row("loss", loss),
        _row("speed", f"{count(s.tokens_per_s)} tok/s   {count(s.tokens)} tokens"),
        _row("rounds", f"{s.round.done} ok  {s.round.repaired} repaired  {s.round.failed} failed"),
        _row("cover", "").append_text(cover_words(answer)),
    ]
    if s.HasField("cell"):
        lines.append(_row("cell", _cell(s.cell)))
    return lines


def _done(s: Snapshot) -> str:
    """The epoch, the share of the run that is done, and the time that is left."""
    epoch = run_epoch(s)
    known = f"{epoch:,}"
    if not epoch and s.state in ABSENT:
        known = "-"
    said = f"{known} of {s.swarm.epochs:,}"
    if not s.swarm.epochs:
        return said
    said += f"  {100 * epoch // s.swarm.epochs} %"
    if epoch >= s.swarm.epochs or s.state in ABSENT:
        return said
    if not s.left_s:
        return f"{said}, time left unknown"
    return f"{said}, {span(s.left_s)} left"


def _cell(c: CellLine) -> str:
    """One of how many, what came of the last window, when the next one is."""
    came = ""
    if c.met == c.window and c.last != c.met:
        came = "  averages"
    elif c.met == c.window:
        came = "  averaged"
    elif c.alone:
        came = "  alone"
    elif c.last:
        came = "  averaged"
    coming = ""
    if c.next_s:
        coming = f"  next {span(c.next_s)}"
    return f"{short_cell(clean(c.cell, 16))} of {c.cells}{came}{coming}"


def warning(s: Snapshot) -> str:
    """The most important text for the line below the peers; "" for nothing."""
    if s.digest_mismatches:
        return f"{s.digest_mismatches} digest mismatches: replicas disagreed on parameters"
    if not s.warnings:
        return ""
    return clean(s.warnings[0])


def loss_rows(s: Snapshot, width: int, height: int) -> Text:
    """The loss curve, highest at the top."""
    if not s.loss_history:
        return Text("no epoch has been committed yet", "dim")
    return Text("\n".join(chart(list(s.loss_history), width, height)), "cyan")


def _row(label: str, value: str) -> Text:
    return Text(f"{label:<7}", "dim").append(value, "")


def _brief(number: float) -> str:
    """Bytes, "3.0 GiB" as "3.0G", for narrow places."""
    return human(number).replace(" ", "").replace("iB", "")
