"""Counts of the program's own source, by its syntax trees; ``benchmarks.codebase`` shows them."""
