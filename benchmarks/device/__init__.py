"""Measurements of how little devices, lines and boxes of a swarm wait: ``python -m
benchmarks.device``."""
