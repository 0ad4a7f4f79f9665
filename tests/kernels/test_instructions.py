"""The kernels compile for a GPU where there is none, and read and write 16 bytes at a time."""

from __future__ import annotations

from typing import Any

import pytest

from ds_vrgd.kernels.records import AdamNumbers, Columns, MomentumNumbers, RatioNumbers, Tensors

FP32, NUMBER, NONE = "*fp32", "fp32", "constexpr"
RATIO = RatioNumbers(*[NUMBER] * 7, NONE)
ADAM = AdamNumbers(*[NUMBER] * 8, NONE)
MOMENTUM = MomentumNumbers(*[NUMBER] * 4)
#: Kernel: what it is given, and the tensors that it reads and writes.
CALLS: dict[str, tuple[Tensors, Any, Columns, int, int]] = {
    "ratio_sums": (Tensors(total=FP32, m2=FP32), ADAM, Columns(), 2, 0),
    "lars_norms": (Tensors(FP32, None, FP32, FP32), MOMENTUM, Columns("*fp64"), 3, 0),
    "momentum_step": (Tensors(FP32, FP32, buffer=FP32, scale=FP32), MOMENTUM, Columns(None, FP32), 3, 2),
    "adam_step": (Tensors(FP32, None, FP32, FP32, FP32, None, FP32, FP32), ADAM, Columns("*fp64"), 6, 4),
    "lamb_advance": (Tensors(FP32, FP32, FP32, FP32, FP32, None, FP32, FP32), ADAM, Columns("*fp64"), 7, 3),
    "lamb_apply": (Tensors(FP32, None, FP32, FP32, FP32, None, FP32, FP32), ADAM, Columns(None, FP32), 3, 1),
}


def compiled(kernel: str, *, aligned: bool) -> str:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from ds_vrgd.kernels import update

    like, rule, columns, *_ = CALLS[kernel]
    types = {"like": like, "numbers": RATIO, "rule": rule, "columns": columns}
    names = update._over_block.arg_names
    known = {"kernel": getattr(update, kernel), "block": update.BLOCK, "aligned": aligned}
    constants: dict[tuple[int, ...], Any] = {(names.index(name),): value for name, value in known.items()}
    signature: dict[str, Any] = dict.fromkeys(names, "i32")
    signature |= {"seed": "i64", "addresses": "*i64", "rows": "*i64", "partials": "*fp64"} | dict.fromkeys(known, NONE)
    for name, fields in types.items():
        signature[name] = type(fields)(*[NONE if field is None else field for field in fields])
        absent = [place for place, field in enumerate(signature[name]) if field == NONE]
        constants |= {(names.index(name), place): None for place in absent}
    source = triton.compiler.ASTSource(update._over_block, signature, constants)
    code = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": update.WARPS})
    return str(code.asm["ptx"])


@pytest.mark.parametrize("kernel", CALLS)
def test_whole_blocks_are_read_and_written_16_bytes_at_a_time(kernel: str) -> None:
    *_, reads, writes = CALLS[kernel]
    code = compiled(kernel, aligned=True)
    assert code.count("ld.global.v4.b32") == 2 * reads  # a thread has eight elements
    assert code.count("st.global.v4.b32") == 2 * writes


def test_tensors_that_are_not_aligned_are_read_element_by_element() -> None:
    assert "ld.global.v4" not in compiled("lamb_apply", aligned=False)


@pytest.mark.parametrize("ranks", [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_the_comparison_of_the_ranks_compiles(ranks: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from ds_vrgd.kernels import compare

    known = {"ranks": ranks, "sketch": 16, "block": 2048, "tile": compare.tile_of(ranks)}
    names = compare._compare.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(known, NONE)
    signature |= {"rows": "*bf16", "row_stride": "i64", "partials": "*fp64", "largest": NUMBER, "least_share": NUMBER}
    signature |= dict.fromkeys(("table", "layers", "peak"), "*i64")
    constants = {(names.index(name),): value for name, value in known.items()}
    source = triton.compiler.ASTSource(compare._compare, signature, constants)
    code = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": compare.WARPS})
    ptx = str(code.asm["ptx"])
    assert "tf32" not in ptx  # whose rounding would be larger than the distance of identical gradients
    assert "atom.global" in ptx
