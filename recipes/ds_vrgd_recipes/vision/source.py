"""The sources of micro-batches: memory for small images, or a folder of JPEGs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.preemption import heed_only_the_rank
from ds_vrgd_recipes.run.ranks import share
from ds_vrgd_recipes.vision.augment import crop_and_flip, draw
from ds_vrgd_recipes.vision.images import SmallImages, cifar_10, fashion_mnist
from ds_vrgd_recipes.vision.network import torchvision
from ds_vrgd_recipes.vision.order import Order, Place
from ds_vrgd_recipes.vision.runfile import Cifar10, FashionMnist, ImageFolder

IGNORED = -100  # the label of rows that fill up a batch
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
MicroBatch = tuple[Tensor, Tensor]  # images in bytes, (n, 3, h, w), and classes, (n,), on the device

# ImageNet's, per channel (torchvision's reference recipes).
_IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Source(Protocol):
    """Training and held-out images of one rank.

    Attributes:
        images: number of training images.
        classes: their number.
        sha256: of the data, as far as possible without reading all of it.
        statistics: mean and standard deviation per channel, for pixels in [0, 1].
    """

    images: int
    classes: int
    sha256: str
    statistics: Statistics

    def training(self, order: Order, places: Iterator[Place]) -> Iterator[MicroBatch]:
        """Yield augmented micro-batches."""

    def held_out(self, micro_batch: int, rank: int, ranks: int) -> Iterator[MicroBatch]:
        """Yield this rank's share, as many full batches on every rank; rows that fill up are ``IGNORED``."""


class InMemory:
    """Small images, all on the device."""

    def __init__(self, data: SmallImages, device: torch.device) -> None:
        self.images, self.classes, self.sha256 = len(data.train), data.classes, data.sha256
        self.statistics = data.statistics()
        self._train, self._held_out = data.train.to(device), data.held_out.to(device)
        self._device = device

    def training(self, order: Order, places: Iterator[Place]) -> Iterator[MicroBatch]:
        """See :class:`Source`."""
        for place in places:
            rows = torch.from_numpy(order.rows(place)).to(self._device)
            drawn = draw(len(rows), order.augmentation(place.first)).to(self._device)
            yield crop_and_flip(self._train.images[rows], drawn), self._train.labels[rows]

    def held_out(self, micro_batch: int, rank: int, ranks: int) -> Iterator[MicroBatch]:
        """See :class:`Source`."""
        for rows, real in share(len(self._held_out), micro_batch, rank, ranks):
            chosen = torch.tensor(rows, device=self._device)
            labels = self._held_out.labels[chosen]
            labels[real:] = IGNORED
            yield self._held_out.images[chosen], labels


class _Samples(Dataset[tuple[Tensor, int]]):
    """Images of a folder by (number, seed): the augmentation of an image depends on the seed alone."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.files = torchvision().datasets.ImageFolder(str(folder), transform)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        number, seed = key
        torch.manual_seed(seed)
        image, label = self.files[number]
        return image, label


class FromFolder:
    """``torchvision.datasets.ImageFolder``, decoded by processes ahead of the update."""

    def __init__(self, settings: ImageFolder, device: torch.device) -> None:
        transforms = torchvision().transforms.v2
        to_tensor = [transforms.PILToTensor()]
        size = settings.size
        # As in torchvision's and Goyal et al.'s recipes: a random part of 8 to 100 % of the area, mirrored or not.
        augment = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *to_tensor]
        middle = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), *to_tensor]
        try:
            self._train = _Samples(settings.path / "train", transforms.Compose(augment))
            self._held_out = _Samples(settings.path / "val", transforms.Compose(middle))
        except FileNotFoundError as error:
            raise InputError(
                f"data.path={settings.path}: {error}; it must hold train/CLASS/*.JPEG and val/CLASS/*.JPEG"
            ) from error
        found, expected = self._held_out.files.classes, self._train.files.classes
        if found != expected:
            odd = sorted(set(found) ^ set(expected))
            raise InputError(
                f"data.path={settings.path}: train has {len(expected)} classes, val {len(found)}, and {odd[0]} is in "
                "one of them alone; give both the same folders"
            )
        self.images, self.classes = len(self._train.files), len(expected)
        # Names, which include the classes: 150 GB are not read before a run starts.
        self.sha256 = _names_sha256(self._train.files.samples, settings.path)
        self.statistics: Statistics = _IMAGENET_STATISTICS
        self._workers, self._device = settings.workers, device

    def training(self, order: Order, places: Iterator[Place]) -> Iterator[MicroBatch]:
        """See :class:`Source`."""
        return self._load(self._train, (_keys(order, place) for place in places))

    def held_out(self, micro_batch: int, rank: int, ranks: int) -> Iterator[MicroBatch]:
        """See :class:`Source`."""
        shares = list(share(len(self._held_out.files), micro_batch, rank, ranks))
        batches = self._load(self._held_out, [[(row, 0) for row in rows] for rows, _ in shares])
        for (images, labels), (_, real) in zip(batches, shares, strict=True):
            labels[real:] = IGNORED
            yield images, labels

    def _load(self, samples: _Samples, keys: Any) -> Iterator[MicroBatch]:
        loader = DataLoader(
            samples,
            batch_sampler=keys,
            num_workers=self._workers,
            multiprocessing_context="fork" if self._workers else None,
            worker_init_fn=heed_only_the_rank,
            pin_memory=self._device.type == "cuda",
        )
        for images, labels in loader:
            yield images.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)


def open_source(data: FashionMnist | Cifar10 | ImageFolder, device: torch.device) -> Source:
    """Open the data of a run file.

    Raises:
        InputError: the data are not available, or not what they should be.
    """
    if isinstance(data, ImageFolder):
        return FromFolder(data, device)
    return InMemory(fashion_mnist() if isinstance(data, FashionMnist) else cifar_10(data.path), device)


def _keys(order: Order, place: Place) -> list[tuple[int, int]]:
    rows = order.rows(place)
    seeds = order.augmentation(place.first).integers(0, 2**63, len(rows))
    return list(zip(rows.tolist(), seeds.tolist(), strict=True))


def _names_sha256(samples: Sequence[tuple[str, int]], folder: Path) -> str:
    digest = hashlib.sha256()
    for path, label in samples:
        digest.update(f"{Path(path).relative_to(folder)}\0{label}\n".encode())
    return digest.hexdigest()
