"""The kernels compiled for real GPUs, without one: their shared memory and registers are what was planned."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdeft.attention import path_for
from specdeft.attention.tiles import padded, pick_hopper_tiles, pick_tiles

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
POINTERS = {
    **dict.fromkeys(("p_lengths", "p_depth", "p_words"), "*i64"),
    **dict.fromkeys(("p_enter", "p_leave", "p_pages"), "*i32"),
    **dict.fromkeys(("p_partial", "p_lse"), "*fp32"),
}


def compiled(source, kernel, constants, types, capability, **options):
    """The kernel for a GPU: parameters are aligned pointers, numbers of 32 bits, or constants."""
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.startswith(("p_", "stride_"))
    }
    target = GPUTarget("cuda", capability, 32)
    return triton_compile(source(kernel, signature, constants, aligned), target=target, options=options)


def test_cuda_takes_the_kernels():
    assert path_for("cuda", torch.bfloat16, 256).__name__ == "specdeft.attention.deft_flatten"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "n"),
    [("bf16", 64, 3, 64), ("bf16", 128, 4, 64), ("bf16", 256, 32, 64), ("bf16", 256, 1, 1), ("fp32", 256, 32, 256)],
)
def test_stage_one_fits_shared_memory(dtype, head_dim, group, n, page, capability):
    from specdeft.attention.deft_flatten import attend_chunks

    itemsize = 4 if dtype == "fp32" else 2
    tiles = pick_tiles(n * group, head_dim, itemsize, 256, SHARED_LIMIT[capability])
    constants = {"HKV": 8, "G": group, "D": head_dim, "D_PAD": padded(head_dim), "TILE": tiles.block_n}
    constants |= {"WINDOWED": True, "CAPPED": True, "PRECISION": "ieee", "BLOCK_M": tiles.block_m}
    constants |= {"MASK_TILE": min(64, tiles.block_n), "PAGE": page, "INTERVALS": False, "OVERLAPPED": capability == 90}
    types = dict.fromkeys(("p_q", "p_k", "p_v"), f"*{dtype}") | POINTERS | dict.fromkeys(("scale", "cap"), "fp32")
    types = {name: kind for name, kind in types.items() if name in attend_chunks.arg_names}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    kernel = compiled(ASTSource, attend_chunks, constants, types, capability, **options)
    assert 0 < kernel.metadata.shared <= SHARED_LIMIT[capability]
    if page == 0:  # gathered pages need room for their offsets, too
        assert kernel.metadata.shared <= tiles.shared_bytes(head_dim, itemsize)


@pytest.mark.parametrize("page", [0, 16, 64, 128])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "bf16"), (64, "fp16")])
@pytest.mark.parametrize("rows", [64, 256, 1024])
def test_the_hopper_kernel_keeps_everything_in_registers(rows, head_dim, dtype, page, tmp_path):
    hopper = pytest.importorskip("specdeft.attention.hopper", reason="this Triton has no Gluon for Hopper")
    from triton.experimental.gluon._runtime import GluonASTSource

    tiles, warpgroups = pick_hopper_tiles(rows, 65536)
    tile = tiles.block_n
    box = [min(page or tile, tile), head_dim]
    layout = hopper.box_layout(*box, torch.bfloat16 if dtype == "bf16" else torch.float16)
    constants = {"HKV": 8, "G": 4, "D": head_dim, "TILE": tile, "STAGES": tiles.num_stages}
    constants |= {"WARPGROUPS": warpgroups, "PAGE": page}
    types = dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{dtype}{box},{layout!r}>")
    types |= {"p_q": f"*{dtype}", "scale": "fp32"} | POINTERS
    types = {name: kind for name, kind in types.items() if name in hopper.attend_chunks.arg_names}
    kernel = compiled(GluonASTSource, hopper.attend_chunks, constants, types, 90, num_warps=4)
    assert 0 < kernel.metadata.shared <= SHARED_LIMIT[90]
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    stack = re.search(r"STACK:(\d+)", resources(kernel.asm["cubin"], tmp_path))
    assert stack is not None
    assert int(stack[1]) <= 16, "registers are spilled"  # bytes per thread


def resources(cubin: bytes, folder: Path) -> str:
    """What the binary takes of the GPU, as CUDA's tool reads it."""
    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run(
        [tool, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
