"""Paths of micro-batches, and the split of work among peers. Enters: members, speeds. Never: I/O,
torch."""
