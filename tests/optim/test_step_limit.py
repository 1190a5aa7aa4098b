"""Bounds on one step of the optimizer: every honest step keeps them, other parameters do not."""

import math

import pytest
import torch

from node.optim.gram import coefficients
from node.optim.owner import Owner
from node.optim.parts import state_shapes
from node.optim.settings import OptimSettings
from node.optim.step_limit import StepLimits, adam_bound, newton_schulz_bound

SHAPES = {
    "layers.0.wide": (6, 10),
    "layers.0.tall": (24, 6),
    "embed": (40, 6),
    "layers.0.norm": (8,),
}
METHODS = ("muon", "shampoo", "soap", "adamw")
EPOCHS = 40


def gradients(kind: str, epoch: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    """Gradients that make long steps: of one sign, of growing length, of rank one."""
    made = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    match kind:
        case "constant":
            return {name: torch.ones(shape) for name, shape in SHAPES.items()}
        case "growing":
            return {name: t * 1.5**epoch for name, t in made.items()}
        case "sparse":
            return {name: t * (torch.rand(t.shape, generator=g) < 0.1) for name, t in made.items()}
        case "rank one":
            return {n: t if t.ndim < 2 else t[:, :1] @ t[:1] for n, t in made.items()}
    return made


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["random", "constant", "growing", "sparse", "rank one"])
@pytest.mark.parametrize("method", METHODS)
def test_every_step_of_an_owner_is_within_the_bounds(method, kind, parameters) -> None:
    settings = OptimSettings(
        method, parameters, weight_decay=0.5, warmup=3, precondition_every=4, adam_beta2=0.99
    )
    owner = Owner(settings, EPOCHS)
    limits = StepLimits(settings, EPOCHS)
    g = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if settings.masters else torch.float32
    held = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}
    for epoch in range(EPOCHS):
        fresh = owner.step_parts(held, gradients(kind, epoch, g), epoch)
        assert limits.objection(held, fresh, epoch) == ""
        owner.commit(epoch)
        held = fresh


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_moved_too_far_are_refused(method, parameters) -> None:
    """One number of a part moves, or all of them, by more than twice the bound."""
    settings = OptimSettings(method, parameters, warmup=0)
    limits = StepLimits(settings, EPOCHS)
    dtype = torch.bfloat16 if settings.masters else torch.float32
    for name, shape in SHAPES.items():
        limit = limits.of(name, shape, 0)
        held = {name: torch.full(shape, 0.01, dtype=dtype)}
        one = held[name].clone()
        one.view(-1)[3] += 2.1 * limit.each
        both = held[name] + 2.1 * limit.whole / math.sqrt(one.numel())
        for fresh in (one, both, torch.full(shape, math.nan), torch.full(shape, math.inf)):
            assert name in limits.objection(held, {name: fresh}, 0)
        assert limits.objection(held, held, 0) == ""


def test_the_schedule_and_the_decay_count() -> None:
    settings = OptimSettings(adam_lr=0.01, warmup=10, weight_decay=0.1)
    limits = StepLimits(settings, 100)
    held = {"embed": torch.full((4, 4), 100.0)}
    first, tenth, last = (limits.of("embed", (4, 4), epoch) for epoch in (0, 9, 99))
    assert first.each == pytest.approx(0.1 * tenth.each)
    assert last.each == pytest.approx(0.1 * tenth.each)
    decayed = {"embed": held["embed"] * (1 - 0.01 * 0.1)}
    assert limits.objection(held, decayed, 9) == ""
    assert limits.objection(held, decayed, 0) != "", "the rate is a tenth of that"


def poisoned(name: str, shape: tuple[int, ...], settings: OptimSettings) -> dict[str, torch.Tensor]:
    """State that passes every check of a receiver and that no history of gradients can produce."""
    state = {key: torch.zeros(of) for key, of in state_shapes(name, shape, settings).items()}
    for key in ("momentum", "exp_avg"):
        if key in state:
            state[key] = torch.full(shape, 1e6)
    for key, of in state.items():
        if key.startswith(("gg_", "q_", "statistics", "pre_conditioners")):
            state[key] = torch.eye(of.shape[0])
    return state | {"steps": torch.full((1,), 5.0)}


@pytest.mark.parametrize("method", METHODS)
def test_state_that_another_peer_made_up_makes_no_longer_step(method) -> None:
    """An honest owner takes the state over, and nobody refuses its parameters."""
    settings = OptimSettings(method, warmup=0)
    limits = StepLimits(settings, EPOCHS)
    g = torch.Generator().manual_seed(2)
    for name, shape in SHAPES.items():
        owner = Owner(settings, EPOCHS)
        owner.load_state(name, shape, poisoned(name, shape, settings))
        held = {name: torch.randn(shape, generator=g)}
        fresh = owner.step_parts(held, {name: torch.randn(shape, generator=g)}, 6)
        assert limits.objection(held, fresh, 6) == ""


def test_adamw_steps_the_pieces_of_a_large_matrix_as_far_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shampoo would step a matrix of the shape of a piece, and not as far."""
    settings = OptimSettings("shampoo", shampoo_lr=1e-6, warmup=0, precondition_side=8)
    g = torch.Generator().manual_seed(3)
    held = torch.randn(24, 6, generator=g)
    gradient = torch.randn(24, 6, generator=g)
    whole = Owner(settings, EPOCHS).step("layers.0.tall", held, gradient, 0)
    monkeypatch.setattr("node.optim.steps.AT_ONCE", 24)
    in_pieces = Owner(settings, EPOCHS).step("layers.0.tall", held, gradient, 0)
    torch.testing.assert_close(in_pieces, whole, rtol=0, atol=1e-7)
    assert float((whole - held).abs().max()) > 1e-3


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.9, 0.999), (0.0, 0.95), (0.8, 0.9)])
def test_the_bound_of_adam_is_reached_and_not_passed(beta1, beta2) -> None:
    """Gradients for which the Cauchy-Schwarz inequality is an equation reach the bound."""
    most = 0.0
    bound = adam_bound(beta1, beta2)
    for length in (1, 2, 5, 20, 200, 8000):
        m = v = 0.0
        for i in range(length):
            gradient = (beta1 / beta2) ** (length - 1 - i)
            m = beta1 * m + (1 - beta1) * gradient
            v = beta2 * v + (1 - beta2) * gradient**2
        ratio = m / (1 - beta1**length) / math.sqrt(v / (1 - beta2**length))
        assert ratio <= bound * (1 + 1e-9)
        most = max(most, ratio)
    assert most > 0.9 * bound


def test_momentum_that_outlives_its_second_moment_has_no_bound() -> None:
    assert math.isinf(adam_bound(0.99, 0.9))
    assert adam_bound(0.0, 0.0) == 1.0


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
@pytest.mark.parametrize("name", ["simple", "quintic", "polar_express"])
def test_newton_schulz_stays_below_its_bound(name, steps) -> None:
    bound = newton_schulz_bound(name, steps)
    for i in range(1, 1000):
        s = i / 1000
        for a, b, c in coefficients(name, steps):
            s = a * s + b * s**3 + c * s**5
        assert abs(s) < bound
    assert bound < 4.0
