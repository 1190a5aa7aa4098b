"""The leader: who is there, what the next plan is, when an attempt has failed; and the service that
carries its decisions out. Never: a member's side.
"""
