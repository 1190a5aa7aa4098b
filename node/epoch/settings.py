"""The epoch and the run. Part of the manifest."""

from dataclasses import dataclass

from node.core.tables import setting


@dataclass(frozen=True)
class TrainingSettings:
    """The training that the swarm agreed on."""

    epochs: int = setting(
        120,
        "Epochs of the run; the schedule of the learning rate is laid out over them.",
        least=1,
        most=10**9,
    )
    target_batch: int = setting(
        128,
        "Number of sequences in one update; a multiple of the micro-batch.",
        least=1,
        most=10**7,
    )
    epoch_timeout_s: float = setting(
        60.0,
        "Seconds after which an unfinished epoch is closed with the micro-batches that are "
        "finished. This is a lower bound: an epoch has four times the time that its work should "
        "take, if that is more.",
        least=1.0,
        most=86400.0,
    )
    eval_every: int = setting(
        10,
        "Epochs between evaluations on the held-out text; 0 never evaluates.",
        least=0,
        most=10**9,
    )
    eval_batches: int = setting(
        4, "Number of micro-batches in one evaluation.", least=1, most=10**5
    )
    min_replicas: int = setting(
        1,
        "Live peers that every block stage needs before the first epoch is planned; the ends need"
        " one.",
        least=1,
        most=1000,
    )
    buddy_every: int = setting(
        5,
        "Epochs between two copies of an owner's optimizer state at its buddy; 0 keeps none.",
        least=0,
        most=10**6,
    )
    mixed_precision: bool = setting(
        False,
        "A peer on a processor that was measured to be faster in bf16 computes forward and "
        "backward in it. Parameters, sums of gradients and steps stay as they are. False: "
        "processors compute in fp32. GPUs compute in bf16 whatever this says.",
    )
    reference: bool = setting(
        False,
        "The held-out loss is measured before the first step too, and every plan carries it beside "
        "the training loss of that step: the losses of the model that the run begins from.",
    )
    rebalance_every_s: float = setting(
        60.0,
        "Least seconds between two looks at whether members of the epochs should change their "
        "stages; peers that wait for an epoch are looked at whenever one closes. 0 never changes a "
        "stage.",
        least=0.0,
        most=86400.0,
    )
