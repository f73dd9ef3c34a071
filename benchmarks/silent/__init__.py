"""Ways into a sharded module by ways in which one rank may part from the others: `python -m benchmarks.silent`."""
