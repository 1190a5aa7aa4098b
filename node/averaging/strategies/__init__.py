"""Strategies of averaging: the groups of peers in a round, and the use of their mean. Pure but for
tensors."""
