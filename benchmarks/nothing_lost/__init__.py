"""Parts of `benchmarks.nothing_lost`; each has ``rows(report, root)``."""
