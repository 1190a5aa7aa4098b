"""Optimizers of other libraries as functions: their own numbers, nothing kept, nothing changed, the
same bits every time."""

import subprocess
import sys

import pytest
import pytorch_optimizer as lib
import torch

from node.core.errors import OutOfResources, StepFault
from node.core.tables import settings_of
from node.manifest import SECTIONS
from node.optim.owner import Owner
from node.optim.parts import state_shapes
from node.optim.settings import OptimSettings
from node.optim.wrapped import WRAPPED, Wrapped
from testbed.models import owner_group

UP = "model.layers.0.mlp.up_proj.weight"
METHODS = ("shampoo", "soap")


def settings(method, **more):
    return OptimSettings(name=method, warmup=0, precondition_every=3, weight_decay=0.1, **more)


def numbers(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def library(method, p, s):
    if method == "adamw":  # which decays no vector
        betas = (s.adam_beta1, s.adam_beta2)
        decay = 0.1 if p.ndim == 2 else 0.0
        return torch.optim.AdamW([p], lr=s.adam_lr, betas=betas, weight_decay=decay)
    betas = (s.momentum, s.adam_beta2)
    if method == "soap":
        return lib.SOAP(
            [p],
            lr=s.soap_lr,
            betas=betas,
            weight_decay=0.1,
            precondition_frequency=3,
            max_precondition_dim=s.precondition_side,
        )
    return lib.ScalableShampoo(
        [p],
        lr=s.shampoo_lr,
        betas=betas,
        moving_average_for_momentum=True,
        weight_decay=0.1,
        decoupled_weight_decay=True,
        start_preconditioning_step=1,
        preconditioning_compute_steps=3,
        block_size=1000,
        shape_interpretation=False,
        graft_type=4,
    )


@pytest.mark.parametrize(
    ("method", "shape", "side"),
    [(m, shape, 10_000) for m in METHODS for shape in [(6, 10), (8, 8), (1, 5)]]
    + [("soap", (6, 10), 8), ("soap", (6, 10), 5), ("adamw", (9, 5), 0), ("adamw", (7,), 0)],
)
def test_steps_have_the_bits_of_the_library(method, shape, side):
    s = settings(method, precondition_side=side)
    owner = Owner(s, 0)
    ours = numbers(0, shape)
    p = torch.nn.Parameter(ours.clone())
    theirs = library(method, p, s)
    for epoch in range(8):
        ours = owner.step(UP, ours, numbers(epoch + 1, shape), epoch)
        owner.commit(epoch)
        p.grad = numbers(epoch + 1, shape)
        torch.manual_seed(epoch)  # Shampoo draws the start of an iteration
        theirs.step()
        # The library keeps factors with whatever strides they come in, which may change the last
        # bits.
        torch.testing.assert_close(ours, p.detach(), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(ours, numbers(0, shape), atol=1e-3)
    assert {k: tuple(t.shape) for k, t in owner.state(UP).items()} == state_shapes(UP, shape, s)
    assert owner.state(UP)["steps"].tolist() == [8.0]


@pytest.mark.parametrize("method", METHODS)
def test_a_wrapped_step_is_repeatable_and_keeps_its_inputs(method):
    owner = Owner(settings(method), 0)
    twin = Owner(settings(method), 0)
    parameter = numbers(0, (6, 10))
    for epoch in range(7):
        gradient = numbers(epoch + 1, (6, 10))
        kept = (parameter.clone(), gradient.clone(), owner.state(UP))
        dice = torch.get_rng_state()
        first = owner.step(UP, parameter, gradient, epoch)
        torch.rand(3)
        again = owner.step(UP, parameter, gradient, epoch)
        owner.abort(epoch)
        last = owner.step(UP, parameter, gradient, epoch)
        assert torch.equal(first, again)
        assert torch.equal(first, last)
        assert torch.equal(parameter, kept[0])
        assert torch.equal(gradient, kept[1])
        assert all(torch.equal(t, kept[2][k]) for k, t in owner.state(UP).items())
        torch.set_rng_state(dice)
        assert torch.equal(twin.step(UP, parameter, gradient, epoch), first)
        assert torch.equal(torch.get_rng_state(), dice), "others' dice are left alone"
        owner.commit(epoch)
        twin.commit(epoch)
        parameter = first


@pytest.mark.parametrize("method", METHODS)
def test_strides_of_what_comes_do_not_matter(method):
    s = settings(method)
    one = Owner(s, 0)
    two = Owner(s, 0)
    parameter = numbers(0, (6, 10))
    other = parameter.mT.contiguous().mT
    for epoch in range(5):
        gradient = numbers(epoch + 1, (6, 10))
        left = one.step(UP, parameter, gradient, epoch)
        right = two.step(UP, other, gradient.mT.contiguous().mT, epoch)
        one.commit(epoch)
        two.commit(epoch)
        assert torch.equal(left, right)
        parameter = left
        other = right.mT.contiguous().mT
    assert all(t.is_contiguous() for t in one.state(UP).values())


@pytest.mark.parametrize(
    ("make", "keeps"),
    [
        (
            lambda p, s, lr, n: torch.optim.NAdam([p], lr=lr),
            {"exp_avg": (6, 10), "exp_avg_sq": (6, 10), "mu_product": ()},
        ),
        (
            lambda p, s, lr, n: torch.optim.Adafactor([p], lr=lr),
            {"row_var": (6, 1), "col_var": (1, 10)},
        ),
        (
            lambda p, s, lr, n: torch.optim.SGD([p], lr=lr, momentum=0.9),
            {"momentum_buffer": (6, 10)},
        ),
    ],
)
def test_any_optimizer_that_steps_one_tensor_can_be_wrapped(make, keeps):
    method = Wrapped(make)
    s = OptimSettings()
    parameter = numbers(0, (6, 10))
    state = {}
    p = torch.nn.Parameter(parameter.clone())
    theirs = make(p, s, 0.01, 0)
    for epoch in range(6):
        parameter, state = method.step(
            s, parameter, numbers(epoch + 1, (6, 10)), state, 0.01, keeps | {"steps": (1,)}
        )
        p.grad = numbers(epoch + 1, (6, 10))
        theirs.step()
        assert torch.equal(parameter, p.detach())
    assert state["steps"].tolist() == [6.0]


def test_state_that_was_not_declared_is_not_lost_in_silence():
    method = Wrapped(lambda p, s, lr, n: torch.optim.AdamW([p], lr=lr))
    with pytest.raises(StepFault, match="AdamW keeps") as fault:
        method.step(
            OptimSettings(),
            torch.ones(2, 3),
            torch.ones(2, 3),
            {},
            0.1,
            {"exp_avg": (2, 3), "steps": (1,)},
        )
    assert "constraints.txt" in fault.value.next_step


class Fails(torch.optim.SGD):
    """Stand-in for a decomposition that fails, or for numbers that are not finite."""

    def step(self, closure=None):
        super().step()
        if self.defaults["lr"] < 0.5:
            raise torch.linalg.LinAlgError("did not converge")
        self.param_groups[0]["params"][0].data.div_(0)


@pytest.mark.parametrize(("lr", "why"), [(0.1, "did not converge"), (1.0, "not finite")])
def test_an_impossible_step_is_reported_and_changes_nothing(monkeypatch, lr, why):
    monkeypatch.setitem(WRAPPED, "soap", Wrapped(lambda p, s, rate, n: Fails([p], lr=rate)))
    monkeypatch.setattr("node.optim.owner.state_shapes", lambda *_: {"steps": (1,)})
    owner = Owner(OptimSettings(name="soap", soap_lr=lr, warmup=0), 0)
    with pytest.raises(StepFault, match=why):
        owner.step_parts(
            {UP: torch.ones(2, 3), "norm": torch.ones(3)},
            {UP: torch.ones(2, 3), "norm": torch.ones(3)},
            0,
        )
    assert owner.staged(0) == frozenset()


@pytest.mark.parametrize(("method", "name"), [("soap", "gg_1"), ("shampoo", "statistics_1")])
def test_statistics_that_cannot_be_are_refused(method, name):
    s = settings(method)
    owner = Owner(settings(method), 0)
    owner.step(UP, numbers(0, (6, 10)), numbers(1, (6, 10)), 0)
    owner.commit(0)
    good = owner.state(UP)
    assert bool((good[name] < 0).any()), "only the diagonal cannot be negative"
    taker = Owner(s, 0)
    for bad in ({name: -good[name]}, {name: good[name][:9]}, {name: good[name] * float("nan")}):
        with pytest.raises(StepFault, match="optimizer state"):
            taker.load_state(UP, (6, 10), good | bad, 0)
    assert taker.names() == ()


def test_what_is_not_a_matrix_of_a_block_is_adamws():
    owner = Owner(settings("soap"), 0)
    plain = Owner(OptimSettings(name="adamw", warmup=0, weight_decay=0.1), 0)
    for name, shape in (
        ("lm_head.weight", (4, 6)),
        ("model.layers.0.input_layernorm.weight", (5,)),
    ):
        ours, theirs = (
            o.step(name, numbers(0, shape), numbers(1, shape), 0) for o in (owner, plain)
        )
        assert torch.equal(ours, theirs)


def test_a_missing_optimizer_package_is_reported_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(OutOfResources, match="pytorch-optimizer") as fault:
        Owner(OptimSettings(name="soap"), 0)
    assert fault.value.next_step
    Owner(OptimSettings(), 0)


def test_the_optimizer_package_is_loaded_only_when_needed():
    program = (
        "import sys\n"
        "from node.optim.owner import Owner; from node.optim.settings import OptimSettings\n"
        "Owner(OptimSettings(), 0)\n"
        "assert 'pytorch_optimizer' not in sys.modules\n"
        "Owner(OptimSettings(name='soap'), 0)\n"
        "assert 'pytorch_optimizer' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_methods_of_the_manifest_can_all_be_stepped():
    assert set(settings_of(SECTIONS)["optimizer.name"].rule.choices) == set(owner_group.METHODS)
    assert WRAPPED.keys() == set(METHODS)
