"""Rounds of averaging at one member: inside a cell every epoch, between cells at intervals. Never:
the decision to hold one (that is in the plan)."""
