"""Plain PyTorch, one process and DDP: micro-batches are the chunks, and the dense reference has the right weights."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ds_vrgd
from ds_vrgd.doctor.chunks import chunk_gradients
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS, VRLAMB, VRSGD, VRAdam, VRAdamW, VROptimizer
from tests.optim.one_shard import OneShard
from tests.support.model import TinyLM, batches, make_model, param_groups
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import ARGUMENTS

STEPS, CHUNKS = 5, 4

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def chunks_of(model: TinyLM, micro_batches: list[Tensor]) -> list[dict[str, Tensor]]:
    """One backward pass a chunk through a copy that nothing observes."""
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    return chunk_gradients(plain, micro_batches, 1.0)


def reference_for(name: str, model: nn.Module, groups: list[dict[str, Any]], **hyper: Any) -> DenseOptimizer:
    """The reference on the parameters of ``groups``, under their names in ``model``."""
    names = {param: n for n, param in model.named_parameters()}
    named = [{**group, "params": [names[param] for param in group["params"]]} for group in groups]
    wanted = {n for group in named for n in group["params"]}
    return DenseOptimizer(name, {n: p for n, p in model.named_parameters() if n in wanted}, named, **hyper)


def error(model: nn.Module, reference: DenseOptimizer) -> float:
    """|theta - theta_ref| / |theta_ref| over what the reference holds."""
    params = dict(model.named_parameters())
    wrong = torch.cat([(params[n].detach().double() - w).flatten() for n, w in reference.params.items()])
    return float(wrong.norm() / torch.cat([w.flatten() for w in reference.params.values()]).norm())


def window(model: nn.Module, micro_batches: list[Tensor]) -> None:
    for tokens in micro_batches:
        (model(tokens) / len(micro_batches)).backward()


def train(
    model: TinyLM, optimizer: VROptimizer, reference: DenseOptimizer, steps: range = range(STEPS), clip: float = 0.0
) -> None:
    for step in steps:
        micro_batches = batches(step, CHUNKS)
        reference.step(chunks_of(model, micro_batches), clip=clip)
        window(model, micro_batches)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipping_is_torchs(max_norm: float) -> None:
    ours, torchs = make_model(), make_model()
    for model in (ours, torchs):
        window(model, batches(0, 1))
    optimizer = OPTIMIZERS["VRLAMB"](ours.parameters())
    norm, expected = optimizer.clip_grad_norm_(max_norm), nn.utils.clip_grad_norm_(torchs.parameters(), max_norm)
    torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)
    for own, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-6, atol=0)
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm_(max_norm) == 0.0


def test_clipping_rounds_no_gradient_to_the_dtype_of_another() -> None:
    params = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    for param in params:
        param.grad = torch.full_like(param, 3.0)
    norm = OPTIMIZERS["VRSGD"](params).clip_grad_norm_(0.37)
    assert float(norm) == pytest.approx(3.0 * 15**0.5)
    for param in params[1:]:
        torch.testing.assert_close(param.grad, torch.full_like(param, 0.37 / 15**0.5), rtol=1e-6, atol=0)


def test_an_engine_that_clips_by_itself_is_named() -> None:
    optimizer = OPTIMIZERS["VRLAMB"]([nn.Parameter(torch.ones(2))])
    optimizer.observe(OneShard(1, False))  # no .grad is left under ZeRO
    with pytest.raises(RuntimeError, match="Set gradient_clipping in the DeepSpeed JSON"):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_follow_the_reference(name: str) -> None:
    # tied weights, a frozen one, unused rows, and a second group without decay
    model, hyper = make_model(), ARGUMENTS[name]
    groups = param_groups(model)
    reference, optimizer = reference_for(name, model, groups, **hyper), OPTIMIZERS[name](groups, **hyper)
    start = {n: w.clone() for n, w in reference.params.items()}
    train(model, optimizer, reference)
    moved = error(model, DenseOptimizer(name, start, **hyper))
    assert moved > 1e-3
    assert error(model, reference) <= 8e-7
    assert torch.equal(model.frozen.weight, make_model().frozen.weight)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_activation_checkpointing(checkpointing: str) -> None:
    model, hyper = make_model(checkpointing), ARGUMENTS["VRLAMB"]
    groups = param_groups(model)
    reference, optimizer = reference_for("VRLAMB", model, groups, **hyper), VRLAMB(groups, **hyper)
    train(model, optimizer, reference)
    assert error(model, reference) <= 8e-7


class SharedInCheckpoints(nn.Module):
    """One weight in two reentrant segments: autograd hands its gradient out twice in one backward pass."""

    def __init__(self, frozen_first: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.shared = nn.Linear(5, 5), nn.Linear(5, 5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.first.requires_grad_(not frozen_first)

    def forward(self, x: Tensor, checkpointed: bool = True) -> Tensor:
        x = self.first(x.requires_grad_())
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True) if checkpointed else self.shared(x)
            x = torch.tanh(x)
        return x.square().mean()


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_weight_shared_between_reentrant_segments_is_one_chunk(frozen_first: bool) -> None:
    # with the first layer frozen, no observed gradient arrives after the last segment
    model, generator = SharedInCheckpoints(frozen_first), torch.Generator().manual_seed(4)
    params = [p for p in model.parameters() if p.requires_grad]
    reference, optimizer = reference_for("VRSGD", model, [{"params": params}], lr=0.1), VRSGD(params, lr=0.1)
    for _ in range(2):
        inputs = torch.randn(3, 6, 5, generator=generator)
        chunks = []
        for x in inputs:
            plain = copy.deepcopy(model)
            plain.zero_grad()
            plain(x.clone(), checkpointed=False).backward()
            chunks.append(gradients(plain))
        reference.step(chunks)
        for x in inputs:
            (model(x.clone()) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ds_vrgd.gsnr_stats(optimizer).k == 3
    assert error(model, reference) <= 8e-7


def test_clipping_before_the_step() -> None:
    # clipping scales the mean and leaves r alone, as in DeepSpeed
    model, hyper = make_model(), ARGUMENTS["VRSGD"]
    groups = param_groups(model)
    reference, optimizer = reference_for("VRSGD", model, groups, **hyper), VRSGD(groups, **hyper)
    assert max(float(g.norm()) for g in chunks_of(model, batches(0, 1))[0].values()) > 0.05  # it does clip
    train(model, optimizer, reference, clip=0.05)
    assert error(model, reference) <= 8e-7


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_a_skipped_step_does_not_leak(forget: str) -> None:
    model = make_model()
    groups = param_groups(model)
    reference, optimizer = reference_for("VRAdamW", model, groups, lr=5e-3), VRAdamW(groups, lr=5e-3)
    train(model, optimizer, reference, range(1))
    for tokens in batches(7, 3):
        (model(tokens) * torch.inf).backward()
    (optimizer if forget == "optimizer" else model).zero_grad()
    train(model, optimizer, reference, range(1, 3))
    assert ds_vrgd.gsnr_stats(optimizer).k == CHUNKS
    assert error(model, reference) <= 8e-7


def test_a_skipped_step_does_not_leak_through_a_parameter_that_goes_unused() -> None:
    # the bias is used in the skipped window of three micro-batches only
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = VRSGD([weight, bias], lr=0.1)
    for _ in range(3):
        (weight + bias).sum().backward()
    weight.grad = bias.grad = None
    for value in (1.0, 3.0):
        (weight * value).sum().backward()
    optimizer.step()
    assert ds_vrgd.gsnr_stats(optimizer).k == 2


@pytest.mark.parametrize("at", [0, 2])
def test_a_backward_pass_that_breaks_off_does_not_leak(at: int) -> None:
    # at 0 no window is open; at 2 two good micro-batches are thrown away with the broken one
    model = make_model()
    groups = param_groups(model)
    reference, optimizer = reference_for("VRSGD", model, groups, lr=0.5), VRSGD(groups, lr=0.5)
    window(model, batches(8, at))

    def break_off(grad: Tensor) -> None:
        raise ArithmeticError("out of memory, say")

    handle = model.positions.weight.register_hook(break_off)
    with pytest.raises(ArithmeticError):
        model(batches(9, 1)[0]).backward()
    handle.remove()
    model.zero_grad()
    train(model, optimizer, reference, range(2))
    assert ds_vrgd.gsnr_stats(optimizer).k == CHUNKS
    assert error(model, reference) <= 8e-7


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(("k", "expected"), [(7, 1), (8, 0)])
def test_few_chunks_warn_once(k: int, expected: int) -> None:
    model = make_model()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            window(model, batches(step, k))
            optimizer.step()
            optimizer.zero_grad()
    ours = [w for w in caught if f"only k = {k}" in str(w.message)]
    assert len(ours) == expected
    assert all(w.filename == __file__ for w in ours)  # it points at the caller of step()


@pytest.mark.parametrize("gamma", [0.1, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_runs_first_and_its_chunks_belong_to_the_window(name: str, gamma: float) -> None:
    # three chunks before step(), and one in its closure: the weights are those of four chunks before it
    models, hyper = (make_model(), make_model()), dict(ARGUMENTS[name])
    if OPTIMIZERS[name].reduces_variance:
        hyper["gamma"] = gamma
    plain, closing = (OPTIMIZERS[name](param_groups(model), **hyper) for model in models)
    for step in range(3):
        micro_batches = batches(step, CHUNKS)
        window(models[0], micro_batches)
        assert plain.step() is None
        for tokens in micro_batches[:-1]:
            (models[1](tokens) / CHUNKS).backward()

        def closure(last: Tensor = micro_batches[-1]) -> Tensor:
            loss = models[1](last) / CHUNKS
            loss.backward()
            return loss

        with torch.no_grad():  # as torch's optimizers, step() enables gradients for the closure
            loss = closing.step(closure)
        assert loss.requires_grad
        plain.zero_grad()
        closing.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(models[0].tokens.weight, make_model().tokens.weight)
    if gamma < 1.0 and OPTIMIZERS[name].reduces_variance:
        assert ds_vrgd.gsnr_stats(closing).k == CHUNKS


def test_a_closure_may_bring_the_whole_window_or_nothing() -> None:
    # Lightning's automatic optimization runs zero_grad and backward in the closure; its manual one passes an idle one
    models = make_model(), make_model(), make_model()
    optimizers = [VRAdamW(model.parameters(), lr=5e-3) for model in models]
    for step in range(2):
        micro_batches = batches(step, CHUNKS)

        def whole(micro_batches: list[Tensor] = micro_batches) -> float:
            optimizers[1].zero_grad()
            window(models[1], micro_batches)
            return 2.5

        for index in (0, 2):
            optimizers[index].zero_grad()
            window(models[index], micro_batches)
        optimizers[0].step()
        assert optimizers[1].step(whole) == 2.5
        assert optimizers[2].step(lambda: None) is None
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("compiler", [lambda graph: graph, torch.compile(backend="eager")], ids=["no", "eager"])
def test_compiled_autograd_is_refused_by_name(compiler: Any) -> None:
    model = make_model()
    optimizer = VRAdamW(model.parameters())
    (tokens,) = batches(0, 1)
    with (
        compiled_autograd._enable(compiler),
        pytest.raises(RuntimeError, match=r"compiled autograd runs .* gamma=1\.0"),
    ):
        model(tokens).backward()
    optimizer.zero_grad()
    for tokens in batches(0, 2):
        model(tokens).backward()
    optimizer.step()
    assert ds_vrgd.gsnr_stats(optimizer).k == 2


def test_the_loss_of_a_closure_is_returned_where_the_step_is_left_out() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = VRSGD([weight], lr=0.1)

    def closure() -> str:
        for value in (1.0, float("nan")):
            (value * weight).sum().backward()
        return "the loss"

    assert optimizer.step(closure) == "the loss"
    assert optimizer.overflow
    assert torch.equal(weight, torch.ones(2))


def step_by_hand(optimizer: VROptimizer, weight: Tensor) -> None:
    weight.grad = torch.ones(2)


def step_by_func(optimizer: VROptimizer, weight: Tensor) -> None:
    weight.grad = torch.func.grad(lambda w: w.square().sum())(weight.detach())


def step_by_autograd(optimizer: VROptimizer, weight: Tensor) -> None:
    (weight.grad,) = torch.autograd.grad(weight.square().sum(), weight)


def step_twice(optimizer: VROptimizer, weight: Tensor) -> None:
    for value in (1.0, 3.0):
        (weight * value).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("how", [step_by_hand, step_by_func, step_by_autograd, step_twice])
def test_no_chunk_is_an_error_that_names_what_may_have_happened(how: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = VRSGD([weight], lr=0.1)
    how(optimizer, weight)
    with pytest.raises(RuntimeError, match=r"saw k = 0 .* set by hand, .* torch\.func .* second step\(\) in a row"):
        optimizer.step()


@pytest.mark.parametrize("groups", [1, 2])
def test_gamma_that_is_turned_on_late_is_named(groups: int) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = VRSGD([{"params": [w], "gamma": (0.1 if groups == 2 and i else 1.0)} for i, w in enumerate(weights)])
    optimizer.param_groups[0]["gamma"] = 0.2
    for value in (1.0, 3.0):
        (weights[0] * value + weights[1]).sum().backward()
    with pytest.raises(RuntimeError, match=r"gamma of param group 0 was 1\.0, .* is now 0\.2; .* 0\.999"):
        optimizer.step()
    assert torch.equal(weights[0], torch.ones(2))


def test_gamma_may_change_where_it_was_below_one() -> None:
    # also to 1 and back; groups that are added later have their own beginning
    models = make_model(), make_model()
    (first, second), others = param_groups(models[0]), param_groups(models[1])
    late = VRSGD([{**first, "gamma": 0.999}], lr=0.1)
    late.add_param_group({**second, "gamma": 0.5})
    for step, gamma in enumerate((0.1, 1.0, 0.3)):
        whole = VRSGD(others, lr=0.1, gamma=gamma)
        for group in late.param_groups:
            group["gamma"] = gamma
        for model, optimizer in zip(models, (late, whole), strict=True):
            window(model, batches(step, CHUNKS))
            optimizer.step()
            optimizer.zero_grad()
        others = param_groups(models[1])
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def test_parameters_that_were_all_frozen_are_named() -> None:
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = VRSGD([weight], lr=0.1)
    weight.requires_grad_()
    for value in (1.0, 3.0):
        (weight * value).sum().backward()
    with pytest.raises(RuntimeError, match="the chunks of the parameters were not observed: frozen when"):
        optimizer.step()


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = VRSGD(table.parameters())
    with pytest.raises(ValueError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()
    del optimizer


def test_a_parameter_that_was_frozen_is_an_error() -> None:
    kept, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = VRSGD([kept, late], lr=0.1)
    late.requires_grad_()
    for value in (1.0, 2.0):
        (value * (kept + late)).sum().backward()
    with pytest.raises(RuntimeError, match="the chunks of 'param_1' were not observed: frozen when"):
        optimizer.step()


@pytest.mark.parametrize("warm", [False, True])
def test_a_param_group_may_be_added_later(warm: bool) -> None:
    model = make_model()
    first, second = param_groups(model)
    optimizer = VRAdamW([first], lr=5e-3)
    if warm:  # the moments' buffers exist already
        train(model, optimizer, reference_for("VRAdamW", model, [first], lr=5e-3), range(1))
        model.zero_grad()
    reference = reference_for("VRAdamW", model, [first, second], lr=5e-3)
    names = dict(model.named_parameters())
    for n, p in names.items():
        if p in optimizer.state and n in reference.state:
            state = optimizer.state[p]
            reference.state[n] |= {key: value.double() for key, value in state.items() if key != "step"}
            reference.state[n]["step"] = int(state["step"])
    optimizer.add_param_group(second)
    train(model, optimizer, reference, range(1, 4))
    assert error(model, reference) <= 8e-7


def test_the_reference_counts_a_parameter_unused_in_a_micro_batch_as_zero() -> None:
    # chunks of the bias: 1, 0, 3: mean 4/3, variance 14/9, r = (16/9) / (14/9) = 8/7
    weight, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = VRSGD([weight, bias], lr=0.1)
    (weight + bias).sum().backward()
    (2 * weight).sum().backward()
    (weight + 3 * bias).sum().backward()
    optimizer.step()
    stats = ds_vrgd.gsnr_stats(optimizer)
    assert stats.k == 3
    assert stats.layers["param_1"].mean_ratio == pytest.approx(8 / 7, rel=1e-6)
    assert stats.layers["param_0"].mean_ratio == pytest.approx(8.0, rel=1e-6)  # 1, 2, 1: (16/9) / (2/9)


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_round_trip_is_bitwise(name: str) -> None:
    hyper = ARGUMENTS[name]
    straight, resumed = make_model(), make_model()
    one = OPTIMIZERS[name](straight.parameters(), **hyper)
    two = OPTIMIZERS[name](resumed.parameters(), **hyper)
    for step in range(4):
        if step == 2:
            saved = pickle.loads(pickle.dumps(two.state_dict()))
            two = OPTIMIZERS[name](resumed.parameters(), lr=1e-9)
            two.load_state_dict(saved)
        for model, optimizer in ((straight, one), (resumed, two)):
            window(model, batches(step, CHUNKS))
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.state.values(), two.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_state_keys() -> None:
    wanted = {
        "VRSGD": set(),
        "VRMomentum": {"momentum_buffer"},
        "VRAdam": {"step", "exp_avg", "exp_avg_sq", "exp_avg_gsnr"},
        "VRLARS": {"momentum_buffer"},
        "VRLAMB": {"step", "exp_avg", "exp_avg_sq", "exp_avg_gsnr"},
        "LARS": {"momentum_buffer"},
        "LAMB": {"step", "exp_avg", "exp_avg_sq"},
    }
    for name, keys in wanted.items():
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
        window(model, batches(0, 2))
        optimizer.step()
        assert set(optimizer.state[model.tokens.weight]) == keys


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_of_model_and_optimizer_trains_alike(how: str) -> None:
    model = make_model()
    optimizer = VRLAMB(model.parameters(), lr=5e-3)
    window(model, batches(0, CHUNKS))
    optimizer.step()
    optimizer.zero_grad()
    both = (model, optimizer)
    other, twin = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    for m, o in ((model, optimizer), (other, twin)):
        window(m, batches(1, CHUNKS))
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.equal(model.tokens.weight, make_model().tokens.weight)


def hooks(model: nn.Module) -> int:
    return sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_a_dropped_optimizer_stops_observing() -> None:
    model = make_model()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    window(model, batches(0, 2))
    optimizer.step()
    observer, moments = weakref.ref(optimizer.observer), weakref.ref(optimizer.observer._moments)
    del optimizer
    gc.collect()
    assert observer() is None
    assert moments() is None
    window(model, batches(0, 2))  # the hooks that are left do nothing


@pytest.mark.parametrize("cls", [VRAdam, VRAdamW, VRLAMB])
def test_gamma_one_turns_everything_off(cls: type[VROptimizer]) -> None:
    model = make_model()
    optimizer = cls(model.parameters(), gamma=1.0)
    assert hooks(model) == 0
    window(model, batches(0, 1))  # one chunk is enough
    optimizer.step()
    assert not any("exp_avg_gsnr" in state for state in optimizer.state.values())
    assert optimizer.observer._moments is None
    with pytest.raises(RuntimeError, match=r"gamma=1\.0 turns GSNR off"):
        ds_vrgd.gsnr_stats(optimizer)


def test_gamma_one_in_one_group_only() -> None:
    model = make_model()
    first, second = param_groups(model)
    optimizer = VRLAMB([first, {**second, "gamma": 1.0}], lr=5e-3)
    assert hooks(model) == len(first["params"])
    reference = reference_for("VRLAMB", model, [first, {**second, "gamma": 1.0}], lr=5e-3)
    train(model, optimizer, reference, range(3))
    assert error(model, reference) <= 8e-7
    assert "exp_avg_gsnr" not in optimizer.state[second["params"][0]]


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def _ddp(rank: int, name: str) -> list[Tensor]:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[name](param_groups(model), **ARGUMENTS[name])
    for step in range(STEPS):
        mine = batches(step, CHUNKS)[rank::2]
        for index, tokens in enumerate(mine):
            with wrapped.no_sync() if index < len(mine) - 1 else nullcontext():
                (wrapped(tokens) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _unwrapped(rank: int) -> str:
    model = make_model()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    window(model, batches(0, 4)[rank::2])
    try:
        optimizer.step()
    except RuntimeError as raised:
        return str(raised)
    return "no error"


def _unequal(rank: int) -> str:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = VRSGD(model.parameters(), lr=0.1)
    for _ in range(rank):
        with wrapped.no_sync():
            wrapped(batches(0, 1)[0]).backward()
    wrapped(batches(0, 1)[0]).backward()
    try:
        optimizer.step()
    except RuntimeError as raised:
        return str(raised)
    return "no error"


def _parted(rank: int) -> str:
    """Each rank's optimizer has other parameters, as under ZeroRedundancyOptimizer."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = VRSGD(list(model.parameters())[rank::2], lr=0.1)
    window(wrapped, batches(0, 4)[rank::2])
    try:
        optimizer.step()
    except RuntimeError as raised:
        return str(raised)
    return "no error"


def _on_two_ranks(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {name: _ddp(rank, name) for name in ("VRMomentum", "VRAdamW", "VRLAMB")}
        return found | {"unwrapped": _unwrapped(rank), "unequal": _unequal(rank), "parted": _parted(rank)}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[list[dict[str, Any]]]:
    return run_on_ranks(2, _on_two_ranks)


@pytest.mark.parametrize("name", ["VRMomentum", "VRAdamW", "VRLAMB"])
def test_ddp_with_no_sync_equals_one_process(two_ranks: list[dict[str, Any]], name: str) -> None:
    model, hyper = make_model(), ARGUMENTS[name]
    groups = param_groups(model)
    reference, optimizer = reference_for(name, model, groups, **hyper), OPTIMIZERS[name](groups, **hyper)
    train(model, optimizer, reference)
    ours, theirs = two_ranks[0][name], two_ranks[1][name]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for param, weight in zip(model.parameters(), ours, strict=True):
        param.data.copy_(weight)
    assert error(model, reference) <= 8e-7


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unwrapped", "the ranks hold different gradients"),
        ("unequal", "the ranks differ in the micro-batches of this step: 1 on one, 2 on another"),
        ("parted", "the ranks differ in what they train: 'parameter 0 of param group 0' is float32 (83, 13), number"),
    ],
)
def test_ranks_that_differ_raise_on_both(two_ranks: list[dict[str, Any]], case: str, message: str) -> None:
    assert all(message in rank[case] for rank in two_ranks)
