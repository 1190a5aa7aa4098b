"""Staging, commit and hand-over."""

import pytest
import torch

from node.core.errors import StepFault
from node.optim.owner import Owner
from node.optim.parts import state_shapes
from node.optim.settings import OptimSettings
from testbed.reference.swarm import step_all

SHAPES = {
    "lm_head.weight": (11, 8),
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 20),
    "model.layers.0.mlp.up_proj.weight": (20, 8),
    "model.layers.1.mlp.up_proj.weight": (20, 8),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
}
SETTINGS = OptimSettings(warmup=2, weight_decay=0.01)
UP = "model.layers.0.mlp.up_proj.weight"


def numbers(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_nothing_given_is_changed():
    owner = Owner(SETTINGS, 8)
    parameters = numbers(0)
    gradients = numbers(1)
    step_all(owner, parameters, gradients, 0)
    assert same(parameters, numbers(0))
    assert same(gradients, numbers(1))
    many = {f"model.layers.{i}.q": gradients[UP] for i in range(4)}
    step_all(owner, many, many, 1)
    state = {name: owner.state(name)["momentum"].clone() for name in many}
    owner.step_parts(many, many, 2)
    assert same(gradients, numbers(1))
    assert same(state, {name: owner.state(name)["momentum"] for name in many})


def test_a_repeated_step_has_equal_bits_and_one_momentum_update():
    owner = Owner(SETTINGS, 8)
    twin = Owner(SETTINGS, 8)
    parameters = numbers(0)
    gradients = numbers(1)
    first = owner.step(UP, parameters[UP], gradients[UP], 0)
    again = owner.step(UP, parameters[UP], gradients[UP], 0)
    twin.step(UP, parameters[UP], gradients[UP], 0)
    assert torch.equal(first, again)
    assert owner.state(UP) == {}
    assert owner.commit(0) == {UP}
    assert owner.commit(0) == frozenset()
    twin.commit(0)
    assert same(owner.state(UP), twin.state(UP))
    assert owner.state(UP)["steps"].tolist() == [1.0]


def test_a_committed_epoch_is_not_stepped_again():
    owner = Owner(SETTINGS, 8)
    parameters = numbers(0)
    gradients = numbers(1)
    step_all(owner, parameters, gradients, 4)
    before = owner.state(UP)
    for epoch in (3, 4):
        with pytest.raises(StepFault, match="committed through epoch 4"):
            owner.step(UP, parameters[UP], gradients[UP], epoch)
    assert owner.commit(4) == frozenset()
    assert same(owner.state(UP), before)


def test_abort_leaves_the_state_as_it_was():
    owner = Owner(SETTINGS, 8)
    parameters = numbers(0)
    step_all(owner, parameters, numbers(1), 0)
    before = owner.state(UP)
    owner.step(UP, parameters[UP], numbers(2)[UP], 1)
    owner.abort(1)
    assert owner.commit(1) == frozenset()
    assert same(owner.state(UP), before)


def test_commit_of_some_names_drops_the_others_and_older_epochs():
    owner = Owner(SETTINGS, 8)
    parameters = numbers(0)
    gradients = numbers(1)
    owner.step_parts(parameters, gradients, 0)
    owner.step_parts(parameters, gradients, 1)
    assert owner.commit(1, names=[UP]) == {UP}
    assert owner.names() == (UP,)
    assert owner.commit(0) == frozenset()


@pytest.mark.parametrize("name", SHAPES)
def test_state_moves_to_another_owner(name):
    old = Owner(SETTINGS, 8)
    new = Owner(SETTINGS, 8)
    parameter = numbers(0)[name]
    for epoch in range(3):
        parameter = old.step(name, parameter, numbers(epoch + 1)[name], epoch)
        old.commit(epoch)
    state = old.state(name)
    assert {k: tuple(v.shape) for k, v in state.items()} == state_shapes(
        name, SHAPES[name], SETTINGS
    )
    assert all(v.dtype is torch.float32 for v in state.values())
    new.load_state(name, SHAPES[name], state, epoch=2)
    with pytest.raises(StepFault, match="committed"):
        new.step(name, parameter, numbers(9)[name], 2)
    old.step(name, parameter, numbers(9)[name], 3)
    old.drop(name)
    assert old.state(name) == {}
    assert old.commit(3) == frozenset()


def test_state_that_cannot_be_is_refused():
    owner = Owner(SETTINGS, 8)
    good = {"momentum": torch.zeros(20, 8), "steps": torch.ones(1)}
    for bad in (
        {},
        {"momentum": torch.zeros(20, 8)},
        good | {"extra": torch.ones(1)},
        good | {"momentum": torch.zeros(8, 20)},
        good | {"momentum": torch.full((20, 8), float("nan"))},
        good | {"steps": -torch.ones(1)},
        good | {"steps": torch.zeros(1)},
        good | {"steps": torch.full((1,), 1.5)},
        good | {"steps": torch.full((1,), 1e30)},
    ):
        with pytest.raises(StepFault, match="optimizer state"):
            owner.load_state(UP, (20, 8), bad)
    head = {"exp_avg": torch.zeros(11, 8), "exp_avg_sq": -torch.ones(11, 8), "steps": torch.ones(1)}
    with pytest.raises(StepFault, match="negative"):
        owner.load_state("lm_head.weight", (11, 8), head)
    assert owner.names() == ()


def test_loaded_state_is_a_copy():
    owner = Owner(SETTINGS, 8)
    state = {"momentum": torch.zeros(20, 8), "steps": torch.ones(1)}
    owner.load_state(UP, (20, 8), state)
    state["momentum"].fill_(7)
    assert owner.state(UP)["momentum"].abs().max() == 0


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({UP: torch.zeros(20, 8).fill_diagonal_(number)}, r"up_proj.* is not finite")
        for number in (float("nan"), float("inf"), -float("inf"))
    ]
    + [
        ({"lm_head.weight": torch.zeros(8, 11)}, "gradient of"),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(20, 8)}, "not of a parameter here"),
    ],
)
def test_a_gradient_that_cannot_be_stages_nothing(bad, why):
    owner = Owner(SETTINGS, 8)
    with pytest.raises(StepFault, match=why) as fault:
        owner.step_parts(numbers(0), numbers(1) | bad, 0)
    assert fault.value.next_step
    assert owner.staged(0) == frozenset()
