"""Parts that benchmarks share: charts, tables of faults, parts by number."""
