"""What the pipeline reports, and to whom: a port that the daemon fills."""

from __future__ import annotations

from typing import Any, Protocol


class Telemetry(Protocol):
    """What the pipeline reports. Never blocks, never raises."""

    def spent(self, kind: str, seconds: float) -> None:
        """Seconds of ``compute`` (device busy), ``wire`` (first byte to ACCEPTED) or ``wait``
        (device idle inside an epoch)."""
        ...

    def bytes(self, sent: int, received: int) -> None:
        """Tensor bytes moved."""
        ...

    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        """One fact for the record."""
        ...


class Silence:
    """A telemetry nobody listens to."""

    def spent(self, kind: str, seconds: float) -> None: ...
    def bytes(self, sent: int, received: int) -> None: ...
    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None: ...
