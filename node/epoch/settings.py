"""The epoch and the run. Part of the manifest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingSettings:
    """What the swarm agreed to do."""

    epochs: int = 120
    """Epochs of the run; the schedule of the learning rate is laid out over them."""
    target_batch: int = 128
    """Sequences behind one update; a multiple of the micro-batch."""
    epoch_timeout_s: float = 60.0
    """An epoch that is not done by then is closed with what it has. A floor: it has four times as
    long as its work should take, where that is more."""
    eval_every: int = 10
    """Epochs between evaluations on the held-out text; 0 never evaluates."""
    eval_batches: int = 4
    """Micro-batches of one evaluation."""
    min_replicas: int = 1
    """Live peers every block stage needs before the first epoch is planned; the ends need one."""
    buddy_every: int = 5
    """Epochs between two copies of an owner's optimizer state at its buddy; 0 keeps none."""
    mixed_precision: bool = False
    """A peer on a processor that was measured to be faster in bf16 computes forward and backward in
    it. Parameters, sums of gradients and steps stay as they are. False: processors compute in fp32.
    GPUs compute in bf16 whatever this says."""
    reference: bool = False
    """The held-out loss is measured before the first step too, and every plan carries it beside the
    training loss of that step: the losses of the model that the run begins from."""
    rebalance_every_s: float = 60.0
    """Seconds between two looks at whether a peer should change its stage; 0 never changes one."""
