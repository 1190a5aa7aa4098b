"""Laboratory of the benchmarks of whole swarms: daemons as processes, a network between them,
faults, and books of their costs. The tests of whole daemons use it too."""
