"""The guard of activations: sizes in, verdicts out."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch

from node.core.ids import PeerId
from node.pipeline.guard import ABSURD_RMS, NotFinite, check_output, check_share, norm_of_share
from node.pipeline.watch import LONE, RECENT, YOUNG, ActivationGuard
from node.wire.tensors import begin_encoding

A, B, C, D = (PeerId(x) for x in "abcd")
LANE = (2, "forward")


def fed(senders, rounds=40, limit=8.0, noise=0.1, seed=0):
    """A guard that has seen `rounds` tensors of each sender, of RMS about 1."""
    watch = ActivationGuard(limit)
    dice = random.Random(seed)
    for _ in range(rounds):
        for sender in senders:
            assert not watch.odd(LANE, sender, math.exp(dice.gauss(0, noise)))
    return watch


@pytest.mark.parametrize("factor", [1e4, 1e-4, 50.0, 0.0])
def test_odd_tensors_of_one_sender_alone_are_refused(factor):
    watch = fed((A, B, C))
    for _ in range(50):
        assert watch.odd(LANE, A, factor) > 8
        assert not watch.odd(LANE, B, 1.0)
        assert not watch.odd(LANE, C, 1.1)
    assert not any(watch.odd(LANE, sender, 1.0) for sender in (B, C) * RECENT)
    assert watch.odd(LANE, D, factor), "what was refused was learned from"
    assert not watch.odd(LANE, A, 1.0)


def test_the_young_and_the_quiet_have_no_hair_trigger():
    watch = ActivationGuard(8.0)
    assert not any(watch.odd(LANE, A, 10.0 ** (i % 7)) for i in range(YOUNG))
    watch = fed((A, B), noise=0.0)
    assert not watch.odd(LANE, A, 3.0)
    assert watch.odd(LANE, A, 10.0)


@pytest.mark.parametrize("senders", [(A,), (A, B), (A, B, C, D)])
def test_a_change_of_the_model_is_learned_after_few_refusals(senders):
    watch = fed(senders)
    refused = sum(bool(watch.odd(LANE, sender, 1e3)) for _ in range(100) for sender in senders)
    assert refused <= max(LONE - 1, len(senders) / 2)
    assert not any(watch.odd(LANE, sender, 1e3 * f) for sender in senders for f in (0.5, 1.0, 2.0))


def test_a_sole_remaining_sender_is_not_refused_for_ever():
    watch = fed((A, B))
    refused = sum(bool(watch.odd(LANE, A, 1e3)) for _ in range(100))
    assert 1 <= refused < RECENT


@pytest.mark.parametrize(
    ("rounds", "smallest", "odd"),
    [
        pytest.param(400, 1.0, 1e6, id="after many rounds"),
        pytest.param(40, 1e-12, 1e-6, id="the first of the lane, after few"),
    ],
)
def test_a_sender_is_held_to_its_own_history_too(rounds, smallest, odd):
    watch = ActivationGuard(8.0)
    for i in range(rounds):
        for j, sender in enumerate((A, B, C, D)):
            assert not watch.odd(LANE, sender, smallest * 100.0**j * (1 + 0.1 * (i % 2)))
    assert watch.odd(LANE, A, odd)


def test_slow_growth_is_no_blow_up():
    watch = ActivationGuard(8.0)
    assert not any(watch.odd(LANE, s, 1.01**i) for i in range(2000) for s in (A, B))


def test_a_sender_that_had_nothing_to_send_while_sizes_grew_is_believed():
    watch = fed((A, B))
    assert not any(watch.odd(LANE, B, 1.01**i) for i in range(400))
    assert not any(watch.odd(LANE, s, 1.01**400) for s in (A, B) * 50)
    assert watch.odd(LANE, A, 1.01**400 * 10)


def test_lanes_are_apart_and_zero_switches_it_off():
    assert not fed((A, B)).odd((2, "backward"), A, 1e4)
    assert not fed((A, B), limit=0.0).odd(LANE, A, 1e5)


def size(tensor: torch.Tensor, wire: str = "fp32") -> float:
    """Root mean square of a tensor in a wire format, as its sender looks at it."""
    made = begin_encoding(tensor, wire, measure=False)
    return made.rms([look.item() for look in made.looks])


def test_the_root_mean_square_and_what_no_receiver_takes():
    x = torch.randn(1000)
    assert size(x) == pytest.approx(float(np.sqrt((x.numpy() ** 2).mean())), rel=1e-5)
    assert size(x, "bf16") == pytest.approx(size(x), rel=1e-2)
    for wire in ("fp32", "bf16", "fp16", "int8", "int4"):
        check_output(size(x, wire))
        for bad in (float("nan"), float("inf"), ABSURD_RMS * 40):
            y = x.clone()
            y[3] = bad
            with pytest.raises(NotFinite):
                check_output(size(y, wire))
    with pytest.raises(NotFinite):
        check_output(size(torch.full((4,), 7e4), "fp16"))  # finite here, infinite there
    assert norm_of_share([]) is None
    for second, fine in ((x, True), (torch.tensor([1.0, float("nan")]), False)):
        norm = norm_of_share([x, second])
        assert norm is not None
        with contextlib.nullcontext() if fine else pytest.raises(NotFinite):
            check_share(norm.item())
