"""The parts of `python -m benchmarks.cells`, one module each."""
