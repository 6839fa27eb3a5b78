"""Many runs: grids of settings, their processes, and SLURM jobs."""
