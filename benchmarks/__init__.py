"""Measurements beside a peer, run as ``python -m benchmarks.NAME [--json -]``; results are ratios
and medians."""
