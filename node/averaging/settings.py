"""How replicas average. Part of the manifest."""

from dataclasses import dataclass

from node.core.errors import refuse
from node.core.tables import setting


@dataclass(frozen=True)
class AveragingSettings:
    """What replicas do every epoch: a butterfly exchange inside their cell."""

    cell: int | str = setting(
        "all",
        'Most replicas that share an optimizer step; "all": every replica of a stage. Cells '
        "average with each other as [outer] says.",
        pattern="all|[1-9][0-9]{0,5}",
        says='"all", or a number of peers',
    )
    wire: str = setting(
        "fp32",
        "Number format of gradients on the wire: fp32, bf16, fp16, int8. Fresh parameters travel "
        "in the format of optimizer.parameters.",
        choices=("fp32", "bf16", "fp16", "int8"),
    )
    group_bytes: int = setting(
        8 << 20,
        "Most bytes of an owner's parts that are stepped together, in the larger of their two "
        "formats on the wire; in fp32 they are at most four times larger. A larger part goes "
        "alone. While a group is stepped, the gradients of the next group arrive and the fresh "
        "parameters of the previous one leave. An owner holds two groups of every member.",
        least=1 << 10,
        most=1 << 40,
    )
    round_timeout_s: float = setting(
        30.0,
        "A contribution or a fresh part that arrives later counts as missing. This is a lower "
        "bound: a round has four times the time that its steps and its bytes should take, if that"
        " is more.",
        least=0.1,
        most=3600.0,
    )
    max_gradient_norm: float = setting(
        1e6,
        "Largest norm per token of a contribution; a contribution above it, or not finite, is "
        "refused and counted against its sender.",
        least=1e-9,
        most=1e30,
    )
    quarantine: float = setting(
        10.0,
        "Multiple of the median norm per token of the other contributions, above which a "
        "contribution is left out of the step and counted against its sender; 0 is off.",
        least=0.0,
        most=1e9,
    )
    reducer: str = setting(
        "mean",
        "Rule by which contributions become one gradient: mean (by tokens), clipped-mean, median, "
        "trimmed-mean, centered-clip. All but the mean need three contributors and average like it "
        "below that.",
        choices=("mean", "clipped-mean", "median", "trimmed-mean", "centered-clip"),
    )
    trim: float = setting(
        0.25,
        "Share of contributors that trimmed-mean leaves out at each end of every coordinate, at "
        "least one.",
        least=0.0,
        most=0.49,
    )
    clip: float = setting(
        2.0,
        "Radius of clipped-mean and centered-clip, in medians of the contributions' norms or "
        "distances.",
        least=0.1,
        most=1000.0,
    )
    clip_iterations: int = setting(
        3, "Number of times that centered-clip moves its center.", least=1, most=100
    )

    def check(self) -> None:
        """Raises UsageFault for settings that cannot hold together."""
        refuse(
            (
                0 < self.quarantine < 2,
                f"averaging.quarantine = {self.quarantine}",
                "0 for off, or 2 and more: honest norms differ",
            ),
            (
                self.reducer == "trimmed-mean" and self.trim == 0,
                "averaging.trim = 0",
                'must be above 0 while averaging.reducer = "trimmed-mean"',
            ),
        )

    @property
    def peers(self) -> int:
        """Most members of a cell; 0 for all replicas of a stage."""
        if self.cell == "all":
            return 0
        return int(self.cell)
