"""A simulated day of volunteers: who comes and goes, and what their machines did."""
