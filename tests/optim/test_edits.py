"""One process without an engine: what a program does to gradients between ``backward()`` and ``step()``.

In the contract's order: what was dropped is no chunk, and what was edited is the gradient of the step, whose ratio is
still that of the chunks as they left autograd. The right values are the dense reference's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_vrgd import gsnr_stats
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS, VRSGD, VRAdam, VRAdamW
from tests.optim.test_windows import OutOfMemory, Regression, break_off, chunks_of, reference_of, same

REDUCING = [name for name in OPTIMIZERS if name.startswith("VR")]
pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


def mean_of(chunks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([chunk[name] for chunk in chunks]).double().mean(0) for name in chunks[0]}


# --- dropped


def by_module(model: nn.Module) -> None:
    model.zero_grad()


def by_module_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.zero_()  # type: ignore[union-attr]


def through_data(model: nn.Module) -> None:  # leaves the version counter as it is
    for param in model.parameters():
        param.grad.data.zero_()  # type: ignore[union-attr]


def by_new_zeros(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def together(model: nn.Module) -> None:
    torch._foreach_zero_([param.grad for param in model.parameters()])


def by_multiplying(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.mul_(0)  # type: ignore[union-attr]


FORMS = [by_module, by_module_in_place, in_place, through_data, by_new_zeros, together, by_multiplying]


@pytest.mark.parametrize("drop", FORMS)
@pytest.mark.parametrize("name", ["VRSGD", "VRLAMB"])
def test_a_dropped_gradient_is_no_chunk(name: str, drop: Callable[[nn.Module], None]) -> None:
    model = Regression()
    optimizer = OPTIMIZERS[name]([{"params": [model.a]}, {"params": [model.b], "gamma": 0.5}], lr=0.1)
    reference = DenseOptimizer(
        name, dict(model.named_parameters()), [{"params": ["a"]}, {"params": ["b"], "gamma": 0.5}], lr=0.1
    )
    for step in range(3):
        window = range(4 * step, 4 * step + 4)
        chunks = chunks_of(model, window)
        for bad in range(step):  # none in the first window, one in the second, two in a row in the third
            (1e3 * model.loss(50 + bad)).backward()
            drop(model)
        for micro_batch in window:
            (model.loss(micro_batch) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
        assert gsnr_stats(optimizer).k == 4
        same(model, reference)


@pytest.mark.parametrize("drop", FORMS)
def test_a_discriminator_is_cleared_between_the_losses(drop: Callable[[nn.Module], None]) -> None:
    # the generator's loss runs backward through the discriminator, whose gradients of it are thrown away
    generator, discriminator = Regression(), Regression()
    of_g = VRAdam(generator.parameters(), lr=0.01)
    of_d = VRAdam(discriminator.parameters(), lr=0.01)
    references = [reference_of(of_g, generator), reference_of(of_d, discriminator)]

    def losses(g: Regression, d: Regression, micro_batch: int) -> tuple[Tensor, Tensor]:
        fake = torch.tanh(torch.ones(3, 4) * (micro_batch + 1) @ g.a) @ g.b
        return torch.tanh(fake @ d.a @ d.b).mean(), torch.tanh(fake.detach() @ d.a @ d.b).square().mean()

    for step in range(3):
        chunks: list[list[dict[str, Tensor]]] = [[], []]
        for micro_batch in range(4 * step, 4 * step + 4):
            twins = Regression(), Regression()
            for twin, model in zip(twins, (generator, discriminator), strict=True):
                twin.load_state_dict(model.state_dict())
            of_twins = losses(*twins, micro_batch)
            for index, loss in enumerate(of_twins):
                weights = dict(twins[index].named_parameters())
                grads = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
                chunks[index].append(dict(zip(weights, grads, strict=True)))
        for micro_batch in range(4 * step, 4 * step + 4):
            (losses(generator, discriminator, micro_batch)[0] / 4).backward()
        of_g.step()
        drop(discriminator)
        generator.zero_grad()
        references[0].step(chunks[0])
        # the discriminator's chunks are at the generator of before its step: computed above
        for parts in chunks[1]:
            surrogate = sum((p * parts[n]).sum() for n, p in discriminator.named_parameters()) / 4
            surrogate.backward()
        of_d.step()
        discriminator.zero_grad(set_to_none=False)
        references[1].step(chunks[1])
        assert (gsnr_stats(of_g).k, gsnr_stats(of_d).k) == (4, 4)
        same(generator, references[0])
        same(discriminator, references[1])


def test_one_layer_is_dropped_and_the_others_stay() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    chunks = chunks_of(model, range(4))
    for micro_batch in range(4):
        if micro_batch == 2:
            model.b.grad.data.zero_()  # type: ignore[union-attr]
        (model.loss(micro_batch) / 4).backward()
    optimizer.step()
    for chunk in chunks[:2]:
        del chunk["b"]  # a zero gradient
    reference.step(chunks)
    assert gsnr_stats(optimizer).k == 4
    same(model, reference)


def test_a_gradient_that_is_zero_by_itself_is_dropped_with_the_others() -> None:
    # an adapter's first matrix, as long as the second is zero; and a layer without elements
    model, adapter, empty = Regression(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 3))
    optimizer = VRSGD([*model.parameters(), adapter, empty], lr=0.5)
    reference = reference_of(optimizer, model)
    for micro_batch in (50, 51, *range(3)):
        if micro_batch == 0:
            for module in (model, nn.ParameterList([adapter, empty])):
                module.zero_grad(set_to_none=False)
            chunks = chunks_of(model, range(3))
        (model.loss(micro_batch) / 3 + (adapter * 0.0).sum() + empty.sum()).backward()
    optimizer.step()
    reference.step(chunks)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


@pytest.mark.parametrize("pattern", [(0.0, 1.0, 2.0, 3.0), (1.0, -1.0, 2.0, 3.0), (1.0, 0.0, 0.0, 2.0)])
def test_gradients_that_autograd_left_at_zero_are_chunks(pattern: tuple[float, ...]) -> None:
    # a micro-batch of which nothing counts, and two that cancel exactly, leave zeros in .grad that nobody dropped
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    (chunk,) = chunks_of(model, range(1))
    for factor in pattern:
        (model.loss(0) * factor / 4).backward()
    optimizer.step()
    reference.step([{name: grad * factor for name, grad in chunk.items()} for factor in pattern])
    assert gsnr_stats(optimizer).k == 4
    same(model, reference)


@pytest.mark.parametrize("dropped_before", [False, True])
def test_a_pass_that_broke_off_is_dropped_in_place(dropped_before: bool) -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    (model.loss(50)).backward()
    if dropped_before:
        model.zero_grad(set_to_none=False)
    break_off(model)
    model.zero_grad(set_to_none=False)
    chunks = chunks_of(model, range(3))
    for micro_batch in range(3):
        (model.loss(micro_batch) / 3).backward()
    optimizer.step()
    reference.step(chunks)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


# --- edited


def mask(grad: Tensor) -> Tensor:
    return grad * torch.tensor([[0.0], [1.0], [1.0], [0.5]], dtype=grad.dtype)


def masked(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.copy_(mask(param.grad))


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_tensor_hooks_are_of_the_chunk_in_any_order(name: str, order: str) -> None:
    model = Regression()
    if order != "after":
        model.a.register_hook(mask)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1, weight_decay=0.0)
    if order != "before":
        model.a.register_hook(mask)
    reference = reference_of(optimizer, model, weight_decay=0.0)
    for step in range(2):
        window = range(4 * step, 4 * step + 4)
        chunks = chunks_of(model, window)
        for chunk in chunks:
            chunk["a"] = mask(mask(chunk["a"])) if order == "both" else mask(chunk["a"])
        for micro_batch in window:
            (model.loss(micro_batch) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
        same(model, reference)
    assert torch.equal(model.a[0], Regression().a[0]), "a masked row trained"


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("how", ["edit", "new tensor", "post-accumulate hook", "earlier post-accumulate hook"])
def test_an_edit_is_the_gradient_and_leaves_the_ratio(name: str, how: str) -> None:
    model = Regression()
    if how == "earlier post-accumulate hook":
        model.a.register_post_accumulate_grad_hook(masked)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    if how == "post-accumulate hook":
        model.a.register_post_accumulate_grad_hook(masked)
    for step in range(2):
        window = range(4 * step, 4 * step + 4)
        chunks = chunks_of(model, window)
        for micro_batch in window:
            (model.loss(micro_batch) / 4).backward()
        mean = mean_of(chunks)
        assert model.a.grad is not None
        if "hook" in how:
            mean["a"] = torch.zeros_like(mean["a"])
            for chunk in chunks:  # a mask of what has been accumulated so far
                mean["a"] = mask(mean["a"] + chunk["a"].double() / 4)
        else:
            edited = 100.0 * mask(model.a.grad)
            if how == "edit":
                model.a.grad.copy_(edited)
            else:
                model.a.grad = edited
            mean["a"] = 100.0 * mask(mean["a"])
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks, mean=mean)
        same(model, reference)


def test_dropped_then_edited() -> None:
    model = Regression()
    optimizer = VRAdamW(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    chunks = chunks_of(model, range(3))
    (1e3 * model.loss(50)).backward()
    model.zero_grad(set_to_none=False)
    for micro_batch in range(3):
        (model.loss(micro_batch) / 3).backward()
    model.a.grad.mul_(-3.0)  # type: ignore[union-attr]
    optimizer.step()
    mean = mean_of(chunks)
    mean["a"] *= -3.0
    reference.step(chunks, mean=mean)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


def test_zeroed_before_the_step_is_an_edit() -> None:
    # k chunks were seen, and the gradient of the step is zero: momentum alone moves the weights, as in torch
    model = Regression()
    optimizer = VRAdamW(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    for step in range(2):
        window = range(3 * step, 3 * step + 3)
        chunks = chunks_of(model, window)
        for micro_batch in window:
            (model.loss(micro_batch) / 3).backward()
        mean = mean_of(chunks)
        if step:
            model.zero_grad(set_to_none=False)
            mean = {name: torch.zeros_like(grad) for name, grad in mean.items()}
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks, mean=mean)
        same(model, reference)


def test_a_gradient_that_was_replaced_in_a_broken_pass_is_still_an_error() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    for micro_batch in range(3):
        (model.loss(micro_batch) / 3).backward()
    with pytest.raises(MemoryError):
        (OutOfMemory.apply(torch.tanh(model.a)) @ model.b).sum().backward()
    model.b.grad.mul_(2.0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="broke off"):
        optimizer.step()
