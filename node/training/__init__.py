"""The epoch: the only package that knows all engines; leader, members, commit.

Enters: plans, reports.
Never: tensor mathematics.
"""
