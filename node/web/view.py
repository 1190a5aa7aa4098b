"""The document behind the page, made of the daemon's answers. Pure.

Every text is cleaned and cut and every list bounded, so that a document has at most
:data:`MOST_BYTES` bytes whatever peers say of themselves. Texts are plain text: the page never
takes one for markup.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.control.text import (
    ABSENT,
    AGED,
    TIME_KINDS,
    WHOLE,
    by_trouble,
    cell_order,
    covers,
    done_words,
    error_words,
    paths_words,
    present,
    receipts_words,
    run_epoch,
    sent_words,
    state_words,
    warmup_words,
)
from node.control.words import GONE, clean, count, milliseconds, shown, span
from node.core.errors import LocalFault
from node.core.ids import PeerId, named, short, short_cell, stage_name
from node.core.numbers import human, plural, several
from node.web.samples import TextSample
from node.web.wishes import wishes
from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import EpochLine, Event, Snapshot, WorkLine

FORMAT = 1
"""Number of the document's form, for those who read exports."""
MOST_BYTES = 320 << 10
MOST_PEERS = 256
MOST_CELLS = 64
MOST_STAGES = 128
"""Block stages on the map."""
MOST_WORK = 64
MOST_NEWS = 20
WARNING = "Warning"
"""Beginning of the labels of this node's warnings."""
DULL = ("doing", "log")
"""Kinds of events that are no news."""
_KEY = re.compile(r"[A-Za-z0-9]{1,128}")
"""Names of peers and cells that become keys of the document."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything the page shows. ``at``: Unix seconds; ``past``: lines of the history, oldest
    first; ``sampling``: why there is no sample, "" where there are or will be."""

    at: float
    snapshot: Snapshot
    answer: PeersAnswer
    past: Sequence[EpochLine] = ()
    work: Sequence[WorkLine] = ()
    stage_bytes: Sequence[int] = ()
    news: Sequence[Event] = ()
    samples: Sequence[TextSample] = ()
    prompt: str = ""
    sampling: str = ""
    chat: bool = False


def document(state: State) -> dict[str, Any]:
    """The document: sections by name, without null."""
    s = state.snapshot
    shares = _work(state)
    return {
        "format": FORMAT,
        "at": int(state.at),
        "run": _run(s),
        "health": _health(s),
        "tiles": _tiles(s),
        "map": _map(state),
        "peers": _peers(state.answer),
        "reference": {"loss": _finite(s.loss_before), "held": _finite(s.loss_val_before)},
        "curve": {str(line.epoch): _point(line) for line in state.past},
        "time": _time(s.time_s),
        "work": shares,
        "me": _me(s, shares),
        "help": [
            {"kind": wish.kind, "text": wish.text}
            for wish in wishes(state.answer, state.stage_bytes)
        ],
        "prompt": clean(state.prompt, 200),
        "sampling": clean(state.sampling, 300),
        "samples": {str(one.epoch): [one.tokens, shown(one.text)] for one in state.samples},
        "news": _news(state.news),
        "chat": state.chat,
    }


def for_strangers(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the texts in which addresses and paths of this machine may stand: news,
    warnings, and reasons of faults."""
    health = dict(document["health"]) | {"reason": "", "step": ""}
    me = {label: fact for label, fact in document["me"].items() if not label.startswith(WARNING)}
    return dict(document) | {"news": [], "health": health, "me": me, "sampling": ""}


def without_answer(old: Mapping[str, Any], fault: LocalFault, at: float) -> dict[str, Any]:
    """The document while the daemon does not answer: the last one, with the fault."""
    health = {
        "ok": False,
        "word": "no answer",
        "reason": clean(fault.what, WHOLE),
        "step": clean(fault.next_step, WHOLE),
    }
    return {"format": FORMAT} | dict(old) | {"at": int(at), "health": health}


# ------------------------------------------------------------------ sections


def _run(s: Snapshot) -> dict[str, Any]:
    done = 0.0
    if s.swarm.epochs:
        done = min(1.0, run_epoch(s) / s.swarm.epochs)
    return {
        "name": clean(s.swarm.name, 40) or "no run yet",
        "id": clean(s.swarm.run_id, 64)[:12],
        "epoch": run_epoch(s),
        "epochs": s.swarm.epochs,
        "done": round(done, 4),
        "tokens": s.tokens,
        "warmup": warmup_words(s),
    }


def _health(s: Snapshot) -> dict[str, Any]:
    word = "degraded"
    if s.healthy:
        word = "healthy"
    reason = clean(s.reason, WHOLE)
    if s.digest_mismatches and not reason:
        reason = f"{s.digest_mismatches} digest mismatches: replicas disagreed on parameters"
    return {"ok": s.healthy, "word": word, "reason": reason, "step": clean(s.next_step, WHOLE)}


def _tiles(s: Snapshot) -> dict[str, list[str]]:
    """(label, value, note) of each figure."""
    epochs = f"{run_epoch(s):,}"
    if s.state in ABSENT and not run_epoch(s):
        epochs = "-"
    if s.swarm.epochs:
        epochs += f" of {s.swarm.epochs:,}"
    note = done_words(s)
    if is_last(s):
        note = "the run is complete"
    speed = "-"
    if s.tokens_per_s:
        speed = f"{count(s.tokens_per_s)} tok/s"
    return {
        "epoch": ["Epoch", epochs, note],
        "loss": ["Training loss", _loss(s.loss), _before(s.loss_before) or _first(s.loss_first)],
        "held": ["Held-out loss", _loss(s.loss_val), _before(s.loss_val_before)],
        "speed": ["Speed", speed, f"{count(s.tokens)} tokens so far"],
    }


def _loss(loss: float) -> str:
    if not loss or not math.isfinite(loss):
        return "-"
    return f"{loss:.3f}"


def _before(loss: float) -> str:
    if not loss or not math.isfinite(loss):
        return ""
    return f"{loss:.3f} before training"


def _first(loss: float) -> str:
    """The first loss of a run that keeps none from before training."""
    if not loss or not math.isfinite(loss):
        return ""
    return f"{loss:.3f} in the first epoch seen"


def _map(state: State) -> dict[str, Any]:
    answer = state.answer
    stages = min(MOST_STAGES, answer.swarm.stages)
    own = next((p.cell for p in answer.peers if p.path == "self"), "")
    cells: dict[str, Any] = {}
    for cell, cover in covers(answer).items():
        if len(cells) == MOST_CELLS:
            break
        cells[_cell_key(cell)] = {
            "label": short_cell(cell),
            "own": cell == own,
            "cover": [cover.get(stage, 0) for stage in range(stages + 1)],
        }
    return {
        "order": [*cells],
        "cells": cells,
        "stages": [stage_name(stage) for stage in range(stages + 1)],
        "needs": [human(nbytes) for nbytes in state.stage_bytes[: stages + 1]],
        "own_stage": state.snapshot.stage,
    }


def _cell_key(cell: str) -> str:
    if _KEY.fullmatch(cell):
        return cell
    return "all"


def _peers(answer: PeersAnswer) -> dict[str, Any]:
    """Rows by PeerId; the others are counted under "more"."""
    here = present(answer.peers)
    cell = cell_order(answer)
    first = PeersAnswer(peers=here, swarm=answer.swarm)
    rows = {p.peer: p for p in by_trouble(first)[:MOST_PEERS] if _KEY.fullmatch(p.peer)}
    chosen = sorted(rows.values(), key=lambda p: (cell(p), p.stage, p.name, p.peer))
    found: dict[str, Any] = {"order": [p.peer for p in chosen], "rows": {}}
    found["rows"] = {p.peer: _peer(p) for p in chosen}
    if more := len(here) - len(rows):
        found["more"] = more
    return found


def _peer(p: PeerLine) -> dict[str, Any]:
    path = clean(p.path, 10)
    speed = "-"
    if p.tokens_per_s:
        speed = count(p.tokens_per_s)
    row: dict[str, Any] = {
        "name": clean(p.name, 24) or short(PeerId(p.peer)),
        "id": short(PeerId(p.peer)),
        "cell": _cell_key(p.cell),
        "stage": p.stage,
        "place": _place(p),
        "kind": _kind(p),
        "said": _said(p),
        "path": path or "-",
        "rtt": milliseconds(p.rtt_s),
        "speed": speed,
        "epoch": p.epoch,
        "version": clean(p.version, 12),
    }
    if p.wire:
        row["sent"] = clean(p.wire, 8) + error_words(p.wire_error)
    if p.path == "self":
        row["path"] = "this node"
        row["self"] = True
    if p.leads and p.state not in AGED:
        row["leads"] = True
    if p.via:
        row["via"] = short(PeerId(clean(p.via, 128)))
    return row


def _place(p: PeerLine) -> str:
    if p.state == "choosing" or p.role == "rendezvous":
        return "-"
    return stage_name(p.stage)


def _kind(p: PeerLine) -> str:
    """Class of a state: at work, coming back, going, or gone."""
    if p.state in GONE:
        return "gone"
    if p.state in ("silent", "draining", "stopping"):
        return "going"
    if p.state in ABSENT:
        return "coming"
    return "works"


def _said(p: PeerLine) -> str:
    """The state with its progress or age."""
    said = clean(p.state, 12) or "unknown"
    if p.state == "joining" and p.progress:
        said += f" {p.progress:.0%}"
    if p.state == "silent":
        said += f" {span(p.silent_s)}"
    elif p.state in AGED:
        said += f" {span(p.seen_s)}"
    return said


def _point(line: EpochLine) -> list[float]:
    """Tokens, loss, held-out loss, seconds, repaired rounds, epochs of the line."""
    return [
        line.tokens,
        _finite(line.loss),
        _finite(line.loss_val),
        round(_finite(line.seconds), 2),
        line.repaired,
        line.epochs,
    ]


def _finite(number: float) -> float:
    if not math.isfinite(number):
        return 0.0
    return round(number, 4)


def _time(time_s: Mapping[str, float]) -> dict[str, float]:
    """Share of each kind, in tenths of a percent."""
    total = sum(time_s.get(kind, 0.0) for kind in TIME_KINDS)
    if not 0 < total < math.inf:
        return {}
    return {kind: round(time_s.get(kind, 0.0) / total, 3) for kind in TIME_KINDS}


def _work(state: State) -> dict[str, Any]:
    """Places with most work and those of this node, each with its share of the work at its
    stage."""
    own = [line for line in state.work[MOST_WORK:] if line.peer == state.snapshot.peer]
    rows: dict[str, Any] = {}
    for line in [*state.work[:MOST_WORK], *own]:
        if not _KEY.fullmatch(line.peer):
            continue
        rows[f"{line.peer}-{line.stage}"] = {
            "name": clean(line.name, 24) or short(PeerId(line.peer)),
            "id": short(PeerId(line.peer)),
            "place": stage_name(line.stage),
            "count": line.micro_batches,
            "share": round(line.micro_batches / max(1, line.of_stage), 3),
            "epochs": line.epochs,
            "self": line.peer == state.snapshot.peer,
        }
    return rows


def _me(s: Snapshot, work: Mapping[str, Any]) -> dict[str, str]:
    """This node's facts, by label."""
    place = "not chosen yet"
    if s.role == "rendezvous":
        place = "rendezvous: helps others find each other"
    elif s.placed or s.layers:
        place = stage_name(s.stage)
        if s.layers:
            place += f" ({clean(s.layers, 24)})"
        if s.replicas:
            place += f", {several(s.replicas, 'replica')}"
    own = [row["share"] for row in work.values() if row["self"]]
    share = "-"
    if own:
        share = f"{max(own):.0%} of the micro-batches at its stage"
    if receipts := receipts_words(s):
        share = f"{receipts}; {share}".removesuffix("; -")
    did = "no micro-batch yet"
    if s.micro_batches:
        last = "within a minute" if s.last_work_s < 60 else f"{span(s.last_work_s)} ago"
        done = plural(s.micro_batches, "micro-batch")
        did = f"{count(s.micro_batches)} {done}, the last one {last}"
    facts = {
        "Node": named(PeerId(clean(s.peer, 64)), clean(s.name, 24)),
        "State": state_words(s).plain.lower(),
        "Place": place,
        "Share": share,
        "Work": did,
        "Traffic": f"sent {human(s.bytes_sent)}, received {human(s.bytes_received)}",
        "Peers": paths_words(s.paths_to) or "nobody yet",
        "Reached": clean(s.reachable, 100) or "-",
        "Device": clean(s.device, 66) or "-",
        "Memory": human(s.memory_used),
        "Rounds": f"{count(s.round.done)} done, {s.round.repaired} repaired, "
        f"{s.round.failed} failed",
        "Up": span(s.up_s),
        "Version": clean(s.version, 16),
    }
    if s.sent:
        facts["Sent as"] = sent_words(s.sent)
    if s.leader:
        facts["Leader"] = named(PeerId(clean(s.leader, 64)), clean(s.leader_name, 24))
    for number, warning in enumerate(s.warnings[:3], 1):
        facts[f"{WARNING} {number}"] = clean(warning)
    return facts


def _news(events: Sequence[Event]) -> list[list[Any]]:
    """(Unix seconds, level, text) of the newest events, newest first."""
    told = [e for e in events if e.kind not in DULL]
    return [[int(e.at), clean(e.level, 8), clean(e.text, 300)] for e in told[: -MOST_NEWS - 1 : -1]]


def is_last(s: Snapshot) -> bool:
    """Return True if the run is complete."""
    return bool(s.swarm.epochs) and run_epoch(s) >= s.swarm.epochs
