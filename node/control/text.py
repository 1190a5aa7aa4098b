"""Text that an operator reads: status, peers, the banner at start, the picture of a whole swarm;
made from daemons' reports of themselves. For 80 columns; pure."""

from __future__ import annotations

import contextlib
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from node.availability.words import clock_words, paused_words
from node.control.words import (
    GONE,
    bits,
    chart,
    clean,
    count,
    lasting,
    milliseconds,
    span,
    stacked,
)
from node.core.errors import WireError
from node.core.home import advice, pasteable
from node.core.ids import ENDS, PeerId, named, short, short_cell, stage_name
from node.core.numbers import human, in_words, plural, several
from node.core.version import PROTOCOLS, Protocols
from node.reach.ladder import Rung
from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import (
    ArchiveLine,
    CellLine,
    CellsAnswer,
    ChangeLine,
    Evaluated,
    Event,
    Missing,
    OrderLine,
    PingReport,
    RoundLine,
    SentLine,
    Snapshot,
)

if TYPE_CHECKING:
    from rich.table import Table

WHOLE = 2000
"""Largest number of characters of a sentence of the own daemon, large enough for every sentence: a
truncated one helps nobody."""
RIGHT = {"justify": "right"}
STATE_STYLE = {
    "training": "green",
    "ready": "green",
    "finished": "bold green",
    "joining": "cyan",
    "starting": "cyan",
    "waiting": "yellow",
    "choosing": "cyan",
    "draining": "yellow",
    "moving": "yellow",
    "pausing": "yellow",
    "paused": "dim",
    "stopping": "yellow",
    "silent": "yellow",
    "lost": "red",
    "left": "dim",
}
AGED = ("silent", *GONE)
"""States that are shown with their age."""
PHASES = {
    "run": "computing",
    "average": "averaging",
    "copy": "copying",
    "done": "waiting",
}
"""Words for people for the phases of a member that trains. ``waiting``: for the others, in the same
epoch."""
TIME_KINDS = ("compute", "wire", "wait", "round")
ABSENT = (
    "lost",
    "left",
    "silent",
    "draining",
    "pausing",
    "paused",
    "joining",
    "moving",
    "choosing",
    "starting",
    "stopping",
)
"""States in which a peer does no work for its stage."""
TIME_STYLE = {"compute": "green", "wire": "blue", "wait": "bright_black", "round": "magenta"}
TIME_GLYPH = {"compute": "█", "wire": "▓", "wait": "░", "round": "▒"}
LEVEL_STYLE = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}
MARK = {
    "training": "●",
    "ready": "●",
    "finished": "●",
    "lost": "✗",
    "left": "✗",
    "silent": "◌",
    "draining": "◐",
    "pausing": "◐",
    "paused": "◌",
    "moving": "◐",
    "stopping": "◐",
}


def status_lines(s: Snapshot, verbose: bool = False) -> list[Text]:
    """One screen about one daemon. Facts that are not known yet are left out, never made up.
    ``verbose``: with the parts of its memory."""
    lines = [_headline(s)]
    if not s.healthy:
        lines.append(_line("  cause", clean(s.reason, WHOLE) or "not said", "yellow"))
    elif s.reason:
        lines.append(_line("  now", clean(s.reason, WHOLE), "cyan"))
    run = ""
    if s.swarm.run_id:
        run = f"{clean(s.swarm.name, 16)} {clean(s.swarm.run_id, 64)[:6]}  {_progress(s)}"
    leader = ""
    if s.leader:
        leader = named(PeerId(clean(s.leader, 64)), clean(s.leader_name, 24))
    if s.leader and s.leader == s.peer:
        leader += ", this node"
    parts: list[tuple[str, str]] = []
    if verbose:
        parts = [("", line) for line in _memory_parts(s)]
    facts = [
        ("  fix", clean(s.next_step, WHOLE)),
        ("swarm", run),
        ("done", done_words(s)),
        ("warm-up", warmup_words(s)),
        ("my work", _my_work(s)),
        ("counted", _counted(s)),
        ("receipts", receipts_words(s)),
        ("rounds", _rounds(s.round)),
        *_paths(s),
        ("sent as", sent_words(s.sent)),
        *_cell(s),
        *_change(s.change),
        ("order", _order(s.order)),
        ("copies", _archive(s.archive)),
        ("time", _shares(s.time_s)),
        ("network", f"{paths_words(s.paths_to) or 'no peer connected'}   {_traffic(s)}"),
        ("", _caps(s)),
        ("reachable", clean(s.reachable, WHOLE)),
        ("device", _device(s)),
        ("memory", _memory(s)),
        *parts,
        ("metrics", clean(s.metrics_url, WHOLE)),
        ("leader", leader),
    ]
    lines += [_line(label, text) for label, text in facts if text]
    if n := s.digest_mismatches:
        text = f"{n} digest mismatches: replicas disagreed on parameters"
        lines.append(_line("warning", text, "red"))
    counted = (
        ("part", "{} went on without optimizer state; tutti logs says why", s.momentum_lost),
        ("epoch", "optimizer state came from copies up to {} old", s.momentum_age),
        ("time", "the p2p daemon was restarted {}", s.p2pd_restarts),
    )
    warnings = [advice(text).format(several(n, what)) for what, text, n in counted if n] + [
        *(clean(one, WHOLE) for one in s.warnings)
    ]
    return lines + [_line("warning", text, "yellow") for text in warnings]


def _my_work(s: Snapshot) -> str:
    if s.role == "rendezvous":
        return "rendezvous: helps others find each other, holds no part of the model"
    if s.state == "paused":
        kept = f"{stage_name(s.stage)} later" if s.placed else "holds no stage"
        return f"{kept}; {clean(s.given_back, WHOLE)}" if s.given_back else kept
    if s.state == "choosing":
        return "chooses the stage that most needs a peer"
    if not (s.placed or s.layers):
        return ""
    place = stage_name(s.stage)
    if s.stage != ENDS:
        place += f" of {s.swarm.stages}"
    if not s.layers:
        return f"{place}, which it builds"
    last = "no micro-batch yet"
    if s.micro_batches:
        last = f"last useful work {span(s.last_work_s)} ago"
    replicas = ""
    if s.replicas:
        replicas = f", {s.replicas} replica{'s' * (s.replicas != 1)}"
    return f"{place} ({clean(s.layers, 24)}){replicas}   {last}"


def _counted(s: Snapshot) -> str:
    if not (s.tokens or s.micro_batches):
        return ""
    said = f"{count(s.tokens)} tokens by the swarm"
    if s.micro_batches:
        done = plural(s.micro_batches, "micro-batch")
        said = f"{count(s.micro_batches)} {done} here, {said}"
    if s.tokens_per_s:
        said += f"   {count(s.tokens_per_s)} tok/s"
    return said


def receipts_words(s: Snapshot) -> str:
    """This peer's share of the swarm's work by receipts; "" before the first epoch with them."""
    r = s.receipts
    if not (r.epochs and r.work):
        return ""
    epochs = several(r.epochs, "epoch")
    return f"{r.own / r.work:.1%} of the swarm's work in {epochs}"


MOST_SENT = 6
"""Peers that the line on number formats names; the others are counted."""


def sent_words(sent: Iterable[SentLine]) -> str:
    """Number formats of the tensors that other peers got from here, and how far the numbers in them
    were off, the worst first: "int4 to h2 (9.1 % off), bf16 to h3 (0.17 % off)"."""
    lines = sorted(sent, key=lambda line: (-line.error, line.wire, line.peer))
    words = [
        f"{clean(line.wire, 8)} to {clean(line.name, 16) or short(PeerId(clean(line.peer, 64)))}"
        f"{error_words(line.error)}"
        for line in lines[:MOST_SENT]
    ]
    if more := len(lines) - len(words):
        words.append(f"and {several(more, 'other')}")
    return ", ".join(words)


def error_words(error: float) -> str:
    """A relative error in parentheses; empty where none was measured."""
    if not error:
        return ""
    return f" ({100 * error:.2g} % off)"


def _rounds(r: RoundLine) -> str:
    if not (r.done or r.failed):
        return ""
    last = f"last {r.last_s:.2f} s with {r.contributors}/{r.members}, {human(r.bytes)}"
    return f"{count(r.done)} ok, {r.repaired} repaired, {r.failed} failed   {last}"


LEAST = (
    "metrics",
    "memory",
    "device",
    "time",
    "leader",
    "counted",
    "rounds",
    "cell",
    "averaging",
    "reachable",
    "sent as",
)
"""Labels of ``status`` that a small screen goes without, the first ones first."""
LABEL = 10
"""Columns of a label."""


def fitted(lines: Sequence[Text], width: int, height: int = 0) -> list[Text]:
    """The lines of ``status`` wrapped at words to ``width`` columns, under the beginning of their
    text. Whole facts are dropped to fit ``height`` rows (0: any number), the least important first;
    the fault and its next step stay."""
    width = max(30, width)
    facts: list[tuple[str, list[Text]]] = []
    for i, line in enumerate(lines):
        label = line.plain[:LABEL].strip()
        if i == 0:
            facts.append(("", [_squeezed(line, width)]))
        elif label:
            facts.append((label, _wrapped(line, width)))
        else:
            facts[-1][1].extend(_wrapped(line, width))  # more about the same
    rows = [row for _, of in facts for row in of]
    if not height or len(rows) <= height:
        return rows
    for label in LEAST:
        if len(rows) < height:  # a row is for saying so
            break
        facts = [(name, of) for name, of in facts if name != label]
        rows = [row for _, of in facts for row in of]
    more = _line("", advice("more:  tutti status --plain"), "dim")
    return [*rows[: height - 1], _cut(more, width)]


def _squeezed(head: Text, width: int) -> Text:
    """The first line in ``width`` columns: without its right part, then with single spaces."""
    if head.cell_len <= width:
        return head
    gaps = list(re.finditer(" {3,}", head.plain))
    if gaps:
        head = head[: gaps.pop().start()]
    if head.cell_len > width:
        parts = head.divide(list(chain.from_iterable(gap.span() for gap in gaps)))
        head = Text(" ").join(part for part in parts if part.plain.strip())
    return _cut(head, width)


def _cut(line: Text, width: int) -> Text:
    cut = line.copy()
    cut.truncate(width, overflow="ellipsis")
    return cut


def _wrapped(line: Text, width: int) -> list[Text]:
    first, *rest = line[LABEL:].wrap(Console(), width - LABEL)
    return [line[:LABEL] + first, *(Text(" " * LABEL) + row for row in rest)]


def doing(s: Snapshot) -> tuple[str, str]:
    """The work of a daemon for the terminal that it was started in: a word that changes when there
    is news, and a sentence."""
    place = stage_name(s.stage)
    if s.reason or not s.healthy:
        why = clean(s.reason, WHOLE)
        if s.next_step:
            why += f"; {clean(s.next_step, WHOLE)}"
        return s.cause or "degraded", why
    if s.state == "joining":
        return "joining", f"fetching the state of {place} from others: {s.progress:.0%} is here"
    if s.role == "rendezvous":
        return s.state, f"peers connected: {paths_words(s.paths_to) or 'none yet'}"
    said = [_progress(s), done_words(s)]
    if warmup_words(s):
        said.append(f"warm-up until epoch {s.warmup}")
    done = plural(s.micro_batches, "micro-batch")
    said.append(f"{count(s.micro_batches)} {done} at {place}")
    if s.micro_batches:
        said.append(f"last work {span(s.last_work_s)} ago")
    if s.tokens_per_s:
        said.append(f"{count(s.tokens_per_s)} tok/s")
    said += [
        f"peers: {paths_words(s.paths_to) or 'none yet'}",
        f"sent {human(s.bytes_sent)}, received {human(s.bytes_received)}",
    ]
    return s.state, f"{clean(s.state, 12)}: {', '.join(filter(None, said))}"


def _paths(s: Snapshot) -> list[tuple[str, str]]:
    """Rows on the paths of micro-batches: their kind, their expected and real times, the reason."""
    p = s.paths
    if not p.how:
        return []
    said = ""
    if p.run_s:
        said = f"   should take {p.run_s:.2f} s + round {p.round_s:.2f} s"
    took = ""
    if p.last_took_s:
        took = f"   the last took {p.last_took_s:.2f} s"
    if p.last_took_s and p.last_said_s:
        took += f", {p.last_said_s:.2f} s expected"
    return [
        ("paths", f"{clean(p.how, 16)}{said}{took}"),
        *(("", clean(why, WHOLE)) for why in p.why),
    ]


def peers_table(
    answer: PeersAnswer,
    *,
    sort: str = "stage",
    stage: int | None = None,
    width: int = 80,
    whole: bool = False,
) -> Group:
    """The peers in sight, sorted, perhaps of one stage only, and the sum below. In a narrow
    terminal the columns of :data:`SPARE` are left out, the first ones first. ``whole``: with
    PeerIds that are not shortened."""
    cells = has_cells(answer)
    titles = ["PEER", "NAME", *TITLES]
    if cells:
        titles.insert(2, "CELL")
    stages = answer.swarm.stages
    rows = [
        dict(zip(titles, peer_cells(p, stages, cells=cells, whole=whole), strict=True))
        for p in in_order(answer, sort)
        if stage is None or p.stage == stage
    ]
    shown = _fitting(titles, rows, width)
    table = _table(*((title, {"width": w, **_STYLE.get(title, {})}) for title, w in shown.items()))
    for row in rows:
        table.add_row(*(row[title] for title in shown))
    states = Counter(p.state or "unknown" for p in answer.peers).most_common()
    seen = ", ".join(f"{n} {clean(state, 12)}" for state, n in states) or "none in sight"
    holes = Text("Stage cover  ").append_text(cover_words(answer))
    others = [Text(line) for line in (other_cells_words(answer),) if line]
    apart = [Text(line, "bold red") for line in protocol_lines(answer)]
    total = Text(f"{several(len(answer.peers), 'peer')}: {seen}.   ")
    total.append("* this node  + leader", "dim")
    why = [Text(line, "dim") for line in paused_lines(answer)]
    if answer.reason:
        why += [Text(f"This peer: {clean(answer.reason, WHOLE)}", "yellow")]
    fix = []
    if answer.reason and answer.next_step:
        fix = [Text(f"  → {clean(answer.next_step, WHOLE)}")]
    return Group(table, total, *why, *fix, holes, *others, *apart)


def paused_lines(answer: PeersAnswer) -> list[str]:
    """A line for each reason for which other peers are paused, with their names."""
    found: dict[str, list[str]] = {}
    for p in answer.peers:
        if p.paused and p.path != "self":
            who = named(PeerId(clean(p.peer, 64)), clean(p.name, 24))
            found.setdefault(clean(p.paused, 48), []).append(who)
    lines = [f"{paused_words(why)}: {', '.join(who)}" for why, who in sorted(found.items())]
    return [f"P{line[1:]}" for line in lines]


TITLES = ("STATE", "STAGE", "PATH", "RTT", "TOK/S", "EPOCH", "UP", "VER")
"""Columns of the peers after their names."""
SPARE = ("VER", "UP", "RTT", "PATH", "TOK/S", "EPOCH", "CELL")
"""Columns that a narrow terminal goes without, the first ones first."""
_STYLE = {"NAME": {"overflow": "ellipsis"}} | dict.fromkeys(TITLES[3:], RIGHT)
LEAST_NAME = 8
USUAL_NAME = 12
LONGEST_NAME = 16
"""Columns that a name has at least in a narrow terminal, at least in others, and at most."""
NARROW = 60


def _fitting(
    titles: Sequence[str], rows: Sequence[Mapping[str, Text]], width: int
) -> dict[str, int]:
    """The columns that fit into ``width``, with their widths."""
    wide = {t: max([len(t), *(row[t].cell_len for row in rows)]) for t in titles}
    name = min(wide["NAME"], LONGEST_NAME)
    least = USUAL_NAME
    if width < NARROW:
        least = LEAST_NAME
    wide["NAME"] = min(name, least)
    for title in SPARE:
        if sum(wide.values()) + len(wide) - 1 <= width:
            break
        wide.pop(title, None)
    spare = max(0, width - sum(wide.values()) - len(wide) + 1)
    wide["NAME"] = min(name, wide["NAME"] + spare)
    return wide


def cells_table(answer: CellsAnswer) -> Group:
    """Cells in sight, the own one first, and how many there are."""
    table = _table(("CELL", {}), ("STATE", {}), ("EPOCH", RIGHT), ("TOK/S", RIGHT), ("PEERS", {}))
    for c in answer.seen:
        state = Text("waiting", "yellow")
        if c.works:
            state = Text("training")
        elif min(c.replicas, default=0) == 0:
            state = Text("lacks a stage", "yellow")
        style = ""
        peers = "-".join(map(str, c.replicas))
        if c.own:
            style = "bold"
            peers += "   (this node's)"
        table.add_row(
            Text(short_cell(clean(c.cell, 16)), style),
            state,
            f"{c.epoch:,}",
            f"{c.tokens_per_s:,.0f}",
            Text(peers),
        )
    total = f"{several(answer.cells, 'cell')}, {len(answer.seen)} in sight."
    return Group(table, Text(total))


def _table(*columns: tuple[str, dict[str, Any]]) -> Table:
    from rich.table import Table  # which most answers go without

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title, how in columns:
        table.add_column(title, no_wrap=True, **how)
    return table


def in_order(answer: PeersAnswer, sort: str = "stage") -> list[PeerLine]:
    """The peers in sight as ``SORTS`` says; where cells lead themselves, cell by cell, the own one
    first."""
    first = cell_order(answer)
    then = SORTS[sort]
    return sorted(answer.peers, key=lambda p: (first(p), then(p)))


def by_trouble(answer: PeersAnswer) -> list[PeerLine]:
    """The peers for a screen that may not have room for all, the own cell first: this node, the
    leader, then silent and lost peers, coming and going ones, and the others by stage."""
    cell = cell_order(answer)

    def urgency(p: PeerLine) -> int:
        if p.path == "self":
            return 0
        if p.leads and p.state not in AGED:
            return 1
        if p.state in ("silent", "lost") and not _long_gone(p):
            return 2
        if p.state in AGED:
            return 5
        if p.state in ABSENT:
            return 3
        return 4

    return sorted(in_order(answer), key=lambda p: (cell(p), urgency(p)))


GONE_S = 60.0
"""Seconds after which a peer that was lost or left is shown only with ``--all``."""


def _long_gone(p: PeerLine) -> bool:
    return p.state in GONE and p.seen_s > GONE_S


def present(peers: Iterable[PeerLine]) -> list[PeerLine]:
    """The peers that take part or are paused, and peers that were lost or left a moment ago. A
    rendezvous takes no part."""
    return [p for p in peers if (p.role != "rendezvous" or p.paused) and not _long_gone(p)]


def cover_words(answer: PeersAnswer) -> Text:
    """Working replicas of every stage: "ends:1 1:2"; red for nobody, yellow for only one."""
    words: list[Text] = []
    for stage, n in cover(answer).items():
        place = "ends" if stage == ENDS else stage
        style = {0: "bold red", 1: "yellow"}.get(n, "")
        words.append(Text(f"{place}:{n}", style))
    return Text(" ").join(words)


def other_cells_words(answer: PeersAnswer) -> str:
    """Sentence on the cells besides the one whose cover is shown; "" if there are none."""
    number, lack = other_cells(answer)
    if not number:
        return ""
    lacking = "each has every stage"
    if number == 1:
        lacking = "it has every stage"
    if number == 1 and lack:
        lacking = "it lacks a stage"
    elif lack:
        lacking = f"{lack} lack{'s' * (lack == 1)} a stage"
    return f"{several(number, 'other cell')}, {lacking}"


def incompatible_peers(answer: PeersAnswer) -> dict[Protocols, list[PeerLine]]:
    """Peers in sight that share no protocol version with this tutti, by their versions."""
    found: dict[Protocols, list[PeerLine]] = {}
    for p in answer.peers:
        with contextlib.suppress(WireError):
            theirs = Protocols.said(p.oldest_protocol, p.newest_protocol)
            if p.newest_protocol and p.state not in GONE and not PROTOCOLS.common(theirs):
                found.setdefault(theirs, []).append(p)
    return found


def protocol_lines(answer: PeersAnswer) -> list[str]:
    """One line for each window of versions that others speak and this tutti does not."""
    lines = []
    for theirs, peers in incompatible_peers(answer).items():
        who = ", ".join(named(PeerId(clean(p.peer, 64)), clean(p.name, 16)) for p in peers[:4])
        if len(peers) > 4:
            who += f" and {len(peers) - 4} more"
        says = "speaks" if len(peers) == 1 else "speak"
        lines.append(f"{who} {says} {theirs}, this tutti {PROTOCOLS}: {PROTOCOLS.advice(theirs)}")
    return lines


def peer_cells(
    p: PeerLine, stages: int, *, cells: bool = False, whole: bool = False
) -> tuple[Text, ...]:
    """PEER NAME STATE STAGE PATH RTT TOK/S EPOCH UP VER of one peer; with ``cells`` CELL before
    STATE, with ``whole`` the PeerId not shortened."""
    peer = PeerId(clean(p.peer, 64))
    state = clean(p.state, 9)
    if p.state == "joining" and p.progress:
        state += f" {p.progress:.0%}"
    if p.state == "silent":
        state += f" {span(p.silent_s)}"
    elif p.state in AGED:
        state += f" {span(p.seen_s)}"
    path = clean(p.path, 8)
    mark = ""
    if p.path == "self":
        path = ""
        mark = "*"
    if p.leads and p.state not in AGED:
        mark += "+"
    name = short(peer)
    if whole:
        name = peer
    of_cell = list[Text]()
    if cells:
        of_cell.append(Text(short_cell(clean(p.cell, 16)) or "-"))
    speed = "-"
    if p.tokens_per_s:
        speed = count(p.tokens_per_s)
    up = "-"
    if p.up_s:
        up = span(p.up_s)
    return (
        Text(f"{mark:<2}{name}"),
        Text(clean(p.name, 16)),
        *of_cell,
        Text(state, STATE_STYLE.get(p.state, "")),
        Text(_place(p, stages)),
        Text(path or "-"),
        Text(milliseconds(p.rtt_s)),
        Text(speed),
        Text(epoch_words(p)),
        Text(up),
        Text(clean(p.version, 8)),
    )


def epoch_words(p: PeerLine) -> str:
    """The epoch that a peer holds; "-" for a peer that holds none."""
    if not p.epoch and p.state in ABSENT:
        return "-"
    return str(p.epoch)


def _place(p: PeerLine, stages: int) -> str:
    """The stage of a peer, beside the number of stages where that is known."""
    if p.role == "rendezvous" or p.state == "choosing":
        return "-"
    if p.stage == ENDS:
        return "ends"
    if stages:
        return f"{p.stage}/{stages}"
    return str(p.stage)


def peer_ids(answer: PeersAnswer, sort: str = "stage", stage: int | None = None) -> list[str]:
    """A line for each peer in sight: its short id, name and PeerId, to be copied."""
    return [
        f"{short(PeerId(clean(p.peer, 64)))}  {clean(p.name, 16):16}  {clean(p.peer, 64)}"
        for p in in_order(answer, sort)
        if stage is None or p.stage == stage
    ]


SORTS: dict[str, Callable[[PeerLine], tuple[Any, ...]]] = {
    "stage": lambda p: (p.stage, p.name, p.peer),
    "name": lambda p: (p.name, p.peer),
    "state": lambda p: (p.state, p.peer),
    "rtt": lambda p: (p.rtt_s <= 0, p.rtt_s, p.peer),
    "speed": lambda p: (-p.tokens_per_s, p.peer),
    "epoch": lambda p: (-p.epoch, p.peer),
    "up": lambda p: (-p.up_s, p.peer),
}
"""Orders of ``tutti peers --sort``: names upward, numbers best first, unknown last."""


def paths_words(paths: Mapping[str, int]) -> str:
    """Number of peers by their ways, the best way first: "3 direct, 1 relayed"."""
    best_first = [rung.word for rung in sorted(Rung, reverse=True)]
    return ", ".join(f"{paths[word]} {word}" for word in best_first if word and paths.get(word))


def ping_lines(report: PingReport) -> list[str]:
    """Lines on a ping: the ways tried, each round trip and the sum; the reason when nothing came
    back."""
    who = named(PeerId(clean(report.peer, 80)), clean(report.name, 40))
    path = clean(report.path, 10) or "unknown path"
    if report.via:
        path += f" by {named(PeerId(clean(report.via, 80)), clean(report.via_name, 40))}"
    lines = [f"{way}: {clean(why, 300) or 'works'}" for way, why in sorted(report.tried.items())]
    lines += [f"{who}: {path}   {t * 1000:.1f} ms" for t in report.rtt_s]
    if report.rtt_s:
        times = sorted(report.rtt_s)
        lines.append(
            f"{len(times)} answers   least {times[0] * 1000:.1f} ms, median "
            f"{times[len(times) // 2] * 1000:.1f} ms"
        )
    if report.error:
        lines.append(f"{who}: {clean(report.error)}")
    return lines


def missing_words(m: Missing) -> str:
    """Block stages that are left out, with the reason: "without block stages 5, 6 (as asked) and 3
    (nobody answers), of 8"."""
    parts = [
        f"{', '.join(map(str, stages))} ({why})"
        for stages, why in ((m.asked, "as asked"), (m.dead, "nobody answers"))
        if stages
    ]
    if not parts:
        return "all block stages"
    noun = "stage" if len(m.asked) + len(m.dead) == 1 else "stages"
    return f"without block {noun} {' and '.join(parts)}, of {m.stages}"


def mean_loss(found: Sequence[Evaluated]) -> float:
    return math.fsum(one.loss for one in found) / len(found)


def evaluated_lines(found: Sequence[Evaluated]) -> list[str]:
    """One line a choice of missing stages; beside the first the perplexity of the others over its
    own, and their mean."""
    whole = found[0].loss
    others = found[1:]
    rows = [(missing_words(f.missing), f.loss) for f in found]
    if (before := found[0].loss_before) and not others:
        rows.append(("before training", before))
    if others:
        rows.append((f"mean of {several(len(others), 'choice')}", mean_loss(others)))
    wide = max(len(words) for words, _ in rows)
    lines = []
    for i, (words, loss) in enumerate(rows):
        over = ""
        if i:
            over = f"   x {math.exp(loss - whole):.3f}"
        lines.append(f"{words:<{wide}}   loss {loss:.4f}   perplexity {math.exp(loss):.3f}{over}")
    return lines


def event_line(event: Event, clock: str) -> Text:
    """``clock`` is the time as text: this package reads no clock and knows no time zone."""
    mark = {"warning": "! ", "error": "!! "}.get(event.level, "")
    return Text(f"{clock} ", "dim").append(
        f"{mark}{clean(event.text, WHOLE)}", LEVEL_STYLE.get(event.level, "")
    )


def export_line(event: Event) -> str:
    """Progress of an export as one line: the work at hand, stages, bytes, rate, time left."""
    try:
        figures = json.loads(event.fields or "{}")
        stages = int(figures["stages"])
        done = int(figures["stages_done"])
        here = float(figures["bytes"])
        total = float(figures["bytes_total"])
        rate = float(figures["bytes_per_s"])
    except (ValueError, TypeError, KeyError):
        return clean(event.text, WHOLE)
    parts = [clean(event.text, WHOLE)]
    if total > 0:
        parts += [
            f"{done} of {several(stages, 'stage')}",
            f"{human(here)} of {human(total)}",
            f"{human(rate)}/s",
        ]
    if total > here and rate > 0:
        parts.append(f"{span((total - here) / rate)} left")
    return "   ".join(parts)


def invite_note(only_on: str) -> str:
    """Describe the only place where an invite can be used, and how to make it good elsewhere; ""
    for an invite that can be used anywhere. ``only_on`` as in InviteReply."""
    if only_on == "machine":
        return (
            "this invite is good on this machine only, where the daemon listens: start it without "
            " --listen"
        )
    if only_on == "network":
        return (
            "so far this invite is good in this machine's own network only: nobody outside is "
            "known to reach this peer. Let two TCP ports P and Q in at the router, and start with "
            " --p2p-port P --grpc-port Q --announce HOST:Q , or meet at a rendezvous:  tutti start "
            "FILE --join ADDRESS . A fresh invite:  tutti swarm invite"
        )
    return ""


def banner(
    *,
    version: str,
    name: str,
    peer: str,
    key_path: str,
    home: str = "",
    new_key: bool = False,
    solo: bool = False,
    swarm: str = "",
    run_id: str = "",
    model: str = "",
    parameters: int = 0,
    listening: Sequence[str] = (),
    metrics_url: str = "",
    invite: str = "",
    only_on: str = "",
    home_flag: str = "",
    everywhere: bool = False,
) -> list[str]:
    """Lines that a daemon prints when it starts; empty values leave their line out. ``home_flag``
    is " --home DIR" when not the default; ``everywhere``: it listens on all addresses; ``only_on``:
    as for :func:`invite_note`."""
    title = f"tutti {version}"
    if solo:
        title += "   a solo swarm: every stage runs on this machine until others join"
    heard = ""
    if everywhere:
        heard = "listening on all addresses; tutti status says how others reach this peer"
        heard = pasteable(heard, home_flag)
    elif listening:
        heard = "listening on one address only, as --listen says"
    who = f"{name}  {short(PeerId(peer))}"
    if new_key:
        who += "   a new key"
    run = ""
    if swarm:
        run = f"{clean(swarm, 40)} {run_id[:12]}"
    trained = ""
    if model:
        trained = f"{count(parameters)} parameters: {model}"
    rows = (
        ("identity", who),
        ("key", f"{key_path}   keep a backup: without it this PeerId is lost"),
        ("home", home),
        ("swarm", run),
        ("model", trained),
        *_labelled("network", listening),
        ("", heard),
        ("metrics", metrics_url),
    )
    lines = [
        title,
        *(_plain(label, value) for label, value in rows if value),
        f"Watch it:                tutti{home_flag} monitor",
    ]
    if invite:
        lines.append(f"Invite another machine:  tutti join {invite}")
        if note := invite_note(only_on):
            lines.append(f"  {pasteable(note, home_flag)}")
    return lines


def _readers(ends_layers: int) -> str:
    """The peers that can read the text on which a peer that hosts the ends trains."""
    said = (
        "others can compute the text of a peer that hosts the ends from what it sends: the first "
        "and the last block stage all of it, other peers parts of it. "
    )
    if ends_layers:
        said += "Layers at the ends make it harder for the first stage, and not impossible. "
    return said + "Train on secret text only with peers that may read it"


def consent_lines(
    *,
    name: str,
    run_id: str,
    owner: str,
    signed: bool,
    admission: str,
    model: str,
    parameters: int,
    data: str,
    cut: str,
    work: str,
    fetched_from: str,
    reads: Sequence[str] = (),
    ends_layers: int = 0,
    memory: Sequence[str] = (),
    traffic: Sequence[str] = (),
    width: int = 80,
) -> list[str]:
    """Terms that a person accepts by joining: the swarm's owner, the model and its data, the
    traffic over the line, the facts that others see. No line is wider than ``width``, unless a word
    is."""
    signature = "NOT SIGNED"
    if signed:
        signature = f"signed by its owner {owner}"
    kind = "open"
    if admission == "invite":
        kind = "private"
    lines = [
        _plain("swarm", f"{clean(name, 64)}   run {run_id[:12]}   {kind}"),
        _plain("", signature),
        _plain("model", f"{count(parameters)} parameters: {clean(model)}"),
        *(_plain(label, text) for label, text in _labelled("memory", memory)),
        _plain("data", clean(data)),
        _plain("pipeline", clean(cut)),
        _plain("work", clean(work)),
        *(_plain(label, clean(text, 500)) for label, text in _labelled("reads", reads)),
        _plain("code", "none is downloaded: this tutti trains, the swarm only sends numbers"),
        *(_plain(label, text) for label, text in _labelled("traffic", traffic)),
        _plain(
            "others see",
            "your IP addresses, node name, version and speed; peers of your stage your gradients, "
            "peers of other stages the "
            "activations and their gradients that you send on",
        ),
        _plain("text", _readers(ends_layers)),
    ]
    if fetched_from:
        lines.append(
            _plain(
                "download",
                f"a peer that hosts the ends fetches this data from {clean(fetched_from, 256)}",
            )
        )
    return [part for line in lines for part in wrapped(line, width)]


def _labelled(label: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    """(label, text) of each row about one thing; only the first row shows the label."""
    return [("" if i else label, text) for i, text in enumerate(texts)]


def swarm_picture(
    snapshots: Sequence[Snapshot], *, width: int = 80, height: int = 24, note: str = ""
) -> Group:
    """A whole swarm: loss curve, a row for each replica of each stage, where its time goes, whether
    replicas agree.

    Never more than ``height`` lines nor ``width`` columns. A peer that is gone is a snapshot in
    state "lost".
    """
    # The peer furthest ahead speaks for the swarm's curve.
    s = max(snapshots, key=lambda s: (s.epoch, len(s.loss_history), s.tokens), default=Snapshot())
    rows = _replica_rows(by_stage(snapshots, s.swarm.stages), width, max(4, height - 8))
    curve_height = max(1, min(7, height - 6 - len(rows) - bool(note)))
    curve = [Text("  " + row, "cyan") for row in chart(s.loss_history, width - 4, curve_height)]
    head = Text(f"{clean(s.swarm.name, 16)} {clean(s.swarm.run_id, 64)[:6]}", "bold").append(
        f"   epoch {s.epoch}/{s.swarm.epochs}", ""
    )
    if s.loss:
        head.append(f"   loss {s.loss:.3f}", "bold")
    if s.loss and s.loss_first:
        head.append(f" from {s.loss_first:.3f}")
    measured = [one for one in snapshots if one.loss_val]
    if measured:
        head.append(f"   held out {max(measured, key=lambda one: one.epoch).loss_val:.3f}")
    speed = s.tokens_per_s or max((one.tokens_per_s for one in snapshots), default=0.0)
    last = [_legend(snapshots, speed), _agreement(snapshots)]
    lines = [head, *curve, Text(""), *rows, Text(""), *last]
    if note:
        lines.append(Text(clean(note, width), "bold yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines[:height])


def _replica_rows(stages: Mapping[int, Sequence[Snapshot]], width: int, most: int) -> list[Text]:
    """A row for each replica; when there are too many, the stage's last row counts the rest."""
    total = sum(max(1, len(members)) for members in stages.values())
    each = 1000
    if total > most:
        each = max(1, most // max(1, len(stages)))
    rows: list[Text] = []
    for stage, members in stages.items():
        place = "ends" if stage == ENDS else f"stage {stage}"
        if not members:
            rows.append(Text(f"{place:<9}", "bold").append("✗ nobody holds it", "bold red"))
        for i, s in enumerate(members[:each]):
            label = place
            if i:
                label = ""
            row = Text(f"{label:<9}", "bold")
            row.append(f"{MARK.get(s.state, '○')} ", STATE_STYLE.get(s.state, ""))
            row.append(f"{clean(s.name, 16):<17}").append(
                f"{_activity(s):<17}", STATE_STYLE.get(s.state, "")
            )
            row.append(f"epoch {s.epoch:<6}")
            row.append_text(time_bar(s.time_s, max(8, width - 9 - 2 - 17 - 17 - 12 - 1)))
            if i == each - 1 and len(members) > each:
                row.append(f" +{len(members) - each}", "dim")
            rows.append(row)
    return rows[:most]


def _activity(s: Snapshot) -> str:
    state = clean(s.state, 9)
    if s.state == "joining" and s.progress:
        return f"{state} {s.progress:.0%}"
    if s.state == "training":
        return PHASES.get(s.phase, state)
    return state


def state_words(s: Snapshot) -> Text:
    """The state of a peer, with its progress or its phase of the epoch."""
    text = s.state.upper()
    if s.state == "joining" and s.progress:
        text += f" {s.progress:.0%}"
    words = Text(text, STATE_STYLE.get(s.state, ""))
    if s.state == "moving" and s.phase:
        words.append(f" {clean(s.phase, 16)}", "")
    elif s.state == "training" and s.phase in PHASES:
        words.append(f", {PHASES[s.phase]}", "dim")
    return words


def time_bar(time_s: Mapping[str, float], width: int) -> Text:
    """Bar of the time spent, by kind, ``width`` columns wide."""
    bar = Text()
    runs = stacked(
        [time_s.get(k, 0.0) for k in TIME_KINDS], [TIME_GLYPH[k] for k in TIME_KINDS], width
    )
    for kind, run in zip(TIME_KINDS, runs, strict=True):
        bar.append(run, TIME_STYLE[kind])
    return bar


def _legend(snapshots: Sequence[Snapshot], tokens_per_s: float) -> Text:
    """Line on the time that all peers spent, by kind."""
    spent = {kind: sum(s.time_s.get(kind, 0.0) for s in snapshots) for kind in TIME_KINDS}
    total = sum(spent.values())
    line = Text("time      ")
    for kind in TIME_KINDS:
        share = ""
        if total > 0:
            share = f" {spent[kind] / total:.0%}"
        line.append(TIME_GLYPH[kind], TIME_STYLE[kind]).append(f" {kind}{share}   ")
    if tokens_per_s:
        line.append(f"{count(tokens_per_s)} tok/s")
    return line


def _agreement(snapshots: Sequence[Snapshot]) -> Text:
    """Most rounds that any peer saw, and whether replicas agree."""
    compared, unequal = compare_digests(snapshots)
    rounds = [s.round for s in snapshots] or [RoundLine()]
    line = Text(f"rounds    {max(r.done for r in rounds)} ok, ")
    line.append(f"{max(r.repaired for r in rounds)} repaired, ")
    line.append(f"{max(r.failed for r in rounds)} failed   ")
    if unequal:
        return line.append(f"replicas DIFFER in stage {', '.join(map(str, unequal))}", "bold red")
    if compared:
        line.append("replicas bit-identical ✓", "green")
    tokens = max((s.tokens for s in snapshots), default=0)
    if tokens:
        line.append(f"   {count(tokens)} tokens")
    return line


def _headline(s: Snapshot) -> Text:
    who = named(PeerId(clean(s.peer, 64)), clean(s.name, 24))
    head = Text(f"{who}   ", "bold").append_text(state_words(s))
    if s.healthy:
        head.append("   healthy", "green")
    else:
        head.append("   degraded", "bold yellow")
    right = f"up {span(s.up_s)}   tutti {clean(s.version, 16)}"
    return head.append(" " * max(3, 80 - head.cell_len - len(right))).append(right, "dim")


def run_epoch(s: Snapshot) -> int:
    """Epoch of the run: the one held here, or the one that this peer hears of while it holds no
    parameters."""
    return s.epoch or s.swarm.epoch


def _progress(s: Snapshot) -> str:
    epoch = run_epoch(s)
    if not epoch and s.state in ABSENT:
        return "".join(["epoch not known yet", *(f"  {words}" for words in loss_words(s))])
    text = f"epoch {epoch}"
    if s.swarm.epochs:
        text += f"/{s.swarm.epochs}"
    return text + "".join(f"  {words}" for words in loss_words(s))


def loss_words(s: Snapshot) -> list[str]:
    """The training loss and the held-out loss, each beside that before training where it is
    known."""
    found = list[str]()
    if s.loss:
        arrow = ""
        if s.loss_first and s.loss_first != s.loss and not s.loss_before:
            sign = "↓" if s.loss_first > s.loss else "↑"
            arrow = f" {sign} {s.loss_first:.3f}"
        found.append(f"loss {s.loss:.3f}{arrow}{_before(s.loss, s.loss_before)}")
    if s.loss_val:
        found.append(f"held out {s.loss_val:.3f}{_before(s.loss_val, s.loss_val_before)}")
    return found


def _before(loss: float, before: float) -> str:
    if before in (0.0, loss):
        return ""
    return f", {before:.3f} before training"


def done_words(s: Snapshot) -> str:
    """The share of the run that is done, and the time for the rest at the speed so far. A peer that
    does not train has no speed."""
    epochs = s.swarm.epochs
    epoch = run_epoch(s)
    if not epochs or epoch >= epochs:
        return ""
    share = f"{100 * epoch // epochs} %"
    if s.state in ABSENT:
        return f"{share} of the run" if epoch else ""
    if not s.left_s:
        return f"{share}, the time left is not known yet"
    over_s = s.left_over_s
    if over_s >= 60:
        over_s = 60 * round(over_s / 60)
    return f"{share}, about {lasting(s.left_s)} left at the speed of the last {lasting(over_s)}"


def warmup_words(s: Snapshot) -> str:
    """A sentence while this peer trains and the learning rate still rises, for the loss may rise
    with it."""
    if not s.warmup or s.epoch >= s.warmup or not s.swarm.epochs or s.state in ABSENT:
        return ""
    return f"epoch {s.epoch} of {s.warmup}: the learning rate rises, and the loss may too"


def _cell(s: Snapshot) -> list[tuple[str, str]]:
    """The cell that this peer belongs to, and the outcome of its windows."""
    if not s.HasField("cell"):
        return []
    c = s.cell
    here = f"{short_cell(clean(c.cell, 16))}: {several(c.peers, 'peer')}"
    seen = "no other cell in sight"
    if c.cells > 1:
        seen = f"{c.cells} cells in sight"
    found = [("cell", f"{here}, {seen}")]
    if c.next_s:
        found = [("cell", f"{here}, {seen}   next window in {span(c.next_s)}")]
    met, mean = (several(n - 1, "other cell") for n in (c.met_cells, c.cells_averaged))
    if c.met == c.window and c.met > c.last:
        found.append(("", f"this window: averages with {met}"))
    elif c.met > c.last:
        found.append(("", f"{_window(c, c.met)}: met {met}, and no mean came into place"))
    if c.alone:
        found.append(("", "alone in the last window"))
    if c.last:
        last = f"averaged with {mean}, {human(c.bytes)} pulled, {c.last_s:.2f} s"
        found.append(("", f"{_window(c, c.last)}: {last}"))
        if c.apart:
            found.append(("", f"its partners were {100 * c.apart:.3g}% away"))
    return found


def _window(c: CellLine, number: int) -> str:
    ago = c.window - number
    return {0: "this window", 1: "last window"}.get(ago, f"{ago} windows ago")


def _change(c: ChangeLine) -> list[tuple[str, str]]:
    """Rules that cells go by, and the owner's newer change if no plan is under it yet."""
    if not c.revision:
        return []
    by = "the manifest"
    if c.in_force:
        by = f"the owner's change {c.in_force}"
    found = [("averaging", f"by {by}"), ("", clean(c.says, WHOLE))]
    if c.in_force != c.revision:
        found.append(("", f"change {c.revision} comes into force with the next plan"))
    return found


def _order(o: OrderLine) -> str:
    """An order of the run's owner that is not in force yet; one that is shows in the reason."""
    if not o.number or o.in_force:
        return ""
    said = f"the run's owner says {clean(o.verb, 8)}, from {clock_words(o.begins)} on"
    if o.reason:
        said += f": {clean(o.reason, 120)}"
    return said


def _archive(a: ArchiveLine) -> str:
    """The newest copy of this peer's checkpoints."""
    if not a.to:
        return ""
    if not a.known:
        return f"none of the checkpoints yet, to {clean(a.to, WHOLE)}"
    said = f"epoch {a.epoch} at {clean(a.to, WHOLE)}"
    if a.at:
        said += f", since {clock_words(a.at)}"
    return said


def _shares(time_s: Mapping[str, float]) -> str:
    total = sum(time_s.get(k, 0.0) for k in TIME_KINDS)
    if total > 0:
        return "  ".join(f"{k} {time_s.get(k, 0.0) / total:.0%}" for k in TIME_KINDS)
    return ""


def _traffic(s: Snapshot) -> str:
    """All that went over the wire, and how fast it does now."""
    now = ""
    if s.up_rate or s.down_rate:
        now = f" ({bits(s.up_rate)} up, {bits(s.down_rate)} down)"
    return f"sent {human(s.bytes_sent)}, received {human(s.bytes_received)}{now}"


def _caps(s: Snapshot) -> str:
    caps = (("up", s.max_up), ("down", s.max_down))
    said = ", ".join(f"{bits(cap)} {way}" for way, cap in caps if cap)
    if not said:
        return ""
    return f"capped at {said}"


def _device(s: Snapshot) -> str:
    """The device, the number format of forward and backward, and the kernels of layers."""
    computes = ""
    if s.precision:
        computes = f", computes in {clean(s.precision, 8)}"
    if s.kernels:
        computes += f", layers by {clean(s.kernels, WHOLE)}"
    return clean(s.device, WHOLE) + computes


def _memory(s: Snapshot) -> str:
    if not s.device:
        return ""
    # The limit is the stage's: the process was subtracted. The memory in use counts the process.
    limit = s.memory_limit + s.memory_process
    used = human(s.memory_used)
    if s.memory_limit:
        used += f" of {human(limit)}"
    if s.memory_peak:
        used += f", at most {human(s.memory_peak)}"
    if not s.memory_planned:
        return used
    return f"{used}, planned {human(s.memory_process + s.memory_planned)}"


def _memory_parts(s: Snapshot) -> list[str]:
    """The parts of the memory: the plan by its items, and the bytes kept now."""
    lines: list[str] = []
    if s.memory_process:
        lines.append(f"this process and p2pd without the stage {human(s.memory_process)}")
    rows = in_words((clean(r.when, 40), clean(r.what, 40), r.bytes) for r in s.memory_plan)
    if rows:
        lines += [f"planned for the stage {human(s.memory_planned)}:", *rows]
    now: list[str] = []
    if s.stash_limit:
        now.append(f"stash {human(s.stash_bytes)} of {human(s.stash_limit)}")
    if s.texts:
        now.append(f"{several(s.texts, 'text')} {human(s.text_bytes)}")
    if s.recompute not in ("", "off"):
        now.append(f"recompute {s.recompute}")
    if s.optimizer_bytes:
        now.append(f"optimizer state {human(s.optimizer_bytes)}")
    if now:
        lines.append("   ".join(["now", *now]))
    return lines


def _line(label: str, value: str, style: str = "") -> Text:
    return Text(f"{label:<{LABEL}}", "dim").append(value, style)


def wrapped(line: str, width: int, indent: int = 11) -> list[str]:
    """``line`` cut between words so that no piece is wider than ``width`` (a single longer word
    stays whole); pieces after the first are indented."""
    return textwrap.wrap(
        line,
        max(width, indent + 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [line]


def _plain(label: str, value: str) -> str:
    return f"{label:<10} {value}"


# ----------------------------------------------------------- what daemons say, put together


def cover(answer: PeersAnswer) -> dict[int, int]:
    """Working replicas of every stage, 0 (ends) to the last, so that a hole shows as 0. Where cells
    lead themselves and the answerer has one, only its own cell counts."""
    own = _own_cell(answer)
    live = Counter(p.stage for p in _working(answer) if not own or p.cell == own)
    return {stage: live[stage] for stage in range(max([answer.swarm.stages, *live]) + 1)}


def covers(answer: PeersAnswer) -> dict[str, dict[int, int]]:
    """Working replicas of every stage for each cell in sight, the own one first; under "" alone
    where the run has one cell."""
    own = _own_cell(answer)
    there = {p.cell for p in answer.peers if p.state not in GONE and p.role != "rendezvous"}
    cells = sorted(there - {""}, key=lambda cell: (cell != own, cell)) or [""]
    live = Counter((p.cell, p.stage) for p in _working(answer))
    stages = max([answer.swarm.stages, *(stage for _, stage in live)])
    return {cell: {s: live[cell, s] for s in range(stages + 1)} for cell in cells}


def has_cells(answer: PeersAnswer) -> bool:
    """Return True if the run has cells that lead themselves."""
    return any(p.cell for p in answer.peers)


def other_cells(answer: PeersAnswer) -> tuple[int, int]:
    """Number of cells besides the own one, and the number of them that lack a working peer for some
    stage."""
    own = _own_cell(answer)
    there = {p.cell for p in answer.peers if p.cell and p.cell != own and p.state not in GONE}
    held = {(p.cell, p.stage) for p in _working(answer)}
    stages = range(answer.swarm.stages + 1)
    return len(there), sum(any((cell, s) not in held for s in stages) for cell in there)


def cell_order(answer: PeersAnswer) -> Callable[[PeerLine], tuple[bool, bool, str]]:
    """Sort key by cell: the own one first, peers without a cell last."""
    own = _own_cell(answer)
    return lambda p: (p.cell != own, not p.cell, p.cell)


def _own_cell(answer: PeersAnswer) -> str:
    return next((p.cell for p in answer.peers if p.path == "self"), "")


def _working(answer: PeersAnswer) -> Iterable[PeerLine]:
    return (p for p in answer.peers if p.state not in ABSENT and p.role != "rendezvous")


def by_stage(snapshots: Iterable[Snapshot], stages: int) -> dict[int, list[Snapshot]]:
    """Snapshots of each stage's hosts, by name; a block stage without a host has an empty list."""
    found: dict[int, list[Snapshot]] = {stage: [] for stage in range(1, stages + 1)}
    for snapshot in sorted(snapshots, key=lambda s: (s.stage, s.name, s.peer)):
        if snapshot.role != "rendezvous":
            found.setdefault(snapshot.stage, []).append(snapshot)
    return dict(sorted(found.items()))


def compare_digests(snapshots: Iterable[Snapshot]) -> tuple[int, tuple[int, ...]]:
    """Number of replicas that could be compared with another of their cell at the same epoch, and
    the stages that differ."""
    at: dict[tuple[int, str, int], list[str]] = {}
    for s in snapshots:
        if s.digest and s.state != "lost":
            at.setdefault((s.stage, s.cell.cell, s.epoch), []).append(s.digest)
    together = {key: digests for key, digests in at.items() if len(digests) > 1}
    return sum(map(len, together.values())), tuple(
        sorted({stage for (stage, *_), d in together.items() if len(set(d)) > 1})
    )
