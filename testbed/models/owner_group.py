"""Peers that own the parts of one stage together, in one process, and their comparison with one
owner of everything."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from node.core.ids import PeerId
from node.core.journey import Version
from node.optim.owner import Owner
from node.optim.ownership import assign
from node.optim.parts import parts_of, state_shapes
from node.optim.settings import OptimSettings
from node.optim.state_replica import Spares, buddy
from node.wire.remote import HeldTensor, collected
from node.wire.tensors import TensorReader, chunks, dtype_of, encode, expected_head
from testbed.reference.swarm import step_all

METHODS = ("muon", "shampoo", "soap", "adamw")

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (67, 32),
    "model.norm.weight": (32,),
} | {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "q": (32, 32),
        "kv": (16, 32),
        "up": (80, 32),
        "down": (32, 80),
        "norm": (32,),
    }.items()
}

STEPS = 50


def settings_of(method: str, parameters: str = "fp32") -> OptimSettings:
    """A run's settings, with some weight decay, and no warm-up so that every step counts."""
    return OptimSettings(name=method, parameters=parameters, warmup=0, weight_decay=0.01)


def numbers(
    seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, scale: float = 1.0
) -> dict[str, Tensor]:
    """Made-up parameters or gradients, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}


class Group:
    """Peers that own a stage's parts together, as an epoch has them: every owner steps its own,
    everybody gets the fresh ones.

    ``epochs``: length of the run for the schedule, 0 if unknown. ``every``: epochs between two
    copies of an owner's state, 0 keeps none. ``repeats``: every epoch has an attempt that comes to
    nothing before the one that counts. ``lost`` counts parts that went on without their
    state, ``age`` the epochs by which the copies that were used were old, in all.
    """

    def __init__(
        self,
        settings: OptimSettings,
        shapes: Mapping[str, tuple[int, ...]],
        members: Sequence[PeerId],
        *,
        epochs: int = 0,
        every: int = 1,
        repeats: bool = True,
    ) -> None:
        self.settings = settings
        self.shapes = shapes
        self.parts = parts_of(shapes, settings)
        self._epochs = epochs
        self._every = every
        self._repeats = repeats
        self.owners = {peer: Owner(settings, epochs) for peer in members}
        self.spares = {peer: Spares() for peer in members}
        self.plan = assign(self.parts, [(peer, 1.0) for peer in members])
        self.lost = self.moved = self.age = 0

    def epoch(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], epoch: int
    ) -> dict[str, Tensor]:
        """The fresh parameters; the state is settled, and each owner's buddy has a copy of it if
        one is due."""
        fresh: dict[str, Tensor] = {}
        for peer, owner in self.owners.items():
            mine = {name: gradients[name] for name, holder in self.plan.items() if holder == peer}
            if self._repeats:
                owner.step_parts(parameters, mine, epoch)
            fresh |= owner.step_parts(parameters, mine, epoch)
            owner.commit(epoch)
            due = self._every and (epoch + 1) % self._every == 0
            if not due or (other := buddy(peer, self.owners)) is None:
                continue
            for name in mine:
                self.spares[other].put(
                    name, Version(epoch + 1), self.travelled(name, owner.state(name))
                )
        for copies in self.spares.values():
            ages = {name: epoch + 1 - v.epoch for name, v in copies.versions().items()}
            copies.drop([name for name, age in ages.items() if age > 2 * self._every])
        return {name: fresh[name] for name in self.shapes}

    def change(self, members: Sequence[PeerId], epoch: int) -> None:
        """Change the members after epoch `epoch` is settled: a missing one has died, a new one has
        come."""
        before = self.plan
        self.plan = assign(self.parts, [(peer, 1.0) for peer in members], before)
        was, self.owners = (
            self.owners,
            {peer: self.owners.get(peer) or Owner(self.settings, self._epochs) for peer in members},
        )
        copies, self.spares = (
            self.spares,
            {peer: self.spares.get(peer) or Spares() for peer in members},
        )
        for name, peer in self.plan.items():
            donor = before[name]
            if donor == peer:
                continue
            self.moved += 1
            if donor in self.owners:
                state = was[donor].state(name)
                was[donor].drop(name)
                if self._every and state:
                    # The newest copy beside the new owner's, until its buddy has one.
                    self.spares[donor].put(name, Version(epoch + 1), state)
            else:
                kept = [c.get(name) for holder, c in copies.items() if holder in self.owners]
                newest = max(filter(None, kept), key=lambda k: k.version, default=None)
                state = {}
                if newest is not None:
                    state = newest.state
                    self.age += epoch + 1 - newest.version.epoch
            if state:
                self.owners[peer].load_state(
                    name, self.shapes[name], self.travelled(name, state), epoch
                )
            self.lost += not state

    def travelled(self, name: str, state: Mapping[str, HeldTensor]) -> dict[str, Tensor]:
        """The state as a peer has it after fetching: through bytes, checked against the declared
        shapes."""
        declared = sorted(state_shapes(name, self.shapes[name], self.settings).items())
        sent = {key: collected(tensor).float() for key, tensor in state.items()}
        reader = TensorReader(
            [expected_head(key, sent[key].shape, "fp32") for key, _ in declared], declared, "fp32"
        )
        for key, _ in declared:
            for chunk in chunks(encode(sent[key], "fp32"), 1 << 12):
                reader.feed(chunk)
        return dict(zip([key for key, _ in declared], reader.finish(), strict=True))


def compared(method: str, steps: int = STEPS, parameters: str = "fp32") -> tuple[float, Group]:
    """(largest difference of any number of ``parameters`` and state from one process's, the group
    after it)."""
    a, b, c, d = (PeerId(p) for p in "abcd")
    settings = settings_of(method, parameters)
    died = steps // 3
    joined = 2 * steps // 3
    group = Group(settings, SHAPES, (a, b, c))
    alone = Owner(settings, 0)
    split, whole = (
        {name: t.to(dtype_of(parameters)) for name, t in numbers(0).items()} for _ in range(2)
    )
    for epoch in range(steps):
        if epoch == died:
            group.change((a, c), epoch - 1)
        if epoch == joined:
            group.change((a, c, d), epoch - 1)
        gradients = numbers(epoch + 1, scale=0.01)
        split = group.epoch(split, gradients, epoch)
        whole = step_all(alone, whole, gradients, epoch)
    worst = max(float((split[n] - whole[n]).abs().max()) for n in SHAPES)
    for name, peer in group.plan.items():
        ours = {key: collected(held) for key, held in group.owners[peer].state(name).items()}
        theirs = {key: collected(held) for key, held in alone.state(name).items()}
        worst = max([worst, *(float((ours[key] - theirs[key]).abs().max()) for key in theirs)])
    return worst, group
