"""Settings of a peer's checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of this peer; a manifest cannot change them."""

    within_s: float = 300.0
    """Seconds of work that a crash may cost at most, one epoch where that is longer; 0 writes no
    checkpoints by time. A stop writes one unless ``every`` is 0 too."""
    every: int = 0
    """Epochs between checkpoints, besides those by time; 0: by time alone. With both at 0 no
    checkpoint is ever written."""
    keep: int = 3
    """Checkpoints of the stage kept on disk."""
    max_age_h: float = 168.0
    """Hours after which a checkpoint is removed, when a newer one of the stage or of the stage that
    this peer hosts now is written; 0 for never."""
    max_disk: int = 0
    """Bytes that the checkpoints of a run may take here; 0 for no limit. Two have to fit."""
    to: str = ""
    """Where this peer copies its checkpoints, besides its disk: a directory ("/mnt/backup"), or an
    address of a file system that fsspec knows ("s3://bucket/run"); empty for nowhere."""
    to_every: str = "1h"
    """Between two copies: a duration ("1h", "90m"), or a number of epochs ("20 epochs")."""
    to_keep: int = 5
    """Copies of the stage kept there; older ones are removed once a newer one is whole."""
    fetch_parallel: int = 4
    """Requests under way at once to each donor, of at most 1 MiB each, when state is fetched from
    members."""
    max_up: float = 0.0
    """Bytes per second this peer gives to joiners; 0 is unlimited."""

    @property
    def writes(self) -> bool:
        """True if checkpoints are written at all."""
        return self.every > 0 or self.within_s > 0
