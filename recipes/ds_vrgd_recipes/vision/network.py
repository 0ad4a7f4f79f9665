"""Residual networks for small images, and torchvision's ResNet-50 for large ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_vrgd_recipes.run.errors import InputError

_WIDTHS = (16, 32, 64)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters ("option A", He et al. 2016, section 4.2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self._stride, self._new_channels = stride, outputs - inputs

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        inner = functional.relu(self.norm1(self.conv1(images)))
        inner = self.norm2(self.conv2(inner))
        if self._new_channels:  # every second pixel, and zeros for the new channels
            before = self._new_channels // 2
            images = images[:, :, :: self._stride, :: self._stride]
            images = functional.pad(images, (0, 0, 0, 0, before, self._new_channels - before))
        return functional.relu(inner + images)


class SmallResNet(nn.Module):
    """The residual network for 32x32 images of He et al. 2016, section 4.2: depth 6n + 2, widths 16, 32, 64.

    Args:
        depth: 56 is the paper's; 20, 14 and 8 are smaller.
        classes: outputs.

    Raises:
        ValueError: no n gives that depth.
    """

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if blocks < 1 or rest:
            raise ValueError(f"depth={depth} is not 6n + 2; use 8, 14, 20, 32, 44, 56 or 110")
        self.stem = nn.Conv2d(3, _WIDTHS[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(_WIDTHS[0])
        widths = (_WIDTHS[0], *_WIDTHS)
        self.blocks = nn.Sequential(
            *(
                BasicBlock(widths[stage] if block == 0 else outputs, outputs, 2 if stage and block == 0 else 1)
                for stage, outputs in enumerate(_WIDTHS)
                for block in range(blocks)
            )
        )
        self.head = nn.Linear(_WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # He et al. 2015

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (n, classes), of images, (n, 3, h, w)."""
        return self.head(self.blocks(functional.relu(self.norm(self.stem(images)))).mean((2, 3)))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """A network from images as they are stored to logits.

    Weights, BatchNorm's statistics and gradients stay in fp32 where the layers compute in bf16: in the 8 bits of bf16
    the running statistics would be rounded at every micro-batch.

    Args:
        network: maps normalised images, (n, 3, h, w), to logits.
        mean, std: of the training images per channel, for pixels in [0, 1].
        bf16: whether to autocast.
    """

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], *, bf16: bool) -> None:
        super().__init__()
        self.network = network
        self.bf16 = bf16
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", 255.0 * torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", 255.0 * torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits in fp32, (n, classes), of images in bytes, (n, 3, h, w)."""
        normal = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            logits: Tensor = self.network(normal)
        return logits.float()


def torchvision() -> Any:
    """Return torchvision, imported only where it is needed: small images do without it.

    Raises:
        InputError: it is missing, or does not fit this torch.
    """
    try:
        import torchvision as module
        import torchvision.datasets
        import torchvision.transforms.v2
    except (ImportError, RuntimeError, OSError) as error:  # a release for another torch fails in all of these ways
        raise InputError(
            f"ImageNet needs torchvision, which cannot be imported ({error}); install the release that belongs to this "
            "torch: pip install 'ds_vrgd_recipes[vision]'"
        ) from error
    return module


def resnet50(classes: int) -> nn.Module:
    """Return torchvision's ResNet-50 v1.5; the last BatchNorm of each block starts at zero (Goyal et al. 2017, 5.1).

    Raises:
        InputError: torchvision is missing, or does not fit this torch.
    """
    network: nn.Module = torchvision().models.resnet50(num_classes=classes, zero_init_residual=True)
    return network


@torch.no_grad()
def average_statistics(network: nn.Module) -> None:
    """Give every rank the mean of all ranks' running BatchNorm statistics. Collective.

    Each rank has seen its own micro-batches. Training does not use these numbers; evaluation and rank 0's checkpoint
    should have those of all ranks.
    """
    ranks = torch.distributed.get_world_size()
    running = [
        statistic
        for module in network.modules()
        if isinstance(module, nn.BatchNorm2d)
        for statistic in (module.running_mean, module.running_var)
        if statistic is not None
    ]
    if ranks == 1 or not running:
        return
    flat = torch.cat([statistic.flatten() for statistic in running])
    torch.distributed.all_reduce(flat)
    flat /= ranks
    for statistic, mean in zip(running, flat.split([statistic.numel() for statistic in running]), strict=True):
        statistic.copy_(mean.view_as(statistic))
