"""Text to token files: corpora, tokenizers, and the files that training and analysis read."""
