"""Cost of a stage in bytes and operations, and the verdict on its fit into memory; both known
before anything is loaded.

Pure arithmetic over the shapes. ``RESERVE`` covers torch's own memory (kernels' scratch space,
fragmentation).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from node.core.errors import OutOfResources
from node.core.ids import ENDS, stage_name
from node.core.numbers import human, in_words
from node.model.settings import ModelSettings
from node.model.shapes import (
    EMBEDDING,
    base_shapes,
    count,
    head_dim,
    layers_of,
    parameter_shapes,
)

RESERVE = 0.1
"""Share of the memory that a plan leaves free."""
RECOMPUTE = ("off", "layers", "stage")
"""Ways to keep a micro-batch for the backward of a stage with layers, largest first: keep
everything; keep the input of every layer, and compute the layers again one by one; keep the input
of the stage, and compute it again whole. The gradients are the same to the bit."""
LOGITS_AT_ONCE = 1 << 24
"""Logits (numbers, not bytes) that one piece of the loss may hold in a plan; 64 MiB in fp32."""
LOGITS_LEAST = 1 << 22
"""The same where memory is short."""


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """Bytes of averaging and stepping on one peer, in the same memory as the stage. ``optimizer``:
    its share of the cell's optimizer state; ``staged``: the new state of its own parts after a
    step, until the new version is settled; ``exchange``: contributions and fresh parts of the
    groups under way; ``step``: scratch of a step, and ``shelf``: the part of it that is kept for
    the next step; ``outer``: state of the rounds between cells."""

    optimizer: int = 0
    staged: int = 0
    exchange: int = 0
    step: int = 0
    shelf: int = 0
    outer: int = 0

    def shared(self, part: float) -> "RoundBytes":
        """The bytes for ``part`` of the layers: state and outer rounds grow with them, groups and
        steps with their largest matrix."""
        return replace(
            self,
            optimizer=int(self.optimizer * part),
            staged=int(self.staged * part),
            outer=int(self.outer * part),
        )


NO_ROUNDS = RoundBytes()


class MemoryRow(NamedTuple):
    """A line of the plan of memory: bytes of ``what``, there while ``when``."""

    when: str
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of one stage on one peer. ``copies`` (of fp32 weights, in 16 bits) are held from the
    first forward on. ``stash`` (activations of ``stashed`` micro-batches), ``shares`` (gradients of
    ``uncounted`` micro-batches) and ``work`` (scratch of one forward and backward) are taken while
    micro-batches pass. ``before`` (the fresh parameters, then the parameters of the version before)
    is taken while gradients are averaged and stepped. Never both: the stash is empty when a round
    begins, and the memory of a round is free before the next plan."""

    parameters: int
    copies: int
    gradients: int
    stashed: int
    stash: int
    shares: int
    uncounted: int
    work: int
    before: int
    rounds: RoundBytes

    @property
    def kept(self) -> int:
        """Bytes held all the time."""
        r = self.rounds
        weights = self.parameters + self.copies
        return weights + self.gradients + r.optimizer + r.outer + r.shelf

    @property
    def passes(self) -> int:
        """Bytes taken while micro-batches pass."""
        return self.stash + self.shares + self.work

    @property
    def round(self) -> int:
        """Bytes taken while gradients are averaged and stepped."""
        r = self.rounds
        return self.before + r.staged + r.exchange + r.step - r.shelf

    @property
    def total(self) -> int:
        """Most bytes at any time."""
        return self.kept + max(self.passes, self.round)

    @property
    def table(self) -> tuple[MemoryRow, ...]:
        """Rows of the table of memory: held always, while micro-batches pass, and in rounds."""
        r = self.rounds
        always = "always"
        passes = "while micro-batches pass"
        stepped = "in averaging and steps"
        return (
            MemoryRow(always, "parameters", self.parameters),
            MemoryRow(always, "their copies in 16 bits", self.copies),
            MemoryRow(always, "gradients", self.gradients),
            MemoryRow(always, "optimizer", r.optimizer),
            MemoryRow(always, "rounds between cells", r.outer),
            MemoryRow(always, "kept for steps", r.shelf),
            MemoryRow(passes, f"activations of {self.stashed} micro-batches", self.stash),
            MemoryRow(passes, f"gradients of {self.uncounted} under way", self.shares),
            MemoryRow(passes, "work space", self.work),
            MemoryRow(stepped, "the version before", self.before),
            MemoryRow(stepped, "its optimizer state", r.staged),
            MemoryRow(stepped, "groups under way", r.exchange),
            MemoryRow(stepped, "steps", r.step - r.shelf),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of :func:`fits`: ``text`` is one sentence with the numbers, ``table`` has the
    parts, ``spare`` is left for optimizer state, ``recompute`` is one of :data:`RECOMPUTE`,
    ``logits`` is the number that one piece of the loss may hold, ``casts`` is False where there is
    no room to compute in 16 bits, which the processor could do. ``older``: the plan is for a GPU
    that may compute in fp32 too."""

    ok: bool
    needed: int
    available: int
    text: str
    spare: int = 0
    next_step: str = ""
    recompute: str = "off"
    table: tuple[MemoryRow, ...] = ()
    logits: int = LOGITS_AT_ONCE
    casts: bool = True
    older: bool = False

    @property
    def parts(self) -> list[str]:
        """The parts of the memory that is needed, a phrase for each time."""
        return in_words(self.table)

    def require(self) -> None:
        """Raises OutOfResources when it does not fit."""
        if not self.ok:
            raise OutOfResources(self.text, self.next_step)


def stash_bytes(
    settings: ModelSettings,
    stages: int,
    stage: int,
    micro_batch: int,
    recompute: str = "off",
    masked: bool = False,
    *,
    cast: bool = False,
) -> int:
    """Bytes kept for one micro-batch of ``micro_batch`` sequences from its forward to its backward,
    fp32.

    That is every tensor autograd saves, as counted by torch's saved-tensor hooks on the CPU, and
    the output, or the part of them that ``recompute`` leaves. The ends keep token ids, the hidden
    states they sent and got back, and for their own layers the tensors of a block stage. ``cast``:
    fp32 parameters are computed with under bf16 autocast.
    """
    tokens = micro_batch * settings.seq_len
    d = settings.d_model
    beside = tokens * 4 * d
    if stage == ENDS:
        beside = tokens * (2 * 4 * d + 2 * 8)
    layers = len(layers_of(settings, stages, stage))
    if recompute != "off":
        if recompute == "layers":
            beside += layers * tokens * 4 * d
        return beside
    return beside + layers * graph_bytes(settings, tokens, masked, cast=cast)


def cast_bytes(settings: ModelSettings, stages: int, stage: int) -> int:
    """Bytes of the 16-bit copies of fp32 weights that products under autocast read: of the layers,
    and of the head."""
    head = 0
    if stage == ENDS:
        head = settings.vocab * settings.d_model
    one = replace(settings, layers=1, ends_layers=0)
    numbers = count(parameter_shapes(one, 1, 1))
    frozen = 0
    if settings.adapter:
        frozen = count(base_shapes(one, 1, 1))
    return 2 * ((numbers + frozen) * len(layers_of(settings, stages, stage)) + head)


def frames_bytes(settings: ModelSettings, micro_batch: int) -> int:
    """Bytes in fp32 of a block stage's input and output for one micro-batch."""
    return 2 * 4 * micro_batch * settings.seq_len * settings.d_model


def graph_bytes(
    settings: ModelSettings, tokens: int, masked: bool = False, *, cast: bool = False
) -> int:
    """Bytes that autograd keeps of one layer for ``tokens`` tokens, fp32. Where documents are kept
    apart (``masked``) attention's output counts twice: once by document, once whole. ``cast``:
    under bf16 autocast."""
    d = settings.d_model
    q = settings.heads * head_dim(settings)
    kv = settings.kv_heads * head_dim(settings)
    queries = 2 * q
    if masked:
        queries = 3 * q
    if cast:
        # Norms are in fp32 and keep input, normalised input and root. Each of the five projections
        # that read their output keeps a bf16 copy of it.
        bytes_each = 2 * 4 * (2 * d + 1) + 5 * 2 * d
        bytes_each += 2 * (queries + 2 * kv + 4 * settings.d_ff)
        bytes_each += 4 * settings.heads
        if settings.qk_norm:
            bytes_each += 4 * (2 * (q + kv) + settings.heads + settings.kv_heads)
        return tokens * bytes_each
    # Each norm keeps its input, the normalised input, its output (input of the projections) and one
    # root a token.
    per_token = 2 * (3 * d + 1)
    # Attention keeps rotated q and k, v, its output and one log-sum a head; q/k norms keep as the
    # others do.
    per_token += queries + 2 * kv + settings.heads
    if settings.qk_norm:
        per_token += 2 * (q + kv) + settings.heads + settings.kv_heads
    # SwiGLU keeps gate, silu(gate), up and their product.
    per_token += 4 * settings.d_ff
    return tokens * 4 * per_token


def uncounted_shares(hops: int) -> int:
    """Number of micro-batches for which a peer holds gradients of its parameters at once. ``hops``:
    backward passes between its own and the end of the path, where a micro-batch counts.

    One is being made. The others wait: a backward takes two thirds of the time in which a peer ends
    one, and waits for half a forward, so that a hop takes five sixths of it.
    """
    return 1 + (5 * hops + 3) // 6


def work_bytes(
    settings: ModelSettings,
    stages: int,
    stage: int,
    micro_batch: int,
    recompute: str = "off",
    masked: bool = False,
    *,
    cast: bool = False,
    logits: int = LOGITS_AT_ONCE,
) -> int:
    """Bytes of the largest passing tensors of one backward. In layers these are the SwiGLU's
    gradients, the tensors that come in and go out, and the ones that are computed again. In the
    head they are logits and their gradients, at most ``logits`` at once, and at least those of one
    token. The ends go through one of them at a time. ``cast``: as for :func:`stash_bytes`."""
    tokens = micro_batch * settings.seq_len
    layers = len(layers_of(settings, stages, stage))
    head = through = 0
    if stage == ENDS:
        # logits, log-probabilities, gradient
        head = 3 * 4 * min(tokens * settings.vocab, max(logits, settings.vocab))
    if layers:
        again = {"off": 0, "layers": 1, "stage": layers}[recompute]
        through = (
            4 * tokens * (3 * settings.d_ff + 2 * settings.d_model)
            + frames_bytes(settings, micro_batch)
            + again * graph_bytes(settings, tokens, masked, cast=cast)
        )
    return max(head, through)


def stage_bytes(
    settings: ModelSettings,
    stages: int,
    stage: int,
    *,
    micro_batch: int = 16,
    in_flight: int = 8,
    rounds: RoundBytes = NO_ROUNDS,
    recompute: str = "off",
    width: int = 4,
    masked: bool = False,
    cast: bool = False,
    logits: int = LOGITS_AT_ONCE,
) -> StageBytes:
    """Plan the memory of ``stage`` on one peer with ``in_flight`` micro-batches stashed, together
    with the memory of ``rounds``. ``width``: bytes of a parameter, and of its gradient by one
    micro-batch; gradients are summed in fp32. ``cast``: as for :func:`stash_bytes`, and the copies
    of :func:`cast_bytes` are kept; ``logits``: as for :func:`work_bytes`.

    Raises UsageFault for a shape, cut or stage that does not exist.
    """
    numbers = count(parameter_shapes(settings, stages, stage))
    trained = width * numbers
    kept = 0
    if settings.adapter:
        kept = width * count(base_shapes(settings, stages, stage))
    copies = 0
    if cast:
        copies = cast_bytes(settings, stages, stage)
    one = (settings, stages, stage, micro_batch, recompute, masked)
    waiting = stash_bytes(*one, cast=cast)
    # Of a micro-batch there are activations or gradients, both of the one in its backward.
    uncounted = 1
    if trained > waiting:
        place = stage
        if stage == ENDS:
            place = stages
        uncounted = min(in_flight, uncounted_shares(place))
    return StageBytes(
        parameters=kept + trained,
        copies=copies,
        gradients=4 * numbers,
        stashed=in_flight + 1 - uncounted,
        stash=(in_flight + 1 - uncounted) * waiting,
        shares=uncounted * trained,
        uncounted=uncounted,
        work=work_bytes(*one, cast=cast, logits=logits),
        before=trained,
        rounds=rounds,
    )


def flops_per_token(settings: ModelSettings, stages: int, stage: int) -> int:
    """Floating-point operations one token costs at ``stage``: 2 a weight forward, 4 backward (2
    where the weight is not trained), plus the attention scores.

    Attention counts the causal half: T/2 keys a query on average; where documents are kept apart it
    takes fewer. An embedding look-up is free, the
    head is a matrix.
    """
    weights = sum(
        count({name: shape})
        for name, shape in base_shapes(settings, stages, stage).items()
        if len(shape) == 2 and name != EMBEDDING
    )
    trained = 0
    if settings.adapter:
        trained = count(parameter_shapes(settings, stages, stage))
    if stage == ENDS and settings.tied:
        weights += settings.vocab * settings.d_model
    heads = settings.heads * head_dim(settings)
    scores = len(layers_of(settings, stages, stage)) * 2 * settings.seq_len * heads
    if settings.adapter:
        return 4 * weights + 6 * trained + 3 * scores
    return 3 * (2 * weights + scores)


def fits(
    settings: ModelSettings,
    stages: int,
    stage: int,
    available: int,
    *,
    micro_batch: int = 16,
    in_flight: int = 8,
    rounds: RoundBytes = NO_ROUNDS,
    recompute: str = "off",
    width: int = 4,
    masked: bool = False,
    cast: bool = False,
    logits: int = LOGITS_AT_ONCE,
) -> Verdict:
    """Verdict on ``stage`` in ``available`` bytes with ``RESERVE`` of them left free. The rest as
    for :func:`stage_bytes`.

    Call ``.require()`` on the verdict to refuse before loading.
    """
    held = _layers(settings, stages, stage)

    def size(
        stages: int = stages,
        stage: int = stage,
        micro_batch: int = micro_batch,
        in_flight: int = in_flight,
    ) -> StageBytes:
        return stage_bytes(
            settings,
            stages,
            stage,
            micro_batch=micro_batch,
            in_flight=in_flight,
            rounds=rounds.shared(_layers(settings, stages, stage) / held),
            recompute=recompute,
            width=width,
            masked=masked,
            cast=cast,
            logits=logits,
        )

    need = size()
    limit = available * (1 - RESERVE)
    ok = need.total <= limit
    table = need.table
    where = stage_name(stage)
    verbs = ("take", "do not fit: they take")
    if stage != ENDS:
        where += f" of {stages}"
        verbs = ("takes", "does not fit: it takes")
    text = (
        f"{where} {verbs[not ok]} {human(need.total)} of {human(available)} "
        f"({RESERVE:.0%} kept free)"
    )
    if not ok:
        text += f": {'; '.join(in_words(table))}"
    if recompute != "off":
        text += f"; of a micro-batch the input of {_KEPT[recompute]} is kept"
    free = int(limit) - (need.kept - rounds.optimizer)
    # State that is owned stands twice in a round.
    spare = min(free - need.passes, (free - (need.round - rounds.staged)) // 2)
    if ok:
        return Verdict(ok, need.total, available, text, max(0, spare), "", recompute, table, logits)
    flights = (n for n in range(in_flight - 1, 0, -1) if size(in_flight=n).total <= limit)
    batches = (
        n
        for n in range(micro_batch - 1, 0, -1)
        if micro_batch % n == 0 and size(micro_batch=n).total <= limit
    )
    steps = ["a device with more memory"]
    steps += [
        f"fewer micro-batches in flight here (--set limits.in_flight={n})"
        for n in islice(flights, 1)
    ]
    steps += [f"a run with pipeline.micro_batch = {n}" for n in islice(batches, 1)]
    if stage == ENDS:
        # Embedding and head stand whole at the ends, into however many stages the layers are cut.
        steps += [
            "a block stage here (--role stage)",
            "a run with a smaller model.vocab or model.d_model",
        ]
        if settings.ends_layers:
            steps.append("a run with a smaller model.ends_layers")
    else:
        cuts = (
            n
            for n in range(stages + 1, settings.layers - settings.ends_layers + 1)
            if size(stages=n, stage=1).total <= limit
        )
        steps += [f"a run with pipeline.stages = {n}" for n in islice(cuts, 1)]
    return Verdict(ok, need.total, available, text, 0, _one_of(steps), recompute, table, logits)


def _layers(settings: ModelSettings, stages: int, stage: int) -> int:
    if stage == ENDS:
        return 1
    return len(layers_of(settings, stages, stage))


_KEPT = {"layers": "every layer", "stage": "the stage"}


def _one_of(steps: Sequence[str]) -> str:
    *others, last = steps
    if not others:
        return f"take {last}"
    return f"take {', '.join(others)}, or {last}"


def fits_beside(stage: int, stages: int, needed: int, available: int, *, windows: bool) -> Verdict:
    """Verdict on the main memory of a stage on a device with memory of its own: ``needed`` bytes
    for ``stage`` in ``available`` bytes with ``RESERVE`` of them left free. ``windows``: some of
    them are of rounds between cells."""
    ok = needed <= available * (1 - RESERVE)
    verb = "need"
    if not ok:
        verb = "do not fit: they need"
    text = (
        f"new parameters and checkpoints of stage {stage} of {stages} {verb} {human(needed)} of "
        f"{human(available)} main memory "
        f"({RESERVE:.0%} kept free), beside the device's"
    )
    steps = ["a machine with more memory"]
    if stage != ENDS:
        steps.append("more stages")
    if windows:
        steps.append('a run with outer.carries = "parameters"')
    return Verdict(ok, needed, available, text, next_step=_one_of(steps))
