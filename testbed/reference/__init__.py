"""Slow twins of fast code and rules as they were published, which tests and benchmarks hold the
program to."""
