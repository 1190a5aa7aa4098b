"""The peers of a cell as their leader knows them: who is here and lives, who takes part, how fast
they are, and the versions that they hold. The whole is :mod:`node.epoch.leader.roster`.

Never: an attempt at an epoch.
"""
