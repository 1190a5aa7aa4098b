"""Settings that hold together, and the reasons why others do not."""

from dataclasses import replace

import pytest

from node.averaging.strategies.outer import (
    CARRIES,
    STRATEGIES,
    OuterSettings,
    carried,
    check,
    pieces,
)
from node.core.errors import UsageFault

DILOCO = OuterSettings(carries="deltas", optimizer="nesterov", window_s=60.0)
SGD = replace(DILOCO, optimizer="sgd")
HELD: dict[str, OuterSettings] = {
    "parameters": OuterSettings(),
    "moshpit": OuterSettings("moshpit", grid=(8, 8)),
    "gossip": OuterSettings("gossip"),
    "diloco": DILOCO,
    "diloco in int8": replace(DILOCO, codec="int8"),
    "diloco in top-k": replace(DILOCO, codec="top-k", feedback=True),
    "diloco over moshpit": OuterSettings("moshpit", "state", "nesterov", grid=(8, 8)),
    "streaming": replace(DILOCO, fragments=5, mixing=0.5, codec="int4"),
    "quorum": replace(DILOCO, quorum=3),
    "agreement": replace(DILOCO, codec="int8", weights="agreement"),
    "server": OuterSettings("parameter-server", shards=2),
    "quorum of a server": replace(DILOCO, strategy="parameter-server", quorum=2),
    "stale": replace(SGD, strategy="parameter-server", staleness=4),
    "hogwild": replace(SGD, strategy="hogwild"),
}
REFUSED: dict[str, tuple[OuterSettings, str]] = {
    "parameters in int8": (OuterSettings(codec="int8"), "rounded again in every round"),
    "parameters in bf16": (OuterSettings("gossip", codec="bf16"), "rounded again in every round"),
    "state in fp16": (
        OuterSettings("gossip", "state", "sgd", codec="fp16"),
        "rounded again in every round",
    ),
    "deltas over gossip": (replace(DILOCO, strategy="gossip"), "anchors differ"),
    "deltas over moshpit": (replace(DILOCO, strategy="moshpit", grid=(8, 8)), "anchors differ"),
    "deltas unstepped": (OuterSettings(carries="deltas"), "need an outer optimizer"),
    "stepped parameters": (OuterSettings(optimizer="sgd"), "steps pseudo-gradients"),
    "state over a butterfly": (replace(DILOCO, carries="state"), "buy nothing"),
    "pushed parameters": (OuterSettings("hogwild"), "do not add up"),
    "momentum without a barrier": (replace(DILOCO, strategy="hogwild"), "once for each"),
    "top-k bare": (replace(DILOCO, codec="top-k"), "leaves most numbers out"),
    "nothing to feed back": (replace(DILOCO, feedback=True), "nothing that could be fed back"),
    "no grid": (OuterSettings("moshpit"), "grid"),
    "thin grid": (OuterSettings("moshpit", grid=(1, 8)), "grid"),
    "a grid for gossip": (OuterSettings("gossip", grid=(4, 4)), "for moshpit"),
    "shards for a butterfly": (OuterSettings(shards=2), "for parameter-server"),
    "staleness for a butterfly": (OuterSettings(staleness=2), "for parameter-server"),
    "mixed parameters": (OuterSettings(mixing=0.5), "not parameters"),
    "streamed parameters": (OuterSettings(fragments=5), "not parameters"),
    "agreement of parameters": (OuterSettings(weights="agreement"), "from one anchor"),
    "agreement without a barrier": (
        replace(SGD, strategy="hogwild", weights="agreement"),
        "from one anchor",
    ),
    "agreement in top-k": (
        replace(DILOCO, codec="top-k", feedback=True, weights="agreement"),
        "say little about agreement",
    ),
    "quorum of parameters": (OuterSettings(quorum=2), "taken late"),
    "quorum without a barrier": (replace(SGD, strategy="hogwild", quorum=2), "in time"),
    "quorum of a stale server": (
        replace(SGD, strategy="parameter-server", staleness=4, quorum=2),
        "in time",
    ),
    "streaming without a barrier": (
        replace(SGD, strategy="hogwild", fragments=5),
        "no common window",
    ),
    "no rate": (replace(DILOCO, lr=0.0), "lr"),
}


@pytest.mark.parametrize("name", HELD)
def test_settings_that_hold_are_let_through(name: str) -> None:
    check(HELD[name])


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_hold_are_refused_with_the_reason(name: str) -> None:
    asked, reason = REFUSED[name]
    with pytest.raises(UsageFault) as refusal:
        check(asked)
    assert reason in refusal.value.what
    assert refusal.value.next_step


def test_cells_whose_anchors_must_be_equal_meet_in_one_group() -> None:
    together = {name for name, settings in HELD.items() if settings.together}
    assert together == {
        "diloco",
        "diloco in int8",
        "diloco in top-k",
        "streaming",
        "quorum",
        "agreement",
        "quorum of a server",
    }


def test_outer_settings_describe_what_is_averaged_and_when() -> None:
    assert OuterSettings("gossip", window_s=2.5).says == "gossip of parameters every 2.5 s"
    assert (
        replace(DILOCO, fragments=4, quorum=3).says
        == "butterfly of one of 4 fragments of deltas every 60 s, closed by a quorum of 3"
    )
    assert (
        replace(DILOCO, weights="agreement").says
        == "butterfly of deltas every 60 s, weighed by agreement"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("carries", CARRIES)
def test_windows_carry_what_a_strategy_can_average(strategy: str, carries: str) -> None:
    able = {
        "butterfly": ("parameters", "deltas"),
        "moshpit": ("parameters", "state"),
        "gossip": ("parameters", "state"),
        "parameter-server": ("parameters", "deltas"),
        "hogwild": ("deltas",),
    }
    optimizer = "none" if carries == "parameters" else "sgd"
    grid = (4, 4) if strategy == "moshpit" else ()
    asked = OuterSettings(strategy, carries, optimizer, window_s=60.0, grid=grid)
    if carries in able[strategy]:
        carried(asked, 2)
        return
    with pytest.raises(UsageFault):
        carried(asked, 2)


@pytest.mark.parametrize(
    ("asked", "cell", "says"),
    [
        (OuterSettings(quorum=2), 2, "outer.window_s is 0"),
        (OuterSettings(), 2, "never average with each other"),
        (DILOCO, 0, "no others to average with"),
        (replace(DILOCO, lr=0.0), 2, "lr"),
    ],
)
def test_cells_meet_in_windows_and_windows_need_cells(
    asked: OuterSettings, cell: int, says: str
) -> None:
    with pytest.raises(UsageFault) as refused:
        carried(asked, cell)
    assert says in refused.value.what
    with pytest.raises(UsageFault, match="stages = 256 while"):
        carried(DILOCO, cell or 2, 256)
    carried(OuterSettings(), 0)
    carried(DILOCO, cell or 2)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fragments_hold_every_part_once_in_about_equal_bytes(count: int) -> None:
    sizes = {f"p{i}": 7 * i % 40 + 1 for i in range(30)}
    found = pieces(sizes, count)
    assert sorted(name for piece in found for name in piece) == sorted(sizes)
    held = [sum(sizes[name] for name in piece) for piece in found]
    assert max(held) - min(held) <= max(sizes.values())
    assert pieces(dict(reversed(sizes.items())), count) == found, "in every cell the same"
    assert pieces({"w": 9}, 3) == [{"w"}, set(), set()]
