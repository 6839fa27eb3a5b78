"""Evaluation of a checkpoint: held-out loss and exact match."""
