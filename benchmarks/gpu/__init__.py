"""Parts of :mod:`benchmarks.gpu`, each with ``rows(report, device, rehearse)``."""
