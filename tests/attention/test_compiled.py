"""The kernels compiled for real GPUs, without one: what they take of shared memory is what `tiles` says, or less."""

import pytest
import torch
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdeft.attention import path_for
from specdeft.attention.tiles import padded, pick_tiles

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
POINTERS = {"p_lengths": "*i64", "p_depth": "*i64", "p_words": "*i64", "p_partial": "*fp32", "p_lse": "*fp32"}


def test_cuda_takes_the_kernels():
    assert path_for("cuda", torch.bfloat16, 256).__name__ == "specdeft.attention.deft_flatten"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "n"),
    [("bf16", 64, 3, 64), ("bf16", 128, 4, 64), ("bf16", 256, 32, 64), ("bf16", 256, 1, 1), ("fp32", 256, 32, 256)],
)
def test_stage_one_fits_shared_memory(dtype, head_dim, group, n, capability):
    from specdeft.attention.deft_flatten import attend_chunks

    itemsize = 4 if dtype == "fp32" else 2
    tiles = pick_tiles(n * group, head_dim, itemsize, 256, SHARED_LIMIT[capability])
    constants = {
        "HKV": 8,
        "G": group,
        "D": head_dim,
        "D_PAD": padded(head_dim),
        "TILE": tiles.block_n,
        "WINDOWED": True,
        "CAPPED": True,
        "PRECISION": "ieee",
        "BLOCK_M": tiles.block_m,
        "MASK_TILE": min(64, tiles.block_n),
    }
    signature = dict.fromkeys(attend_chunks.arg_names, "i32")
    signature |= dict.fromkeys(("p_q", "p_k", "p_v"), f"*{dtype}") | POINTERS | dict.fromkeys(("scale", "cap"), "fp32")
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(attend_chunks.arg_names)
        if name.startswith(("p_", "stride_"))
    }
    kernel = triton_compile(
        ASTSource(attend_chunks, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    assert 0 < kernel.metadata.shared <= tiles.shared_bytes(head_dim, itemsize) <= SHARED_LIMIT[capability]
