"""The arithmetic of one visit: forward, loss, backward. Runs on the device thread and nowhere else.

Activations are (sequences B, length T, width D) fp32 at every boundary; inside, the autocast
context decides.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.memory import let_go
from node.model.device import brought, free_cached, out_of_memory
from node.model.documents import ends_of, untrained_in, within
from node.model.lanes import Lanes, Mark
from node.model.products import PassThreads, of_texts
from node.model.stages import Blocks, Ends
from node.model.text_cache import TextCache, Turn, text_bytes
from node.pipeline.events import Crossing, Direction
from node.pipeline.frames import FrameReader
from node.pipeline.gradients import Share
from node.pipeline.guard import check_output, check_share, norm_of_share
from node.pipeline.settings import forward_only_wire
from node.wire.sketch import Sketch
from node.wire.sketcher import VALUES, Sketcher, read_sketch
from node.wire.tensors import Encoded, TensorReader, begin_encoding

T = TypeVar("T")
Autocast = Callable[[], AbstractContextManager[object]]
Gradients = Callable[[Tensor, Sequence[Tensor], Tensor | None], tuple[Tensor | None, ...]]
"""As ``torch.autograd.grad(output, inputs, gradient)``; None for inputs without influence."""
MEASURED = 8
"""One in this number of a stage's encodings has its relative error measured."""
COMPUTE_ERRORS = (RuntimeError, ValueError, IndexError, OSError, MemoryError, WireError)
"""Errors of a broken micro-batch: torch's own errors (out of memory among them), bad numbers, bad
data."""


class EndsModule(Protocol):
    """Methods of stage 0; ``node.model.stages.Ends`` has them."""

    def embed(self, tokens_BT: Tensor, document_ends: Sequence[int] = ()) -> Tensor: ...
    def logits(self, h_BTD: Tensor) -> Tensor: ...
    def loss(self, h_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, int]: ...


@dataclass(slots=True)
class VisitBuffers:
    """Tensors kept for one visit: input, graph, output. Fields are dropped as soon as nothing needs
    them."""

    deadline: float
    shape: tuple[int, ...]
    origin: PeerId | None = None
    """The peer to which the stash charges it."""
    batch: Callable[[], tuple[Tensor, Tensor]] | None = None
    targets: Tensor | None = None
    input: FrameReader | None = None
    document_ends: tuple[int, ...] = ()
    """Document ends of the input, or of the batch."""
    untrained: int = 0
    """Number of its tokens that end no document and are not trained on."""
    gradient: TensorReader | None = None
    x: Tensor | None = None
    """Hidden states that came in; at the first hop of a micro-batch, its tokens."""
    y: Tensor | None = None
    output: memoryview | None = None
    upstream: memoryview | None = None
    """Gradient of the input as bytes, kept until the previous hop is DONE with it."""
    wires: dict[Direction, str] = field(default_factory=dict)
    """Wire formats of the output (FORWARD) and of the input's gradient (BACKWARD); the run's format
    for a missing entry."""
    errors: dict[Direction, float] = field(default_factory=dict)
    """Relative errors of these two encoded tensors, if they were measured."""
    sketches: dict[Crossing, Sketch] = field(default_factory=dict)
    """Sketches of the tensors that were received and sent so far."""
    share: Share | None = None
    leaving: "Leaving | None" = None
    """A result that the device may still be computing."""
    loss_sum: float = 0.0
    tokens: int = 0
    nbytes: int = 0
    """Bytes that the stash counts for it."""
    dead: bool = False
    """Freed while its job was queued; the job then does nothing."""

    def free_graph(self) -> None:
        """Free the tensors that only a backward needs."""
        held: list[object] = [self.input, self.gradient, self.x, self.y, self.output, self.targets]
        self.input = self.gradient = self.x = self.y = self.output = self.targets = None
        let_go(held, self.nbytes)


@dataclass(frozen=True, slots=True)
class Leaving:
    """The result of one direction of a visit, still on the device and not yet checked.

    ``encoded``: the tensor for the next hop in its wire format; None if there is no next hop.
    ``share``: the parameter gradients; None for a forward. ``share_look``: a scalar as
    :func:`~node.pipeline.guard.norm_of_share` makes it. ``losses``: the loss sum of each slice, in
    nats. ``sketches``: as :meth:`~node.wire.sketcher.Sketcher.sketch` makes them. ``together``: all
    :meth:`looks` and the sketches in one tensor, None if there are none, or before
    :meth:`gathered`.
    """

    way: Direction
    encoded: Encoded | None
    share: Share | None = None
    share_look: Tensor | None = None
    losses: tuple[Tensor, ...] = ()
    sketches: Mapping[Crossing, Tensor] = field(default_factory=dict)
    together: Tensor | None = None

    def looks(self) -> list[Tensor]:
        """All scalars to check: the scalars of the tensor, then of the share, then the losses."""
        found: list[Tensor] = []
        if self.encoded is not None:
            found += self.encoded.looks
        if self.share_look is not None:
            found.append(self.share_look)
        return [*found, *self.losses]

    def gathered(self) -> "Leaving":
        """The same with ``together``, which is computed here: after the job's mark it would come
        behind the next job, and be read before it is done."""
        parts = list(self.sketches.values())
        if looks := self.looks():
            parts.insert(0, torch.stack(looks))
        if not parts:
            return self
        return replace(self, together=torch.cat(parts))


@dataclass(frozen=True, slots=True)
class TextStep:
    """The next ``count`` tokens of one text at one stage.

    ``tokens``: their ids [n] at the ends, where the text enters the model; ``input``: their hidden
    states at other stages. ``past``: number of tokens in the cache before them; tokens behind are
    forgotten. ``positions``: number of last positions of which the output is wanted; 0: all.
    """

    cache: TextCache
    past: int
    count: int
    tokens: Tensor | None = None
    input: FrameReader | None = None
    positions: int = 0


class StageMath:
    """Forward and backward of the module this peer hosts.

    Gradients are made by ``torch.autograd.grad`` into fresh tensors, so a backward that fails
    half-way leaves nothing behind. A result that is not finite raises NotFinite. If copies run
    concurrently with computations (``lanes``), a job of a visit only issues its computations, and
    :meth:`deliver` checks the result and copies it to the host. Once memory has run out, fewer
    sequences are computed at once. ``graph_bytes``: bytes that one micro-batch keeps for backward,
    by shape, measured at the first forward of that shape.

    ``recompute``: with "layers" the module keeps the input of every layer and computes the layer
    again in backward, with "stage" it keeps only its own input, with "off" it keeps everything.
    ``gradients`` replaces ``torch.autograd.grad`` for a number format that needs a scale.
    """

    recompute: str = "off"
    slice: int = 0
    """Number of sequences that are computed at once since memory ran out; 0: all of a
    micro-batch."""
    on_gpu: bool = False
    lanes: Lanes = Lanes()
    kernels: str = ""
    """Kernels by which the module computes, and why, for people; "" where there was no choice."""
    sketcher: Sketcher | None = None
    """Makes the sketches of the tensors of training work; None makes none."""

    def __init__(
        self,
        module: nn.Module,
        wire: str,
        autocast: Autocast = nullcontext,
        recompute: str = "off",
        gradients: Gradients | None = None,
    ) -> None:
        self.module = module
        self.wire = wire
        self._encodings = 0
        self.autocast = autocast
        self._gradients = gradients
        self.recompute = recompute
        self._ends = cast(EndsModule, module)
        """The module as stage 0 has it; used only there."""
        if isinstance(module, Blocks | Ends):
            module.recompute = recompute == "layers"
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._frozen = not self._trained
        held = (*module.parameters(), *module.buffers())
        self._device = held[0].device if held else torch.device("cpu")
        self.on_gpu = self._device.type == "cuda"
        self.graph_bytes: dict[tuple[int, ...], int] = {}
        self._texts = WeakSet[TextCache]()
        self._pass_threads: PassThreads | None = None
        if isinstance(module, Blocks | Ends) and module.layers and self._device.type == "cpu":
            self._pass_threads = PassThreads(module.extend_first_layer)

    @property
    def caches_texts(self) -> bool:
        """True if the stage can keep keys and values of texts: it is on one device."""
        return isinstance(self.module, Blocks | Ends)

    def pausing(self, pause: Callable[[], None]) -> None:
        """Have ``pause`` called between two layers, forward and backward."""
        if isinstance(self.module, Blocks | Ends):
            self.module.pause = pause

    def use(self, lanes: Lanes) -> None:
        """Use the lanes of the device thread for copies and computations."""
        self.lanes = lanes

    def sketch_as(self, seed: str) -> None:
        """Sketch the tensors of training work from now on; peers with the same ``seed`` make the
        same sketches. "" makes none."""
        self.sketcher = Sketcher(seed) if seed else None

    def receive(self, reader: FrameReader) -> None:
        """Copy a received tensor to the device, in its wire format, and compute its norm there.
        Runs concurrently with the jobs. If the device has no memory for the tensor or the norm, the
        tensor stays on the host and its job copies it. Raises WireError for scales that no encoder
        writes."""
        with self.lanes.uploading():
            try:
                if self.lanes.beside:
                    reader.arrive(self.lanes.up)
                reader.rms()
                return
            except RuntimeError as e:
                if not self.lanes.beside or not out_of_memory(e):
                    raise
            # Only now: the exception kept the memory of the look alive.
            reader.arrive(Tensor.cpu)
            reader.rms()

    # Texts
    # ------------------------------------------------------------

    def text_bytes(self, tokens: int) -> int:
        """Upper bound on the bytes of keys and values that a text of ``tokens`` tokens needs."""
        if not isinstance(self.module, Blocks | Ends):
            return 0
        return text_bytes(self.module.settings, len(self.module.layers), tokens)

    @torch.no_grad()
    def extend_texts(self, steps: Sequence[TextStep]) -> list[memoryview | Exception]:
        """Compute the hidden states after this stage for the next tokens of several texts, in one
        pass. A text that fails has its error in place of the hidden states."""
        module = self.module
        if not isinstance(module, Blocks | Ends):
            raise ValueError("this stage keeps no texts")
        able = [step for step in steps if step.cache.length >= step.past]
        found: dict[int, memoryview | Exception] = {}
        if able:
            self._texts.update(step.cache for step in able)
            for step in able:
                step.cache.cut(step.past)
            turns = [Turn(step.cache, step.count) for step in able]
            count = sum(turn.count for turn in turns)
            with self._computing_texts(), self._threads(count):
                h_ND = module.extend(torch.cat([self._entering(step) for step in able]), turns)
            pieces = h_ND.split([turn.count for turn in turns])
            for step, piece in zip(able, pieces, strict=True):
                found[id(step)] = self._leaving(piece[-step.positions :])
        gone = ValueError("the keys and values of this text are no longer here")
        return [found.get(id(step), gone) for step in steps]

    @torch.no_grad()
    def text_logits(self, readers: Sequence[FrameReader]) -> list[Tensor | Exception]:
        """Logits [p, V], fp32 on the CPU, of the positions [1, p, D] of each text, in one pass."""
        hidden = [self._take(reader)[0] for reader in readers]
        with self._computing_texts():
            logits_NV = self._ends.logits(torch.cat(hidden)).float().cpu()
        return [*logits_NV.split([len(h_pD) for h_pD in hidden])]

    def _entering(self, step: TextStep) -> Tensor:
        """Hidden states [n, D] of the new tokens before the layers of this stage."""
        if step.tokens is not None:
            return cast(Ends, self.module).rows(step.tokens.to(self._device))
        return self._take(_there(step.input))[0]

    def _leaving(self, h_nD: Tensor) -> memoryview | Exception:
        try:
            return self._encode(h_nD[None])
        except COMPUTE_ERRORS as e:
            return e

    @contextmanager
    def _computing_texts(self) -> Iterator[None]:
        """The context of a pass over texts; where memory runs out, all of them are forgotten."""
        try:
            # Texts come between two layers of training, whose number format would go on.
            alone = torch.autocast(self._device.type, enabled=False)
            with of_texts(), alone, self.autocast():
                yield
        except (RuntimeError, MemoryError) as e:
            if out_of_memory(e):
                self._forget_texts()
            raise

    def _threads(self, count: int) -> AbstractContextManager[None]:
        """The threads of a pass over ``count`` tokens."""
        if self._pass_threads is None:
            return nullcontext()
        return self._pass_threads.taken(count)

    def _forget_texts(self) -> bool:
        """Free the keys and values of all texts; True if there were any."""
        held = [text for text in self._texts if text.length]
        for text in held:
            text.clear()
        return bool(held)

    # Block stages
    # ------------------------------------------------------------

    def forward(self, work: VisitBuffers) -> None:
        """Input → output; keeps the graph, or the input from which it is made again."""
        came = _there(work.input)
        work.document_ends = came.document_ends
        work.untrained = came.untrained
        self._leave(work, lambda: self._forward(work, came))
        work.input = None
        # As at the ends, where the loss is summed over tokens with a target alone.
        without = len(work.document_ends) + work.untrained
        work.tokens = work.shape[0] * work.shape[1] - without

    def _forward(self, work: VisitBuffers, came: FrameReader) -> Leaving:
        work.x = work.y = None  # of a try that ran out of memory
        x = work.x = self._take(came).requires_grad_()
        y = self._hidden(work, x)
        encoded = self._encode_for(work, Direction.FORWARD, y)
        sketches = self._sketches({Crossing.INPUT: x, Crossing.OUTPUT: y})
        return Leaving(Direction.FORWARD, encoded, sketches=sketches)

    def _hidden(self, work: VisitBuffers, x: Tensor) -> Tensor:
        """Hidden states that a visit passes on. Keeps their graph, unless ``recompute`` is
        "stage"."""
        if self.recompute == "stage":
            self.graph_bytes[work.shape] = 0
            # In the number format of the backward, which computes the same again with gradients.
            with self.autocast():
                return self._forward_only(x, work.document_ends)
        known = work.shape in self.graph_bytes
        with nullcontext() if known else self._measured(work.shape):
            work.y = self._module(x, work.document_ends)
        return work.y

    def backward(self, work: VisitBuffers) -> None:
        """Output gradient → input gradient and this micro-batch's share of the parameter
        gradients."""
        self._leave(work, lambda: self._backward(work))

    def _backward(self, work: VisitBuffers) -> Leaving:
        x = _there(work.x)
        dy = self._take(_there(work.gradient))
        dx, *grads = self._through_graph(work, x, dy)
        back = _some(dx, x)
        encoded = self._encode_for(work, Direction.BACKWARD, back)
        sketches = self._sketches({Crossing.OUTPUT_GRADIENT: dy, Crossing.INPUT_GRADIENT: back})
        share, look = self._share(grads)
        return Leaving(Direction.BACKWARD, encoded, share, look, sketches=sketches)

    def _through_graph(self, work: VisitBuffers, x: Tensor, dy: Tensor) -> Sequence[Tensor | None]:
        """Gradients of ``x`` (None if it holds tokens) and of the parameters, by the graph that the
        forward kept. A graph that it did not keep is made again."""
        y = work.y
        work.y = None  # gone through, a graph cannot be tried again
        if y is not None and self.recompute != "stage":
            return self._grads(y, x, dy)
        del y  # kept from before memory ran out

        def part(x: Tensor, dy: Tensor, ends: tuple[int, ...]) -> Sequence[Tensor | None]:
            return self._grads(self._module(x, ends), x, dy)

        return self._by_slices(part, x, dy, work.document_ends)

    @torch.no_grad()
    def forward_only(
        self, reader: FrameReader, positions: int = 0
    ) -> tuple[memoryview, tuple[int, ...]]:
        """Compute an input whole. Returns (output bytes, their shape): of all positions if
        ``positions`` is 0, else of the last ``positions`` ones."""
        x = self._take(reader)
        y = self._in_memory(len(x), lambda: self._forward_only(x, reader.document_ends))
        y = y[:, -positions:]
        return self._encode(y), tuple(y.shape)

    @torch.no_grad()
    def _forward_only(self, x: Tensor, document_ends: tuple[int, ...]) -> Tensor:
        parts = self._slices(x, self.slice or len(x), document_ends)
        return torch.cat([self._module(part, ends) for part, ends in parts])

    # The ends
    # ------------------------------------------------------------

    def embed(self, work: VisitBuffers) -> None:
        """Tokens → hidden states. Keeps the graph, or the tokens from which it is made again.
        Raises ValueError if the batch is not of the planned shape."""
        tokens, targets = _there(work.batch)()
        work.batch = None
        work.targets = targets
        work.document_ends = ends_of(targets)
        work.untrained = untrained_in(targets)
        if tuple(tokens.shape) != work.shape[:2]:
            raise ValueError(
                f"the batch is {tuple(tokens.shape)}, the plan's micro-batches are {work.shape}"
            )
        self._leave(work, lambda: self._embed(work, tokens))

    def _embed(self, work: VisitBuffers, tokens: Tensor) -> Leaving:
        work.x = work.y = None  # of a try that ran out of memory
        x = work.x = brought(tokens, self._device)
        y = self._hidden(work, x)
        encoded = self._encode_for(work, Direction.FORWARD, y)
        sketches = self._sketches({Crossing.OUTPUT: y})
        return Leaving(Direction.FORWARD, encoded, sketches=sketches)

    def loss(self, work: VisitBuffers) -> None:
        """Hidden states → loss sum in nats, gradient of the hidden states, gradient share of the
        head. ``work`` has the targets."""
        self._leave(work, lambda: self._loss(work))

    def _loss(self, work: VisitBuffers) -> Leaving:
        h = self._take(_there(work.input)).requires_grad_()
        losses: list[Tensor] = []
        work.tokens = 0

        def part(h: Tensor, targets: Tensor, _: tuple[int, ...]) -> Sequence[Tensor | None]:
            with self.autocast():
                total, tokens = self._ends.loss(h, targets)
            found = self._grads(total, h, None)
            losses.append(total.detach())
            work.tokens = work.tokens + tokens
            return found

        dh, *grads = self._by_slices(part, h, _there(work.targets))
        back = _some(dh, h)
        encoded = self._encode_for(work, Direction.BACKWARD, back)
        sketches = self._sketches({Crossing.INPUT: h, Crossing.INPUT_GRADIENT: back})
        share, look = self._share(grads)
        return Leaving(Direction.BACKWARD, encoded, share, look, tuple(losses), sketches)

    def embed_backward(self, work: VisitBuffers) -> None:
        """Gradient of the hidden states → gradient share of the embedding and the first layers; an
        empty share if no parameter is trained."""
        self._leave(work, lambda: self._embed_backward(work))

    def _embed_backward(self, work: VisitBuffers) -> Leaving:
        x = _there(work.x)
        dy = self._take(_there(work.gradient))
        grads: Sequence[Tensor | None] = []
        if not self._frozen:
            _, *grads = self._through_graph(work, x, dy)
        sketches = self._sketches({Crossing.OUTPUT_GRADIENT: dy})
        share, look = self._share(grads)
        return Leaving(Direction.BACKWARD, None, share, look, sketches=sketches)

    @torch.no_grad()
    def embed_only(self, tokens: Tensor, document_ends: Sequence[int] = ()) -> memoryview:
        """Tokens → hidden states as bytes, for forward-only work."""
        x = brought(tokens, self._device)
        ends = tuple(document_ends)
        return self._encode(self._in_memory(len(x), lambda: self._forward_only(x, ends)))

    @torch.no_grad()
    def loss_only(self, reader: TensorReader, targets: Tensor) -> tuple[float, int]:
        h = self._take(reader)
        return self._in_memory(len(h), lambda: self._loss_only(h, targets))

    def _loss_only(self, h: Tensor, targets: Tensor) -> tuple[float, int]:
        size = self.slice or len(h)
        loss_sum = 0.0
        tokens = 0
        for some, beside in zip(h.split(size), targets.split(size), strict=True):
            with self.autocast():
                total, count = self._ends.loss(some, beside)
            loss_sum = loss_sum + total.item()
            tokens = tokens + count
        return loss_sum, tokens

    @torch.no_grad()
    def logits_only(self, reader: TensorReader) -> Tensor:
        """Logits [B, V] of the last position, fp32 on the CPU."""
        with self.autocast():
            return self._ends.logits(self._take(reader))[:, -1].float().cpu()

    # Shared
    # ------------------------------------------------------------

    def _in_memory(self, sequences: int, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, which is called again with smaller slices as long as
        memory runs out. Raises its error once the slices cannot be smaller."""
        while True:
            try:
                return self.lanes.compute(compute)
            except (RuntimeError, MemoryError) as e:
                if not out_of_memory(e):
                    raise
                if not self._forget_texts() and not self._shrink(sequences):
                    raise
            free_cached()  # not in the handler: the exception keeps earlier tensors alive

    def _shrink(self, sequences: int) -> bool:
        """Halve the number of sequences computed at once, and let the stage keep only its input
        from now on. Returns False if there is nothing left to reduce."""
        if self.recompute == "stage" and self.slice == 1:
            return False
        self.recompute = "stage"
        self.slice = max(1, (self.slice or sequences) // 2)
        return True

    def _by_slices(
        self,
        part: Callable[[Tensor, Tensor, tuple[int, ...]], Sequence[Tensor | None]],
        x: Tensor,
        beside: Tensor,
        document_ends: tuple[int, ...] = (),
    ) -> Sequence[Tensor | None]:
        """Gradients of ``x`` (None if it holds tokens) and of the parameters, slice by slice.
        ``part`` computes them for one slice of ``x``, the same slice of ``beside``, and the
        document ends in it."""
        if not 0 < self.slice < len(x):
            return part(x, beside, document_ends)
        inputs: list[Tensor] = []
        total: list[Tensor | None] = [None] * len(self._trained)
        for (some, ends), other in zip(
            self._slices(x, self.slice, document_ends), beside.split(self.slice), strict=True
        ):
            some = some.detach().requires_grad_(x.requires_grad)
            dx, *grads = part(some, other, ends)
            if x.requires_grad:
                inputs.append(_some(dx, some))
            for i, g in enumerate(grads):
                here = total[i]
                if here is None:
                    total[i] = g
                elif g is not None:
                    here.add_(g)
        return [torch.cat(inputs) if inputs else None, *total]

    def _slices(
        self, x: Tensor, size: int, document_ends: tuple[int, ...]
    ) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """``x`` in slices of ``size`` sequences, each with the ends of the documents in it."""
        for i, some in enumerate(x.split(size)):
            yield some, within(document_ends, i * size, len(some), x.shape[1])

    def _take(self, reader: TensorReader) -> Tensor:
        """A received tensor on this device, in fp32. It is copied to the device in its wire
        format."""
        if not self.lanes.beside:
            reader.arrive(self.lanes.up)
        return reader.numbers(self._device)

    def _module(self, x: Tensor, document_ends: tuple[int, ...]) -> Tensor:
        """Hidden states that the stage passes on: the output of a block stage, or the ends'
        embedding of tokens."""
        with self.autocast():
            if isinstance(self.module, Ends):
                return self._ends.embed(x, document_ends)
            return self.module(x, document_ends)

    def _grads(self, output: Tensor, x: Tensor, gradient: Tensor | None) -> list[Tensor | None]:
        """Gradients of ``x`` (None if it holds tokens) and of the trained parameters."""
        inputs = [x] if x.requires_grad else []
        found = self._grad(output, [*inputs, *self._trained.values()], gradient)
        return [*found] if inputs else [None, *found]

    def _grad(
        self, output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        seed = None if gradient is None else gradient.to(output.dtype)
        if self._gradients is not None:
            return self._gradients(output, inputs, seed)
        return torch.autograd.grad(output, inputs, seed, allow_unused=True)

    def _share(self, grads: Sequence[Tensor | None]) -> tuple[Share, Tensor | None]:
        """Parameter gradients by name, and the scalar by which :func:`check_share` will check
        them."""
        share = {name: g for name, g in zip(self._trained, grads, strict=True) if g is not None}
        return share, norm_of_share(list(share.values()))

    def _encode(self, tensor: Tensor) -> memoryview:
        """Encode an activation of forward-only work."""
        made = begin_encoding(tensor, forward_only_wire(self.wire), measure=False)
        together = torch.stack(made.looks)
        after = self.lanes.mark()
        return self._read(made, self._seen(together, after), after)[0]

    def _encode_for(self, work: VisitBuffers, way: Direction, tensor: Tensor) -> Encoded:
        """Begin to encode a visit's result in the number format that the plan names for it. The
        error of one encoding in :data:`MEASURED` is measured."""
        wire = work.wires.get(way, self.wire)
        measure = wire != "fp32" and self._encodings % MEASURED == 0
        begun = begin_encoding(tensor, wire, measure=measure)
        self._encodings += 1
        return begun

    def _leave(self, work: VisitBuffers, compute: Callable[[], Leaving]) -> None:
        """Compute a result of a visit, and keep it for :meth:`deliver`, which synchronous lanes
        call at once. Where memory runs out anywhere in it, the whole is computed again."""
        work.leaving = self._in_memory(work.shape[0], lambda: compute().gathered())
        if not self.lanes.beside:
            self.deliver(work, self.lanes.mark())

    def deliver(self, work: VisitBuffers, after: Mark) -> None:
        """Check the result of a visit's last job and copy it to the host, once the computations
        before ``after`` are done. Raises NotFinite, and ValueError for a loss that is not finite.
        Does nothing if there is no such result."""
        leaving = work.leaving
        work.leaving = None
        if leaving is None or work.dead:
            return
        values = self._seen(leaving.together, after)
        looks = values[: len(leaving.looks())]
        losses = looks[len(looks) - len(leaving.losses) :]
        if not math.isfinite(sum(losses)):
            raise ValueError("the loss is not finite")
        encoded = leaving.encoded
        if encoded is not None:
            data, error = self._read(encoded, looks[: len(encoded.looks)], after)
            if error is not None:
                work.errors[leaving.way] = error
            if leaving.way is Direction.FORWARD:
                work.output = data
            else:
                work.upstream = data
        if leaving.share_look is not None:
            check_share(looks[len(looks) - len(losses) - 1])
        for i, crossing in enumerate(leaving.sketches):
            start = len(looks) + i * VALUES
            numbers = values[start : start + VALUES]
            work.sketches[crossing] = read_sketch(numbers)
        work.share = leaving.share
        work.loss_sum = sum(losses)

    def _sketches(self, tensors: Mapping[Crossing, Tensor]) -> Mapping[Crossing, Tensor]:
        """Sketches of a visit's tensors, still on the device; none without a sketcher."""
        sketcher = self.sketcher
        if sketcher is None:
            return {}
        return {crossing: sketcher.sketch(tensor) for crossing, tensor in tensors.items()}

    def _seen(self, together: Tensor | None, after: Mark) -> list[float]:
        """Values of the scalars in ``together``, which were computed before ``after``, fetched in
        one copy."""
        if together is None:
            return []
        return self.lanes.down(together, after).tolist()

    def _read(
        self, encoded: Encoded, looks: Sequence[float], after: Mark
    ) -> tuple[memoryview, float | None]:
        """The bytes of an encoded tensor, and its relative error, or None if it was not measured.
        Raises NotFinite."""
        check_output(encoded.rms(looks))
        return encoded.read(self.lanes.down(encoded.data, after), looks)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The memory of a tensor in this process."""
        return tensor.untyped_storage()

    @contextmanager
    def _measured(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Measure the bytes that a forward keeps for backward. Weights and their copies are there
        without it."""
        seen = dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            storage = self._storage(tensor)
            seen[storage.data_ptr()] = storage.nbytes()
            # the same tensor would make its own graph node keep itself alive
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        held = [*self.module.parameters(), *self.module.buffers()]
        if isinstance(self.module, Blocks | Ends):
            held += self.module.copies
        own = {self._storage(t).data_ptr() for t in held}
        self.graph_bytes[shape] = sum(seen[data] for data in seen.keys() - own)


def _some(gradient: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or zeros: a loss that does not depend on its input has gradient zero."""
    if gradient is None:
        return torch.zeros_like(like)
    return gradient


def _there(value: T | None) -> T:
    if value is None:
        raise ValueError("what this visit needs was freed")
    return value
