"""What happened: events, metrics, the JSONL sink.
Enters: facts from every room.
Never: blocking, or deciding."""
