"""Lightning's automatic and manual optimization: the weights are those of a plain loop, bit for bit.

The first tests speak Lightning's protocol without it; the others run where it is installed (``pip install lightning``).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.optim import OPTIMIZERS
from tests.support.ranks import run_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "LIGHTNING.md"
STEPS, CHUNKS, WORLD = 3, 4, 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]
installed = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")

Make = Callable[[Any], Any]


def adamw(params: Any) -> Any:
    return ds_vrgd.VRAdamW(params, lr=5e-3, weight_decay=0.1)


#: Each optimizer, the plain ones at gamma=1, and torch's own, which goes the same way.
RULES: dict[str, Make] = {
    "torch.optim.AdamW": lambda params: torch.optim.AdamW(params, lr=5e-3, weight_decay=0.1),
    "VRAdamW, gamma=1": lambda params: ds_vrgd.VRAdamW(params, lr=5e-3, weight_decay=0.1, gamma=1.0),
    **{name: lambda params, cls=cls: cls(params, lr=5e-3) for name, cls in OPTIMIZERS.items()},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def inputs(micro_batches: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 5, generator=generator) for _ in range(micro_batches)]


def plain_loop(make: Make, micro_batches: list[Tensor], clip: float = 0.0) -> list[Tensor]:
    """The weights after a window for every ``CHUNKS`` micro-batches."""
    model = Net()
    optimizer = make(model.parameters())
    for index, x in enumerate(micro_batches):
        (model(x) / CHUNKS).backward()
        if index % CHUNKS == CHUNKS - 1:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [weight.detach() for weight in model.parameters()]


def same(ours: Any, theirs: list[Tensor]) -> bool:
    start = [weight.detach() for weight in Net().parameters()]
    assert not any(torch.equal(*pair) for pair in zip(start, theirs, strict=True))
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


# -- the protocol -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_automatic_optimization_steps_with_a_closure_that_ends_the_window(rule: str) -> None:
    # every closure computes a loss, zeroes before a window's first backward, and goes backward; the last is step()'s
    model = Net()
    optimizer = RULES[rule](model.parameters())
    micro_batches = inputs(STEPS * CHUNKS)
    for index, x in enumerate(micro_batches):

        def closure(x: Tensor = x, index: int = index) -> Tensor:
            loss = model(x) / CHUNKS
            if index % CHUNKS == 0:
                optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        loss = optimizer.step(closure) if index % CHUNKS == CHUNKS - 1 else closure()
        assert loss.ndim == 0
    assert same(model.parameters(), plain_loop(RULES[rule], micro_batches))


@pytest.mark.parametrize("rule", RULES)
def test_manual_optimization_steps_with_a_closure_that_does_nothing(rule: str) -> None:
    model = Net()
    optimizer = RULES[rule](model.parameters())
    micro_batches = inputs(STEPS * CHUNKS)
    for index, x in enumerate(micro_batches):
        (model(x) / CHUNKS).backward()
        if index % CHUNKS == CHUNKS - 1:
            assert optimizer.step(lambda: None) is None
            optimizer.zero_grad()
    assert same(model.parameters(), plain_loop(RULES[rule], micro_batches))


# -- Lightning --------------------------------------------------------------------------------------------------------


def lightning_module(make: Make, *, manual: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization, self.seen = Net(), not manual, []

        def configure_optimizers(self) -> Any:
            return make(self.net.parameters())

        def training_step(self, batch: Tensor, index: int) -> Any:
            loss = self.net(batch)
            if not manual:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss / CHUNKS)
            if index % CHUNKS == CHUNKS - 1:
                optimizer.step()
                self.seen.append(optimizer)
                optimizer.zero_grad()
            return None

    return Module()


def trainer(folder: Any = None, **options: Any) -> Any:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False}
    return lightning.Trainer(**quiet, **(defaults | options), default_root_dir=folder)


def loader(micro_batches: list[Tensor]) -> Any:
    return torch.utils.data.DataLoader(micro_batches, batch_size=None)


@installed
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_lightning_trains_as_a_plain_loop_does(rule: str, manual: bool, tmp_path: Path) -> None:
    module, micro_batches = lightning_module(RULES[rule], manual=manual), inputs(STEPS * CHUNKS)
    fit = trainer(tmp_path, **({} if manual else {"accumulate_grad_batches": CHUNKS}))
    fit.fit(module, loader(micro_batches))
    assert same(module.net.parameters(), plain_loop(RULES[rule], micro_batches))
    assert fit.global_step == STEPS
    cls = OPTIMIZERS.get(rule)
    if cls is not None and cls.reduces_variance:
        assert ds_vrgd.gsnr_stats(fit.optimizers[0]).k == CHUNKS
        assert all(ds_vrgd.gsnr_stats(optimizer).k == CHUNKS for optimizer in module.seen)  # Lightning's wrapper


@installed
def test_clipping_happens_inside_the_closure_and_leaves_the_ratio_alone(tmp_path: Path) -> None:
    module, micro_batches = lightning_module(adamw), inputs(STEPS * CHUNKS)
    trainer(tmp_path, accumulate_grad_batches=CHUNKS, gradient_clip_val=0.01).fit(module, loader(micro_batches))
    clipped = plain_loop(adamw, micro_batches, clip=0.01)
    assert same(module.net.parameters(), clipped)
    assert not same(clipped, plain_loop(adamw, micro_batches))


@installed
def test_a_run_that_is_resumed_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    micro_batches = inputs(2 * CHUNKS)
    straight, first, second = (lightning_module(adamw) for _ in range(3))
    trainer(tmp_path, accumulate_grad_batches=CHUNKS, max_epochs=2).fit(straight, loader(micro_batches))
    one = trainer(tmp_path, accumulate_grad_batches=CHUNKS)
    one.fit(first, loader(micro_batches))
    one.save_checkpoint(tmp_path / "half.ckpt")
    two = trainer(tmp_path, accumulate_grad_batches=CHUNKS, max_epochs=2)
    two.fit(second, loader(micro_batches), ckpt_path=tmp_path / "half.ckpt")
    assert same(second.net.parameters(), [weight.detach() for weight in straight.net.parameters()])
    assert two.global_step == 4


@installed
def test_bf16_autocast(tmp_path: Path) -> None:
    module, micro_batches = lightning_module(adamw), inputs(STEPS * CHUNKS)
    fit = trainer(tmp_path, accumulate_grad_batches=CHUNKS, precision="bf16-mixed")
    fit.fit(module, loader(micro_batches))
    model = Net()
    optimizer = adamw(model.parameters())
    for index, x in enumerate(micro_batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x) / CHUNKS
        loss.backward()
        if index % CHUNKS == CHUNKS - 1:
            optimizer.step()
            optimizer.zero_grad()
    assert same(module.net.parameters(), [weight.detach() for weight in model.parameters()])


@installed
def test_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning writes lightning_logs there
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"model": Net(), "loader": loader(inputs(16))}
    exec(code, names)
    assert ds_vrgd.gsnr_stats(names["trainer"].optimizers[0]).k == 8
    assert names["trainer"].global_step == 2
    trainer = names["lightning"].Trainer(max_epochs=2, accumulate_grad_batches=8)
    trainer.fit(names["Module"](Net()), loader(inputs(9)))  # each epoch ends with a window of one chunk
    assert trainer.global_step == 4


class Player(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def losses(generator: nn.Module, critic: nn.Module, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The generator's and the critic's."""
    return (
        lambda: -critic(generator(x)).mean(),
        lambda: (critic(generator(x).detach()) - critic(x)).square().mean() + critic(x).mean(),
    )


def play_plainly(micro_batches: list[Tensor]) -> list[Tensor]:
    players = Player(1), Player(2)
    optimizers = [adamw(player.parameters()) for player in players]
    for index, x in enumerate(micro_batches):
        for turn, loss in enumerate(losses(*players, x)):
            players[1 - turn].requires_grad_(False)
            (loss() / CHUNKS).backward()
            players[1 - turn].requires_grad_(True)
        if index % CHUNKS == CHUNKS - 1:
            for optimizer in optimizers:
                optimizer.step()
                assert ds_vrgd.gsnr_stats(optimizer).k == CHUNKS
                optimizer.zero_grad()
    return [weight.detach() for player in players for weight in player.parameters()]


@installed
def test_two_optimizers_that_take_turns(tmp_path: Path) -> None:
    import lightning

    class Game(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.players = nn.ModuleList([Player(1), Player(2)])

        def configure_optimizers(self) -> Any:
            return [adamw(player.parameters()) for player in self.players]

        def training_step(self, batch: Tensor, index: int) -> None:
            optimizers = self.optimizers()
            for optimizer, loss in zip(optimizers, losses(*self.players, batch), strict=True):
                self.toggle_optimizer(optimizer)
                self.manual_backward(loss() / CHUNKS)
                self.untoggle_optimizer(optimizer)
            if index % CHUNKS == CHUNKS - 1:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    micro_batches = inputs(STEPS * CHUNKS)
    game = Game()
    trainer(tmp_path).fit(game, loader(micro_batches))
    plain = play_plainly(micro_batches)
    assert all(torch.equal(*pair) for pair in zip(game.players.parameters(), plain, strict=True))


def on_a_rank(rank: int, folder: str) -> tuple[list[Tensor], int]:
    """A strategy: Lightning's DDP over the ranks of the test."""
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    module = lightning_module(adamw)
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    fit = trainer(
        folder, accumulate_grad_batches=CHUNKS // WORLD, devices=WORLD, strategy=strategy, use_distributed_sampler=False
    )
    fit.fit(module, loader(inputs(STEPS * CHUNKS)[rank::WORLD]))
    return [weight.detach() for weight in module.net.parameters()], ds_vrgd.gsnr_stats(fit.optimizers[0]).k


@installed
def test_ddp_is_one_process_with_all_the_chunks(tmp_path: Path) -> None:
    (first, k), (second, _) = run_on_ranks(WORLD, on_a_rank, str(tmp_path))
    assert k == CHUNKS
    assert same(first, second)
    alone = plain_loop(adamw, list(itertools.chain(inputs(STEPS * CHUNKS))))
    wrong = torch.cat([(a - b).flatten() for a, b in zip(first, alone, strict=True)]).norm()
    assert wrong <= 8e-7 * torch.cat([weight.flatten() for weight in alone]).norm()
