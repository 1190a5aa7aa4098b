"""The peers of a cell as their leader knows them: presence, signs of life, participation, speeds,
versions. The whole is :mod:`node.epoch.leader.roster`.

Never: an attempt at an epoch.
"""
