"""The words inside the monitor's boxes: a snapshot in, lines out. Pure."""

from __future__ import annotations

from rich.text import Text

from node.control.text import STATE_STYLE, cover_words, paths_words, time_bar
from node.control.words import chart, clean, count, span
from node.core.ids import ENDS, short_cell
from node.core.numbers import human
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import CellLine, Snapshot


def node_lines(s: Snapshot, width: int) -> list[Text]:
    """This node in five lines; why it is not healthy comes before everything else."""
    state = s.state.upper() + (f" {s.progress:.0%}" if s.state == "joining" and s.progress else "")
    head = (
        _row("state", "")
        .append(state, STATE_STYLE.get(s.state, ""))
        .append(f" {clean(s.phase, 8)}", "dim")
    )
    lines = [head.append(f"  up {span(s.up_s)}")]
    if not s.healthy:
        lines.append(Text(clean(s.reason, 200) or "degraded", "bold yellow"))
        if s.next_step:
            lines.append(Text("→ " + clean(s.next_step, 200)))
    place = (
        "rendezvous"
        if s.role == "rendezvous"
        else "ends"
        if s.stage == ENDS
        else f"{s.stage}/{s.swarm.stages}"
    )
    last = f", last {span(s.last_work_s)} ago" if s.micro_batches else ""
    return [
        *lines,
        _row(
            "stage", f"{place} {clean(s.layers, 18)}  {s.replicas} replica{'s' * (s.replicas != 1)}"
        ),
        _row("work", f"{count(s.micro_batches)} mb here{last}"),
        _row(
            "net",
            f"{paths_words(s.paths_to) or 'nobody yet'}  ↑{_brief(s.bytes_sent)} "
            f"↓{_brief(s.bytes_received)}",
        ),
        _row("time", "").append_text(time_bar(s.time_s, max(8, width - 7))),
    ]


def swarm_lines(s: Snapshot, answer: PeersAnswer) -> list[Text]:
    """The swarm in five lines, or six where cells lead themselves."""
    loss = f"{s.loss:.3f}" if s.loss else "-"
    if s.loss and s.loss_first:
        loss += f" {'↓' if s.loss < s.loss_first else '↑'} {s.loss_first:.3f}"
    return [
        _row(
            "epoch",
            f"{s.epoch:,} of {s.swarm.epochs:,}   {clean(s.swarm.name, 14)} {s.swarm.run_id[:6]}",
        ),
        _row("loss", loss + (f" held out {s.loss_val:.3f}" if s.loss_val else "")),
        _row("speed", f"{count(s.tokens_per_s)} tok/s   {count(s.tokens)} tokens"),
        _row("rounds", f"{s.round.done} ok  {s.round.repaired} repaired  {s.round.failed} failed"),
        _row("cover", "").append_text(cover_words(answer)),
        *([_row("cell", _cell(s.cell))] if s.HasField("cell") else ()),
    ]


def _cell(c: CellLine) -> str:
    """One of how many, what came of the last window, when the next one is."""
    came = ""
    if c.met == c.window:
        came = "  averaged" if c.last == c.met else "  averages"
    elif c.alone:
        came = "  alone"
    elif c.last:
        came = "  averaged"
    coming = f"  next {span(c.next_s)}" if c.next_s else ""
    return f"{short_cell(clean(c.cell, 16))} of {c.cells}{came}{coming}"


def warning(s: Snapshot) -> str:
    """What deserves the line below the peers most; "" for nothing."""
    if s.digest_mismatches:
        return f"{s.digest_mismatches} digest mismatches: replicas disagreed on parameters"
    return clean(s.warnings[0]) if s.warnings else ""


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
