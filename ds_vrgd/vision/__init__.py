"""Image classification with residual networks: the paper's tables 2 (ImageNet) and 5 (CIFAR-10)."""

from ds_vrgd.extras import need

need("vision", "numpy", "pydantic", "yaml", "tqdm")  # torchvision for ImageNet only: library.py
