"""Observations: events, metrics, the JSONL sink.
Enters: facts from every package.
Never: blocking, or deciding."""
