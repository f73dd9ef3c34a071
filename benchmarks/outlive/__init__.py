"""A run that outlives its ranks, and what keeping its steps costs: `python -m benchmarks.outlive`."""
