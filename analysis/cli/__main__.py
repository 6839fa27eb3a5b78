"""``python -m analysis.cli NAME``, the same as ``olmo-sparsity NAME``."""

from analysis.cli import main

if __name__ == "__main__":
    main()
