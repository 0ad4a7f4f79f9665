"""One process without an engine: where windows begin and end, which chunks are in them, odd tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_vrgd import gsnr_stats
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS, VRLAMB, VRSGD, VRAdam, VROptimizer
from tests.optim.training import BOUND, STEPS, Training
from tests.support.model import OutOfMemory

REDUCING = [name for name in OPTIMIZERS if name.startswith("VR")]
pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("accumulation", [2, 9])
def test_any_accumulation_equals_the_reference(name: str, accumulation: int) -> None:
    training = Training(name, accumulation)
    for step in range(STEPS):
        training.step(step, clip=0.5)
    assert training.moved() > 1e-2
    assert training.error() <= BOUND


def test_other_arguments_of_gsnr() -> None:
    training = Training("VRAdam", gamma=0.5, beta3=0.5, gsnr_eps=1e-3)
    for step in range(STEPS):
        training.step(step)
    assert training.error() <= BOUND


class Regression(nn.Module):
    """Two matrices whose gradients are easy to tell apart."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.a, self.b = (nn.Parameter(torch.randn(4, 4, dtype=dtype)) for _ in range(2))

    def loss(self, micro_batch: int, use: str = "ab") -> Tensor:
        generator = torch.Generator().manual_seed(micro_batch)
        x = torch.randn(3, 4, generator=generator, dtype=self.a.dtype)
        for name in use:
            x = torch.tanh(x @ getattr(self, name))
        return x.square().mean()


def reference_of(optimizer: VROptimizer, model: Regression, **arguments: Any) -> DenseOptimizer:
    arguments = {"lr": optimizer.defaults["lr"], "gamma": optimizer.defaults["gamma"], **arguments}
    return DenseOptimizer(type(optimizer).__name__, dict(model.named_parameters()), **arguments)


def chunks_of(model: Regression, micro_batches: range, use: str = "ab") -> list[dict[str, Tensor]]:
    """Chunk gradients from a copy that nobody watches; a parameter that took no part is left out."""
    chunks = []
    for micro_batch in micro_batches:
        alone = Regression(model.a.dtype)
        alone.load_state_dict(model.state_dict())
        alone.loss(micro_batch, use).backward()
        chunks.append({n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
    return chunks


def same(model: Regression, reference: DenseOptimizer) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach().double(), reference.params[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("missing", ["first", "last", "all but one"])
def test_a_parameter_without_part_in_a_micro_batch(missing: str) -> None:
    # there its gradient is 0, as in the mean that autograd accumulates
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    uses = {"first": ["a", "ab", "ab"], "last": ["ab", "ab", "a"], "all but one": ["a", "ab", "a"]}[missing]
    for step in range(3):
        chunks = []
        for index, use in enumerate(uses):
            chunks += chunks_of(model, range(3 * step + index, 3 * step + index + 1), use)
            (model.loss(3 * step + index, use) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
        same(model, reference)


def test_fp64_parameters() -> None:
    model = Regression(torch.float64)
    optimizer = VRLAMB(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    run_window(model, optimizer, range(4), reference)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), reference.params[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unused_rows_in_half_precision_stay_put(name: str, dtype: torch.dtype) -> None:
    # an embedding of which half the rows never occur, without decay: 0 is their only right update
    table = nn.Embedding(6, 4).to(dtype)
    before = table.weight.detach().clone()
    # 1e-8 is 0 in fp16, where torch.optim.Adam divides 0 by 0 as well
    eps = {"eps": 1e-4} if name in ("VRAdam", "VRAdamW", "VRLAMB") else {}
    rate = 10.0 if name == "VRLARS" else 0.1
    optimizer = OPTIMIZERS[name](table.parameters(), lr=rate, weight_decay=0.0, **eps)
    for step in range(2):
        for index in range(3):
            (table(torch.tensor([0, 1, 2])) * (1 + index + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(table.weight).all()
    assert torch.equal(table.weight[3:], before[3:])
    assert not torch.equal(table.weight[:3], before[:3])


def test_channels_last() -> None:
    # gradients of another memory format than the moments'
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = VRLAMB(layer.parameters(), lr=0.1)
        for part in x.to(memory_format=memory_format).split(1):
            layer(part).square().mean().backward()
        optimizer.step()
        results.append(layer.weight.detach().contiguous())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


# --- windows


def run_window(
    model: Regression, optimizer: VROptimizer, window: range, reference: DenseOptimizer | None = None
) -> None:
    chunks = chunks_of(model, window)
    for micro_batch in window:
        (model.loss(micro_batch) / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if reference is not None:
        reference.step(chunks)


def by_optimizer(model: nn.Module, optimizer: VROptimizer) -> None:
    optimizer.zero_grad()


def by_optimizer_in_place(model: nn.Module, optimizer: VROptimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_model(model: nn.Module, optimizer: VROptimizer) -> None:
    model.zero_grad()


Clear = Callable[[nn.Module, VROptimizer], None]


@pytest.mark.parametrize("clear", [by_optimizer, by_optimizer_in_place, by_model])
def test_a_skipped_step_leaks_nothing(clear: Clear) -> None:
    # what torch.amp.GradScaler does at an overflow: no step, then zero_grad; the window before was longer, besides
    model = Regression()
    optimizer = VRAdam(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    run_window(model, optimizer, range(3), reference)
    for micro_batch in range(5):
        (model.loss(micro_batch) * float("inf")).backward()
    clear(model, optimizer)
    run_window(model, optimizer, range(3, 6), reference)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


def by_layer(model: nn.Module, optimizer: VROptimizer) -> None:
    model.b.grad = None  # type: ignore[union-attr]


def by_layer_in_place(model: nn.Module, optimizer: VROptimizer) -> None:
    model.b.grad.zero_()  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("clear", "k"),
    # where b's zeros lie beside a's own, nobody can tell whether a's were set there too
    [(by_layer, 3), (by_layer_in_place, 2), (by_optimizer, 2), (by_optimizer_in_place, 2), (by_model, 2)],
)
def test_a_gradient_of_zero_goes_with_all_others_alone(clear: Clear, k: int) -> None:
    model = Regression()
    optimizer = VRAdam(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    (model.a * 0.0 + model.b).sum().backward()
    clear(model, optimizer)
    chunks: list[dict[str, Tensor]] = [{"a": torch.zeros_like(model.a)}][: k - 2] + chunks_of(model, range(2))
    for micro_batch in range(2):
        (model.loss(micro_batch) / k).backward()
    optimizer.step()
    reference.step(chunks)
    assert gsnr_stats(optimizer).k == k
    same(model, reference)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_state_that_is_loaded_within_a_window_leaves_its_chunks(at: int) -> None:
    # their gradients are in .grad, which a state dict does not touch
    model = Regression()
    optimizer = VRAdam(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    run_window(model, optimizer, range(3), reference)
    reference.step(chunks_of(model, range(3, 6)))
    for micro_batch in range(3):
        if micro_batch == at:
            optimizer.load_state_dict(optimizer.state_dict())
        (model.loss(3 + micro_batch) / 3).backward()
    if at == 3:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


def test_grad_scaler() -> None:
    # the scaler skips the second window; r does not see the scale, nor that it halves
    model = Regression()
    optimizer = VRLAMB(model.parameters(), lr=0.1)
    reference = reference_of(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        window = range(3 * step, 3 * step + 3)
        chunks = chunks_of(model, window)
        for micro_batch in window:
            loss = model.loss(micro_batch) / 3
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        if step != 1:
            reference.step(chunks)
    assert scaler.get_scale() == 2.0**9
    same(model, reference)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_checkpoints_around_every_layer(reentrant: bool, shared: bool) -> None:
    # every segment is a backward pass of its own, and no parameter is outside of them; a shared one comes twice
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)

    def loss(of: Regression, micro_batch: int) -> Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(micro_batch)).requires_grad_()
        for name in ("a", "b", "a" if shared else "b"):
            weight = getattr(of, name)
            x = checkpoint(lambda x, weight=weight: torch.tanh(x @ weight), x, use_reentrant=reentrant)
        return x.square().mean()

    for step in range(2):
        chunks = []
        for micro_batch in range(3 * step, 3 * step + 3):
            alone = Regression()
            alone.load_state_dict(model.state_dict())
            loss(alone, micro_batch).backward()
            chunks.append({n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
            (loss(model, micro_batch) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
        assert gsnr_stats(optimizer).k == 3
        same(model, reference)


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # the outer ones' forward, without gradients
def test_nested_checkpoints() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)

    def inner(x: Tensor) -> Tensor:
        return torch.tanh(x @ model.b)

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, torch.tanh(checkpoint(inner, x, use_reentrant=True) @ model.a), use_reentrant=True)

    for _ in range(3):
        x = torch.ones(3, 4).requires_grad_()
        checkpoint(outer, checkpoint(outer, x, use_reentrant=True), use_reentrant=True).sum().backward()
    optimizer.step()
    assert gsnr_stats(optimizer).k == 3


def test_gradients_that_are_not_accumulated_are_no_chunk() -> None:
    # torch.autograd.grad (a penalty on gradients, a log of their norms) runs the hooks of the parameters, too
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    for step in range(2):
        window = range(3 * step, 3 * step + 3)
        chunks = chunks_of(model, window)
        for micro_batch in window:
            torch.autograd.grad(model.loss(micro_batch + 50), list(model.parameters()))
            (model.loss(micro_batch) / 3).backward()
            torch.autograd.grad(model.loss(micro_batch + 60), [model.b])
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
        assert gsnr_stats(optimizer).k == 3
        same(model, reference)


def test_gradients_for_some_parameters_only() -> None:
    # backward(inputs=...) accumulates into these; the other has a gradient of 0 in that chunk
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    chunks = chunks_of(model, range(3))
    del chunks[1]["b"]
    for micro_batch in range(3):
        (model.loss(micro_batch) / 3).backward(inputs=[model.a] if micro_batch == 1 else None)
    optimizer.step()
    reference.step(chunks)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


# --- errors and the warning


def test_a_step_without_a_backward_pass_is_an_error() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="saw k = 0"):
        optimizer.step()


# --- hooks and state


def hooks(param: Tensor) -> int:
    return len(param._backward_hooks or {})


def test_the_gradient_is_left_alone() -> None:
    model = Regression()
    optimizer = VRLAMB(model.parameters(), lr=0.1, prenormalize=True, weight_decay=0.1)
    for micro_batch in range(3):
        model.loss(micro_batch).backward()
    assert model.a.grad is not None
    before, weights = model.a.grad.clone(), model.a.detach().clone()
    optimizer.step()
    assert torch.equal(model.a.grad, before)
    assert not torch.equal(model.a, weights)


@pytest.mark.parametrize("taken", [False, True])
def test_what_another_hook_does_to_the_sum_is_not_of_the_chunk(taken: bool) -> None:
    model = Regression()
    arrived: dict[Tensor, Tensor] = {}

    def take(param: Tensor) -> None:  # the gradient itself, where it is the first one
        if taken and torch.equal(param.grad, arrived[param]):  # type: ignore[arg-type]
            param.grad = arrived[param]

    def quadruple(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(4.0)

    for param in model.parameters():
        param.register_hook(lambda grad, param=param: arrived.__setitem__(param, grad))
        param.register_post_accumulate_grad_hook(take)
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(quadruple)
    for step in range(2):
        window = range(3 * step, 3 * step + 3)
        chunks = chunks_of(model, window)
        for micro_batch in window:
            (model.loss(micro_batch) / 3).backward()
            for param in model.parameters():
                assert param.grad is not None
                assert not taken or micro_batch > window.start or param.grad is arrived[param]
                param.grad.div_(4.0)
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
        same(model, reference)


class Copies(TorchDispatchMode):
    """Counts what copies a whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


def test_observing_copies_no_gradient_that_is_added_up() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    model.loss(0).backward()
    with Copies() as copies:
        model.loss(1).backward()
    assert copies.count == 0
    optimizer.zero_grad()
    with Copies() as copies:
        model.loss(2).backward()
    assert copies.count == 2  # autograd's own: somebody else holds what arrived


def test_a_dropped_model_is_freed() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    run_window(model, optimizer, range(3))
    param = weakref.ref(model.a)
    del model, optimizer
    gc.collect()
    assert param() is None


def test_restoring_another_gamma_leaves_gsnr_on_or_off_as_it_was_built() -> None:
    model = Regression()
    on, off = VRLAMB(model.parameters(), lr=0.1, gamma=0.2), VRLAMB(model.parameters(), lr=0.1, gamma=1.0)
    assert hooks(model.a) == 1
    state_on, state_off = on.state_dict(), off.state_dict()
    off.load_state_dict(state_on)
    on.load_state_dict(state_off)
    assert (on.param_groups[0]["gamma"], off.param_groups[0]["gamma"]) == (0.2, 1.0)
    assert hooks(model.a) == 1
    on.load_state_dict(VRLAMB(model.parameters(), lr=0.1, gamma=0.5).state_dict())
    assert on.param_groups[0]["gamma"] == 0.5
    run_window(model, on, range(3))
    assert gsnr_stats(on).k == 3


# --- backward passes that break off


def break_off(model: Regression) -> None:
    with pytest.raises(MemoryError):
        (OutOfMemory.apply(torch.tanh(model.a)) @ model.b).sum().backward()


@pytest.mark.parametrize("then", ["step", "more micro-batches"])
def test_no_step_with_a_part_of_a_backward_pass(then: str) -> None:
    model = Regression()
    optimizer = VRSGD(model.named_parameters(), lr=0.5)
    for micro_batch in range(2):
        model.loss(micro_batch).backward()
    break_off(model)
    if then != "step":
        model.loss(2).backward()
    before = model.b.detach().clone()
    with pytest.raises(RuntimeError, match=r"broke off .*\.grad of 1 parameters, 'b' among them.*zero_grad\(\)"):
        optimizer.step()
    assert torch.equal(model.b, before)


def test_no_step_with_a_part_of_a_backward_pass_around_a_reentrant_checkpoint() -> None:
    # the pass inside has ended when the one around it breaks off
    model = Regression()
    optimizer = VRSGD(model.named_parameters(), lr=0.5)
    model.loss(0).backward()
    before = model.b.detach().clone()
    with pytest.raises(MemoryError):
        checkpoint(lambda x: x @ model.b, OutOfMemory.apply(model.a), use_reentrant=True).sum().backward()
    with pytest.raises(RuntimeError, match=r"broke off .*\.grad of 1 parameters, 'b' among them"):
        optimizer.step()
    assert torch.equal(model.b, before)


@pytest.mark.parametrize("clear", [by_optimizer, by_optimizer_in_place, by_model])
def test_a_window_that_begins_anew_after_a_backward_pass_that_broke_off(clear: Clear) -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    model.loss(50).backward()
    break_off(model)
    clear(model, optimizer)
    run_window(model, optimizer, range(3), reference)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


def test_a_forward_pass_in_the_middle_is_no_chunk() -> None:
    # an evaluation, or a micro-batch that ran out of memory before its backward pass began
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5)
    reference = reference_of(optimizer, model)
    chunks = chunks_of(model, range(3))
    for micro_batch in range(3):
        (model.loss(micro_batch) / 3).backward()
        with torch.no_grad():
            model.loss(60)
        model.loss(70)
    optimizer.step()
    reference.step(chunks)
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)
