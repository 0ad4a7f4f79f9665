"""Every example, run as its first lines say, learns more than the frequencies of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from tests.examples.launch import ROOT, losses, run_example

pytestmark = pytest.mark.slow

Run = tuple[str, int]

# What an example prints on two ranks, beside the losses.
PRINTED = {
    "hf_accelerate": [],
    "hf_trainer": [],
    "moe": ["k = 16; the first rank holds experts 0, 1 of 4"],
    "offload": ["k = 8; ", "MB on {'cpu'}"],
    "pipeline": ["k = 8; 27 layers, of which this stage holds"],
    "sequence_parallel": ["k = 8: 2 ranks share each of them"],
    "tensor_parallel": ["k = 8; 15 of 21 layers are cut over two ranks"],
}
ON_TWO_RANKS = [pytest.param((name, 2), id=name) for name in PRINTED]
ALONE = [
    pytest.param(("hf_trainer", 1), id="hf_trainer alone"),
    pytest.param(
        ("lightning_module", 1),
        id="lightning_module alone",
        marks=pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning"),
    ),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[Run, Future[str]]]:
    """Run the examples that this session asks for, two at a time: launcher and imports leave cores idle."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    here = [item for item in items if item.module is request.module and "runs" in item.fixturenames]
    asked = [item.callspec.params["run"] for item in here]
    with ThreadPoolExecutor(2) as pool:
        yield {run: pool.submit(run_example, *run) for run in asked}


@pytest.mark.parametrize("run", [*ON_TWO_RANKS, *ALONE])
def test_it_learns_more_than_frequencies(runs: dict[Run, Future[str]], run: Run) -> None:
    name, ranks = run
    printed = runs[run].result()
    for said in PRINTED[name] if ranks == 2 else []:
        assert said in printed, printed
    learned, frequencies = losses(printed)
    assert learned < frequencies, printed


def test_every_example_is_run() -> None:
    elsewhere = {"text", "lightning_module"}
    elsewhere |= {"torchtitan_optimizer", "axolotl_plugin", "swift_plugin", "automodel_recipe"}  # test_frameworks.py
    elsewhere |= {"fsdp2", "megatron_gpt"}  # test_fsdp2.py, test_megatron_gpt.py
    assert PRINTED.keys() == {path.stem for path in (ROOT / "examples").glob("*.py")} - elsewhere
