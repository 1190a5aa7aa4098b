"""An owner whose steps are made over two processes takes one device's steps to the bit, and neither
process keeps all of its state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.core.errors import DeviceLost, StepFault
from node.core.ids import ENDS
from node.core.journey import Version
from node.local.optimizer import CutTensor
from node.optim.settings import OptimSettings
from node.optim.state_replica import Spares
from node.optim.wrapped import WRAPPED, Wrapped
from node.wire.remote import collected, off_device
from tests.local.conftest import DEEP, EPOCHS, MODEL, Pair, pair

CASES = {
    "muon": (1, MODEL, OptimSettings(warmup=1, weight_decay=0.1)),
    "polar express": (
        ENDS,
        DEEP,
        OptimSettings(warmup=1, coefficients="polar_express", ns_steps=7, stack=False),
    ),
    "adamw": (ENDS, DEEP, OptimSettings(name="adamw", warmup=1, weight_decay=0.1)),
    "soap": (1, MODEL, OptimSettings(name="soap", warmup=1, precondition_every=2)),
    "shampoo": (1, MODEL, OptimSettings(name="shampoo", warmup=1, precondition_every=2)),
}


@dataclass
class Case:
    """A stage over two processes and alone, and settings of both owners."""

    pair: Pair
    optim: OptimSettings
    epoch: int = 0

    def gradients(self, names: Any = None) -> dict[str, Tensor]:
        """Gradients of these parts, of all by default, that differ from epoch to epoch."""
        dice = torch.Generator().manual_seed(100 + self.epoch)
        shapes = self.pair.one.state.shapes
        made = {n: torch.randn(shapes[n], generator=dice) for n in sorted(shapes)}
        return {n: made[n] for n in (names or made)}

    def step(self) -> None:
        """Step both owners on the same gradients, in two groups; assert the same fresh parameters,
        and put them in place."""
        names = sorted(self.pair.one.state.shapes)
        fresh: dict[str, Tensor] = {}
        for group in (names[::3], [n for n in names if n not in names[::3]]):
            given = self.gradients(group)
            made = []
            for side in (self.pair.two, self.pair.one):
                made.append(side.owner.step_parts(side.state.parameters(), given, self.epoch))
            assert made[0].keys() == made[1].keys() == set(group)
            assert [n for n in group if not torch.equal(made[0][n], made[1][n])] == []
            fresh |= made[0]
        for side in (self.pair.two, self.pair.one):
            side.owner.commit(self.epoch)
            side.state.adopt(fresh, Version(self.epoch + 1))
            side.state.settle()
        self.epoch += 1

    def states(self) -> list[dict[str, dict[str, Tensor]]]:
        """The state of both owners, whole."""
        return [
            {n: {k: collected(t) for k, t in owner.state(n).items()} for n in owner.names()}
            for owner in (self.pair.two.owner, self.pair.one.owner)
        ]


def same(a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return {n: s.keys() for n, s in a.items()} == {n: s.keys() for n, s in b.items()} and all(
        torch.equal(t, b[n][k]) for n, s in a.items() for k, t in s.items()
    )


@pytest.fixture(scope="module", params=CASES, ids=[c.replace(" ", "-") for c in CASES])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    stage, model, optim = CASES[request.param]
    with pair(stage, tmp_path_factory.mktemp("devices"), model, optim) as made:
        yield Case(made, optim)


def test_steps_and_state_are_those_of_one_device_to_the_bit(case):
    for _ in range(4):
        case.step()
    assert same(*case.states())
    assert case.pair.two.owner.nbytes == case.pair.one.owner.nbytes


def test_rank_0_has_half_of_the_state_and_of_the_gradients(case):
    if not case.epoch:
        case.step()
    owner = case.pair.two.owner
    held = [t for n in owner.names() for t in owner.held_after(n, case.epoch - 1).values()]
    cut = [t for t in held if isinstance(t, CutTensor)]
    here = sum(t.piece.untyped_storage().nbytes() for t in cut if t.piece is not None)
    here += sum(t.nbytes for t in held if isinstance(t, Tensor))
    assert 0.45 * owner.nbytes <= here <= 0.55 * owner.nbytes


def test_a_checkpoint_of_two_devices_goes_on_with_one_and_back(case, tmp_path):
    if not case.epoch:
        case.step()
    two, one = case.pair.two, case.pair.one
    store = CheckpointStore(tmp_path, CheckpointSettings())
    for at, side in ((1, two), (2, one)):
        state = {
            n: {k: off_device(t) for k, t in side.owner.held_after(n, case.epoch - 1).items()}
            for n in side.owner.names()
        }
        store.save(0, at, side.state.parameters(), state, {})
    files = [store.path(0, at) / "optimizer.safetensors" for at in (1, 2)]
    assert files[0].read_bytes() == files[1].read_bytes()
    for at, side in ((2, two), (1, one)):
        side.owner.clear()
        found = store.load(0, at)
        for name, state in found.optimizer.items():
            side.owner.load_state(name, side.state.shapes[name], state, case.epoch - 1)
    assert same(*case.states())
    case.step()


def test_a_copy_that_is_set_aside_is_taken_back(case):
    if not case.epoch:
        case.step()
    owner = case.pair.two.owner
    before = case.states()[0]
    spares = Spares()
    for name in owner.names():
        spares.put(name, Version(case.epoch), owner.state(name))
        owner.drop(name)
    assert owner.nbytes == 0
    for name, spare in spares.items():
        owner.load_state(name, case.pair.two.state.shapes[name], spare.state, case.epoch - 1)
    assert same(case.states()[0], before)
    case.step()


def test_an_attempt_that_is_given_up_changes_no_state(case):
    if not case.epoch:
        case.step()
    side = case.pair.two
    before = case.states()[0]
    side.owner.step_parts(side.state.parameters(), case.gradients(), case.epoch)
    side.owner.abort(case.epoch)
    assert same(case.states()[0], before)
    bad = case.gradients()
    name = max(bad)
    bad[name].view(-1)[0] = float("nan")
    with pytest.raises(StepFault, match="not finite"):
        side.owner.step_parts(side.state.parameters(), bad, case.epoch)
    case.step()
    assert case.pair.lost == []


def test_a_matrix_that_cannot_be_stepped_spares_the_devices(case, monkeypatch):
    name = case.optim.name
    if name not in WRAPPED:
        pytest.skip("the steps of this optimizer always end")
    if not case.epoch:
        case.step()

    def fails(p: torch.nn.Parameter, *_: Any) -> Any:
        class Fails(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                raise torch.linalg.LinAlgError("did not converge")  # pyright: ignore

        return Fails([p], lr=0.1)

    real = WRAPPED[name]
    broken = Wrapped(fails, real.sides, {}, real.numbers)
    monkeypatch.setattr(Wrapped, "_fill", lambda *_: None)
    monkeypatch.setitem(WRAPPED, name, broken)
    side = case.pair.two
    with pytest.raises(StepFault, match="cannot be stepped on its local device"):
        side.owner.step_parts(side.state.parameters(), case.gradients(), case.epoch)
    monkeypatch.undo()
    assert side.owner.staged(case.epoch) == frozenset()
    case.step()


def test_a_dead_process_fails_steps_and_state(case):
    """Last in this file: the devices are gone after it."""
    if not case.epoch:
        case.step()
    owner = case.pair.two.owner
    name = next(n for n in owner.names() if n.endswith("down_proj.weight"))
    state = case.states()[1][name]
    case.pair.ranks._processes[0].kill()
    with pytest.raises(DeviceLost, match="local device 1 ended with code -9"):
        case.states()
    with pytest.raises(DeviceLost):
        owner.load_state(name, case.pair.two.state.shapes[name], state, EPOCHS)
    assert len(case.pair.lost) == 1
