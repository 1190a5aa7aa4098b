"""Copies of this peer's checkpoints at a place of its operator: a directory, or an address of a
file system that fsspec knows. Training never waits for it."""
