"""The ports through which the parts of a pipeline reach the process around them."""

from typing import Any, Protocol


class Telemetry(Protocol):
    """Reports of the pipeline: a port that the daemon fills. Never blocks, never raises."""

    def spent(self, kind: str, seconds: float) -> None:
        """Seconds of ``compute`` (device busy), ``wire`` (first byte to ACCEPTED) or ``wait``
        (device idle inside an epoch)."""

    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        """One fact for the record."""
