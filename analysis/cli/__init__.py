"""The commands of the analysis; see `olmo_sparsity.cli`."""
