"""Settings that cannot be exact are refused before any training, with a message that names what to change."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch._dynamo import compiled_autograd

import ds_vrgd
from ds_vrgd.engines.deepspeed import refusals
from tests.support.model import batches, make_model
from tests.support.ranks import run_on_ranks

ROOT = Path(__file__).parents[3]

#: By name: the addition to the JSON, and the parts that the message must contain.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one chunk": (
        {"gradient_accumulation_steps": 1},
        ("gradient_accumulation_steps=1 on 1 data-parallel rank makes k = 1 chunk in every step", "Raise", "gamma=1.0"),
    ),
    "fp16 at stage 0": ({"fp16": {"enabled": True}}, ("fp16.enabled=true", "stage=0", "Use stage 1, 2 or 3, or bf16")),
    "fp16 autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "zero_optimization": {"stage": 2}},
        ("torch_autocast.dtype=float16", "bfloat16"),
    ),
    "DeepCompile": (
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 2}},
        ("compile.deepcompile=true", "Set it to false"),
    ),
    "ZenFlow": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": False},
            },
        },
        ("zero_optimization.zenflow", "Remove"),
    ),
    "SuperOffload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        ("super_offload=true", "Set it to false"),
    ),
    "partial offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        ("offload_optimizer.ratio=0.5", "Set it to 1.0"),
    ),
    "NVMe offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}},
        ("offload_optimizer.device=nvme", "Use cpu"),
    ),
    "NVMe offload of parameters": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        ("offload_param.device=nvme", "Use cpu"),
    ),
    "bf16 masters": (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 2},
        },
        ("bf16_master_weights_and_grads=true", "Set it to false"),
    ),
    "summed gradients": (
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}},
        ("gradient_allreduce_op=sum", "mean"),
    ),
    "fp16 masters": (
        {
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        ("fp16_master_weights_and_grads=true", "Set it to false"),
    ),
    **{
        f"{name} of {optimizer}": (
            {"zero_optimization": {"stage": 3, name: True}, "optimizer": {"type": optimizer, "params": {"lr": 1e-3}}},
            (f"zero_optimization.{name}=true", "Set it to false"),
        )
        for optimizer in ("VRLAMB", "LAMB", "LARS")
        for name in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
    },
    "norm that is not formed": (
        {
            "zero_optimization": {"stage": 2, "compute_grad_norm": False},
            "gradient_clipping": 0.0,
            "optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "prenormalize": True}},
        },
        ("compute_grad_norm=false with prenormalize", "Set it to true"),
    ),
    # Sums in 16 bits where the step is taken with DeepSpeed's mean: at stage 0, and without GSNR.
    "bf16 on the wire, fp16": (
        {
            "communication_data_type": "bf16",
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "LAMB"},
        },
        ("communication_data_type=bfloat16 with float16 weights", "Leave it out"),
    ),
    "fp16 on the wire, bf16": (
        {"communication_data_type": "fp16", "bf16": {"enabled": True}, "optimizer": {"type": "LARS"}},
        ("communication_data_type=float16 with bfloat16 weights", "Leave it out"),
    ),
    "bf16 on the wire, stage 0": ({"communication_data_type": "bf16"}, ("communication_data_type=bfloat16", "out")),
    **{
        f"{name}, {optimizer['type']}, stage {stage}": (
            {**change, "optimizer": optimizer, "zero_optimization": {"stage": stage}},
            parts,
        )
        for name, change, parts in (
            ("fp16 on the wire", {"communication_data_type": "fp16"}, ("communication_data_type=float16", "Leave it")),
            (
                "bf16 accumulation",
                {"data_types": {"grad_accum_dtype": "bf16"}},
                ("data_types.grad_accum_dtype=bfloat16", "Leave it out"),
            ),
            (
                "bf16 autocast",
                {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
                ("torch_autocast", "lower_precision_safe_modules to []"),
            ),
        )
        for optimizer in ({"type": "LAMB"}, {"type": "LARS"}, {"type": "VRAdamW", "params": {"gamma": 1.0}})
        for stage in (1, 3)
    },
    "elastic checkpoint": (
        {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
        ("elastic_checkpoint=true", "Set it to false", "ds-vrgd to-universal"),
    ),
    "universal checkpoint at stage 0": (
        {"checkpoint": {"load_universal": True}},
        ("checkpoint.load_universal=true", "Set it to false"),
    ),
}


#: Settings that are near to a refused one, and exact.
TAKEN: dict[str, dict[str, Any]] = {
    "one chunk without GSNR": {"gradient_accumulation_steps": 1, "optimizer": {"type": "LAMB"}},
    "one chunk by DeepSpeed's count": {"gradient_accumulation_steps": 1, "managed_gradient_accumulation": False},
    "quantized, at stage 2": {
        "zero_optimization": {
            "stage": 2,
            "zero_quantized_gradients": True,
            "zero_quantized_weights": True,
            "zero_quantized_nontrainable_weights": True,
        }
    },
    "bf16 on the wire, fused": {"communication_data_type": "bf16", "zero_optimization": {"stage": 2}},
    "bf16 accumulation, fused": {"data_types": {"grad_accum_dtype": "bf16"}, "zero_optimization": {"stage": 2}},
    "bf16, fp16 on the wire, stage 0": {"communication_data_type": "fp16", "bf16": {"enabled": True}},
    "LAMB, bf16, fp32 on the wire": {
        "optimizer": {"type": "LAMB"},
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
    },
    "LAMB, bf16": {"optimizer": {"type": "LAMB"}, "bf16": {"enabled": True}, "communication_data_type": "bf16"},
    "LAMB, autocast, stage 0": {
        "optimizer": {"type": "LAMB"},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
    "LAMB, autocast, no layer in 16 bits": {
        "optimizer": {"type": "LAMB"},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        "zero_optimization": {"stage": 2},
    },
}


def logged_by(logger: logging.Logger, config: dict[str, Any]) -> list[str]:
    """Return the lines that are logged while an engine is built."""
    lines: list[str] = []
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel("WARNING" if logger is deepspeed.utils.logger else "INFO")
    try:
        assert attempt(config) == ""
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def attempt(config: dict[str, Any], model: torch.nn.Module | None = None, **optimizer: Any) -> str:
    """Return the error of building an engine, or "" if it was built."""
    base = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9}
    if not optimizer:
        base["optimizer"] = {"type": "VRLAMB", "params": {"lr": 1e-3}}
    model = model or make_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        deepspeed.initialize(model=model, model_parameters=parameters, config=base | config, **optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


#: Spellings that a JSON may have by mistake. "lamb" and "adamw" are DeepSpeed's own.
MISSPELT = {
    "vrlamb": "VRLAMB",
    "VRLamb": "VRLAMB",
    "VR_LAMB": "VRLAMB",
    "vr-lars": "VRLARS",
    "lars": "LARS",
    "Lars": "LARS",
    "VRAdmaW": "VRAdamW",
    "vrmomentun": "VRMomentum",
}


def attempt_all(rank: int) -> dict[str, str]:
    errors = {name: attempt(config) for name, (config, _) in SETTINGS.items()}
    errors |= {f"not {name}": attempt(config) for name, config in TAKEN.items()}
    unknown = {"zero_optimisation": {"stage": 2}, "comment": "ours", "_note": 1}
    errors["warnings"] = "\n".join(logged_by(deepspeed.utils.logger, unknown))
    ours = logging.getLogger("ds_vrgd")
    errors["announced"] = "\n".join(logged_by(ours, {"zero_optimization": {"stage": 2}}))
    errors["announced LAMB"] = "\n".join(logged_by(ours, {"optimizer": {"type": "LAMB"}}))
    bag = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 3, sparse=True), torch.nn.Linear(3, 1))
    errors["sparse bag"] = attempt({}, bag)
    sparse = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
    errors["sparse embedding"] = attempt({}, sparse)
    for name in ("VRLAMB", "VR-LAMB", "VR-SGD", "LAMB", "LARS"):
        errors[f"type {name}"] = attempt(
            {"optimizer": {"type": name, "params": {"lr": 1e-3}}, "bf16": {"enabled": True}}
        )
    for name in (*MISSPELT, "Novograd"):
        errors[f"type {name}"] = attempt({"optimizer": {"type": name, "params": {"lr": 1e-3}}})
    errors["unknown argument"] = attempt({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gama": 0.1}}})
    errors["bad argument"] = attempt({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gamma": 1.5}}})
    errors["class"] = attempt({"zero_optimization": {"stage": 3}}, optimizer=functools.partial(ds_vrgd.VRLAMB, lr=1e-3))
    named = {"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}}}
    errors["overruled"] = attempt(named, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))
    errors["not overruled"] = attempt(named, optimizer=functools.partial(ds_vrgd.VRLAMB, lr=1e-3))
    named = {"optimizer": {"type": "LAMB", "params": {"lr": 1e-3}}}
    errors["perhaps DeepSpeed's"] = attempt(named, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))
    two = attempt({"fp16": {"enabled": True}, "gradient_allreduce_op": "sum"})
    return errors | {"two at once": two, "compiled autograd": compile_autograd()}


def compile_autograd() -> str:
    """Return the errors when an engine of ours is asked for compiled autograd, and when it is run without asking."""
    model = make_model()
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}},
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    told = []
    try:
        engine.compile(compiled_autograd_enabled=True)
    except ValueError as error:
        told.append(str(error))
    loss = engine(batches(0, 1)[0])
    try:
        with compiled_autograd._enable(lambda graph: graph):
            engine.backward(loss)
    except RuntimeError as error:
        told.append(str(error))
    return "\n".join(told)


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    return run_on_ranks(1, attempt_all)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_is_refused_by_name_with_the_way_out(errors: dict[str, str], name: str) -> None:
    optimizer = SETTINGS[name][0].get("optimizer", {}).get("type", "VRLAMB")
    assert errors[name].startswith(f"ValueError: {optimizer} cannot be exact under this configuration"), errors[name]
    for part in SETTINGS[name][1]:
        assert part in errors[name]


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_exact_is_not_refused(errors: dict[str, str], name: str) -> None:
    assert errors[f"not {name}"] == ""


def test_keys_that_deepspeed_passes_over_are_warned_of(errors: dict[str, str]) -> None:
    told = [line for line in errors["warnings"].splitlines() if "is no key of DeepSpeed" in line]
    assert len(told) == 2
    assert told[0].startswith('"zero_optimisation"')
    assert told[0].endswith('did you mean "zero_optimization"?')
    assert told[1].startswith('"comment"')


def test_experts_that_have_one_chunk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that hold different experts compute one chunk of each together."""
    expert = torch.nn.Linear(2, 2)
    for param in expert.parameters():
        param.allreduce, param.group_name = False, "ep_size_2"
    monkeypatch.setattr(refusals.groups, "_get_expert_parallel_world_size", {"ep_size_2": 2}.__getitem__)

    def reasons(steps: int, managed: bool = True) -> list[str]:
        engine = SimpleNamespace(
            module=torch.nn.Sequential(torch.nn.Linear(2, 2), expert), dp_world_size=2,
            gradient_accumulation_steps=lambda: steps, managed_gradient_accumulation=lambda: managed,
        )  # fmt: skip
        return list(refusals._of_chunks(engine))

    (told,) = reasons(1)
    assert told.startswith(
        "gradient_accumulation_steps=1 on 2 data-parallel ranks, all with other experts, makes k = 1"
    )
    assert reasons(2) == reasons(1, managed=False) == []


def test_the_start_says_what_happens_in_one_line(errors: dict[str, str]) -> None:
    assert errors["announced"] == (
        "VRLAMB: k = 2 (1 rank x 2 micro-batches); DeepSpeed ZeRO-2 (FusedZeroOptimizer), fused mode "
        '(reduction="auto"); 9 layers, 1,715 parameters'
    )
    assert errors["announced LAMB"] == (
        "LAMB: k = 2 (1 rank x 2 micro-batches); DeepSpeed ZeRO-0 (LAMB), GSNR off, DeepSpeed's mean "
        "(zero_optimization.stage=0 keeps whole gradients on every rank. Use stage 1, 2 or 3); 9 layers, 1,715 "
        "parameters"
    )


HERE = "tests/engines/deepspeed/test_refusals.py"
#: The table of refusals: how each row begins, and the tests, by file, that hold the refusals in it.
ROWS: dict[str, list[tuple[str, str]]] = {
    "k = 1": [
        ("tests/optim/test_one_chunk.py", "test_one_chunk_in_every_window_is_an_error_at_the_second"),
        (HERE, '"one chunk"'),
    ],
    "fp16 at stage 0": [(HERE, '"fp16 at stage 0"')],
    "fp16 autocast with ZeRO": [(HERE, '"fp16 autocast"')],
    "DeepCompile, compiled autograd": [(HERE, '"DeepCompile"'), (HERE, "test_compiled_autograd_is_refused")],
    "`torch.compile` with several GPUs": [(HERE, "test_compiled_model_is_refused_at_and_after_stage_3")],
    "bf16 or fp16 master weights": [(HERE, '"bf16 masters"'), (HERE, '"fp16 masters"')],
    "ZenFlow, SuperOffload, offload `ratio` < 1": [
        (HERE, '"ZenFlow"'), (HERE, '"SuperOffload"'), (HERE, '"partial offload"'),
    ],
    "offload to NVMe": [(HERE, '"NVMe offload"'), (HERE, '"NVMe offload of parameters"')],
    "`communication_data_type`, `grad_accum_dtype` or autocast": [
        (HERE, '"bf16 on the wire, stage 0"'), (HERE, '"fp16 on the wire"'), (HERE, '"bf16 accumulation"'),
        (HERE, '"bf16 autocast"'),
    ],
    "ZeRO++ at stage 3": [(HERE, "zero_quantized_nontrainable_weights")],
    "summed gradients": [(HERE, '"summed gradients"')],
    "`prenormalize` with `compute_grad_norm` false": [(HERE, '"norm that is not formed"')],
    "sparse embeddings": [(HERE, "test_sparse_embedding_is_refused_by_its_name")],
    "`elastic_checkpoint`, and `load_universal` at stage 0": [
        (HERE, '"elastic checkpoint"'), (HERE, '"universal checkpoint at stage 0"'),
    ],
    "a weight shared by reentrant checkpoint segments": [("tests/moments/test_sharded.py", "arrived twice")],
    "MoE except at stages 1 and 2": [
        ("tests/engines/deepspeed/test_experts.py", "test_stage_0_is_refused_with_the_way_out"),
        ("tests/engines/deepspeed/test_experts.py", "test_what_was_never_verified_is_refused"),
    ],
    "FSDP1, Megatron's parallel layers without an engine": [
        ("tests/optim/test_layers.py", "test_sharded_parameters_are_refused_when_the_optimizer_is_made"),
        ("tests/optim/test_layers.py", "test_sums_over_dtensors_are_whole_layers"),
        ("tests/optim/test_layers.py", "test_megatrons_mark_is_read_where_no_engine_has_taken_the_weights_over"),
    ],
    "`LAMB(prenormalize=True)` under torch's `ZeroRedundancyOptimizer`": [
        ("tests/optim/test_layers.py", "test_the_norm_of_a_model_that_no_rank_has_whole_is_refused"),
    ],
    "complex weights": [
        ("tests/optim/test_options.py", "test_complex_weights_are_refused_by_what_has_no_rule_for_them"),
    ],
    "DDP's `join()` with unequal data": [
        ("tests/optim/test_uneven.py", "test_a_rank_that_has_run_out_of_data_is_named"),
    ],
    "DeepSpeed before 0.19.8, torch before 2.9": [
        ("tests/engines/deepspeed/test_versions.py", "test_other_deepspeed_is_refused"),
    ],
}  # fmt: skip


SHARDED = "tests/engines/fsdp/test_lifecycle.py"
PIPELINES, SEQUENCES = "tests/engines/deepspeed/test_pipeline.py", "tests/engines/deepspeed/sequence_cases.py"
#: Every page with such a table, how the table begins, and the tests that hold its rows.
TABLES: dict[str, tuple[str, dict[str, list[tuple[str, str]]]]] = {
    "docs/SUPPORTED.md": ("| refused | why | instead |", ROWS),
    "docs/FSDP.md": (
        "| refused | instead |",
        {
            "FSDP1 (`FullyShardedDataParallel`)": [(SHARDED, '"FSDP1": "')],
            "FSDP2 with tensor or expert parallelism": [(SHARDED, '"tensor parallelism": "')],
            "a reduction in float16": [(SHARDED, '"fp16": "')],
            "shards along another dimension than 0, several meshes in one model": [(SHARDED, '"dimension 1": "')],
            "a mesh that replicates and does not shard": [(SHARDED, '"copies": "')],
            "a custom reduce-scatter that somebody else has set": [(SHARDED, '"set by somebody": "')],
            "trained parameters outside every `fully_shard` call": [(SHARDED, '"outside": "')],
            "a module of its own `fully_shard` that runs twice in a forward pass": [
                (SHARDED, "test_a_module_that_runs_twice_is_refused"),
            ],
            "`set_requires_gradient_sync(False)` on a part of the model": [
                (SHARDED, "test_a_pass_that_reduces_some_and_leaves_others_is_refused"),
            ],
        },
    ),
    "docs/PIPELINE.md": (
        "| what | why | the way out |",
        {
            "`gradient_clipping` at stage 0 in fp32": [(PIPELINES, '"clipping without ZeRO"')],
            "fp16 with `grad_accum_dtype=fp32` and tied weights": [(PIPELINES, '"copies unsummed"')],
            "saving at stage 0 in bf16": [(PIPELINES, '"saving"')],
            "stages with unequal numbers of param groups": [(PIPELINES, '"number of groups"')],
            "`checkpoint.load_universal`": [(PIPELINES, '"universal"')],
            "`DualPipeVModule`": [(PIPELINES, '"DualPipeV"')],
            "a pipeline with sequence parallelism": [(PIPELINES, "test_sequence_parallelism_in_a_pipeline_is_refused")],
        },
    ),
    "docs/SEQUENCE_PARALLEL.md": (
        "| refused | why | use |",
        {
            "`mesh_param`, or `data_parallel_size`": [(SEQUENCES, '"a mesh"')],
            "`sequence_parallel_size` in the JSON without an `mpu`": [(SEQUENCES, '"no mpu"')],
            "bf16 at stage 1 with `grad_accum_dtype` fp32": [(SEQUENCES, '"BF16_Optimizer"')],
            "stage 3 with `reduce_scatter` false": [(SEQUENCES, '"stage 3 without reduce-scatter"')],
            "`ranks_per_node` that parts a sequence group": [(SEQUENCES, '"nodes that part sequences"')],
        },
    ),
}


@pytest.mark.parametrize("page", TABLES)
def test_every_row_of_what_is_refused_is_held_by_a_test(page: str) -> None:
    header, rows = TABLES[page]
    table = (ROOT / page).read_text(encoding="utf-8").partition(header)[2].partition("\n\n")[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert cells
    for cell in cells:
        assert [row for row in rows if cell.startswith(row)], f"no test is named for: {cell}"
    for row, places in rows.items():
        assert sum(cell.startswith(row) for cell in cells) == 1, row
        for file, needle in places:
            before, _, after = (ROOT / file).read_text(encoding="utf-8").partition("\nROWS: ")
            assert needle in before + after.partition("\n}  # fmt: skip")[2], f"{row}: {needle} in {file}"


def test_every_refused_setting_is_listed_at_once(errors: dict[str, str]) -> None:
    assert "fp16.enabled=true" in errors["two at once"]
    assert "gradient_allreduce_op=sum" in errors["two at once"]


def test_sparse_embedding_is_refused_by_its_name(errors: dict[str, str]) -> None:
    assert "Embedding(sparse=True) at '0'" in errors["sparse embedding"]
    assert "EmbeddingBag(sparse=True) at '0'" in errors["sparse bag"]


@pytest.mark.parametrize("name", ["VRLAMB", "VR-LAMB", "VR-SGD", "LAMB", "LARS"])
def test_json_names_are_known_in_bf16_too(errors: dict[str, str], name: str) -> None:
    assert errors[f"type {name}"] == ""


def test_compiled_autograd_is_refused(errors: dict[str, str]) -> None:
    assert "compiled_autograd_enabled=True" in errors["compiled autograd"]
    assert "Leave it at False" in errors["compiled autograd"]
    assert "compiled autograd runs this backward pass" in errors["compiled autograd"]


@pytest.mark.parametrize(
    ("device", "ranks", "stage", "after_stage_3", "compiled", "refused"),
    [
        ("cuda", 2, 3, False, True, True),
        ("cuda", 2, 3, False, False, False),
        ("cuda", 2, 2, False, True, False),
        ("cuda", 2, 2, True, True, True),
        ("cuda", 1, 3, True, True, False),
        ("cpu", 2, 3, True, True, False),
    ],
)
def test_compiled_model_is_refused_at_and_after_stage_3_on_several_accelerators(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    ranks: int,
    stage: int,
    after_stage_3: bool,
    compiled: bool,
    refused: bool,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    if after_stage_3:  # DeepSpeed leaves it in place
        monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if compiled:
        module[0].compile(backend="eager")  # a part is enough
    engine = SimpleNamespace(
        device=torch.device(device), module=module, compile=lambda: None, zero_optimization_stage=lambda: stage,
        is_deepcompile_enabled=lambda: False,
    )  # fmt: skip
    several = (device, ranks) == ("cuda", 2) and (stage == 3 or after_stage_3)
    assert list(refusals._of_model(engine)) == [refusals.COMPILED_ON_SEVERAL_DEVICES] * refused
    refusals.guard_compile(engine)
    with pytest.raises(ValueError, match="with several accelerators") if several else nullcontext():
        engine.compile()


def test_factory_is_accepted(errors: dict[str, str]) -> None:
    assert errors["class"] == ""


def test_an_optimizer_of_the_program_does_not_silently_overrule_the_json(errors: dict[str, str]) -> None:
    assert "section names VRLAMB, but the program has given the engine AdamW" in errors["overruled"]
    assert errors["not overruled"] == errors["perhaps DeepSpeed's"] == ""


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_type_is_named_with_what_was_meant(errors: dict[str, str], name: str) -> None:
    assert f'optimizer.type="{name}" is neither' in errors[f"type {name}"]
    assert f'did you mean "{MISSPELT[name]}"?' in errors[f"type {name}"]


def test_a_type_that_is_like_none_of_ours_is_deepspeeds_to_refuse(errors: dict[str, str]) -> None:
    assert "Novograd is not a supported DeepSpeed Optimizer" in errors["type Novograd"]


def test_json_arguments_are_checked(errors: dict[str, str]) -> None:
    assert "VRLAMB has no argument gama=0.1" in errors["unknown argument"]
    assert "gamma=1.5 is out of range: must be in (0, 1]" in errors["bad argument"]
