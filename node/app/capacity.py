"""Demands of a run's stage on a machine, before anything is loaded: the memory it may take here,
the verdict on the fit, the cut that fits into machines, and the traffic over the line. Arithmetic
only.

The traffic is reckoned from a manifest and the number of peers that host each stage;
``benchmarks.firsthour.caps`` checks it against the counters of interfaces.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from node.averaging.exchange.events import LET_IN
from node.config import NodeConfig, size_of
from node.core.errors import OutOfResources
from node.core.ids import ENDS, stage_name
from node.core.numbers import human
from node.manifest import Manifest
from node.model.cost import (
    LOGITS_AT_ONCE,
    LOGITS_LEAST,
    RECOMPUTE,
    RESERVE,
    MemoryRow,
    RoundBytes,
    Verdict,
    fits,
    fits_beside,
    frames_bytes,
    stash_bytes,
    uncounted_shares,
)
from node.model.shapes import count, layers_said, parameter_shapes
from node.optim.parts import SCRATCH_KEPT, ParameterPart, parts_of, step_scratch
from node.outer.memory import outer_bytes
from node.pipeline.settings import STASH, TEXTS
from node.telemetry.resources import bf16_units
from node.transport.shared.region import MOST, SUPPORTED
from node.wire.coding.formats import nbytes_of

if TYPE_CHECKING:
    from node.model.device import Device

KERNELS = 112 << 20
"""Bytes of main memory of compiled kernels, which torch's libraries keep for each shape: 42 MiB
after the trials of kernels, and as much again for the shapes of a stage."""
PROCESS = 416 << 20
"""Bytes of main memory of a daemon and its p2pd without a stage, where they cannot be measured."""
AMPLE = 1 << 60
"""Bytes of a main memory that takes anything."""
OVERHEAD = 1.05
"""Bytes on the wire for each byte of a tensor: headers of segments, records and frames, and
acknowledgements of received data."""
FRAME = 1500
"""Bytes that a frame costs beside its tensor, both directions together: head, journey, receipts,
and the note that its share counts."""
MEMBER = 80
"""Bytes of a plan for each member."""
HOP = 8
"""Bytes of a plan for each hop of a path."""
SAMPLE = 7
"""Bytes of a plan for each sequence."""
OWNED = 50
"""Bytes of a plan for each part of the model."""
PLAN = 1500
"""Bytes of a plan beside its members, hops, sequences and parts."""
LOGIT_BYTES = 16
"""Bytes of a GPU for each logit of a piece of the loss: logits in 16 bits and in 32,
log-probabilities, and gradients in both formats."""
LOGITS_MOST = 1 << 28
"""Logits of a piece of the loss however much memory there is. On an H100, 4,096 tokens of a
vocabulary of 49,152 take 41 ms in pieces of 2^24, 14 in pieces of 2^26, and 6 in one."""
IDLE = 1500.0
"""Bytes a second, each way, of a peer that takes part: the directory, heartbeats, probes; and for
each other peer:"""
IDLE_EACH = 300.0


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Main memory that stages cannot have, in bytes. ``others``: of other daemons of this machine,
    without their libraries; ``process``: of each daemon without its stage (interpreter, libraries,
    p2pd); ``libraries``: the part of it that all daemons of this machine have together."""

    others: int = 0
    process: int = 0
    libraries: int = 0

    def of(self, processes: int) -> int:
        """Bytes of ``processes`` daemons without their stages."""
        return processes * self.process - (processes - 1) * self.libraries


NOTHING_TAKEN = MainMemory()


def room_on(
    config: NodeConfig,
    devices: Sequence[Device],
    held: int = 0,
    processes: int = 1,
    taken: MainMemory = NOTHING_TAKEN,
) -> tuple[int, str]:
    """(bytes that a stage may take of these devices together, all alike; a text that explains the
    number where it is not all of a device). Of a GPU no more is counted than is free now, so that
    memory which other programs use, a desktop for instance, is left to them; ``held`` bytes of each
    are used by this peer itself, and count as free. Of main memory that counts which other daemons
    leave (``taken``), and the process of this one is subtracted. ``processes``: daemons that share
    the room, of which each has a context on a GPU, or a process in main memory; this process's
    context is there already."""
    gpu = devices[0].is_cuda
    reserve = size_of(config.node.reserve)
    said = list[str]()
    if gpu:
        free, total = min((d.memory_free() + held, d.memory_limit()) for d in devices)
        said.append(f"{human(free)} of {human(total)} were free")
        contexts = (processes - 1) * devices[0].context
    else:
        total = min(d.memory_limit() for d in devices)
        if taken.others:
            other = f"{human(taken.others)} of {human(total)}"
            said.append(f"{other} are other daemons' of this machine")
        total = free = max(0, total - taken.others)
        contexts = taken.of(processes)
    if reserve:
        said.append(f"{human(reserve)} are reserved for others")
    limit = max(0, min(config.memory_limit(total), free - reserve - contexts))
    return limit * len(devices), " and ".join(said)


def main_memory(manifest: Manifest, stage: int, verdict: Verdict, gpu: bool) -> int:
    """Bytes of main memory that a stage takes: all that ``verdict`` counts, or for a stage on a GPU
    the part that is kept in main memory."""
    if not gpu:
        return verdict.needed
    m = manifest.model
    p = manifest.pipeline
    parts = parts_of(parameter_shapes(m, p.stages, stage), manifest.optimizer)
    outer = outer_bytes(manifest.outer, {part.name: part.bytes for part in parts}).main
    return _beside_gpu(parts, manifest, outer)


def _beside_gpu(parts: Sequence[ParameterPart], manifest: Manifest, outer: int) -> int:
    """Bytes of main memory of a stage on a GPU: the parameters that a round makes, a checkpoint
    while it is written, and ``outer`` bytes of rounds between cells."""
    parameters = sum(part.bytes for part in parts)
    return parameters + parameters + _rounds(parts, manifest, outer).optimizer + outer


def shares(
    config: NodeConfig,
    manifest: Manifest,
    limit: int,
    stages: Sequence[int] = (),
    *,
    gpu: bool = False,
    older: bool = False,
) -> dict[int, int]:
    """Bytes for each stage when ``stages``, by default all of a run, share one device and may take
    ``limit`` together: first the minimum of each, then the rest in proportion to what each takes
    when memory is ample. If ``limit`` is less than all minima together, every minimum is cut by the
    same factor. ``gpu``: the device is a GPU, an ``older`` one without units for bf16;
    main memory is judged where a stage is built."""
    beside = 0
    if gpu:
        beside = AMPLE
    stages = stages or range(manifest.pipeline.stages + 1)
    check = partial(check_memory, config, manifest, beside=beside, older=older)
    least = [check(s, 0).needed / (1 - RESERVE) for s in stages]
    ample = [check(s, limit).needed for s in stages]
    part = min(1.0, limit / sum(least))
    rest = max(0.0, limit - sum(least))
    each = zip(stages, least, ample, strict=True)
    return {s: int(part * low + rest * high / sum(ample)) for s, low, high in each}


def check_memory(
    config: NodeConfig,
    manifest: Manifest,
    stage: int,
    limit: int,
    beside: int = 0,
    said: str = "",
    *,
    older: bool = False,
) -> Verdict:
    """Judge if ``stage`` fits into ``limit`` bytes of this peer's device. ``beside`` is for a GPU,
    which computes under autocast, or in fp32 if it is an ``older`` one without units for bf16:
    bytes of main memory into which the part of the stage there has to fit; 0 where the device is
    main memory. As little is computed again for a backward, and the
    loss is computed in as large pieces, as makes the stage fit; a processor computes in fp32 where
    no mode leaves room for copies of the weights in 16 bits. ``said`` explains the limit to
    people."""
    m = manifest.model
    p = manifest.pipeline
    outer = manifest.outer
    parts = parts_of(parameter_shapes(m, p.stages, stage), manifest.optimizer)
    kept = outer_bytes(outer, {part.name: part.bytes for part in parts})
    outer_here = kept.device
    if not beside:
        outer_here += kept.main
    rounds = _rounds(parts, manifest, outer_here)
    modes: tuple[str, ...] = (config.limits.recompute,)
    if modes == ("auto",):
        modes = ("off",)
        if config.node.local_devices == 1:
            modes = RECOMPUTE
    if stage == ENDS and not m.ends_layers:
        modes = ("off",)
    formats = casts(manifest, beside > 0, older)
    ways = [(mode, LOGITS_AT_ONCE, formats) for mode in modes]
    if stage == ENDS:
        ways.append((modes[-1], LOGITS_LEAST, formats))
    if len(formats) > 1:
        ways += [(mode, logits, (False,)) for mode, logits, _ in ways]
    tried: list[Verdict] = []
    for mode, logits, allowed in ways:
        in_format = [
            fits(
                m,
                p.stages,
                stage,
                limit,
                micro_batch=p.micro_batch,
                in_flight=in_flight(config, manifest),
                rounds=rounds,
                recompute=mode,
                width=manifest.optimizer.width,
                masked=manifest.data.document_mask,
                cast=cast,
                logits=logits,
            )
            for cast in allowed
        ]
        largest = max(in_format, key=lambda verdict: verdict.needed)
        tried.append(replace(largest, casts=allowed == formats))
        if tried[-1].ok:
            break
    verdict = min(tried, key=lambda v: (not v.ok, v.needed))
    text = "; ".join(filter(None, (verdict.text, said)))
    verdict = replace(verdict, text=text, older=older)
    if not verdict.ok or not beside:
        return verdict
    found = fits_beside(
        stage, p.stages, _beside_gpu(parts, manifest, kept.main), beside, windows=kept.main > 0
    )
    if found.ok:
        return verdict
    return found


def in_flight(config: NodeConfig, manifest: Manifest) -> int:
    """Most micro-batches that a stage holds at once: those that the ends keep under way, and no
    more than an epoch has."""
    epoch = manifest.training.target_batch // manifest.pipeline.micro_batch
    return min(config.limits.in_flight, epoch)


def casts(manifest: Manifest, gpu: bool, older: bool) -> tuple[bool, ...]:
    """For each format in which a forward may compute here: True if it makes copies of fp32
    parameters in 16 bits. A GPU does. An ``older`` one may, and so may a processor with units for
    bf16, if the manifest allows it; memory has to suffice for both."""
    if manifest.optimizer.width != 4:
        return (False,)
    if older:
        return (False, True)
    if gpu:
        return (True,)
    if manifest.training.mixed_precision and bf16_units():
        return (False, True)
    return (False,)


def _rounds(parts: Sequence[ParameterPart], manifest: Manifest, outer: int) -> RoundBytes:
    t = manifest.training
    group = manifest.averaging.group_bytes
    members = max(1, t.min_replicas)
    sizes = [part.bytes for part in parts]
    # A member is also the buddy of another: beside its own share of the optimizer's state it holds
    # a copy of that member's.
    shares = members
    if members > 1 and t.buddy_every:
        shares = members // 2
    states = [part.state for part in parts]
    # An owner holds two groups of every other member, and their means.
    together = max((group, *sizes)) + (LET_IN - 1) * group
    step = step_scratch(parts, manifest.optimizer, group)
    return RoundBytes(
        optimizer=_share(states, shares),
        staged=_share(states, members),
        exchange=members * min(_share(sizes, members), together),
        step=step,
        shelf=min(step, SCRATCH_KEPT),
        outer=outer,
    )


def _share(sizes: Sequence[int], among: int) -> int:
    # A matrix is stepped whole: however many share the rest, somebody has all of the largest.
    return max((*sizes, -(-sum(sizes) // among)))


def parts_of_stages(manifest: Manifest) -> dict[int, tuple[ParameterPart, ...]]:
    """Parts of the run's model that can have an owner, by stage."""
    m = manifest.model
    stages = manifest.pipeline.stages
    return {
        s: tuple(parts_of(parameter_shapes(m, stages, s), manifest.optimizer))
        for s in range(stages + 1)
    }


def hosted(config: NodeConfig, manifest: Manifest, limit: int) -> list[int]:
    """Stages that show how much a peer with these settings may hold: the one it names; else
    the ends and the largest block stage, as its role allows."""
    if config.stage is not None:
        wanted = [config.stage]
    else:
        # The first ones may have a layer more, and at later ones more gradients wait until their
        # micro-batch counts.
        wanted = [
            ENDS,
            max(
                range(1, manifest.pipeline.stages + 1),
                key=lambda stage: check_memory(config, manifest, stage, limit).needed,
            ),
        ]
    blocks = [stage for stage in wanted if stage != ENDS]
    return {"ends": [ENDS], "stage": blocks}.get(config.node.role, wanted)


def planned_memory(config: NodeConfig, manifest: Manifest, verbose: bool = False) -> list[str]:
    """The memory that each stage of :func:`hosted` takes by the plan, before anything is loaded: in
    one line, with ``verbose`` also in its parts."""
    limit = config.memory_limit(1 << 60)
    plans = {s: check_memory(config, manifest, s, limit) for s in hosted(config, manifest, limit)}
    said = [f"{human(plan.needed)} for {stage_name(stage)}" for stage, plan in plans.items()]
    found = [f"up to {' or '.join(said)}, beside the program itself"]
    if not verbose:
        return found
    for stage, plan in plans.items():
        found += [f"{stage_name(stage)}:", *(f"  {part}" for part in plan.parts)]
    return found


def stash_limit(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool = False
) -> int:
    """Bytes of activations that a peer keeps: the configured number, else the bytes that the
    planned micro-batches and passing tensors take, and more up to :data:`STASH` where ``verdict``
    leaves memory. ``gpu``: the stage is on a GPU."""
    if asked := config.limits.stash_bytes:
        return asked
    planned = _planned_stash(config, manifest, stage, verdict, gpu)
    return max(planned, min(STASH, planned + _free(config, verdict, gpu)))


def share_places(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool = False
) -> int:
    """Number of micro-batches whose gradients may wait here until their origins name them: the
    number in the plan of memory, one for a note on its way, and up to a window more if ``verdict``
    leaves memory beside the stash."""
    window = in_flight(config, manifest)
    counted = stage
    if stage == ENDS:
        counted = manifest.pipeline.stages
    planned = min(window, uncounted_shares(counted))
    left = _beside_stash(config, manifest, stage, verdict, gpu)
    return planned + 1 + min(window, left // _gradient_bytes(manifest, stage))


def text_limit(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool = False
) -> int:
    """Bytes of keys and values of texts that a peer keeps: the configured number, else up to
    :data:`TEXTS` where ``verdict`` leaves memory beside everything else; at least 1, which is room
    for none."""
    if asked := config.limits.text_bytes:
        return asked
    left = _beside_stash(config, manifest, stage, verdict, gpu)
    each = _gradient_bytes(manifest, stage)
    places = min(in_flight(config, manifest), left // each)
    return max(1, min(TEXTS, left - places * each))


def text_row(nbytes: int) -> MemoryRow:
    """The row of texts in the table of memory, for a limit of :func:`text_limit`. Without bytes
    where there is room for none."""
    what = "keys and values of texts"
    return MemoryRow("where memory is left, dropped first", what, nbytes if nbytes > 1 else 0)


def shared_row(config: NodeConfig) -> MemoryRow:
    """The row of memory shared with other daemons in the table of memory: its limit."""
    nbytes = 0
    if SUPPORTED and config.transport.shared_memory == "auto":
        nbytes = MOST
    what = "memory shared with them"
    return MemoryRow("beside daemons of this machine, at most", what, nbytes)


def _gradient_bytes(manifest: Manifest, stage: int) -> int:
    """Bytes of the gradients of a stage; at least 1, because the ends of a run of adapters train
    nothing."""
    shapes = parameter_shapes(manifest.model, manifest.pipeline.stages, stage)
    return max(1, manifest.optimizer.width * count(shapes))


def logits_at_once(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool = False
) -> int:
    """Logits that one piece of the loss may hold at the ends: the number in the plan of memory. A
    GPU launches the same kernels for a small piece as for a large one, so there a piece may take a
    quarter of the memory that ``verdict`` leaves beside the stash."""
    if not gpu or stage != ENDS:
        return verdict.logits
    left = _left_by_stash(config, manifest, stage, verdict, gpu)
    return max(verdict.logits, min(LOGITS_MOST, left // 4 // LOGIT_BYTES))


def _beside_stash(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool
) -> int:
    """Bytes that the plan of memory leaves beside the stash and larger pieces of the loss."""
    beyond = logits_at_once(config, manifest, stage, verdict, gpu) - verdict.logits
    left = _left_by_stash(config, manifest, stage, verdict, gpu)
    return left - LOGIT_BYTES * beyond


def _left_by_stash(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool
) -> int:
    """Bytes that the plan of memory leaves beside the stash."""
    stash = stash_limit(config, manifest, stage, verdict, gpu)
    beyond = max(0, stash - _planned_stash(config, manifest, stage, verdict, gpu))
    return max(0, _free(config, verdict, gpu) - beyond)


def _planned_stash(
    config: NodeConfig, manifest: Manifest, stage: int, verdict: Verdict, gpu: bool
) -> int:
    """Bytes of the planned micro-batches and passing tensors."""
    m = manifest.model
    p = manifest.pipeline
    masked = manifest.data.document_mask
    kept = max(
        stash_bytes(m, p.stages, stage, p.micro_batch, verdict.recompute, masked, cast=cast)
        for cast in casts(manifest, gpu, verdict.older)
    )
    return in_flight(config, manifest) * (kept + frames_bytes(m, p.micro_batch))


def _free(config: NodeConfig, verdict: Verdict, gpu: bool) -> int:
    """Bytes that the plan of memory leaves beside memory shared with other daemons, which is main
    memory."""
    left = max(0, int(verdict.available * (1 - RESERVE)) - verdict.needed)
    if gpu:
        return left
    return max(0, left - shared_row(config).nbytes)


# ------------------------------------------------------------ a cut for machines


class StagePlace(NamedTuple):
    """A stage and the machine that can hold it: ``memory`` of the machine, and ``needed`` of it for
    the stage and its daemon, in bytes."""

    stage: int
    layers: str
    memory: int
    needed: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of the model that fits into named machines. ``places``: the machine of each stage, the
    ends first; ``more``: machines that can hold a block stage beside these, and ``small``: machines
    that cannot, in bytes. ``again``: some activations are computed again in a backward. ``alone``:
    the machine of the ends can hold all stages, before others come."""

    stages: int
    ends_layers: int
    places: tuple[StagePlace, ...]
    more: tuple[int, ...] = ()
    small: tuple[int, ...] = ()
    again: bool = False
    alone: bool = True

    @property
    def settings(self) -> dict[str, int]:
        """Settings of the manifest, by name."""
        return {"pipeline.stages": self.stages, "model.ends_layers": self.ends_layers}


def cut_for(
    config: NodeConfig, manifest: Manifest, machines: Sequence[int], ends_layers: int | None = None
) -> Cut:
    """Cut the model of ``manifest`` so that it fits into ``machines`` (bytes of memory of each),
    one stage on each; a single machine holds all stages.

    The cut has the fewest block stages with which every machine beside the ends' can hold one, or
    if there is none, with which the model fits; a stage may compute activations again in a
    backward. Layers stay at the ends only if nothing else fits; ``ends_layers``: exactly that
    number stays there. Raises OutOfResources if no cut fits.
    """
    # The data decide later if documents are kept apart, which takes more memory.
    manifest = replace(manifest, data=replace(manifest.data, document_mask=True))
    first = ends_layers or 0
    most = max(1, min(len(machines) - 1, manifest.model.layers - first))
    fitting: Cut | None = None
    for stages in range(1, most + 1):
        cut = _placed(config, _with_cut(manifest, stages, first), machines)
        if cut is not None and not cut.small:
            return cut
        fitting = fitting or cut
    if fitting is None and ends_layers is None and len(machines) > 1:
        fitting = _with_layers_at_the_ends(config, manifest, machines)
    if fitting is None:
        raise _no_cut(config, _with_cut(manifest, most, first), machines)
    return fitting


def cut_lines(cut: Cut) -> list[str]:
    """Describe a cut, and the reasons for it, in lines for people."""
    why = "with which each of these machines can hold a part"
    if cut.small:
        why = "that fit"
    lines = [f"stages   {_counted(cut.stages, 'block stage')}, the fewest {why}"]
    for place in cut.places:
        what = stage_name(place.stage)
        layers = place.layers
        if place.stage != ENDS:
            layers = f"layers {layers}"
        size = f"{human(place.needed)} of {_size(place.memory)}"
        lines.append(f"         {what} ({layers}): {size}")
    if cut.ends_layers:
        layers = _counted(cut.ends_layers, "layer")
        lines.append(f"         {layers} of the ends")
    if cut.again:
        lines.append("         activations are computed again where memory is short")
    if cut.more:
        lines.append(f"         another peer of a block stage: {_sizes(cut.more)}")
    if cut.small:
        lines.append(f"         too small for a block stage: {_sizes(cut.small)}")
    if not cut.alone:
        lines.append("         the ends' machine cannot hold all: start it with  --role ends")
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _size(memory: int) -> str:
    """Memory of a machine, in the unit in which people name it."""
    gigabytes, rest = divmod(memory, 10**9)
    if rest:
        return human(memory)
    return f"{gigabytes} GB"


def _sizes(machines: Sequence[int]) -> str:
    """Memory of several machines: "2 of 8 GB, 1 of 24 GB"."""
    counts = Counter(machines)
    return ", ".join(f"{count} of {_size(memory)}" for memory, count in sorted(counts.items()))


def _with_cut(manifest: Manifest, stages: int, ends_layers: int) -> Manifest:
    """The manifest with another cut, unchecked."""
    return replace(
        manifest,
        model=replace(manifest.model, ends_layers=ends_layers),
        pipeline=replace(manifest.pipeline, stages=stages),
    )


def _placed(config: NodeConfig, manifest: Manifest, machines: Sequence[int]) -> Cut | None:
    """The cut of ``manifest`` on these machines, None where it does not fit."""
    demands = stage_demands(config, manifest)
    largest = sorted(machines, reverse=True)
    heaviest = sorted(demands, key=lambda stage: (-demands[stage], stage))
    if len(machines) == 1:
        holders = dict.fromkeys(demands, largest[0])
        fit = _holds(config, largest[0], demands.values())
    else:
        holders = dict(zip(heaviest, largest, strict=False))
        fit = all(_holds(config, holders[stage], [demands[stage]]) for stage in heaviest)
    if not fit:
        return None
    least = min(demands[stage] for stage in demands if stage != ENDS)
    left = largest[len(heaviest) :]
    small = [memory for memory in left if not _holds(config, memory, [least])]
    stages = range(manifest.pipeline.stages + 1)
    if len(machines) == 1:
        limits = shares(config, manifest, config.memory_limit(largest[0]) - PROCESS * len(stages))
    else:
        limits = {stage: config.memory_limit(holders[stage]) - PROCESS for stage in stages}
    verdicts = [check_memory(config, manifest, stage, limits[stage]) for stage in stages]
    return Cut(
        manifest.pipeline.stages,
        manifest.model.ends_layers,
        tuple(
            StagePlace(
                stage,
                layers_said(manifest.model, manifest.pipeline.stages, stage),
                holders[stage],
                verdict.needed + PROCESS,
            )
            for stage, verdict in enumerate(verdicts)
        ),
        more=tuple(left[: len(left) - len(small)]),
        small=tuple(small),
        again=any(verdict.recompute != "off" for verdict in verdicts),
        alone=_holds(config, holders[ENDS], demands.values()),
    )


def _with_layers_at_the_ends(
    config: NodeConfig, manifest: Manifest, machines: Sequence[int]
) -> Cut | None:
    """The cut with the fewest block stages, and then the fewest layers at the ends. The ends get
    the largest machine. None where no cut fits."""
    largest, *others = sorted(machines, reverse=True)
    layers = manifest.model.layers

    def blocks_fit(stages: int, ends_layers: int) -> bool:
        cut = _with_cut(manifest, stages, ends_layers)
        needed = sorted(
            (_needed(config, cut, stage) for stage in range(1, stages + 1)), reverse=True
        )
        pairs = zip(others, needed, strict=False)
        return all(_holds(config, memory, [nbytes]) for memory, nbytes in pairs)

    for stages in range(1, min(len(others), layers - 1) + 1):
        # The more layers are at the ends, the less the block stages take.
        choices = range(1, layers - stages + 1)
        chosen = bisect_left(choices, True, key=lambda count, n=stages: blocks_fit(n, count))
        if chosen == len(choices):
            continue
        cut = _with_cut(manifest, stages, choices[chosen])
        if _holds(config, largest, [_needed(config, cut, ENDS)]):
            return _placed(config, cut, machines)
    return None


def stage_demands(config: NodeConfig, manifest: Manifest) -> dict[int, int]:
    """Fewest bytes that each stage takes."""
    stages = range(manifest.pipeline.stages + 1)
    return {stage: _needed(config, manifest, stage) for stage in stages}


def _needed(config: NodeConfig, manifest: Manifest, stage: int) -> int:
    """Fewest bytes that a stage takes."""
    limits = (replace(config.limits, recompute=mode) for mode in RECOMPUTE)
    configs = (replace(config, limits=limit) for limit in limits)
    return min(check_memory(each, manifest, stage, AMPLE).needed for each in configs)


def _holds(config: NodeConfig, memory: int, needed: Collection[int]) -> bool:
    """True if a machine with ``memory`` bytes can hold stages that take ``needed`` bytes each, and
    a daemon for each of them."""
    room = config.memory_limit(memory) - PROCESS * len(needed)
    return sum(needed) <= room * (1 - RESERVE)


def _no_cut(config: NodeConfig, manifest: Manifest, machines: Sequence[int]) -> OutOfResources:
    """The error for machines into which not even this cut fits."""
    ends, *blocks = (nbytes + PROCESS for nbytes in stage_demands(config, manifest).values())
    block = f"each of {len(blocks)} block stages takes up to"
    if len(blocks) == 1:
        block = "the block stage takes"
    return OutOfResources(
        f"the model does not fit into machines of this memory: {_sizes(machines)}. The ends take "
        f"{human(ends)}, {block} {human(max(blocks))}, and a part of each machine stays free",
        "name more machines or larger ones, train adapters (--set model.adapter=16), keep "
        "parameters in half the memory (--set optimizer.parameters=bf16), or take smaller "
        "micro-batches (--set pipeline.micro_batch=1)",
    )


# ------------------------------------------------------------ over the line


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of one peer over its line. ``activations``: with their gradients, each way, of one
    epoch; ``averaging``: gradients up, parameters down and copies of optimizer state, for itself
    and for others, each way, of one epoch; ``plans``: sent in one epoch by the leader at the ends;
    ``state``: received once by a peer that joins; ``idle``: each way, of one second, trained or
    not."""

    activations: float
    averaging: float
    plans: float
    state: int
    idle: float

    def over(self, epochs: float, seconds: float, leads: bool = False) -> tuple[float, float]:
        """Return the bytes sent and the bytes received in ``seconds`` in which ``epochs`` epochs
        are trained. The leader at the ends (``leads``) sends the plans as well."""
        down = epochs * (self.activations + self.averaging) + seconds * self.idle
        up = down
        if leads:
            up += epochs * self.plans
        return up, down


def forecast(manifest: Manifest, stage: int, peers: Mapping[int, int] | None = None) -> Forecast:
    """Forecast for a peer of ``stage`` (0: the ends). ``peers``: number of hosts by stage; a stage
    that is missing has the number that the run waits for before it begins. The replicas of a stage
    share its micro-batches and average with each other.

    Not included are the rounds between cells, in which a cell's speaker moves the parameters of its
    stage once more each way.
    """
    m = manifest.model
    p = manifest.pipeline
    t = manifest.training
    a = manifest.averaging
    hosts = {s: max(1, (peers or {}).get(s, t.min_replicas)) for s in range(p.stages + 1)}
    shapes = parameter_shapes(m, p.stages, stage)
    numbers = sum(math.prod(shape) for shape in shapes.values())

    tensor = nbytes_of(p.micro_batch * m.seq_len * m.d_model, p.wire)
    visits = 1.0
    if stage != ENDS:
        visits = manifest.scheduler.hops(p.stages) / p.stages
    # Forward and backward for trained batches, forward only for held-out ones.
    evaluated = 0.0
    if t.eval_every:
        evaluated = t.eval_batches / t.eval_every
    trained = t.target_batch // p.micro_batch
    frames = (2 * trained + evaluated) * visits / hosts[stage]
    activations = frames * (OVERHEAD * tensor + FRAME / 2)

    cell = min(hosts[stage], a.peers or hosts[stage])
    others = 1 - 1 / cell
    averaging = (
        OVERHEAD * others * (nbytes_of(numbers, a.wire) + manifest.optimizer.width * numbers)
    )
    if t.buddy_every and cell > 1:
        state = sum(part.state for part in parts_of(shapes, manifest.optimizer))
        averaging += OVERHEAD * state / cell / t.buddy_every

    everybody = sum(hosts.values())
    parts = sum(len(parameter_shapes(m, p.stages, s)) for s in range(p.stages + 1))
    path = HOP * manifest.scheduler.hops(p.stages) + SAMPLE * p.micro_batch
    plan = PLAN + MEMBER * everybody + OWNED * parts + path * trained
    return Forecast(
        activations,
        averaging,
        float(plan * (everybody - 1)),
        int(OVERHEAD * 4 * numbers),
        IDLE + IDLE_EACH * (everybody - 1),
    )
