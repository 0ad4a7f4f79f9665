"""Windows that are skipped, thrown away, edited, and optimizers that take each other's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.megatron.ranks import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("dtype", "config"), [("bf16", {}), ("fp16", {"initial_loss_scale": 64.0, "hysteresis": 1})])
def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks(dtype: str, config: dict[str, float]) -> None:
    for of_rank in on_ranks(2, "lifecycle.nonfinite", dtype, config):
        assert of_rank == {"success": False, "skipped": True, "moved": True, "steps": 2.0}


def test_what_is_an_error_says_what_to_do() -> None:
    for of_rank in on_ranks(2, "lifecycle.errors"):
        assert "k = 0" in of_rank["nothing reduced"]
        assert "finalize_model_grads" in of_rank["a part reduced"]
        assert "k = 0" in of_rank["thrown away"]
        assert "another optimizer has been built" in of_rank["another optimizer"]
        buckets = of_rank["detached"].count("False")
        assert buckets > 1
        assert of_rank["detached"] == str([False] * buckets) + str([True] * buckets)
        assert "DistributedDataParallel" in of_rank["not wrapped"]
        assert "betas3" in of_rank["an argument"]
        assert "VRLAMB" in of_rank["a name"]
        assert "gamma is 1.0 in some param groups and below in others" in of_rank["two gammas"]
        assert "a data-parallel rank owns no element of the model" in of_rank["no element"]


def test_an_edited_gradient_stays_and_any_other_is_the_mean_in_fp32() -> None:
    for of_rank in on_ranks(2, "lifecycle.edited"):
        assert of_rank == dict.fromkeys(of_rank, True)


def test_copies_of_a_weight_stay_alike_where_their_gradients_are_summed_after_the_reduction() -> None:
    for of_rank in on_ranks(4, "lifecycle.copies"):
        assert len(of_rank) > 3
        assert of_rank == dict.fromkeys(of_rank, True)


def test_what_random_programs_found(tmp_path: Path) -> None:
    for of_rank in on_ranks(2, "lifecycle.changed", str(tmp_path / "saved")):
        assert of_rank["options"] == {(1e-8, (0.9, 0.999)), (1e-6, (0.8, 0.99))}, (
            "as given, also where Adam's are alike"
        )
        assert of_rank["gammas"] == {"embedding.word_embeddings.weight": 0.3}, "also of layers that are on other ranks"
        for way in ("dp_reshardable", "unsharded"):  # a run that is rolled back has as many as its checkpoint
            assert of_rank[f"ratios of 1 steps, {way}"] == {-1}, "every step had one"
            assert of_rank[f"ratios of 2 steps, {way}"] == {1}
        assert "gamma is 1.0 in some param groups and below in others" in of_rank["a second gamma"]
        assert "reduced twice" in of_rank["reduced twice"]
        assert of_rank["reductions"] == {False}
        assert of_rank["reductions thrown away"] == {True}
        assert "Run all micro-batches of a window but the last inside no_sync()" in of_rank["without no_sync"]
