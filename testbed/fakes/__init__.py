"""Substitutes of ports in the process of a test: one for each port."""
