"""The document of the page: its figures, its bounds, and hostile names."""

import json
import math

import pytest

from node.control.text import covers, status_lines
from node.core.errors import LocalFault
from node.web.samples import MOST, MOST_TEXT, TextSample
from node.web.view import (
    MOST_BYTES,
    MOST_PEERS,
    MOST_WORK,
    State,
    document,
    is_last,
    without_answer,
)
from node.web.wishes import wishes
from protos.ask_pb2 import PeersAnswer
from protos.control_pb2 import EpochLine, Event, ReceiptsLine, Snapshot, WorkLine
from testbed.fakes.canned_crowd import HOSTILE, CannedCrowd, crowd
from testbed.fakes.canned_window import ME, some_history, some_peers, training_snapshot


def state_of(window: CannedCrowd, **more) -> State:
    return State(
        at=1000.5,
        snapshot=window.said,
        answer=window.seen,
        past=window.past.epochs,
        work=window.past.work,
        stage_bytes=window.past.stage_bytes,
        **more,
    )


def small(**changes) -> State:
    snapshot = training_snapshot(**changes)
    return State(at=0.0, snapshot=snapshot, answer=some_peers(), past=some_history(snapshot).epochs)


def size(made: dict) -> int:
    return len(json.dumps(made, ensure_ascii=False, allow_nan=False).encode())


def test_it_says_what_status_says():
    made = document(small(loss_before=5.56, loss_val_before=5.61))
    assert made["tiles"]["epoch"][1:] == [
        "120 of 150",
        "80 %, about 3 h 10 min left at the speed of the last 10 min",
    ]
    assert made["tiles"]["held"] == ["Held-out loss", "2.010", "5.610 before training"]
    assert made["reference"] == {"loss": 5.56, "held": 5.61}
    assert made["health"] == {"ok": True, "word": "healthy", "reason": "", "step": ""}
    assert made["me"]["Place"] == "stage 2 (layers 2-3), 2 replicas"
    assert made["time"] == {"compute": 0.62, "wire": 0.08, "wait": 0.24, "round": 0.06}
    assert made["curve"]["120"][:2] == [41_199_960, pytest.approx(1.8014, abs=1e-3)]
    assert made["curve"]["40"][4] == 1, "a repaired round"


def test_it_says_in_which_format_each_peer_gets_tensors_and_how_far_off_they_are():
    state = small()
    state.snapshot.sent.add(peer="p", name="h2", wire="int4", error=0.1, measured=8)
    row = state.answer.peers[1]
    row.wire = "int8"
    row.wire_error = 0.0071
    made = document(state)
    assert made["me"]["Sent as"] == "int4 to h2 (10 % off)"
    assert made["peers"]["rows"][row.peer]["sent"] == "int8 (0.71 % off)"
    others = [one for key, one in made["peers"]["rows"].items() if key != row.peer]
    assert others
    assert all("sent" not in one for one in others)


def test_a_run_without_a_loss_before_training_has_the_first_one():
    made = document(small())
    assert made["tiles"]["loss"][2] == "5.560 in the first epoch seen"
    assert made["tiles"]["held"][2] == ""


def test_the_map_marks_thin_stages_and_peers_that_come_back():
    made = document(small())
    assert made["map"]["cells"]["all"]["cover"] == [1, 1, 1, 0]
    rows = {row["name"]: row for row in made["peers"]["rows"].values()}
    assert rows["brisk-otter"]["self"]
    assert (rows["basement"]["kind"], rows["basement"]["said"]) == ("coming", "joining 62%")
    assert (rows["mac-m2"]["kind"], rows["sunny-stoat"]["kind"]) == ("going", "gone")
    assert rows["quiet-ferret"]["path"] == "tunnel"
    assert rows["quiet-ferret"]["leads"]


def test_what_would_help_is_most_urgent_first_and_has_its_size():
    answer = some_peers()
    said = [(w.kind, w.text) for w in wishes(answer, [1 << 30, 0, 9 << 30])]
    assert said == [
        ("urgent", "stage 3 has no peer"),
        ("thin", "the ends have one replica: 1.0 GiB"),
        ("thin", "stage 1 has one replica"),
        ("thin", "stage 2 has one replica: 9.0 GiB"),
    ]
    assert wishes(PeersAnswer(), []) == []


def test_relays_and_speed_are_wishes_of_a_swarm_that_is_covered():
    answer = crowd(peers=24, cells=1, stages=2)
    for n, p in enumerate(answer.peers):
        p.state = "training"
        p.stage = n % 3
        p.path = "self" if n == 0 else "direct"
    (only,) = wishes(answer, [])
    assert only.text.startswith("every stage has 8 replicas")
    for p in answer.peers[1:]:
        p.path = "relayed"
    assert "23 of 23 peers are reached through a relay" in wishes(answer, [])[0].text


def test_equal_wishes_of_many_cells_are_one_line():
    answer = crowd()
    texts = [w.text for w in wishes(answer, [])]
    assert len(texts) == len(set(texts)) <= 12
    assert any("cells" in text for text in texts)
    thin = sum(count == 0 for cover in covers(answer).values() for count in cover.values())
    assert thin > len(texts)


def test_cells_cover_their_own_stages():
    answer = crowd(peers=12, cells=2, stages=2)
    for p in answer.peers:
        p.state = "training"
    own, other = covers(answer)
    assert own == answer.peers[0].cell
    assert covers(answer)[other] == {0: 2, 1: 2, 2: 2}
    answer.peers[1].state = "lost"
    assert covers(answer)[other][0] == 1


def test_200_peers_in_12_cells_fit():
    window = CannedCrowd()
    made = document(state_of(window))
    assert len(made["peers"]["rows"]) + made["peers"].get("more", 0) == 200
    assert len(made["map"]["cells"]) == 12
    assert size(made) < MOST_BYTES / 2


def test_the_largest_document_is_bounded():
    """More of everything than there can be, with the longest texts."""
    window = CannedCrowd(peers=3000, cells=500, stages=6000)
    for p in window.seen.peers:
        p.name = "\U0001f600" * 500
        p.version = "v" * 500
        p.via = "w" * 500
    long = "\U0001f600" * 3000
    window.said.reason = window.said.next_step = window.said.device = long
    window.said.warnings.extend([long] * 100)
    del window.past.epochs[:]
    window.past.epochs.extend(
        EpochLine(epoch=2**60 + n, tokens=2**62, loss=1.23456789, loss_val=9.87654321, seconds=1e6)
        for n in range(512)
    )
    window.past.work.extend(
        WorkLine(peer=p.peer, name=long, stage=1, micro_batches=2**60) for p in window.seen.peers
    )
    made = document(
        state_of(
            window,
            news=[Event(at=1.0, level=long, text=long)] * 500,
            samples=[TextSample(n, 2**60, "\U0001f600" * MOST_TEXT) for n in range(MOST)],
            prompt=long,
            sampling=long,
        )
    )
    assert len(made["peers"]["rows"]) == MOST_PEERS
    assert made["peers"]["more"] == 3000 - MOST_PEERS
    assert size(made) < MOST_BYTES


def test_hostile_names_stay_texts_and_no_key_is_theirs():
    window = CannedCrowd()
    window.seen.peers[5].peer = "__proto__"
    window.seen.peers[6].cell = "__proto__"
    window.seen.peers[7].peer = "<b>"
    made = document(state_of(window, news=[Event(text=name) for name in HOSTILE]))
    text = json.dumps(made, ensure_ascii=False)
    assert "\\u" not in text, "no control characters are left to escape"
    assert "\u202e" not in text
    names = {row["name"] for row in made["peers"]["rows"].values()}
    assert any(name.startswith("<img src=x") for name in names)

    def keys(value):
        if isinstance(value, dict):
            yield from value
            for inner in value.values():
                yield from keys(inner)

    assert "__proto__" not in set(keys(made))
    assert not [key for key in keys(made) if "<" in key]


def test_numbers_that_are_none_are_left_out():
    snapshot = Snapshot(loss=math.nan, loss_val=math.inf, loss_before=math.nan)
    snapshot.time_s["compute"] = math.nan
    line = EpochLine(epoch=1, tokens=1, loss=math.nan, seconds=math.inf, epochs=1)
    made = document(State(at=0.0, snapshot=snapshot, answer=PeersAnswer(), past=[line]))
    assert size(made), "JSON takes it"
    assert made["curve"] == {"1": [1, 0.0, 0.0, 0.0, 0, 1]}
    assert made["tiles"]["loss"][1] == made["tiles"]["held"][1] == "-"


def test_a_daemon_that_is_not_in_a_run_yet_has_a_document():
    made = document(State(at=0.0, snapshot=Snapshot(), answer=PeersAnswer()))
    assert made["run"]["name"] == "no run yet"
    assert made["help"] == []
    assert size(made)


def test_a_silent_daemon_leaves_the_last_document():
    last = document(small())
    fault = LocalFault("no daemon is running", "tutti start")
    made = without_answer(last, fault, 7.9)
    assert (made["at"], made["tiles"]) == (7, last["tiles"])
    assert made["health"] == {
        "ok": False,
        "word": "no answer",
        "reason": "no daemon is running",
        "step": "tutti start",
    }


def test_the_share_of_a_peer_is_of_its_stage():
    work = [
        WorkLine(peer=ME, stage=1, micro_batches=30, of_stage=40),
        WorkLine(peer="A", stage=1, of_stage=40),
        WorkLine(peer="B", stage=1, micro_batches=10, of_stage=40),
        WorkLine(peer="C", stage=2),
    ]
    made = document(State(at=0.0, snapshot=training_snapshot(), answer=some_peers(), work=work))
    assert made["work"][f"{ME}-1"]["share"] == 0.75
    assert made["me"]["Share"] == "75% of the micro-batches at its stage"


def test_shares_are_of_the_whole_stage_and_the_own_place_is_shown():
    work = [WorkLine(peer=f"A{n}", stage=1, micro_batches=4, of_stage=1202) for n in range(300)]
    work.append(WorkLine(peer=ME, stage=2, micro_batches=3, of_stage=12))
    made = document(State(at=0.0, snapshot=training_snapshot(), answer=some_peers(), work=work))
    assert len(made["work"]) == MOST_WORK + 1
    assert made["work"]["A0-1"]["share"] == round(4 / 1202, 3)
    assert made["work"][f"{ME}-2"]["share"] == 0.25
    assert made["me"]["Share"] == "25% of the micro-batches at its stage"


def test_the_share_of_the_swarms_work_is_said_by_receipts():
    snapshot = training_snapshot()
    snapshot.receipts.CopyFrom(ReceiptsLine(own=12, work=100, unsigned=3, epochs=40))
    made = document(State(at=0.0, snapshot=snapshot, answer=some_peers()))
    assert made["me"]["Share"] == "12.0% of the swarm's work in 40 epochs"
    assert "receipts" in "".join(line.plain for line in status_lines(snapshot))
    assert "receipts" not in "".join(line.plain for line in status_lines(training_snapshot()))


def test_a_run_is_complete_at_its_last_epoch():
    assert not is_last(training_snapshot())
    assert is_last(training_snapshot(epoch=150))
    assert not is_last(Snapshot())
