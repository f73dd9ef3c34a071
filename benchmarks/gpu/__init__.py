"""What is to be measured on a GPU, in parts that go on where they stopped: `python -m benchmarks.gpu`, `make gpu`."""
