"""The networks' shapes and sizes, and where bf16 stays out."""

from __future__ import annotations

import pytest
import torch

from ds_vrgd_recipes.vision.network import BasicBlock, Classifier, SmallResNet


@pytest.mark.parametrize("depth, parameters", [(20, 269_722), (56, 853_018)])
def test_sizes_of_the_paper(depth: int, parameters: int) -> None:
    # He et al. 2016, table 6: 0.27 M and 0.85 M. Convolutions 3x3 without bias, two numbers a BatchNorm channel, and
    # a head of 64 x 10 + 10; shortcuts have none.
    network = SmallResNet(depth, 10)
    n = (depth - 2) // 6
    convolutions = 9 * (3 * 16 + (2 * n) * 16**2 + 16 * 32 + (2 * n - 1) * 32**2 + 32 * 64 + (2 * n - 1) * 64**2)
    assert convolutions + 2 * (16 + 2 * n * (16 + 32 + 64)) + 650 == parameters
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_a_shortcut_takes_every_second_pixel_and_fills_channels_with_zeros() -> None:
    block = BasicBlock(2, 4, 2).eval()
    torch.nn.init.zeros_(block.norm2.weight)  # nothing but the shortcut is left
    images = torch.rand(1, 2, 4, 4)
    expected = torch.zeros(1, 4, 2, 2)
    expected[:, 1:3] = images[:, :, ::2, ::2]
    torch.testing.assert_close(block(images), expected, rtol=0, atol=0)


@pytest.mark.parametrize("depth", [2, 9, 49])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth={depth} is not 6n \+ 2; use 8"):
        SmallResNet(depth, 10)


def test_images_are_normalised_and_only_layers_compute_in_bf16() -> None:
    seen = []

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.BatchNorm2d(3), torch.nn.Linear(3, 2)

        def forward(self, normal: torch.Tensor) -> torch.Tensor:
            seen.append(normal)
            logits: torch.Tensor = self.head(self.norm(normal).mean((2, 3)))
            assert logits.dtype == torch.bfloat16
            return logits

    model = Classifier(Layer(), (0.5, 0.5, 0.2), (0.25, 0.5, 0.1), bf16=True)
    logits = model(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8))
    logits.sum().backward()
    torch.testing.assert_close(seen[0][0, :, 0, 0], torch.tensor([2.0, 1.0, 8.0]))  # (1 - mean) / std
    assert logits.dtype == torch.float32
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
