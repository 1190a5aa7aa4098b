"""``tutti simulate --averaging``: the published experiment, played with the daemon's own
strategies."""

import json

import numpy as np
import pytest

import cli
from node.averaging.strategies.strategy import Barrierless
from node.core.errors import ExitCode, UsageFault
from node.sim.averaging import CAP, NAMES, AveragingTrial, Pushed, simulate


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_agrees_on_the_mean(name: str) -> None:
    found = simulate(name, AveragingTrial(64, (8, 8), failure=0.0, seeds=3))
    assert found.variance[0] == pytest.approx(1, abs=0.3)
    assert found.variance[-1] < 1e-9
    assert list(found.variance) == sorted(found.variance, reverse=True)
    assert found.bias < 1e-6


@pytest.mark.parametrize("name", [n for n in NAMES if n != "all-reduce"])
def test_failures_slow_it_down_and_stop_nothing(name: str) -> None:
    quiet = simulate(name, AveragingTrial(64, (8, 8), 0.0, seeds=3))
    failing = simulate(name, AveragingTrial(64, (8, 8), 0.05, seeds=3))
    assert quiet.rounds[1] < failing.rounds[1] <= CAP
    assert failing.variance[-1] < 1e-6


@pytest.mark.parametrize(
    ("peers", "failure", "published"),
    [(512, 0.0, 1.0), (512, 0.001, 1.6), (512, 0.005, 10.9), (512, 0.01, 41.7), (768, 0.005, 28.7)],
)
def test_a_plain_all_reduce_fails_exactly_as_published(
    peers: int, failure: float, published: float
) -> None:
    """Ten runs of the same random numbers (plot_results.ipynb of yandex-research/moshpit-sgd): no
    rounding, no tolerance."""
    found = simulate("all-reduce", AveragingTrial(peers, (32, 32), failure, seeds=10))
    assert found.rounds[0] == found.rounds[1] == pytest.approx(published, abs=1e-9)


def test_a_packed_grid_beats_the_published_one() -> None:
    packed, fixed = (
        simulate(n, AveragingTrial(512, (32, 32), 0.01, seeds=8)).rounds
        for n in ("moshpit", "moshpit-fixed")
    )
    assert packed[1] < 8.8 - 1.5  # published: 8.8
    assert fixed[1] == pytest.approx(8.8, abs=1.0)


def test_a_tight_bound_of_staleness_costs_rounds() -> None:
    """A round applies at most `bound` pushes, so it takes about peers / bound rounds."""
    ends = []
    for bound in (2, 64):
        world = Pushed(Barrierless(bound), np.random.default_rng(0).standard_normal((64, 1)), 0)
        ends.append(
            next(i for i in range(1, 200) if world.round(i, np.ones(64, bool)).var() < 1e-9)
        )
    assert ends[1] <= 3 < 10 < ends[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("peers", [2, 3, 5, 13])
def test_the_smallest_swarms_are_simulated(peers: int, name: str) -> None:
    found = simulate(name, AveragingTrial(peers, (4, 4), 0.1, seeds=2, cap=5))
    assert np.isfinite(found.variance).all()


def test_bytes_are_those_of_the_codec_and_the_group() -> None:
    trial = AveragingTrial(64, (8, 8), seeds=1, parameters=1000)
    sent = {
        name: simulate(name, trial).sent
        for name in ("butterfly", "moshpit", "gossip", "parameter-server")
    }
    assert sent == pytest.approx(
        {
            "butterfly": 8000 * 63 / 64,
            "moshpit": 8000 * 7 / 8,
            "gossip": 4000,
            "parameter-server": 8000 * 63 / 64,
        }
    )
    assert simulate("parameter-server", trial).busiest == 8000 * 63
    steps = {
        name: simulate(name, trial).to_dict()["bytes_per_peer_per_step"]
        for name in ("butterfly", "diloco", "streaming")
    }
    # diloco sends every 50 steps; streaming sends halves every 25
    assert steps == {
        "butterfly": 7875,
        "diloco": round(7875 / 50),
        "streaming": round(7875 / 50),
    }
    assert (
        simulate(
            "butterfly", AveragingTrial(64, (8, 8), seeds=1, parameters=1 << 20, codec="int8")
        ).sent
        < sent["butterfly"] * 1049 * 0.26
    )


def test_json_is_one_document_and_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        "--averaging",
        "moshpit",
        "--peers",
        "64",
        "--grid",
        "8,8",
        "--failure",
        "0.01",
        "--seeds",
        "3",
        "--json",
    ]
    documents = []
    for _ in range(2):
        assert cli.main(words) == ExitCode.OK
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] | {"wall_s": 0} == documents[1] | {"wall_s": 0}
    (found,) = documents[0]["strategies"]
    assert (found["strategy"], documents[0]["grid"], documents[0]["cap"]) == ("moshpit", [8, 8], 50)
    assert 2 <= found["rounds_to_1e-4"] <= found["rounds_to_1e-9"] < 20
    assert found["variance"][0] > found["variance"][1] > found["variance"][2]
    assert found["bytes_per_peer_per_round"] == 7_000_000


def test_people_get_a_line_for_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--averaging", "all", "--peers", "16", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(NAMES)


@pytest.mark.parametrize(
    "words",
    [
        ["--averaging", "gossipp"],
        ["--averaging", "moshpit", "--grid", "4,x"],
        ["--averaging", "moshpit", "--grid", "2,2"],
        ["--averaging", "moshpit", "--grid", "100000,100000"],
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--peers", "12", *words]) == ExitCode.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "trial",
    [
        AveragingTrial(8, failure=1.0),
        AveragingTrial(8, failure=-0.1),
        AveragingTrial(8, codec="int2"),
        AveragingTrial(1),
        AveragingTrial(8, seeds=0),
    ],
    ids=["failure of all", "negative failure", "codec", "peers", "seeds"],
)
def test_chances_and_codecs_are_checked(trial: AveragingTrial) -> None:
    with pytest.raises(UsageFault):
        simulate("gossip", trial)
