import io
import json
import math
from typing import Any

import pytest
from rich.console import Console, RenderableType

from node.app.snapshot import sent_gauge
from node.control.commands import plain, say_json
from node.control.text import (
    banner,
    by_trouble,
    compare_digests,
    consent_lines,
    doing,
    evaluated_lines,
    fitted,
    peer_cells,
    peers_table,
    ping_lines,
    present,
    sent_words,
    status_lines,
    swarm_picture,
)
from node.core.ids import PeerId, short
from node.core.version import PROTOCOL, PROTOCOLS
from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import (
    CellLine,
    ChangeLine,
    Evaluated,
    Missing,
    PingReport,
    SentLine,
    Snapshot,
)
from testbed.fakes.canned_window import ME, some_peers, training_snapshot

NEWER = (PROTOCOL + 1, PROTOCOL + 2)


def shown(*what: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    for each in what:
        console.print(each)
    return console.file.getvalue().rstrip("\n").split("\n")  # pyright: ignore


def swarm(stages: int = 3, replicas: int = 2, **changes: object) -> list[Snapshot]:
    return [
        training_snapshot(
            stage=s,
            name=f"peer-{s}-{r}",
            peer=f"{ME[:-3]}{s}x{r}",
            digest=f"{s:02d}" * 32,
            **changes,
        )
        for s in range(stages + 1)
        for r in range(replicas)
    ]


def test_status_shows_the_facts_in_eighty_columns():
    lines = shown(*status_lines(training_snapshot()))
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == len(status_lines(training_snapshot()))  # nothing wrapped
    text = "\n".join(lines)
    for fact in (
        "brisk-otter (kJ4m2a)",
        "TRAINING",
        "healthy",
        "3h12m",
        "epoch 120/150",
        "loss 1.802 ↓ 5.560",
        "held out 2.010",
        "stage 2 of 3 (layers 2-3), 2 replicas",
        "41.2M tokens",
        "118 ok, 2 repaired, 0 failed",
        "compute 62%",
        "leader    brisk-otter (kJ4m2a), this node",
        "5 direct, 1 relayed",
    ):
        assert fact in text


def test_status_says_which_kernels_compute_the_layers_and_why():
    s = training_snapshot(precision="bf16", kernels="compile, 1.31 times as fast as eager")
    said = "computes in bf16, layers by compile, 1.31 times as fast as eager"
    assert said in " ".join(shown(*status_lines(s), width=200))


def worst() -> Snapshot:
    """A snapshot of everything that a screen can show, at its longest."""
    s = training_snapshot(
        healthy=False,
        reason="no way to " + "brisk-otter (stage 2), " * 8,
        next_step="see tutti doctor net, " * 8,
        name="a-very-long-name-of-a-peer",
        reachable="relayed through 2 peers; direct after a router maps a port, which none has done "
        "so far, though asked",
        device="cuda:0 NVIDIA H200, 139.8 GiB (120.3 free)",
        kernels="compile, 1.31 times as fast as eager",
        memory_used=1 << 35,
        memory_limit=1 << 37,
        digest_mismatches=1,
        momentum_lost=2,
        momentum_age=3,
        p2pd_restarts=4,
    )
    s.change.CopyFrom(
        ChangeLine(
            revision=3,
            in_force=2,
            says="cells of 3, moshpit on a grid of 3 x 3 x 3 with int8, nesterov",
        )
    )
    s.paths.how = "planned"
    s.paths.run_s = 1.0
    s.paths.round_s = 2.0
    s.paths.why.extend(
        ["stage 2 is skipped by every third micro-batch, for its peers are slow at this time"] * 3
    )
    s.warnings.extend(["stage 2 has one peer only: when it leaves, training waits"])
    return s


@pytest.mark.parametrize("snapshot", [training_snapshot(), worst()], ids=["usual", "worst"])
@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 23), (40, 12), (200, 0)])
def test_status_fits_any_screen_and_keeps_what_is_wrong(
    snapshot: Snapshot, width: int, height: int
):
    lines = shown(*fitted(status_lines(snapshot), width, height), width=width)
    assert all(len(line) <= width for line in lines)
    assert not height or len(lines) <= height
    if not snapshot.healthy and height != 12:
        text = " ".join(" ".join(lines).split())
        assert "cause no way to brisk-otter" in text
        assert "fix see tutti doctor net" in text
    if not height:
        assert "metrics" in "\n".join(lines)  # nothing is left out where there is room


def test_status_cuts_no_sentence():
    long = " ".join(f"word{n}" for n in range(120))
    s = training_snapshot(healthy=False, reason=long, next_step=long, device=long, reachable=long)
    s.change.CopyFrom(ChangeLine(revision=1, in_force=1, says=long))
    s.paths.why.append(long)
    s.paths.how = "planned"
    s.warnings.extend([long])
    for lines in (status_lines(s), fitted(status_lines(s), 80)):
        text = "\n".join(line.plain for line in lines)
        assert "…" not in text
        assert text.count("word119") == 7, "each to its end"


def test_status_shows_the_plan_of_memory():
    s = training_snapshot()
    s.memory_planned = 3 << 30
    s.memory_process = 410 << 20
    s.memory_peak = 910 << 20
    for when, what in (("always", "parameters"), ("always", "gradients"), ("in steps", "groups")):
        s.memory_plan.add(when=when, what=what, bytes=1 << 30)
    text = "\n".join(shown(*status_lines(s)))
    assert "900.0 MiB of 4.4 GiB, at most 910.0 MiB, planned 3.4 GiB" in text
    assert "always" not in text, "the parts are told to those only who ask"
    text = "\n".join(shown(*status_lines(s, verbose=True)))
    assert "this process and p2pd without the stage 410.0 MiB" in text
    assert "planned for the stage 3.0 GiB:" in text
    assert "always parameters 1.0 GiB, gradients 1.0 GiB\n" in text
    assert "in steps groups 1.0 GiB" in text
    assert "stash 12.0 MiB of 1.0 GiB" in text


def test_a_truncated_screen_names_the_full_command():
    lines = shown(*fitted(status_lines(worst()), 80, 23))
    assert "tutti status --plain" in lines[-1]
    assert "--plain" not in "\n".join(shown(*fitted(status_lines(training_snapshot()), 80, 23)))


@pytest.mark.parametrize(
    ("changes", "word", "says"),
    [
        ({}, "training", "training: epoch 120/150"),
        (
            {"state": "joining", "progress": 0.45, "stage": 2},
            "joining",
            "state of stage 2 from others: 45%",
        ),
        (
            {"state": "choosing", "cause": "starting", "reason": "finds out which stage"},
            "starting",
            "finds out which stage",
        ),
        (
            {"healthy": False, "reason": "waiting for an ends peer", "next_step": "start one"},
            "degraded",
            "ends peer; start one",
        ),
    ],
)
def test_what_a_daemon_does_is_one_sentence(changes: dict[str, object], word: str, says: str):
    news, text = doing(training_snapshot(**changes))
    assert news == word
    assert says in text


def own_cell(**changes: object) -> Snapshot:
    """A peer of a cell that leads itself, which has averaged in the window before."""
    snapshot = training_snapshot()
    snapshot.cell.CopyFrom(
        CellLine(
            cell="3fa2c1" + "0" * 10,
            peers=4,
            cells=3,
            window_s=60.0,
            window=101,
            next_s=34.2,
            met=100,
            met_cells=2,
            last=100,
            cells_averaged=2,
            bytes=132_915,
            last_s=0.08,
        )
    )
    for name, value in changes.items():
        setattr(snapshot.cell, name, value)
    return snapshot


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ["last window: averaged with 1 other cell, 129.8 KiB pulled, 0.08 s"]),
        (
            {"last": 101, "met": 101, "cells_averaged": 4, "met_cells": 4},
            ["this window: averaged with 3 other cells, 129.8 KiB pulled, 0.08 s"],
        ),
        (
            {"met": 101, "met_cells": 3},
            [
                "this window: averages with 2 other cells",
                "last window: averaged with 1 other cell, 129.8 KiB pulled, 0.08 s",
            ],
        ),
        (
            {"last": 97, "met": 97, "alone": True},
            [
                "alone in the last window",
                "4 windows ago: averaged with 1 other cell, 129.8 KiB pulled, 0.08 s",
            ],
        ),
        (
            {"last": 0, "met": 100},
            ["last window: met 1 other cell, and no mean came into place"],
        ),
        (
            {"apart": 0.00813},
            [
                "last window: averaged with 1 other cell, 129.8 KiB pulled, 0.08 s",
                "its partners were 0.813% away",
            ],
        ),
        ({"last": 0, "met": 0}, []),
        ({"last": 0, "met": 0, "alone": True}, ["alone in the last window"]),
    ],
)
def test_a_cell_that_leads_itself_says_what_came_of_its_windows(
    changes: dict[str, object], says: list[str]
):
    lines = shown(*status_lines(own_cell(**changes)))
    assert all(len(line) <= 80 for line in lines)
    at = lines.index("cell      3fa2c1: 4 peers, 3 cells in sight   next window in 34s")
    end = next(i for i, line in enumerate(lines) if line.startswith("time"))
    assert [line.strip() for line in lines[at + 1 : end]] == says


def test_a_cell_without_others_and_one_that_has_finished_say_so():
    lone = shown(*status_lines(own_cell(peers=1, cells=1, next_s=0.0)))
    assert "cell      3fa2c1: 1 peer, no other cell in sight" in lone
    assert not any(line.startswith("cell") for line in shown(*status_lines(training_snapshot())))


def test_the_owners_change_is_shown_with_what_is_still_to_come():
    snapshot = training_snapshot()
    assert not any("averaging" in line for line in shown(*status_lines(snapshot)))
    snapshot.change.CopyFrom(
        ChangeLine(
            revision=2,
            in_force=1,
            says="cells of 2, gossip of parameters every 30 s",
        )
    )
    text = "\n".join(lines := shown(*status_lines(snapshot)))
    assert "averaging by the owner's change 1" in text
    assert "cells of 2, gossip of parameters every 30 s" in text
    assert "change 2 comes into force with the next plan" in text
    assert all(len(line) <= 80 for line in lines)
    snapshot.change.in_force = 2
    assert "comes into force" not in "\n".join(shown(*status_lines(snapshot)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "done      80 %, about 3 h 10 min left at the speed of the last 10 min"),
        (
            {"left_over_s": 42.0, "left_s": 70.0},
            "80 %, about 1 min 10 s left at the speed of the last 42 s",
        ),
        ({"left_s": 0.0}, "done      80 %, the time left is not known yet"),
        ({"epoch": 149}, "done      99 %"),
    ],
)
def test_status_says_how_long_the_run_will_take(changes: dict[str, object], says: str):
    lines = shown(*status_lines(training_snapshot(**changes)))
    assert any(says in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert says[10:20] in doing(training_snapshot(**changes))[1]


def test_a_run_that_is_complete_has_no_time_left():
    done = training_snapshot(epoch=150, state="finished")
    assert not any(line.startswith("done") for line in shown(*status_lines(done)))


def test_warm_up_is_said_until_it_is_over():
    young = training_snapshot(epoch=4, warmup=10)
    warm = "warm-up   epoch 4 of 10: the learning rate rises, and the loss may too"
    assert warm in shown(*status_lines(young))
    assert "warm-up until epoch 10" in doing(young)[1]
    old = training_snapshot(epoch=10, warmup=10)
    assert not any("warm-up" in line for line in shown(*status_lines(old)))


@pytest.mark.parametrize("state", ["paused", "pausing", "starting", "joining", "choosing"])
def test_a_peer_that_does_not_train_shows_the_epoch_of_the_run_and_no_speed(state: str):
    away = training_snapshot(epoch=0, state=state, warmup=100, micro_batches=0, layers="")
    away.swarm.epoch = 60
    text = "\n".join(shown(*status_lines(away)))
    assert "epoch 60/150" in text
    assert "done      40 % of the run\n" in text
    assert "warm-up" not in text
    assert "0 micro-batches" not in text
    away.swarm.epoch = 0
    text = "\n".join(shown(*status_lines(away)))
    assert "epoch not known yet" in text
    assert "done" not in text
    assert doing(training_snapshot(micro_batches=1))[1].count("1 micro-batch at")


def test_a_peer_that_holds_no_parameters_has_no_epoch_in_the_table():
    paused = PeerLine(peer=ME, state="paused", role="rendezvous")
    assert peer_cells(paused, 3)[7].plain == "-"
    assert peer_cells(PeerLine(peer=ME, state="training"), 3)[7].plain == "0"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"placed": True, "stage": 2, "layers": ""}, "my work   stage 2 of 3, which it builds"),
        ({"placed": True, "stage": 0, "layers": ""}, "my work   the ends, which it builds"),
        ({"placed": False, "stage": 0, "layers": ""}, ""),
    ],
)
def test_a_stage_that_is_being_built_is_named_once_it_is_known(
    changes: dict[str, object], says: str
):
    lines = shown(*status_lines(training_snapshot(state="starting", **changes)))
    assert [line for line in lines if line.startswith("my work")] == [says] * bool(says)


@pytest.mark.parametrize(
    ("phase", "says"),
    [("run", "TRAINING, computing"), ("average", "TRAINING, averaging"), ("done", "waiting")],
)
def test_phases_are_words_for_people(phase: str, says: str):
    assert says in shown(*status_lines(training_snapshot(phase=phase)))[0]


def test_what_is_usual_is_told_without_alarm():
    loads = training_snapshot(state="waiting", cause="children", reason="stage 2 loads here")
    lines = shown(*status_lines(loads))
    assert "healthy" in lines[0]
    assert lines[1] == "  now     stage 2 loads here"
    assert doing(loads) == ("children", "stage 2 loads here")


def test_a_degraded_node_shows_the_reason_and_next_step_first():
    snapshot = training_snapshot(
        healthy=False,
        state="waiting",
        reason="no peer holds stage 3",
        next_step="tutti swarm invite",
    )
    lines = shown(*status_lines(snapshot))
    assert "degraded" in lines[0]
    assert "no peer holds stage 3" in lines[1]
    assert "tutti swarm invite" in lines[2]


def test_a_daemon_that_knows_nothing_yet_makes_nothing_up():
    lines = shown(
        *status_lines(
            Snapshot(peer=ME, name="new", state="starting", healthy=True, version="0.1.0")
        )
    )
    assert len(lines) == 2
    assert "loss" not in "".join(lines)


def test_peers_of_another_protocol_are_named_with_what_helps():
    answer = some_peers()
    assert "protocol" not in "".join(shown(peers_table(answer)))
    for p, window in zip(answer.peers[1:4], (NEWER, NEWER, (PROTOCOL, PROTOCOL)), strict=True):
        p.oldest_protocol, p.newest_protocol = window
    answer.peers[5].oldest_protocol = answer.peers[5].newest_protocol = PROTOCOL + 3  # it is lost
    said = " ".join(line.strip() for line in shown(peers_table(answer)))
    newer = (
        f"golden-condor (Qm81xF), quiet-ferret (9Zt9pw) speak protocols {NEWER[0]} to {NEWER[1]}"
    )
    assert f"{newer}, this tutti {PROTOCOLS}" in said
    assert "update this tutti" in said
    assert "basement (b7Lq3d) speak" not in said
    assert f"protocol {PROTOCOL + 3}" not in said


def test_the_peers_table_fits_and_marks_this_node():
    lines = shown(peers_table(some_peers()))
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].split() == [
        "PEER",
        "NAME",
        "STATE",
        "STAGE",
        "PATH",
        "RTT",
        "TOK/S",
        "EPOCH",
        "UP",
        "VER",
    ]
    assert [line for line in lines if line.startswith("* kJ4m2a")]
    assert any("joining 62%" in line and "3/3" in line for line in lines)
    assert any("lost 41s" in line for line in lines)
    assert lines[-1] == "Stage cover  ends:1 1:1 2:1 3:0"


@pytest.mark.parametrize(
    ("chosen", "line", "says"),
    [
        ({"sort": "speed"}, 1, "golden-condor"),
        ({"sort": "rtt"}, 1, "31ms"),
        ({"stage": 1}, 1, "golden-condor"),
        ({"stage": 1}, 2, "6 peers"),
    ],
)
def test_peers_are_sorted_and_filtered(chosen: dict[str, Any], line: int, says: str):
    assert says in shown(peers_table(some_peers(), **chosen))[line]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_peers_table_is_whole_in_any_terminal(width: int):
    """A narrow screen goes without columns; the remaining words are whole, names apart."""
    answer = some_peers()
    answer.peers[3].state = "silent"
    answer.peers[3].silent_s = 4.0
    lines = shown(peers_table(answer, width=width), width=width)
    assert all(len(line) <= width for line in lines)
    header = lines[0].split()
    assert header[:4] == ["PEER", "NAME", "STATE", "STAGE"]
    assert ("VER" in header, "EPOCH" in header) == (width >= 80, True)
    assert any("b7Lq3d" in line and "silent 4s" in line for line in lines)
    assert lines[1].startswith("+ 9Zt9pw"), "the leader is marked"
    cut = "…" in "".join(lines[1:7])
    assert not cut or width == 40


def test_a_peer_that_waits_is_told_below_the_table_why():
    answer = some_peers()
    answer.reason = "waiting for a peer for stage 3"
    answer.next_step = "invite one"
    lines = shown(peers_table(answer))
    at = lines.index("This peer: waiting for a peer for stage 3")
    assert lines[at + 1] == "  → invite one"


def test_a_screen_without_room_shows_who_needs_a_look():
    answer = some_peers()
    answer.peers[1].state = "silent"
    order = [p.name for p in by_trouble(answer)]
    assert order[:3] == ["brisk-otter", "quiet-ferret", "golden-condor"]
    assert order[3:] == ["sunny-stoat", "basement", "mac-m2"]
    answer.peers[5].seen_s = 3600.0
    assert [p.name for p in by_trouble(answer)][-1] == "sunny-stoat"
    assert "sunny-stoat" not in [p.name for p in present(answer.peers)]


def test_peers_without_a_sign_of_life_cover_no_stage():
    answer = some_peers()
    assert shown(peers_table(answer))[-1] == "Stage cover  ends:1 1:1 2:1 3:0"
    answer.peers[1].state = "silent"
    answer.peers[2].state = "lost"
    assert shown(peers_table(answer))[-1] == "Stage cover  ends:0 1:0 2:1 3:0"


def cells_of_peers(*cells: str) -> PeersAnswer:
    """The canned peers, each in one of these cells."""
    answer = some_peers()
    for line, cell in zip(answer.peers, cells, strict=True):
        line.cell = cell * 16 if cell else ""
    return answer


def test_peers_of_the_own_cell_come_first_and_its_cover():
    answer = cells_of_peers("c", "a", "c", "b", "a", "c")
    lines = shown(peers_table(answer))
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].split()[:4] == ["PEER", "NAME", "CELL", "STATE"]
    assert [line.lstrip("*+ ").split()[2] for line in lines[1:7]] == (
        ["cccccc"] * 3 + ["aaaaaa"] * 2 + ["bbbbbb"]
    )
    assert "quiet-ferret" in lines[1], "inside a cell by stage"
    assert lines[-2] == "Stage cover  ends:1 1:0 2:1 3:0"
    assert lines[-1] == "2 other cells, 2 lack a stage"
    fastest = shown(peers_table(answer, sort="speed"))
    assert "brisk-otter" in fastest[1], "the own cell first, whatever the order inside"
    assert "CELL" not in shown(peers_table(some_peers()))[0]


def test_cells_that_are_whole_and_peers_without_one():
    answer = cells_of_peers("c", "a", "a", "a", "a", "")
    answer.peers[3].state = "training"
    lines = shown(peers_table(answer))
    assert lines[-1] == "1 other cell, it lacks a stage"
    assert lines[6].split()[2] == "-"
    answer.peers[4].stage = 2
    answer.peers[4].state = "training"
    assert shown(peers_table(answer))[-1] == "1 other cell, it has every stage"
    assert [p["cell"] for p in plain(answer)["peers"]] == [p.cell for p in answer.peers]


def test_a_peer_that_belongs_to_no_cell_sees_the_cover_of_all():
    answer = cells_of_peers("", "a", "a", "b", "b", "b")
    lines = shown(peers_table(answer))
    assert lines[-2] == "Stage cover  ends:1 1:1 2:1 3:0"
    assert lines[-1] == "2 other cells, 2 lack a stage"


def test_a_hostile_name_cannot_draw_on_the_terminal():
    answer = PeersAnswer(
        peers=[PeerLine(peer="\x1b]0;x", name="\x1b[31mred\nnext", state="\x1b[2J", version="\r")]
    )
    assert "\x1b" not in "".join(shown(peers_table(answer)))
    assert len(shown(peers_table(answer))) == 4
    hostile = training_snapshot(
        name="\x1b[2J", reason="\x1b[1m", healthy=False, layers="[red]x[/red]"
    )
    hostile.swarm.run_id = "\x1b[2J\x1b[H"
    text = "\n".join(shown(*status_lines(hostile)))
    assert "\x1b" not in text + "\n".join(shown(swarm_picture([hostile])))
    assert "[red]x[/red]" in text  # markup of a stranger is text


def test_json_has_every_field_and_real_numbers():
    document = plain(training_snapshot())
    assert set(document) == {f.name for f in Snapshot.DESCRIPTOR.fields}
    assert document["tokens"] == 41_200_000
    assert document["swarm"]["epochs"] == 150
    assert document["time_s"] == {"compute": 620.0, "round": 60.0, "wait": 240.0, "wire": 80.0}
    assert document["p2pd_restarts"] == 0


def test_numbers_that_json_has_no_words_for_are_null(capsys):
    say_json({"logprobs": (-math.inf, math.nan, -1.5)})
    assert json.loads(capsys.readouterr().out) == {"logprobs": [None, None, -1.5]}


@pytest.mark.parametrize(("stages", "replicas"), [(3, 2), (1, 1), (8, 4), (16, 16)])
@pytest.mark.parametrize("note", ["", "killed peer-2-1: its work goes to peer-2-0"])
def test_the_picture_of_a_swarm_fits_the_screen(stages: int, replicas: int, note: str):
    snapshots = swarm(stages, replicas)
    for s in snapshots:
        s.swarm.stages = stages
    lines = shown(swarm_picture(snapshots, note=note))
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert "epoch 120/150" in lines[0]
    assert not note or lines[-1] == note


def test_the_picture_shows_who_is_gone_and_who_disagrees():
    snapshots = swarm()
    text = "\n".join(shown(swarm_picture(snapshots)))
    assert "bit-identical" in text
    assert text.count("●") == 8
    snapshots[3].digest = "ff" * 32
    snapshots[5].state = "lost"
    text = "\n".join(shown(swarm_picture(snapshots)))
    assert "DIFFER in stage 1" in text
    assert text.count("✗") == 1
    without = [s for s in swarm() if s.stage != 2]
    assert "stage 2  ✗ nobody holds it" in "\n".join(shown(swarm_picture(without)))
    assert "epoch 0/0" in shown(swarm_picture([]))[0]


def test_digests_are_compared_only_at_the_same_epoch():
    a = swarm(1, 1)[0]
    b = swarm(1, 1)[0]
    c = swarm(1, 1)[0]
    b.digest = "ff" * 32
    b.epoch = a.epoch + 1
    assert compare_digests([a, b]) == (0, ())
    assert compare_digests([a, b, c]) == (2, ())
    c.digest = "ee" * 32
    assert compare_digests([a, b, c]) == (2, (0,))


def test_digests_of_different_cells_are_not_compared():
    a = own_cell()
    b = own_cell(cell="b" * 16)
    b.digest = "ff" * 32
    assert compare_digests([a, b]) == (0, ())
    b.cell.cell = a.cell.cell
    assert compare_digests([a, b]) == (2, (2,))


def test_the_peer_furthest_ahead_speaks_for_the_swarm():
    behind = training_snapshot(epoch=5, loss=4.0)
    ahead = training_snapshot(epoch=9, loss=3.0, stage=0)
    behind.time_s["wire"] = 1080.0
    first, *_, legend, _ = shown(swarm_picture([behind, ahead]))
    assert "epoch 9/150   loss 3.000" in first
    assert "compute 41%   ▓ wire 39%" in legend, "the time of all of them"


def test_ping_shows_every_round_trip_or_the_error():
    assert ping_lines(PingReport(peer=ME, name="n", path="tunnel", rtt_s=[0.1, 0.3, 0.2]))[
        -1
    ].endswith("least 100.0 ms, median 200.0 ms")
    assert ping_lines(PingReport(peer=ME, error="no route")) == ["kJ4m2a: no route"]


def test_the_banner_shows_the_next_commands():
    lines = banner(
        version="0.1.0",
        name="otter",
        peer=ME,
        key_path="/k",
        home="/h",
        home_flag=" --home /h",
        model="6 layers",
        parameters=1_200_000,
        new_key=True,
        solo=True,
        invite="tutti2x",
        listening=("/ip4/a", "/ip4/b"),
    )
    text = "\n".join(lines)
    for words in (
        "solo",
        "a new key",
        "/k   keep a backup",
        "home       /h",
        "1.2M parameters: 6 layers",
        "tutti --home /h monitor",
        "tutti2x",
        "/ip4/b",
    ):
        assert words in text
    assert "device" not in text
    assert "this invite is good" not in text


def test_the_banner_says_where_alone_its_invite_is_good():
    about = {"version": "0.1.0", "name": "otter", "peer": ME, "key_path": "/k"}
    lines = banner(**about, invite="tutti2x", only_on="network")
    assert "own network only" in lines[-1]
    for step in ("--announce HOST:Q", "rendezvous"):
        assert step in lines[-1]
    assert "without  --listen" in banner(**about, invite="tutti2x", only_on="machine")[-1]
    assert "good" not in banner(**about, only_on="network")[-1]


_LABELS = (
    "swarm",
    "model",
    "memory",
    "data",
    "pipeline",
    "work",
    "reads",
    "code",
    "traffic",
    "others see",
    "text",
    "download",
)


@pytest.mark.parametrize("ends_layers", [0, 1])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_consent_sheet_lists_what_is_accepted_and_wraps_between_words(width, ends_layers):
    said = "a sentence about traffic that is longer than any terminal of this test is wide, " * 3
    sheet = consent_lines(
        name="demo",
        run_id="ab" * 32,
        owner=ME,
        signed=True,
        admission="open",
        model="6 layers",
        parameters=1_000_000,
        data="builtin:pydoc",
        cut="3 stages",
        work="10 epochs",
        fetched_from="x" * 190,
        reads=["no file of yours"],
        ends_layers=ends_layers,
        traffic=[said, "and more"],
        width=width,
    )
    words = " ".join(sheet).split()
    for fact in (
        "demo",
        ME,
        "1.0M parameters",
        "builtin:pydoc",
        "no file of yours",
        "none is downloaded",
        "others see",
        "activations",
        "the first and the last block stage all of it",
        "only with peers that may read it",
    ):
        assert fact in " ".join(words)
    assert ("harder for the first stage, and not impossible" in " ".join(words)) == ends_layers
    at = words.index("traffic")
    assert words[at + 1 : at + 1 + len(said.split())] == said.split(), "no word is cut or lost"
    assert [line for line in sheet if len(line) > width and len(line.split()) > 1] == [], (
        "only a word can be too long"
    )
    assert all(line[:11].strip() in ("", *_LABELS) for line in sheet)


@pytest.mark.parametrize(
    ("up", "down", "capped"),
    [
        (2.5e6, 0.0, "capped at 20 Mbit/s up"),
        (0.0, 1.25e5, "capped at 1 Mbit/s down"),
        (0.0, 0.0, ""),
    ],
)
def test_status_shows_traffic_rates_and_the_cap(up: float, down: float, capped: str):
    rates = Snapshot(up_rate=1e5, down_rate=5e4, max_up=up, max_down=down)
    rates.MergeFrom(Snapshot(bytes_sent=3 << 20, bytes_received=1 << 20, paths_to={"direct": 2}))
    text = " ".join(line.plain for line in status_lines(rates))
    assert "2 direct   sent 3.0 MiB, received 1.0 MiB (800 kbit/s up, 400 kbit/s down)" in text
    assert (capped or "(800 kbit") in text
    assert ("capped" in text) == bool(capped)


def test_losses_stand_beside_those_before_training():
    s = training_snapshot(loss_before=5.6, loss_val_before=4.125)
    text = " ".join(" ".join(shown(*status_lines(s))).split())
    assert "loss 1.802, 5.600 before training" in text
    assert "held out 2.010, 4.125 before training" in text
    assert "before training" not in "".join(shown(*status_lines(training_snapshot())))
    found = [Evaluated(missing=Missing(stages=3), loss=2.0, loss_before=3.0)]
    first, second = evaluated_lines(found)
    assert first.startswith("all block stages")
    assert second.split()[:5] == ["before", "training", "loss", "3.0000", "perplexity"]


def test_status_says_how_far_off_the_numbers_are_that_each_peer_gets():
    sent = [
        SentLine(peer=f"{ME[:-3]}0x1", name="fine", wire="bf16", error=0.0017, measured=3),
        SentLine(peer=f"{ME[:-3]}0x2", wire="int4", error=0.112, measured=3),
        SentLine(peer=f"{ME[:-3]}0x3", name="exact", wire="fp32"),
    ]
    snapshot = training_snapshot()
    snapshot.sent.extend(sent)
    text = "\n".join(shown(*status_lines(snapshot), width=160))
    assert f"int4 to {short(PeerId(sent[1].peer))} (11 % off), bf16 to fine (0.17 % off), " in text
    assert "fp32 to exact" in text
    assert "sent as" not in "\n".join(shown(*status_lines(training_snapshot())))
    many = [SentLine(peer=f"p{i}", name=f"n{i}", wire="int8", error=0.007) for i in range(20)]
    assert sent_words(many).endswith("int8 to n13 (0.7 % off), and 14 others")


def test_the_metrics_page_has_an_error_for_each_peer_that_was_measured():
    sent = [
        SentLine(peer="a", wire="int4", error=0.1, measured=3),
        SentLine(peer="b", wire="bf16"),
    ]
    samples = sent_gauge(sent).samples
    assert [(s.name, s.labels, s.value) for s in samples] == [
        ("tutti_sent_error", {"peer": "a", "wire": "int4"}, 0.1)
    ]
