"""What the benchmarks of whole swarms share: daemons as processes, a network between them, faults,
and the books that are kept of what they cost. The tests of whole daemons use the same.
"""
