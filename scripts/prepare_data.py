"""`olmo-sparsity prepare_data`, from a checkout."""

from analysis.cli import run

if __name__ == "__main__":
    run("prepare_data")
