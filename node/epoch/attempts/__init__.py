"""The sides of one attempt at an epoch: its times, the results of its micro-batches, the owners of
the parts, the digests that its members report. The whole is :mod:`node.epoch.leader.attempt`.

Never: the choice of a plan.
"""
