"""Both small data sets, from files laid out like the published ones."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.vision import images
from ds_vrgd_recipes.vision.images import cifar_10, fashion_mnist
from tests.recipes.vision.cases import small_images
from tests.support.archives import archive


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """The format of MNIST's files: two zeros, 8 for bytes, the number of dimensions, their sizes, the data."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return gzip.compress(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def files() -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    folder = "usr/share/datasets/fashion-mnist"
    return {
        f"{folder}/{part}-{kind}-ubyte.gz": idx(array)
        for part, count in (("train", 5), ("t10k", 3))
        for kind, array in (
            ("images-idx3", rng.integers(0, 256, (count, 28, 28))),
            ("labels-idx1", np.arange(count)),
        )
    }


def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Path:
    """Put a package into the cache, pinned instead of the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ds_vrgd").mkdir()
    path = archive(tmp_path / "ds_vrgd" / images.FASHION_MNIST.file, files)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(images, "FASHION_MNIST", dataclasses.replace(images.FASHION_MNIST, sha256=digest))
    return path


def test_fashion_mnist_gets_a_margin_and_three_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    offer(tmp_path, monkeypatch, files)
    data = fashion_mnist()
    assert (data.train.images.shape, data.held_out.images.shape) == ((5, 3, 32, 32), (3, 3, 32, 32))
    raw = gzip.decompress(files["usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz"])[16:]
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(5, 1, 28, 28).expand(-1, 3, -1, -1)
    assert torch.equal(data.train.images[:, :, 2:30, 2:30], pixels)
    assert int(data.train.images.sum()) == int(pixels.long().sum())  # the margin is black
    assert data.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert data.held_out.labels.tolist() == [0, 1, 2]


def test_a_package_that_is_laid_out_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> None:
    name = "usr/share/datasets/fashion-mnist/t10k-labels-idx1-ubyte.gz"
    path = offer(tmp_path, monkeypatch, files | {name: gzip.compress(b"\0\0\0\0\0\0\0\3")})
    with pytest.raises(InputError, match=rf"source=fashion-mnist: {path} cannot be read \(8 bytes with the mark 0x0"):
        fashion_mnist()


def cifar(folder: Path) -> Path:
    """Two images a batch, pickled as Python 2 did: keys and pixels in bytes."""
    for number, name in enumerate([f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]):
        pixels = np.full((2, 3072), number, np.uint8)
        pixels[:, 1024:2048] = 200  # green
        content = {b"data": pixels, b"labels": [number, number], b"filenames": [b"a", b"b"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


def test_cifar_10(tmp_path: Path) -> None:
    data = cifar_10(cifar(tmp_path))
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert data.held_out.labels.tolist() == [5, 5]
    assert data.train.images.shape == (10, 3, 32, 32)
    assert data.train.images[2, :, 7, 9].tolist() == [1, 200, 1]
    before = data.sha256
    (tmp_path / "data_batch_2").write_bytes((tmp_path / "data_batch_3").read_bytes())
    assert cifar_10(tmp_path).sha256 != before


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_what_is_no_cifar_10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"data_batch_1 cannot be read \(No such file.*give the folder"):
        cifar_10(tmp_path)
    cifar(tmp_path)
    (tmp_path / "data_batch_4").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(InputError, match=r"data_batch_4 is not a batch of CIFAR-10 \(it names posix\.mkdir\)"):
        cifar_10(tmp_path)
    assert not (tmp_path / "evil").exists()


def test_statistics_are_those_of_the_pixels() -> None:
    data = small_images()
    pixels = data.train.images.double() / 255
    mean, std = data.statistics()
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(std, dtype=torch.float64), pixels.std((0, 2, 3), correction=0))
