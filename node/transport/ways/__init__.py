"""Ways to a peer: direct, punched, relayed; which is tried next and which is kept."""
