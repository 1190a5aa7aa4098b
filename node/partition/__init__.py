"""The planner: which peer steps which matrix, computed by everybody and negotiated by nobody.

Pure Python, no torch, no clock, no dice: the same shapes, speeds and previous owners give the same
plan on every peer. ``plan.make_plan`` is the front door; docs/optimizer.md describes the method and
its measurements.
"""
