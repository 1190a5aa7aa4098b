"""Slow twins and published rules that tests and benchmarks hold the program to; no daemon has
them."""
