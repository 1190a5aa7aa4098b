"""Peers that benchmarks start as processes, each with a ``main``."""
