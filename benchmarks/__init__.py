"""What collectives, kernels and whole training steps cost, side by side in one run: ``python -m benchmarks --help``."""
