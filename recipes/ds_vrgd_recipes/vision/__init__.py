"""Image classification with residual networks: the paper's tables 2 (ImageNet) and 5 (CIFAR-10)."""

from ds_vrgd.extras import need

# torchvision for ImageNet only: network.py
need("vision", "numpy", "pydantic", "yaml", "tqdm", distribution="ds_vrgd_recipes")
