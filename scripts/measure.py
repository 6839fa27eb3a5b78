from olmo_sparsity.cli import run

if __name__ == "__main__":
    run("measure")
