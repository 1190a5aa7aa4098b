"""Reduction of contributions to one gradient: their weights, the contributions left out, the rule
of the average."""
