"""The leader of the epoch: its view of the members, the choice of the next plan, the end of an
attempt.

Never: a member's side, a message.
"""
