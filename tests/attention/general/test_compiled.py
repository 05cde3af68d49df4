"""The kernels for general trees compiled for real GPUs, without one: they fit shared memory and spill no registers."""

import re

import pytest
from triton.compiler import ASTSource

from specdeft.attention.general import cut_kernels, kernels, work_kernels
from specdeft.attention.general.tiles import MASKED_STAGES, pick_tiles
from specdeft.attention.merge import PARTIALS_AT_ONCE
from specdeft.attention.tiles import padded
from tests.attention.test_compiled import SHARED_LIMIT, compiled, resources

TABLES = ("p_counts", "p_items", "p_queries", "p_rows", "p_ranks", "p_nodes", "p_pages", "p_chunks")
TYPES = dict.fromkeys(TABLES, "*i32") | dict.fromkeys(("p_partial", "p_lse"), "*fp32")

STAGE_ONE = [  # dtype, D, G, Q, windowed and capped
    ("bf16", 64, 3, 20, True),
    ("bf16", 80, 4, 64, True),
    ("bf16", 128, 4, 1, True),
    ("bf16", 128, 4, 50, False),
    ("fp16", 128, 1, 256, True),
    ("bf16", 256, 32, 64, True),
    ("fp32", 128, 4, 256, False),
    ("fp32", 256, 8, 64, True),
]


def build(kernel, constants, types, capability, **options):
    types = {name: kind for name, kind in (TYPES | types).items() if name in kernel.arg_names}
    return compiled(ASTSource, kernel, constants, types, capability, **options)


def spilled(kernel, folder) -> int:
    """Bytes per thread that live on the stack."""
    stack = re.search(r"STACK:(\d+)", resources(kernel.asm["cubin"], folder))
    assert stack is not None
    return int(stack[1])


@pytest.mark.parametrize(("dtype", "head_dim", "group", "queries", "features"), STAGE_ONE)
def test_stage_one_keeps_everything_in_registers(dtype, head_dim, group, queries, features, tmp_path):
    itemsize = 4 if dtype == "fp32" else 2
    tiles = pick_tiles(queries * group, head_dim, itemsize, SHARED_LIMIT[90])
    constants = {"PAGE": 16, "G": group, "D": head_dim, "D_PAD": padded(head_dim), "TILE": tiles.block_n}
    constants |= {"BLOCK_M": tiles.block_m, "WINDOWED": features, "CAPPED": features}
    constants |= {"PRECISION": "ieee" if itemsize == 4 else "tf32"}
    constants |= {"MASKED_STAGES": min(tiles.num_stages, MASKED_STAGES), "OVERLAPPED": True}
    types = dict.fromkeys(("p_q", "p_k", "p_v"), f"*{dtype}") | dict.fromkeys(("scale", "cap"), "fp32")
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    kernel = build(kernels.attend_items, constants, types, 90, **options)
    assert 0 < kernel.metadata.shared <= SHARED_LIMIT[90]
    assert spilled(kernel, tmp_path) <= 16


@pytest.mark.parametrize("chunks", [1, 4, 16])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 80), ("fp32", 256)])
def test_stage_two_keeps_everything_in_registers(dtype, head_dim, chunks, tmp_path):
    constants = {"G": 3, "D": head_dim, "D_PAD": padded(head_dim)}
    rows = PARTIALS_AT_ONCE // chunks
    constants |= {"ROWS": rows, "CHUNKS": chunks, "OVERLAPPED": True}
    warps = min(4, rows) * (1 if head_dim <= 128 else 2)
    kernel = build(kernels.merge_items, constants, {"p_out": f"*{dtype}"}, 90, num_warps=warps)
    assert spilled(kernel, tmp_path) <= 16


@pytest.mark.parametrize("flatten", [False, True])
def test_the_partition_compiles(flatten, tmp_path):
    constants = {"STEPS": 9, "PAGE": 16, "BLOCK": cut_kernels.BLOCK, "GRAIN": 64, "FLATTEN": flatten}
    for kernel in (
        cut_kernels.measure, cut_kernels.lay_rows, cut_kernels.cut_chunks,
        work_kernels.list_items, work_kernels.rank_chunks,
    ):  # fmt: skip
        wanted = {name: value for name, value in constants.items() if name in kernel.arg_names}
        assert spilled(build(kernel, wanted, {}, 90, num_warps=2), tmp_path) <= 16


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("group", [1, 8, 32])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_heads_of_256_fit_in_every_dtype(dtype, group, capability):
    tiles = pick_tiles(64 * group, 256, 4 if dtype == "fp32" else 2, SHARED_LIMIT[capability])
    assert tiles.shared_bytes(256, 4 if dtype == "fp32" else 2) <= SHARED_LIMIT[capability]
