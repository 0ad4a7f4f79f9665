"""Images from a folder of JPEGs, through torchvision's data set and processes that decode."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.vision.order import Order
from ds_vrgd_recipes.vision.runfile import ImageFolder
from ds_vrgd_recipes.vision.source import IGNORED, FromFolder
from tests.recipes.vision.cases import run_file
from tests.recipes.vision.folders import has_torchvision, image_folder
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if not has_torchvision():
        pytest.skip("torchvision is not installed: `make venv` leaves it out, see the Makefile")
    return image_folder(tmp_path / "images")


def opened(folder: Path, workers: int = 0) -> FromFolder:
    return FromFolder(ImageFolder(source="image-folder", path=folder, size=32, workers=workers), CPU)


def test_micro_batches_are_the_same_with_and_without_processes_and_from_any_update_on(folder: Path) -> None:
    order = Order(images=8, seed=1, global_batch=4, micro_batch=2)
    alone = list(opened(folder).training(order, order.places(0, 4, 0, 1)))
    decoded = list(opened(folder, workers=2).training(order, order.places(2, 4, 0, 1)))
    assert len(alone) == 8
    for (images, labels), (others, other_labels) in zip(alone[4:], decoded, strict=True):
        assert (images.shape, images.dtype) == ((2, 3, 32, 32), torch.uint8)
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)
    # The second epoch has the same images, cut otherwise; bright is the first class by name.
    for images, labels in alone:
        for image, label in zip(images, labels, strict=True):
            assert (image.double().mean() > 125) == (label == 0)
    first, second = (torch.cat([images for images, _ in part]) for part in (alone[:4], alone[4:]))
    assert not torch.equal(first.sort(0).values, second.sort(0).values)


def test_held_out_images_are_the_middle_and_fill_up_whole_batches(folder: Path) -> None:
    source = opened(folder)
    (images, labels), (_, others) = source.held_out(2, 0, 1)
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 1]  # bright/1, dark/0, dark/2
    assert others.tolist() == [1, IGNORED]
    assert (source.images, source.classes) == (8, 2)


def test_folders_that_do_not_fit(folder: Path) -> None:
    before = opened(folder).sha256
    shutil.copy(folder / "train/dark/0.JPEG", folder / "train/dark/9.JPEG")
    assert opened(folder).sha256 != before
    shutil.rmtree(folder / "val/dark")
    with pytest.raises(InputError, match=r"train has 2 classes, val 1, and dark is in one of them alone"):
        opened(folder)
    shutil.rmtree(folder / "val")
    with pytest.raises(InputError, match=r"data\.path=.*it must hold train/CLASS/\*\.JPEG and val/CLASS/\*\.JPEG"):
        opened(folder)


def train_resnet50(rank: int, folder: Path) -> str:
    assert has_torchvision()
    from ds_vrgd_recipes.run.launch import load_deepspeed_config
    from ds_vrgd_recipes.vision.runfile import load_run_file
    from ds_vrgd_recipes.vision.train import train

    configs = Path(__file__).parents[3] / "configs" / "resnet50"
    changes = {
        "data": {"source": "image-folder", "path": folder, "size": 64, "workers": 1},
        "global_batch": 4,
        "micro_batch": 2,
        "epochs": 1,
        "warmup_epochs": 0,
    }
    run = run_file(**load_run_file(configs / "96k.yaml").model_dump(exclude_unset=True) | changes)
    return train(run, load_deepspeed_config(configs / "vr_lars.json"), folder.parent / "out", None)


@pytest.mark.slow
def test_resnet_50_trains_by_the_shipped_files(folder: Path) -> None:
    (line,) = run_on_ranks(1, train_resnet50, folder)
    assert line.endswith("after 2 updates of 4 images")
    state = torch.load(folder.parent / "out" / "model.pt")
    # ResNet-50 with two classes in place of 1,000: 25,557,032 - 998 * 2,049 (torchvision's documentation).
    assert sum(tensor.numel() for name, tensor in state.items() if "running" not in name and "num_b" not in name) == (
        25_557_032 - 998 * 2_049
    )
