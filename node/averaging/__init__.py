"""Gradients of a cell to fresh parameters at every member: one exchange per round.
Enters: parameter gradients, an owner's step.
Never: optimizer mathematics."""
