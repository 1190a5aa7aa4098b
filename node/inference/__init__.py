"""Forward-only requests through a live swarm: evaluation, text; around peers that are missing."""
