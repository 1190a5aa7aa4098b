"""Settings of a peer's checkpoints."""

from dataclasses import dataclass

from node.core.tables import rate_setting, setting

PLACE = r"|[/~].*|[a-zA-Z][a-zA-Z0-9+.-]*://.+"
PLACE_SAYS = 'a whole path ("/mnt/backup") or an address ("s3://bucket/run"); empty for nowhere'
"""Pattern of the place of an archive, and the same in words."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of this peer; a manifest cannot change them."""

    within_s: float = setting(
        300.0,
        "Seconds of work that a crash may cost at most, or one epoch if that is longer; 0 writes "
        "no checkpoints by time. A stop writes one unless every is 0 too.",
        least=0,
        most=86400,
    )
    every: int = setting(
        0,
        "Epochs between checkpoints, besides those by time; 0: by time alone. With both at 0 no "
        "checkpoint is ever written.",
        least=0,
        most=10**9,
    )
    keep: int = setting(3, "Checkpoints of the stage kept on disk.", least=1, most=1000)
    max_age_h: float = setting(
        168.0,
        "Hours after which a checkpoint is removed, when a newer one of the stage or of the stage "
        "that this peer hosts now is written; 0 for never.",
        least=0,
        most=10**6,
    )
    max_disk: int = setting(
        0,
        "Bytes that the checkpoints of a run may take here; 0 for no limit. Two checkpoints have "
        "to fit.",
        least=0,
        most=1 << 60,
    )
    to: str = setting(
        "",
        'Where this peer copies its checkpoints, besides its disk: a directory ("/mnt/backup"), or '
        'an address of a file system that fsspec knows ("s3://bucket/run"); empty for nowhere.',
        pattern=PLACE,
        says=PLACE_SAYS,
    )
    to_every: str = setting(
        "1h",
        'Between two copies: a duration ("1h", "90m"), or a number of epochs ("20 epochs").',
        pattern=r"[0-9][0-9a-z. ]*",
        says='a duration such as "1h", or such as "20 epochs"',
    )
    to_keep: int = setting(
        5,
        "Number of copies of the stage kept there; older copies are removed once a newer one is "
        "complete.",
        least=1,
        most=1000,
    )
    fetch_parallel: int = setting(
        4,
        "Requests under way at once to each donor, of at most 1 MiB each, when state is fetched "
        "from members.",
        least=1,
        most=16,
    )
    max_up: float = rate_setting("Bytes per second this peer gives to joiners; 0 is unlimited.")

    @property
    def writes(self) -> bool:
        """True if checkpoints are written at all."""
        return self.every > 0 or self.within_s > 0
