"""tutti as people install it: from a wheel, into an environment that never saw the repository."""
