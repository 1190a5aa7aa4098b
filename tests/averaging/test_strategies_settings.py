"""Which settings hold together, and why the others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.averaging.strategies.central import Hogwild, ParameterServer, Stale
from node.averaging.strategies.gossip import Exponential, Pairs, Ring
from node.averaging.strategies.moshpit import Moshpit
from node.averaging.strategies.outer import (
    IN_WINDOWS,
    OuterSettings,
    carried,
    check,
    strategy_of,
)
from node.averaging.strategies.strategy import Butterfly
from node.core.errors import UsageFault

DILOCO = OuterSettings(carries="deltas", every=500, optimizer="nesterov")
HELD: dict[str, tuple[OuterSettings, object]] = {
    "synchronous": (OuterSettings(carries="gradients"), Butterfly()),
    "moshpit": (OuterSettings("moshpit", grid=(8, 8)), Moshpit((8, 8))),
    "gossip": (OuterSettings("gossip"), Pairs()),
    "ring": (OuterSettings("ring"), Ring()),
    "push-sum": (OuterSettings("push-sum", fanout=2), Exponential(2)),
    "diloco": (DILOCO, Butterfly()),
    "diloco in int8": (replace(DILOCO, codec="int8"), Butterfly()),
    "diloco in top-k": (replace(DILOCO, codec="top-k", feedback=True), Butterfly()),
    "diloco over moshpit": (
        OuterSettings("moshpit", "state", 100, "nesterov", grid=(8, 8)),
        Moshpit((8, 8)),
    ),
    "streaming": (replace(DILOCO, fragments=5, overlap=5, mixing=0.5, codec="int4"), Butterfly()),
    "quorum": (replace(DILOCO, quorum=3, grace_s=10.0), Butterfly()),
    "robust": (replace(DILOCO, reducer="median"), Butterfly()),
    "server": (OuterSettings("parameter-server", "gradients", shards=2), ParameterServer(2)),
    "stale": (OuterSettings("parameter-server", "gradients", staleness=4), Stale(4)),
    "hogwild": (OuterSettings("hogwild", "gradients"), Hogwild()),
}
REFUSED: dict[str, tuple[OuterSettings, str]] = {
    "parameters in int8": (OuterSettings(codec="int8"), "rounded again in every round"),
    "parameters in bf16": (OuterSettings("gossip", codec="bf16"), "rounded again in every round"),
    "state in fp16": (
        OuterSettings("gossip", "state", 9, "sgd", codec="fp16"),
        "rounded again in every round",
    ),
    "gradients over gossip": (OuterSettings("gossip", "gradients"), "nothing pulls them together"),
    "gradients over a grid": (
        OuterSettings("moshpit", "gradients", grid=(4, 4)),
        "nothing pulls them together",
    ),
    "old gradients": (OuterSettings(carries="gradients", every=2), "in the epoch they are of"),
    "deltas over gossip": (replace(DILOCO, strategy="gossip"), "anchors differ"),
    "deltas over push-sum": (replace(DILOCO, strategy="push-sum"), "anchors differ"),
    "deltas unstepped": (OuterSettings(carries="deltas"), "need an outer optimizer"),
    "stepped parameters": (OuterSettings(optimizer="sgd"), "steps pseudo-gradients"),
    "state over a butterfly": (replace(DILOCO, carries="state"), "buy nothing"),
    "pushed parameters": (OuterSettings("hogwild"), "do not add up"),
    "momentum without a barrier": (replace(DILOCO, strategy="hogwild"), "once for each"),
    "top-k bare": (replace(DILOCO, codec="top-k"), "leaves most numbers out"),
    "nothing to feed back": (replace(DILOCO, feedback=True), "nothing that could be fed back"),
    "robust pairs": (OuterSettings("gossip", reducer="median"), "who is wrong"),
    "robust narrow grid": (
        OuterSettings("moshpit", grid=(2, 8), reducer="trimmed-mean"),
        "who is wrong",
    ),
    "robust pushes": (OuterSettings("hogwild", "gradients", reducer="median"), "comes alone"),
    "clipped parameters": (OuterSettings(reducer="clipped-mean"), "far less than parameters"),
    "clipped state": (
        replace(DILOCO, strategy="moshpit", grid=(3, 3), carries="state", reducer="centered-clip"),
        "far less than state",
    ),
    "no reducer": (replace(DILOCO, reducer="krum"), "'krum'"),
    "robust top-k": (
        replace(DILOCO, codec="top-k", feedback=True, reducer="median"),
        "contributions to a number are 0",
    ),
    "no grid": (OuterSettings("moshpit"), "grid"),
    "thin grid": (OuterSettings("moshpit", grid=(1, 8)), "grid"),
    "a grid for gossip": (OuterSettings("gossip", grid=(4, 4)), "for moshpit"),
    "a fanout for gossip": (OuterSettings("gossip", fanout=2), "for push-sum"),
    "shards for a butterfly": (OuterSettings(shards=2), "for parameter-server"),
    "staleness for a butterfly": (OuterSettings(staleness=2), "for parameter-server"),
    "uneven fragments": (replace(DILOCO, fragments=7), "do not divide"),
    "fragments that overlap": (replace(DILOCO, fragments=5, overlap=100), "under way"),
    "mixing for nothing": (replace(DILOCO, mixing=0.5), "none is"),
    "streamed parameters": (OuterSettings(every=10, fragments=5), "not parameters"),
    "quorum of gradients": (OuterSettings(carries="gradients", quorum=2), "taken late"),
    "quorum without a barrier": (
        replace(DILOCO, strategy="hogwild", optimizer="sgd", quorum=2),
        "waits for nobody",
    ),
    "streaming without a barrier": (
        replace(DILOCO, strategy="hogwild", optimizer="sgd", fragments=5),
        "no common epoch",
    ),
    "unknown strategy": (OuterSettings("ringo"), "ringo"),
    "unknown codec": (OuterSettings(codec="int2"), "int2"),
    "never": (OuterSettings(every=-1), "every"),
    "no rate": (replace(DILOCO, lr=0.0), "lr"),
    "momentum of one": (replace(DILOCO, momentum=1.0), "momentum"),
    "endless grace": (replace(DILOCO, quorum=1, grace_s=float("inf")), "grace_s"),
}


@pytest.mark.parametrize("name", HELD)
def test_settings_that_hold_make_their_strategy(name: str) -> None:
    asked, made = HELD[name]
    assert strategy_of(asked) == made
    assert strategy_of(asked).partial == asked.partial, "settings and strategy say the same"


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_hold_are_refused_with_the_reason(name: str) -> None:
    asked, reason = REFUSED[name]
    with pytest.raises(UsageFault) as refusal:
        check(asked)
    assert reason in refusal.value.what
    assert refusal.value.next_step


def test_outer_settings_describe_what_is_averaged_and_when() -> None:
    assert OuterSettings("gossip", every=3).says == "gossip of parameters after every 3 epochs"
    streamed = replace(DILOCO, every=20, fragments=4, overlap=2, quorum=3)
    assert (
        streamed.says
        == "butterfly of one of 4 fragments of deltas after every 5 epochs, sent 2 epochs before, "
        "closed by a quorum of 3"
    )


@pytest.mark.parametrize(
    ("strategy", "carries", "says"),
    [("ring", "deltas", '"parameters" or "state"'), ("push-sum", "state", '"parameters"')],
)
def test_windows_carry_some_of_each_strategy_and_say_which(
    strategy: str, carries: str, says: str
) -> None:
    with pytest.raises(UsageFault, match="do not carry this yet") as refused:
        carried(OuterSettings(strategy, carries, window_s=60.0), 2)
    assert says in refused.value.next_step
    for name, able in IN_WINDOWS.items():
        for each in able:
            steps = "none" if each == "parameters" else "nesterov"
            grid = (4, 4) if name == "moshpit" else ()
            carried(OuterSettings(name, each, optimizer=steps, window_s=60.0, grid=grid), 2)
