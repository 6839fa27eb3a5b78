"""`olmo-sparsity longppl`, from a checkout."""

from analysis.cli import run

if __name__ == "__main__":
    run("longppl")
