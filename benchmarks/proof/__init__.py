"""Measurements at scale and beside proven bounds: ``python -m benchmarks.proof``."""
