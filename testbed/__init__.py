"""What tests and benchmarks share: daemons as processes, networks between them, fakes of ports, and
reference models. Nothing here asserts or measures, and no daemon loads it."""
