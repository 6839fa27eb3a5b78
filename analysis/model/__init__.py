"""What is measured: a model, its tokenizer, and its losses on subsequences."""
