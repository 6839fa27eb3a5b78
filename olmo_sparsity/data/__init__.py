"""Text to token files, and token files or synthetic tasks to training batches."""
