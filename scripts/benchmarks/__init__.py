"""What `scripts/benchmark.py` measures."""
