"""The OpenAI-compatible endpoint, a client of the daemon's control service."""
