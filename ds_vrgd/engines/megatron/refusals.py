"""The refusals under Megatron-Core: one table, each row with its reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import megatron.core
from megatron.core.distributed import DistributedDataParallel

from ds_vrgd.extras import UnsupportedRelease

#: The releases that the tests were run with.
MEASURED = ("0.16.1", "0.19.2")


@dataclass(frozen=True)
class Setup:
    """The configuration and the model that are checked."""

    config: Any  # Megatron-Core's OptimizerConfig
    chunks: Sequence[Any]  # of the model
    gsnr: bool  # whether GSNR is on
    watch: bool = False  # whether the ranks are compared

    @property
    def ddp(self) -> Any:
        """Return the DistributedDataParallelConfig."""
        return self.chunks[0].ddp_config

    @property
    def model(self) -> Any:
        """Return the TransformerConfig."""
        return self.chunks[0].config

    @property
    def sums_over_tensor_ranks(self) -> bool:
        """Return whether gradients are summed over tensor-parallel ranks after the reduction."""
        if self.chunks[0].tp_group.size() == 1:
            return False
        params = [param for chunk in self.chunks for param in chunk.parameters()]
        averaged = any(getattr(param, "average_gradients_across_tp_domain", False) for param in params)
        return bool(self.model.sequence_parallel or self.model.qk_layernorm or averaged)

    @property
    def shares_over_stages(self) -> bool:
        """Return whether pipeline stages hold copies of a weight, as every stage knows."""
        ties = any(getattr(m, "share_embeddings_and_output_weights", False) for m in self.chunks[0].modules())
        return bool(ties or self.model.mtp_num_layers or getattr(self.model, "has_cond_embedder", False))


class Refusal(NamedTuple):
    """One row of the table."""

    what: str  # the setting
    holds: Callable[[Setup], Any]
    with_gsnr_alone: bool
    why: str  # and what to do instead


REFUSALS = (
    Refusal("use_megatron_fsdp", lambda s: s.ddp.use_megatron_fsdp, False,
            "Megatron-FSDP has buffers of its own, which were not looked at. Set use_megatron_fsdp=False"),
    Refusal("use_precision_aware_optimizer", lambda s: s.config.use_precision_aware_optimizer, False,
            "it is a property of Transformer Engine's FusedAdam. Set use_precision_aware_optimizer=False"),
    Refusal("optimizer_cpu_offload", lambda s: s.config.optimizer_cpu_offload, False,
            "its HybridDeviceOptimizer makes optimizers of its own. Set optimizer_cpu_offload=False"),
    Refusal("fp8_param_gather", lambda s: s.ddp.fp8_param_gather or s.ddp.reuse_grad_buf_for_mxfp8_param_ag, False,
            "fp8 weights were not tried. Set fp8_param_gather=False and reuse_grad_buf_for_mxfp8_param_ag=False"),
    Refusal("fp4_param_gather", lambda s: getattr(s.ddp, "fp4_param_gather", False), False,
            "fp4 weights were not tried. Set fp4_param_gather=False"),
    Refusal("param_name_patterns_for_fp32_local_accumulation",
            lambda s: getattr(s.ddp, "param_name_patterns_for_fp32_local_accumulation", ()), False,
            "gradients accumulate outside of the buffer that is reduced. Set "
            "param_name_patterns_for_fp32_local_accumulation=(), or grad_reduce_in_fp32=True for fp32 everywhere"),
    Refusal("gtp_weight_remat_size", lambda s: getattr(s.model, "gtp_weight_remat_size", 1) > 1, False,
            "a chunk would be the sum over the ranks that share a weight. Set gtp_weight_remat_size=1"),
    Refusal("cuda_graph_impl", lambda s: s.model.cuda_graph_impl != "none", False,
            "gradients that a CUDA graph leaves were not tried. Set cuda_graph_impl='none'"),
    Refusal("optimizer_cuda_graph", lambda s: getattr(s.config, "optimizer_cuda_graph", False), False,
            "the step decides on the host. Set optimizer_cuda_graph=False"),
    Refusal("num_distributed_optimizer_instances", lambda s: s.ddp.num_distributed_optimizer_instances > 1, False,
            "each instance reduces by itself before the instances do. Set num_distributed_optimizer_instances=1"),
    Refusal("overlap_param_gather_with_optimizer_step",
            lambda s: s.config.overlap_param_gather_with_optimizer_step, False,
            "it makes two optimizers of one model. Set overlap_param_gather_with_optimizer_step=False"),
    Refusal("context_parallel_size", lambda s: s.model.context_parallel_size > 1, False,
            "a chunk would be the sum over the context-parallel ranks. Set context_parallel_size=1"),
    Refusal("expert_model_parallel_size", lambda s: s.model.expert_model_parallel_size > 1, False,
            "experts are reduced over other ranks, in buffers of their own. Set expert_model_parallel_size=1"),
    Refusal("virtual_pipeline_model_parallel_size", lambda s: len(s.chunks) > 1, False,
            "several model chunks on one rank were not tried. Leave virtual_pipeline_model_parallel_size out"),
    Refusal("calculate_per_token_loss", lambda s: s.model.calculate_per_token_loss, True,
            "the weights of the chunks, their tokens, are known only after the reduction. Set "
            "calculate_per_token_loss=False"),
    Refusal("sequence_parallel", lambda s: s.sums_over_tensor_ranks, True,
            "gradients of normalisation layers are summed over the tensor-parallel ranks after the reduction, so that "
            "no chunk is whole. Set sequence_parallel=False, and qk_layernorm=False where it is on"),
    Refusal("share_embeddings_and_output_weights",
            lambda s: s.chunks[0].pp_group.size() > 1 and s.shares_over_stages, True,
            "gradients of weights that stages share are summed over the stages after the reduction, so that no chunk "
            "is whole. Set share_embeddings_and_output_weights=False (--untie-embeddings-and-output-weights)"),
    Refusal("data-parallel size 1", lambda s: s.chunks[0].dp_cp_group.size() == 1, True,
            "a chunk is what one data-parallel rank accumulates, so that k = 1, and one chunk has no variance. Use "
            "more data-parallel ranks, or LAMB, LARS or gamma=1.0"),
)  # fmt: skip


def require_one_gamma(optimizer: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse param groups of which some reduce variance and others do not: when the optimizer is built, and in a step.

    Raises:
        ValueError: saying what to do instead.
    """
    if len({group["gamma"] < 1.0 for group in groups}) > 1:
        raise ValueError(
            f"{optimizer}: gamma is 1.0 in some param groups and below in others, and ranks that own a part of only "
            "some groups would wait for each other. Use one gamma for all; 0.999 leaves r within 0.1 % of 1"
        )


def require_supported(optimizer: str, setup: Setup) -> None:
    """Refuse what is not exact, or was not tried, for an optimizer given by its class's name.

    Raises:
        UnsupportedRelease: Megatron-Core is of a release that was not measured.
        ValueError: naming the setting, the reason and the way out.
    """
    if megatron.core.__version__ not in MEASURED:
        raise UnsupportedRelease(
            f"megatron-core {megatron.core.__version__} was not measured, and ds_vrgd.megatron relies on private parts "
            f"of it. Install megatron-core {' or '.join(MEASURED)}"
        )
    for chunk in setup.chunks:
        sharded = getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False)  # refused below
        if not isinstance(chunk, DistributedDataParallel) and not sharded:
            raise ValueError(
                f"{optimizer}: the model is a {type(chunk).__name__}, and not in Megatron-Core's "
                "DistributedDataParallel, which has the buffers of its gradients. Wrap it first"
            )
    for refusal in REFUSALS:
        if (setup.gsnr or setup.watch or not refusal.with_gsnr_alone) and refusal.holds(setup):
            why = "GSNR; LAMB, LARS and gamma=1.0 run" if setup.gsnr else "watch; without it, it does"
            remark = f" with {why}" if refusal.with_gsnr_alone else ""
            raise ValueError(f"{optimizer} does not support {refusal.what}{remark}: {refusal.why}.")
