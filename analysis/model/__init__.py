"""What is measured: a model, its losses on subsequences, and the memory this takes."""
