"""Image classification with residual networks: the paper's tables 2 (ImageNet) and 5 (CIFAR-10)."""
