"""The epoch of one cell: plans, the leader and the members that follow it, deadlines. Pure.

Enters: events and the time.
Leaves: actions.
Never: the bytes of a vote, a tensor, a task.
"""
