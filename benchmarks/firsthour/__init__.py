"""The parts of `python -m benchmarks.firsthour`, one module each."""
