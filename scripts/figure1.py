"""`olmo-sparsity figure1`, from a checkout."""

from analysis.cli import run

if __name__ == "__main__":
    run("figure1")
