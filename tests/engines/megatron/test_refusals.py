"""Every row of the one table of refusals, and the release."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # importing Megatron-Core takes seconds

GSNR_ALONE = {
    "calculate_per_token_loss", "sequence_parallel", "share_embeddings_and_output_weights", "data-parallel size 1",
}  # fmt: skip
#: Settings that 0.16.1 does not have, and which of the configurations has them.
OF_NEWER = {
    "fp4_param_gather": "ddp_config", "param_name_patterns_for_fp32_local_accumulation": "ddp_config",
    "gtp_weight_remat_size": "config", "optimizer_cuda_graph": "optimizer",
}  # fmt: skip


def setup(gsnr: bool = True, chunks: int = 1, shares: bool = False, **changed: Any) -> Any:
    """A setup that is supported, with changes: a setting, or the size of a group."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ds_vrgd.engines.megatron.refusals import Setup

    parts = {
        "ddp_config": DistributedDataParallelConfig(),
        "optimizer": OptimizerConfig(optimizer="adam", lr=1.0),
        "config": TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
    }
    sizes = {"dp_cp_group": 2, "tp_group": 2, "pp_group": 2} | {
        key: changed.pop(key) for key in list(changed) if key.endswith("_group")
    }
    for key, value in changed.items():
        owners = [parts[OF_NEWER[key]]] if key in OF_NEWER else [p for p in parts.values() if hasattr(p, key)]
        assert owners, f"Megatron-Core has no {key}"
        for owner in owners:
            setattr(owner, key, value)
    chunk: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    chunk.__dict__ |= {"_modules": {}, "_parameters": {}, "_buffers": {}}
    if shares:
        chunk.__dict__["share_embeddings_and_output_weights"] = True
    chunk.__dict__ |= {"config": parts["config"], "ddp_config": parts["ddp_config"]}
    chunk.__dict__ |= {name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()}
    return Setup(parts["optimizer"], [chunk] * chunks, gsnr)


ROWS: dict[str, dict[str, Any]] = {
    "use_megatron_fsdp": {"use_megatron_fsdp": True},
    "use_precision_aware_optimizer": {"use_precision_aware_optimizer": True},
    "optimizer_cpu_offload": {"optimizer_cpu_offload": True},
    "fp8_param_gather": {"fp8_param_gather": True},
    "fp4_param_gather": {"fp4_param_gather": True},
    "param_name_patterns_for_fp32_local_accumulation": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
    "gtp_weight_remat_size": {"gtp_weight_remat_size": 2},
    "cuda_graph_impl": {"cuda_graph_impl": "local"},
    "optimizer_cuda_graph": {"optimizer_cuda_graph": True},
    "num_distributed_optimizer_instances": {"num_distributed_optimizer_instances": 2},
    "overlap_param_gather_with_optimizer_step": {"overlap_param_gather_with_optimizer_step": True},
    "context_parallel_size": {"context_parallel_size": 2},
    "expert_model_parallel_size": {"expert_model_parallel_size": 2},
    "virtual_pipeline_model_parallel_size": {"chunks": 2},
    "calculate_per_token_loss": {"calculate_per_token_loss": True},
    "sequence_parallel": {"sequence_parallel": True},
    "share_embeddings_and_output_weights": {"shares": True},
    "data-parallel size 1": {"dp_cp_group": 1},
}


def test_the_table_is_the_one_that_is_tested() -> None:
    from ds_vrgd.engines.megatron.refusals import REFUSALS, require_supported

    assert {refusal.what for refusal in REFUSALS} == set(ROWS)
    require_supported("VRLAMB", setup())
    require_supported("VRLAMB", setup(sequence_parallel=True, tp_group=1))
    require_supported("VRLAMB", setup(shares=True, pp_group=1))


@pytest.mark.parametrize("what", ROWS)
def test_a_row_refuses_and_names_the_setting_and_the_way_out(what: str) -> None:
    from ds_vrgd.engines.megatron.refusals import require_supported

    with pytest.raises(ValueError, match=f"VRLAMB does not support {what}") as caught:
        require_supported("VRLAMB", setup(**ROWS[what]))
    assert any(way in str(caught.value) for way in ("Set ", "Leave ", "Use "))
    if what in GSNR_ALONE:
        assert "LAMB, LARS and gamma=1.0 run" in str(caught.value)
        require_supported("LAMB", setup(gsnr=False, **ROWS[what]))
    else:
        with pytest.raises(ValueError, match=what):
            require_supported("LAMB", setup(gsnr=False, **ROWS[what]))


def test_settings_of_newer_releases_have_their_names() -> None:
    release = importlib.import_module("megatron.core").__version__
    parts = {"ddp_config": setup().ddp, "config": setup().model, "optimizer": setup().config}
    for key, part in OF_NEWER.items():
        assert hasattr(parts[part], key) == (release != "0.16.1"), f"Megatron-Core {release} and {key}: refusals.py"


@pytest.mark.parametrize("changed", [{"qk_layernorm": True}, {"mtp_num_layers": 1}])
def test_other_settings_with_the_same_effect(changed: dict[str, Any]) -> None:
    from ds_vrgd.engines.megatron.refusals import require_supported

    with pytest.raises(ValueError, match="no chunk is whole"):
        require_supported("VRLAMB", setup(**changed))


def test_a_release_that_was_not_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    from ds_vrgd.engines.megatron.refusals import require_supported
    from ds_vrgd.extras import UnsupportedRelease

    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    with pytest.raises(UnsupportedRelease, match=r"0\.17\.0 was not measured.*Install megatron-core 0\.16\.1 or"):
        require_supported("VRLAMB", setup())
