"""What the pipeline reports, and to whom: a port that the daemon fills."""

from __future__ import annotations

from typing import Any, Protocol


class Telemetry(Protocol):
    """What the pipeline reports. Never blocks, never raises."""

    def spent(self, kind: str, seconds: float) -> None:
        """Seconds of ``compute`` (device busy), ``wire`` (first byte to ACCEPTED) or ``wait``
        (device idle inside an epoch)."""

    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        """One fact for the record."""
