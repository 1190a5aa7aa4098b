"""How micro-batches travel. The first part belongs to the manifest, the second to the peer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSettings:
    """Agreed by the swarm."""

    stages: int = 3
    """Block stages."""
    micro_batch: int = 16
    """Sequences in one micro-batch."""
    wire: str = "fp32"
    """Number format of activations and their gradients on the wire: fp32, bf16, fp16."""
    forward_timeout_s: float = 30.0
    """Seconds within which a hop must answer DONE; later it is treated as failed for this
    micro-batch. Where the plan gives an epoch more than ``training.epoch_timeout_s``, this time is
    multiplied by the same factor."""
    may_skip: float = 0.0
    """Share of the block stages that a micro-batch may leave out when no replica of them can be
    reached; 0: it is dropped instead."""
    watch: float = 8.0
    """Most mean absolute deviations between a tensor's size and the usual size of its stage; a
    tensor further off is refused; 0: none is."""


STASH = 1 << 30
"""Bytes of activations that a peer keeps if its settings name no limit, and there is memory."""


TEXTS = 1 << 30
"""Bytes of keys and values of texts that a peer keeps at most, and where there is memory."""


@dataclass(frozen=True)
class PipelineLimits:
    """Limits of this peer; a manifest cannot change them."""

    stash_bytes: int = 0
    """Activations kept for backward; a forward beyond it is answered BUSY. 0: room for
    ``in_flight`` micro-batches, and for more of them up to 1 GiB where there is memory."""
    in_flight: int = 8
    """Micro-batches an ends peer keeps under way at once."""
    text_bytes: int = 0
    """Keys and values of texts that are generated, which are kept so that a token is a pass over
    itself alone. 0: up to 1 GiB where there is memory beside everything else."""
    recompute: str = "auto"
    """Work that a stage computes again for a backward instead of keeping its results: off, layers,
    stage; auto: as little as makes it fit into the memory."""
    backward_first: bool = True
    """Backward jobs go before forward ones on the device; False serves them in order of arrival."""
