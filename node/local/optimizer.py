"""The optimizer's step over the ranks: gradients and optimizer state stay sharded as the parameters
are.

A matrix of Muon is gathered at a host for the products only. AdamW works on each rank's own piece.
An optimizer of a library needs a matrix whole, so one rank hosts it, with its state.
Vectors, and parts that are not cut, are rank 0's.

Every rank makes the same calls with the same orders. Enters: mean gradients at rank 0, state in the
pieces of the ranks. Leaves: fresh parameters at rank 0, new state where the old was.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from node.core.errors import StepFault
from node.local.groups import Sharded
from node.local.program import Program, local_part
from node.local.rank import lost_is_a_fault
from node.local.ranks import Handle, Ranks
from node.local.split import stepped_in_pieces
from node.local.step import TensorParallelStep
from node.optim.muon import State, muon_direction, muon_fresh, next_counts
from node.optim.newton_schulz import followed
from node.optim.parts import method_of, state_bytes, state_shapes
from node.optim.settings import OptimSettings
from node.optim.steps import HeldState, PartSteps, Stepped, check_finite
from node.optim.wrapped import WRAPPED
from node.partition.matrices import Method
from node.wire.remote import HeldTensor, RemoteTensor

COUNT = "steps"
"""Name of the one entry of the state that is a number; every rank has it."""


@dataclass(frozen=True)
class PartOrder:
    """Order to step one part. ``host``: the rank that steps the whole part, -1 if the part stays
    sharded; ``before``: key under which the ranks keep the part's state, 0 for no state; ``after``:
    key of the state after the step; ``count``: number of steps made before."""

    name: str
    shape: tuple[int, int]
    method: Method
    host: int
    before: int
    after: int
    count: int


def cut_at(host: int, name: str, shape: tuple[int, int], ranks: int) -> Sharded:
    """The pieces of a tensor [rows, cols] of the part ``name``."""
    if host >= 0:
        return Sharded.at(host, name, shape, ranks)
    return Sharded.as_parameter(name, shape, ranks)


class RankSteps:
    """Steps of one rank's pieces."""

    def __init__(self, program: Program, settings: OptimSettings, epochs: int) -> None:
        self._program = program
        self._here = program.here
        self._settings = settings
        self._steps = PartSteps(settings, epochs)
        self._products: dict[tuple[Sharded, ...], TensorParallelStep] = {}

    @torch.no_grad()
    @lost_is_a_fault()
    def step(
        self,
        orders: Sequence[PartOrder],
        epoch: int,
        kept: Mapping[int, State],
        wholes: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[dict[int, State], dict[str, Tensor], list[str]]:
        """Make the steps of ``orders``. Returns (new state by its key, fresh parameters, names of
        failed parts). ``wholes``: the whole parameter and mean gradient of each part, given at rank
        0 only. Only rank 0 gets fresh parameters.
        """
        after: dict[int, State] = {}
        pieces: dict[str, Tensor] = {}
        given = wholes or {}
        cut = {
            order.name: cut_at(order.host, order.name, order.shape, self._here.size)
            for order in orders
        }
        gradients: dict[str, Tensor] = {}
        begins: dict[str, Tensor] = {}
        for order in orders:
            parameter, gradient = given.get(order.name, (None, None))
            gradients[order.name] = self._here.scatter(cut[order.name], gradient)
            if order.host >= 0:
                begins[order.name] = self._here.scatter(cut[order.name], parameter)
        failed: list[str] = []
        for order, made in self._hosted(orders, begins, gradients, kept, epoch):
            if made is None:
                failed.append(order.name)
                continue
            pieces[order.name], after[order.after] = made
        for order in orders:
            if order.method == "adamw":
                pieces[order.name], after[order.after] = self._steps.adamw(
                    self._own(order.name),
                    gradients.pop(order.name),
                    _state(order, kept),
                    epoch,
                )
        matrices = [order for order in orders if order.method == "muon"]
        for order, (fresh, state) in self._muon(matrices, cut, gradients, kept, epoch):
            pieces[order.name] = fresh
            after[order.after] = state
        fresh = {
            name: whole
            for name, piece in sorted(pieces.items())
            if (whole := self._here.gather(cut[name], piece)) is not None
        }
        return {number: _pieces(state) for number, state in after.items()}, fresh, failed

    @lost_is_a_fault()
    def keep(
        self,
        name: str,
        host: int,
        shapes: Mapping[str, tuple[int, int]],
        state: Mapping[str, Tensor] | None = None,
    ) -> State:
        """Distribute the state of a part, and return this rank's pieces. Rank 0 gives the whole
        tensors, the other ranks None."""
        given = state or {}
        return {
            key: self._here.scatter(
                cut_at(host, name, shape, self._here.size), given.get(key)
            ).clone()
            for key, shape in shapes.items()
        }

    @lost_is_a_fault()
    def collect(
        self, name: str, host: int, shape: tuple[int, int], piece: Tensor | None
    ) -> Tensor | None:
        """Gather a tensor of the state of a part from the ``piece`` of each rank, if it has one.
        Returns the whole tensor at rank 0, None at the other ranks."""
        cut = cut_at(host, name, shape, self._here.size)
        if piece is None:
            piece = torch.empty(cut.shape(self._here.rank))
        return self._here.gather(cut, piece)

    def _own(self, name: str) -> Tensor:
        return local_part(self._program.parameters[name].detach())

    def _muon(
        self,
        orders: Sequence[PartOrder],
        cut: Mapping[str, Sharded],
        gradients: dict[str, Tensor],
        kept: Mapping[int, State],
        epoch: int,
    ) -> list[tuple[PartOrder, tuple[Tensor, State]]]:
        settings = self._settings
        lr = self._steps.rate("muon", epoch)
        directions: dict[str, Tensor] = {}
        states: dict[str, State] = {}
        for order in orders:
            gradient = gradients.pop(order.name)
            momentum = _state(order, kept).get("momentum")
            if momentum is None:
                momentum = torch.zeros_like(gradient)
            directions[order.name], momentum = muon_direction(settings, gradient, momentum)
            states[order.name] = {"momentum": momentum}
        fresh: dict[str, Tensor] = {}
        shapes = {order.name: order.shape for order in orders}

        def apply(name: str, update: Tensor) -> None:
            fresh[name] = muon_fresh(settings, self._own(name), update, lr, shapes[name])
            # Its numbers are in the exchange's buffers; the next ones need the memory.
            del directions[name]

        self._product([cut[order.name] for order in orders]).run(directions, apply)
        for order in orders:
            if order.name not in fresh:  # this rank has no number of it
                fresh[order.name] = directions[order.name]
        return [(order, (fresh[order.name], states[order.name])) for order in orders]

    def _product(self, matrices: Sequence[Sharded]) -> TensorParallelStep:
        """The exchange for these matrices. The latest exchange is kept; its buffers are freed
        before those of another are made."""
        key = tuple(matrices)
        if key not in self._products:
            self._products.clear()
            self._products[key] = TensorParallelStep(
                self._here,
                matrices,
                self._settings.ns_steps,
                stack=self._settings.stack,
                coefficients=self._settings.coefficients,
            )
        return self._products[key]

    def _hosted(
        self,
        orders: Sequence[PartOrder],
        begins: Mapping[str, Tensor],
        gradients: dict[str, Tensor],
        kept: Mapping[int, State],
        epoch: int,
    ) -> list[tuple[PartOrder, tuple[Tensor, State] | None]]:
        """Step whole matrices at their hosts, in parallel. Returns this rank's pieces of each
        result; None for a step that failed."""
        hosted = [order for order in orders if order.host >= 0]
        made: dict[str, tuple[Tensor, State]] = {}
        for order in hosted:
            gradient = gradients.pop(order.name)
            if order.host != self._here.rank:
                made[order.name] = begins[order.name], {}
                continue
            with suppress(StepFault):
                made[order.name] = self._steps.wrapped(
                    order.name, begins[order.name], gradient, _state(order, kept), epoch
                )
        found: list[tuple[PartOrder, tuple[Tensor, State] | None]] = []
        for order in hosted:
            fine = self._agreed(order.host, order.name in made)
            found.append((order, made[order.name] if fine else None))
        return found

    def _agreed(self, host: int, fine: bool) -> bool:
        """Return the host's value of ``fine`` at every rank."""
        said = torch.tensor([float(fine)], device=self._here.device.device)
        dist.broadcast(said, host)
        return bool(said)


class CutTensor(RemoteTensor):
    """A tensor of a part's state in pieces at the ranks. ``piece``: the piece of rank 0;
    ``handle``: key of the part's state at the other ranks."""

    def __init__(
        self,
        box: "CutSteps",
        name: str,
        key: str,
        shape: tuple[int, int],
        *,
        host: int,
        handle: Handle,
        piece: Tensor | None,
    ) -> None:
        super().__init__(shape)
        self.handle = handle
        self.piece = piece
        self._box = box
        self._name = name
        self._key = key
        self._host = host

    def collect(self) -> Tensor:
        return self._box.reader.submit(self._collect).result()

    def _collect(self) -> Tensor:
        words = {
            "number": self.handle.number,
            "key": self._key,
            "name": self._name,
            "host": self._host,
            "shape": list(self.shape),
        }
        rows, cols = self.shape
        with self._box.ranks.command("collect", **words):
            whole = self._box.mine.collect(self._name, self._host, (rows, cols), self.piece)
        return cast(Tensor, whole)

    def off_device(self) -> HeldTensor:
        if self._box.on_cpu:
            return self
        return self.collect()


class CutSteps:
    """Rank 0's control of the steps over all ranks; for an owner it is a
    :class:`~node.optim.steps.Steps`."""

    def __init__(
        self, ranks: Ranks, program: Program, settings: OptimSettings, epochs: int
    ) -> None:
        self.ranks = ranks
        self.mine = RankSteps(program, settings, epochs)
        self.on_cpu = not program.here.device.is_cuda
        # A thread of low priority, as the writer of checkpoints is, must not hold the ranks up.
        self.reader = ThreadPoolExecutor(1, "state-reader")
        self._size = program.here.size
        self._settings = settings
        self._alone = PartSteps(settings, epochs)
        self._lock = threading.Lock()
        self._hosts: dict[str, int] = {}
        self._hosted = [0] * self._size
        """Bytes of the state of hosted parts, by rank."""

    def keep(self, name: str, state: Mapping[str, Tensor]) -> HeldState:
        """Distribute the state of a part to the ranks. Raises DeviceLost."""
        if not stepped_in_pieces(name):
            return state
        moved = {key: t for key, t in state.items() if key != COUNT}
        shapes = {key: (t.shape[0], t.shape[1]) for key, t in moved.items()}
        moment = next(iter(shapes.values()))
        host = self._host(name, moment)
        handle = self.ranks.handle()
        with self.ranks.command("keep", number=handle.number, name=name, host=host, shapes=shapes):
            pieces = self.mine.keep(name, host, shapes, moved)
        count = state[COUNT]
        return self._held(name, shapes, host, handle=handle, pieces=pieces, count=count)

    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        states: Mapping[str, HeldState],
        epoch: int,
    ) -> Stepped:
        """Make one step of each part in ``gradients``. Sharded parts begin from the ranks' own
        parameters, which are the ones in place. Raises StepFault, DeviceLost."""
        names = [name for name in sorted(gradients) if stepped_in_pieces(name)]
        alone = {name: g for name, g in gradients.items() if not stepped_in_pieces(name)}
        # Kept to the end of the step: the other ranks free a state when its handle is freed here.
        held = {name: states.get(name, {}) for name in gradients}
        fresh, staged = self._alone.step(parameters, alone, held, epoch)
        for name in names:
            check_finite([name], torch.linalg.vector_norm(gradients[name]).view(1))
        if not names:
            return fresh, staged
        handles = {name: self.ranks.handle() for name in names}
        orders = [self._order(name, parameters[name], held[name], handles[name]) for name in names]
        kept = {
            order.before: {
                key: t.piece
                for key, t in held[order.name].items()
                if isinstance(t, CutTensor) and t.piece is not None
            }
            for order in orders
            if order.before
        }
        wholes = {
            name: (parameters[name].detach(), gradients[name].detach().float()) for name in names
        }
        with self.ranks.command(
            "step",
            orders=[asdict(order) for order in orders],
            epoch=epoch,
            rule=asdict(followed("cpu" if self.on_cpu else "cuda")),
        ):
            pieces, made, failed = self.mine.step(orders, epoch, kept, wholes)
        if failed:
            raise StepFault(
                f"{failed[0]} cannot be stepped on its local device", "take a smaller learning rate"
            )
        counts = next_counts([_counted(held[name]) for name in names])
        for order, count in zip(orders, counts, strict=True):
            shapes = _shapes(order.name, order.shape, self._settings)
            staged[order.name] = self._held(
                order.name,
                shapes,
                order.host,
                handle=handles[order.name],
                pieces=pieces[order.after],
                count=count,
            )
        return fresh | made, staged

    def _order(self, name: str, parameter: Tensor, state: HeldState, handle: Handle) -> PartOrder:
        rows, cols = parameter.shape
        before = next((t.handle for t in state.values() if isinstance(t, CutTensor)), Handle(0))
        count = 0
        if before.number:
            count = int(_counted(state)[COUNT].item())
        return PartOrder(
            name,
            (rows, cols),
            method_of(name, (rows, cols), self._settings),
            self._host(name, (rows, cols)),
            before.number,
            handle.number,
            count,
        )

    def _host(self, name: str, shape: tuple[int, int]) -> int:
        """The rank that steps the whole part, chosen when the part is seen first: the rank that
        hosts the fewest bytes. -1 for a part that stays sharded."""
        if method_of(name, shape, self._settings) not in WRAPPED:
            return -1
        with self._lock:
            if name not in self._hosts:
                host = self._hosted.index(min(self._hosted))
                self._hosts[name] = host
                self._hosted[host] += state_bytes(name, shape, self._settings)
            return self._hosts[name]

    def _held(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, int]],
        host: int,
        *,
        handle: Handle,
        pieces: State,
        count: Tensor,
    ) -> HeldState:
        held: dict[str, HeldTensor] = {
            key: CutTensor(self, name, key, shape, host=host, handle=handle, piece=pieces.get(key))
            for key, shape in shapes.items()
        }
        held[COUNT] = count
        return held


def _counted(state: HeldState) -> State:
    """The count of steps of a part's state; empty before the first step."""
    return {key: t for key, t in state.items() if key == COUNT and isinstance(t, Tensor)}


def _shapes(
    name: str, shape: tuple[int, int], settings: OptimSettings
) -> dict[str, tuple[int, int]]:
    """Shapes of the state of a sharded or hosted part, by name."""
    found = state_shapes(name, shape, settings)
    return {key: (of[0], of[1]) for key, of in found.items() if key != COUNT}


def _state(order: PartOrder, kept: Mapping[int, State]) -> State:
    """This rank's pieces of a part's state, in the form that a step takes; empty before the first
    step."""
    if not order.before:
        return {}
    return kept[order.before] | {COUNT: torch.tensor([float(order.count)])}


def _pieces(state: State) -> State:
    return {key: tensor for key, tensor in state.items() if key != COUNT}
