"""The verbs that talk to a running daemon: each asks, prints and returns an exit code. Data on
stdout, the rest on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from node.control.text import (
    WHOLE,
    cells_table,
    evaluated_lines,
    event_line,
    export_line,
    fitted,
    mean_loss,
    missing_words,
    peer_ids,
    peers_table,
    ping_lines,
    status_lines,
)
from node.control.words import clean, shown
from node.core.errors import ExitCode, LocalFault, NotRunning, TimedOut
from node.core.home import advice, expanded
from node.core.ids import PeerId, named
from node.core.interrupts import raising, telling
from node.telemetry.events import LEVELS
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import (
    CellsAnswer,
    Evaluated,
    EvaluateRequest,
    Event,
    ExportRequest,
    GenerateRequest,
    Missing,
    Piece,
    PingReport,
    Snapshot,
)

if TYPE_CHECKING:
    from node.control.client import ControlClient

WIDE = 132
"""Columns in which a list of peers has room for whole PeerIds."""
QUIET_S = 1.5
"""Seconds of a stop before a line on the daemon's present step."""
AGAIN_S = 5.0
"""Seconds between two questions for the present step of a stopping daemon."""
STOP_S = 900.0
"""Longest wait for a daemon that is stopping: it may have a large model to write."""
EVENTS = 50
"""Number of newest events that are searched for the reason of a wait."""
ENDING = ("daemon", "checkpoint")
"""Components with events about an end: a checkpoint, a child, the daemon itself."""
NOW_S = 5.0
"""Seconds that a daemon has to end before ``stop --now`` kills it."""


LINE_S = 5.0
"""Seconds between two lines on the progress of an export, where there is no terminal."""


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON-ready values: every field present, numbers stay numbers (64-bit ones
    too)."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            result[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            result[field.name] = [plain(v) if isinstance(v, Message) else v for v in value]
        elif isinstance(value, Message):
            result[field.name] = plain(value)
        elif isinstance(value, bytes):
            result[field.name] = value.hex()
        else:
            result[field.name] = value
    return result


def say_json(document: Any) -> None:
    """One document on one line of stdout; numbers that are not finite, which JSON has no words
    for, are null."""
    print(json.dumps(_finite(document), sort_keys=False, allow_nan=False, default=str), flush=True)


def say(text: str) -> None:
    """For people, on stderr."""
    print(advice(text), file=sys.stderr, flush=True)


def status(
    client: ControlClient, *, as_json: bool, bare: bool, watch: bool, verbose: bool = False
) -> ExitCode:
    console = _console(bare)

    def screen(snapshot: Snapshot) -> list[Text]:
        lines = status_lines(snapshot, verbose)
        if bare:
            return lines
        # Whoever asks for more has a terminal that scrolls.
        height = 0
        if console.is_terminal and not verbose:
            height = console.height - 1
        return fitted(lines, console.width, height)

    if watch and not as_json and console.is_terminal and not console.is_dumb_terminal:
        from rich.console import Group
        from rich.live import Live

        with raising(), Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(Group(*screen(client.status())), refresh=True)
                time.sleep(1.0)
    while True:
        snapshot = client.status()
        if as_json:
            say_json(plain(snapshot))
        else:
            for line in screen(snapshot):
                console.print(line, no_wrap=bare, soft_wrap=True)
        if not watch:
            if snapshot.healthy:
                return ExitCode.OK
            return ExitCode.DEGRADED
        sys.stdout.flush()
        time.sleep(1.0)


def peers(
    answer: PeersAnswer, *, as_json: bool, sort: str, stage: int | None, verbose: bool = False
) -> ExitCode:
    """``verbose``: with whole PeerIds, which a wide terminal shows anyway."""
    if as_json:
        document = plain(answer)
        if stage is not None:
            document["peers"] = [p for p in document["peers"] if p["stage"] == stage]
        say_json(document)
    else:
        console = _console()
        whole = console.width >= WIDE
        table = peers_table(answer, sort=sort, stage=stage, width=console.width, whole=whole)
        console.print(table)
        if verbose and not whole:
            print("\n".join(peer_ids(answer, sort, stage)))
    return ExitCode.OK


def cells(answer: CellsAnswer, *, as_json: bool) -> ExitCode:
    if as_json:
        say_json(plain(answer))
    else:
        _console().print(cells_table(answer))
    return ExitCode.OK


def ping(report: PingReport, *, as_json: bool) -> ExitCode:
    if as_json:
        say_json(plain(report))
    else:
        print("\n".join(ping_lines(report)))
    if not report.rtt_s:
        return ExitCode.NETWORK
    return ExitCode.OK


def drain(client: ControlClient, timeout_s: float, *, as_json: bool) -> ExitCode:
    with telling("the drain goes on;  tutti stop  ends the daemon now"):
        _progress(client.drain(timeout_s), as_json)
        _wait_gone(client)
    say("drained and stopped")
    return ExitCode.OK


def stop(client: ControlClient, *, now: bool) -> ExitCode:
    """Ask, and wait until the process is gone. ``now``: kill the process after five seconds."""
    with telling("the daemon goes on stopping;  tutti stop  waits for it again"):
        with contextlib.suppress(NotRunning):  # the process ended before it could answer
            client.stop(now=now)
        if now:
            _kill_late(client)
        else:
            _wait_gone(client)
    say("stopped")
    return ExitCode.OK


def _kill_late(client: ControlClient) -> None:
    """Wait for a moment, then kill the process."""
    if client.wait_gone(NOW_S):
        return
    if not client.pid:
        raise TimedOut("the daemon does not end, and its process is not known here", "see  ps")
    with contextlib.suppress(ProcessLookupError):
        os.kill(client.pid, signal.SIGKILL)
    if not client.wait_gone(NOW_S):
        raise TimedOut(f"pid {client.pid} does not die", "look at it with  ps")
    say(f"killed pid {client.pid}")


def _wait_gone(client: ControlClient) -> None:
    """Wait for the end of a daemon that is stopping, and print its present step after a moment.
    Raises TimedOut after STOP_S seconds."""
    if client.wait_gone(QUIET_S):
        return
    who = "the daemon"
    if client.pid:
        who = f"pid {client.pid}"
    end = time.monotonic() + STOP_S
    said: str | None = None
    while time.monotonic() < end:
        does = _newest(client)
        if does != said:
            line = f"waiting for {who} to end"
            if does:
                line += f": {does}"
            say(line)
            said = does
        if client.wait_gone(AGAIN_S):
            return
    raise TimedOut(
        f"the daemon is still there after {STOP_S / 60:.0f} minutes", "tutti stop --now  kills it"
    )


def _newest(client: ControlClient) -> str:
    """Last line of a stopping daemon about its own work, "" when it does not answer any more."""
    said = ""
    with contextlib.suppress(LocalFault):
        for event in client.events(last=EVENTS):
            if event.component in ENDING:
                said = clean(event.text)
    return said


def generate(client: ControlClient, request: GenerateRequest, *, as_json: bool) -> ExitCode:
    text = ""
    speed = 0.0
    missing = Missing()
    by = ""
    slow = ""
    tokens: list[tuple[int, float]] = []
    for piece in client.generate(request):
        if piece.HasField("token"):
            tokens.append((piece.token, piece.logprob))
        text = text + piece.text
        speed = piece.tokens_per_s or speed
        by = _asked(by, piece, as_json)
        slow = piece.slow or slow
        if piece.HasField("missing"):
            missing = piece.missing
            if not as_json:
                say(missing_words(missing))
        elif not as_json:
            print(shown(piece.text), end="", flush=True)
    if as_json:
        document = {
            "prompt": request.prompt,
            "text": text,
            "tokens": [token for token, _ in tokens],
            "logprobs": [chance for _, chance in tokens],
            "tokens_per_s": speed,
            "slow": slow,
            "left_out": list(missing.asked),
            "dead": list(missing.dead),
        }
        if by:
            document["ends"] = by
        say_json(document)
    else:
        print()
        if speed:
            line = f"{speed:.1f} tok/s"
            if slow:
                line += f": {clean(slow, 300)}"
            say(line)
    return ExitCode.OK


def evaluate(client: ControlClient, request: EvaluateRequest, *, as_json: bool) -> ExitCode:
    """Every choice as it comes, on stderr; the table, or one document, at the end."""
    found: list[Evaluated] = []
    for one in client.evaluate(request):
        found.append(one)
        _asked("", one, as_json)
        if not as_json:
            say(f"{missing_words(one.missing)}: loss {one.loss:.4f}")
    if not found:
        raise LocalFault("the daemon evaluated nothing", "see  tutti logs --level error")
    if not as_json:
        print(f"epoch {found[0].epoch}, {found[0].tokens} held-out tokens")
        print("\n".join(evaluated_lines(found)))
        return ExitCode.OK
    first = found[0]
    others = found[1:]
    loss = mean_loss(others or found)
    ratio = {}
    if others:
        ratio = {"perplexity_ratio": math.exp(loss - first.loss)}
    say_json(
        {
            "epoch": first.epoch,
            "stages": first.missing.stages,
            "tokens": first.tokens,
            "choices": [
                {"left_out": list(f.missing.asked), "dead": list(f.missing.dead), "loss": f.loss}
                for f in found
            ],
            "loss": loss,
            "loss_before": first.loss_before or None,
            **ratio,
        }
    )
    return ExitCode.OK


def _asked(known: str, piece: Piece | Evaluated, as_json: bool) -> str:
    """The ends peer that runs the passes, told once on stderr."""
    if piece.by and not as_json:
        who = named(PeerId(clean(piece.by, 64)), clean(piece.by_name, 24))
        say(f"this peer hosts no ends: asked ends peer {who}")
    return piece.by or known


def export(client: ControlClient, request: ExportRequest, *, as_json: bool) -> ExitCode:
    """Show the progress on stderr: a line that is written over on a terminal, else one every
    :data:`LINE_S` seconds; with ``as_json`` nothing but the result, on stdout."""
    # The daemon has its own working directory: it is told whole paths.
    request.directory = str(expanded(request.directory).absolute())
    if request.tokenizer:
        request.tokenizer = str(expanded(request.tokenizer).absolute())
    events = client.export(request)
    if not as_json:
        events = _export_progress(events)
    newest = deque(events, maxlen=1)
    if not newest or newest[0].kind != "exported":
        raise LocalFault("the daemon exported nothing", "see  tutti logs --level error")
    fields = event_document(newest[0])["fields"]
    if as_json:
        say_json(event_document(newest[0]))
        return ExitCode.OK
    for note in fields.get("notes", []):
        say(f"note: {clean(str(note), 400)}")
    if fields.get("adapter") and fields.get("base"):
        say(f'load it with  peft.AutoPeftModelForCausalLM.from_pretrained("{request.directory}")')
    elif fields.get("adapter"):
        say(
            "load it on top of the model that the run began from, with  "
            f'peft.PeftModel.from_pretrained(model, "{request.directory}")'
        )
    else:
        say(
            "load it with  transformers.AutoModelForCausalLM.from_pretrained"
            f'("{request.directory}")'
        )
    return ExitCode.OK


def _export_progress(events: Iterable[Event]) -> Iterator[Event]:
    """The same events; their progress is shown as they pass."""
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    terminal = console.is_terminal and not console.is_dumb_terminal
    updating = Live(console=console, auto_refresh=False, transient=True)
    told = ""
    at = 0.0
    with updating if terminal else contextlib.nullcontext():
        for event in events:
            line = Text(export_line(event), no_wrap=True, overflow="ellipsis")
            if event.kind != "export-progress":
                console.print(event_line(event, local_time(event.at)), soft_wrap=True)
            elif terminal:
                updating.update(line, refresh=True)
            elif event.text != told or event.at - at >= LINE_S:
                console.print(line, soft_wrap=True)
                told = event.text
                at = event.at
            yield event


def logs(
    client: ControlClient | None, file: Path, *, follow: bool, last: int, level: str, as_json: bool
) -> ExitCode:
    """Print the daemon's events, or those of its event file if no daemon runs."""
    console = _console()
    if client:
        events = client.events(follow=follow, last=last, level=level)
    else:
        events = read_events(file, last, level)
    try:
        for event in events:
            if as_json:
                say_json(event_document(event))
            else:
                console.print(event_line(event, local_time(event.at)), soft_wrap=True)
    except NotRunning:
        if not follow:
            raise
        say("the daemon ended")
    return ExitCode.OK


def read_events(file: Path, last: int, level: str) -> Iterator[Event]:
    """The newest ``last`` events of at least ``level`` in an event file; a torn last line is
    skipped."""
    if not file.is_file():
        raise NotRunning(
            f"no daemon is running and {file} does not exist", "start one with  tutti start"
        )
    floor = LEVELS[level]
    newest: deque[Event] = deque(maxlen=max(0, last))
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                entry = json.loads(line)
                if LEVELS[entry["level"]] >= floor:
                    newest.append(
                        Event(
                            at=float(entry["at"]),
                            level=entry["level"],
                            component=entry["component"],
                            kind=entry["kind"],
                            text=entry["text"],
                            fields=json.dumps(entry.get("fields", {})),
                        )
                    )
    yield from newest


def event_document(event: Event) -> dict[str, Any]:
    """An event as JSON-ready values, its fields as an object."""
    document = plain(event)
    try:
        document["fields"] = json.loads(event.fields or "{}")
    except ValueError:
        document["fields"] = {"unreadable": event.fields[:200]}
    return document


def local_time(at: float) -> str:
    """Unix seconds as the time of day here, with the date when it is another day."""
    moment = time.localtime(at)
    form = "%H:%M:%S"
    if moment[:3] != time.localtime()[:3]:
        form = "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, moment)


def _progress(events: Iterable[Event], as_json: bool) -> Event | None:
    """Show progress; people read it on stderr, a machine gets the last event as its one
    document."""
    newest: Event | None = None
    console = Console(stderr=True)
    for newest in events:
        console.print(event_line(newest, local_time(newest.at)), soft_wrap=True)
    if as_json and newest is not None:
        say_json(event_document(newest))
    return newest


def _console(bare: bool = False) -> Console:
    if bare:
        return Console(no_color=True, highlight=False, width=200)
    return Console(highlight=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def show_fault(fault: LocalFault, *, as_json: bool) -> None:
    """One clear block on stderr: the fault, then the next step; with ``as_json`` also a document on
    stdout."""
    what = advice(fault.what)
    next_step = advice(fault.next_step)
    if as_json:
        say_json(
            {
                "error": what,
                "next_step": next_step,
                "exit_code": int(fault.code),
                **fault.details,
            }
        )
    console = Console(stderr=True, highlight=False)
    first, *rest = what.splitlines() or [""]
    console.print(Text("tutti: ", "bold red").append(clean(first, WHOLE), ""), soft_wrap=True)
    for line in (*rest, *next_step.splitlines()):
        console.print(Text("  " + clean(line, WHOLE)), soft_wrap=True)
