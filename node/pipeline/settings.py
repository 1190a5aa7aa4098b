"""How micro-batches travel. The first part belongs to the manifest, the second to the peer."""

from dataclasses import dataclass

from node.core.errors import refuse
from node.core.tables import setting
from node.wire.coding.formats import BLOCKWISE


def forward_only_wire(wire: str) -> str:
    """Number format of work that only goes forward in a run whose training travels as ``wire``:
    bf16 instead of int8 and int4. An evaluation measures the parameters, which others take without
    that rounding, and a token of a text is too few bytes to matter."""
    if wire in BLOCKWISE:
        return "bf16"
    return wire


@dataclass(frozen=True)
class PipelineSettings:
    """Agreed by the swarm."""

    stages: int = setting(3, "Block stages.", least=1, most=4096)
    micro_batch: int = setting(16, "Sequences in one micro-batch.", least=1, most=65536)
    wire: str = setting(
        "fp32",
        "Number format of activations and their gradients on the wire: fp32, bf16, fp16, int8, "
        "int4. int8 and int4 have a scale for every 256 and 64 numbers, and evaluations and texts "
        "travel as bf16 beside them.",
        choices=("fp32", "bf16", "fp16", "int8", "int4"),
    )
    wire_least: str = setting(
        "",
        "Coarsest number format that a plan may give to the tensors between two peers: bf16, fp16, "
        "int8, int4. A link whose bytes would take longer than the work of the busiest device gets "
        "a coarser one than pipeline.wire. Empty: all links have pipeline.wire.",
        pattern="(bf16|fp16|int8|int4)?",
        says="bf16, fp16, int8, int4, or empty",
    )
    forward_timeout_s: float = setting(
        30.0,
        "Seconds within which a hop must answer DONE; a later hop counts as failed for this "
        "micro-batch. If the plan gives an epoch more than training.epoch_timeout_s, this time is"
        " multiplied by the same factor.",
        least=0.1,
        most=3600.0,
    )
    may_skip: float = setting(
        0.0,
        "Share of the block stages that a micro-batch may leave out when no replica of them can be "
        "reached; 0: it is dropped instead.",
        least=0.0,
        most=1.0,
    )
    watch: float = setting(
        8.0,
        "Largest difference between a tensor's root mean square and the usual one of its stage, "
        "in mean absolute deviations; a tensor further off is refused. 0: none is.",
        least=0.0,
        most=1000.0,
    )
    inspect: bool = setting(
        True,
        "Peers send their leader sketches of the tensors that they send and receive, and a peer "
        "whose tensors do not fit gets no work for an hour or longer. Only replicas of one stage "
        "can be compared.",
    )

    def check(self) -> None:
        """Raises UsageFault for number formats that cannot hold together."""
        refuse(
            (
                self.wire_least and len(self.wires) < 2,
                f'pipeline.wire_least = "{self.wire_least}"',
                f'must be coarser than pipeline.wire = "{self.wire}", or empty; from fine to '
                "coarse: fp32, bf16 or fp16, int8, int4",
            ),
        )

    @property
    def wires(self) -> tuple[str, ...]:
        """Number formats that a plan may choose from, the run's first, each with fewer bytes than
        the one before it. Empty if ``wire_least`` is no format below ``wire``."""
        halves = ("bf16", "fp16")
        half = next((w for w in (self.wire, self.wire_least) if w in halves), "bf16")
        formats = ("fp32", half, "int8", "int4")
        first = formats.index(self.wire)
        if not self.wire_least:
            return formats[first : first + 1]
        if self.wire_least not in formats:
            return ()
        return formats[first : formats.index(self.wire_least) + 1]

    @property
    def blockwise(self) -> bool:
        """True if tensors may travel in int8 or int4, or if plans say which format a link has:
        peers must speak :data:`node.core.version.WIRES_SINCE`."""
        return bool(self.wire_least) or self.wire in BLOCKWISE


STASH = 1 << 30
"""Bytes of activations that a peer keeps if its settings name no limit, and there is memory."""


TEXTS = 1 << 30
"""Bytes of keys and values of texts that a peer keeps at most, and where there is memory."""


@dataclass(frozen=True)
class PipelineLimits:
    """Limits of this peer; a manifest cannot change them."""

    stash_bytes: int = setting(
        0,
        "Bytes of activations kept for backward; a forward beyond that is answered BUSY. 0: room "
        "for in_flight micro-batches, and for more up to 1 GiB if there is memory.",
        least=0,
        most=1 << 50,
    )
    in_flight: int = setting(
        8,
        "Most micro-batches that an ends peer has under way at once; fewer where the peers of its "
        "first stage have no room for so many.",
        least=1,
        most=10000,
    )
    text_bytes: int = setting(
        0,
        "Bytes of keys and values kept for texts that are being generated, so that the model "
        "computes only the new token. 0: up to 1 GiB, if other uses leave that much memory.",
        least=0,
        most=1 << 50,
    )
    text_share: float = setting(
        0.2,
        "Share of the processor's time that texts take at most while this peer trains on it; all "
        "daemons of the machine share it. A pass waits 10 s at most, so passes of several seconds "
        "may take more. 1: texts are never kept waiting, as on a GPU.",
        least=0.01,
        most=1.0,
    )
    recompute: str = setting(
        "auto",
        "Activations that a stage computes again in backward instead of keeping them: off, "
        "layers, stage; auto: the least that makes the stage fit into the memory.",
        choices=("auto", "off", "layers", "stage"),
    )
    job_order: str = setting(
        "slack",
        "Order of the jobs of micro-batches on the device. slack: the one with the least time to "
        "spare in its epoch first; arrival: first come, first served.",
        choices=("slack", "arrival"),
    )
