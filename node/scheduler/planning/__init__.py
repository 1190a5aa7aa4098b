"""The planner of paths that skip and swap stages: the problem, its rules, an exact replay, a search
and floors. Pure.
"""
