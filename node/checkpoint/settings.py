"""How state is kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of this peer; a manifest cannot change them."""

    every: int = 20
    """Epochs between checkpoints; 0 never writes one."""
    keep: int = 3
    """Newest checkpoints kept on disk."""
    fetch_parallel: int = 4
    """Requests under way at once to each donor, of at most 1 MiB each, when state is fetched from
    members."""
    max_up: float = 0.0
    """Bytes per second this peer gives to joiners; 0 is unlimited."""
