"""The epoch: the only room that knows all engines; leader, members, commit.
Enters: plans, reports.
Never: tensor mathematics."""
