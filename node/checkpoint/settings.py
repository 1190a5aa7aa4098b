"""How state is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointSettings:
    """Of this peer."""

    every: int = 20
    """Epochs between checkpoints; 0 never writes one."""
    keep: int = 3
    """Newest checkpoints kept on disk."""
    fetch_chunk: int = 1 << 20
    """Bytes asked for in one request when state is fetched from a member."""
    fetch_parallel: int = 4
    """Requests under way at once, spread over the donors."""
    max_up: float = 0.0
    """Bytes per second this peer gives to joiners; 0 is unlimited."""
