"""What a checkpoint is worth: held-out loss and exact match."""
