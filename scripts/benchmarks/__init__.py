"""What `scripts/benchmark.py` compares, where it takes more than a function."""
