"""The cache of these benchmarks: models, books, training losses."""

import os
from pathlib import Path


def cache() -> Path:
    """Return the folder under the cache of this user; it may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tutti-benchmarks"
