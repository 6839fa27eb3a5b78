"""``python -m olmo_sparsity.cli NAME``, the same as ``olmo-sparsity NAME``."""

from olmo_sparsity.cli import main

if __name__ == "__main__":
    main()
