"""The stage that a peer hosts: its parameters and the engines that change them, optimizer state
that changes owners, versions on disk.

Enters: the actions of a member.
Leaves: the outcome of an attempt, state for other peers.
Never: a decision about the epoch, a vote.
"""
