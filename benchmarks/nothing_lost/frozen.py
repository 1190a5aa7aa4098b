"""A frozen leader: how long its cell makes no epoch. See :mod:`benchmarks.frozen`."""

from benchmarks.frozen import rows

__all__ = ["rows"]
