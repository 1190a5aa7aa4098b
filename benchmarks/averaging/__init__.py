"""Parts of `benchmarks.averaging`: speed, faults of a member, training under each strategy."""
