"""What collectives, kernels and whole training steps cost, side by side in one run: ``python -m benchmarks --help``."""

import ds_vrgd  # noqa: F401  # python -m benchmarks.evidence, as it was called before it was python -m evidence
