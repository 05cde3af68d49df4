"""What attention over nodes refuses, before it computes anything, and what it says."""

import pytest
import torch

from specdeft.attention.general import make_plan, node_attention
from specdeft.attention.general.plan import kernels_for
from tests.attention.general.cases import nodes_of, plan_for, pool_of

NODES = nodes_of([-1, 0, 0], [5, 3, 2], 4)
POOL = pool_of(NODES, 3, 16, kv_heads=2)


def pool_like(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "flatten"}, "one of deft-flatten, deft-node, deft-node-chunk, got 'flatten'"),
        ({"chunk_size": 24}, "a positive multiple of 16 KV rows, got 24"),
        ({"chunk_size": 0}, "a positive multiple of 16 KV rows, got 0"),
        ({"chunk_size": "large"}, "'auto' or an int, got 'large'"),
        ({"chunk_size": True}, "'auto' or an int, got True"),
        ({"headroom": 0.5}, "at least 1, got 0.5"),
        ({"headroom": float("nan")}, "at least 1, got nan"),
        ({"q_heads": 5}, "Hq = 5 and Hkv = 2"),
        ({"q_heads": 0}, "Hq = 0 and Hkv = 2"),
        ({"k": pool_like(9, 4, 16)}, r"k must be \[pages, page_size, Hkv, D\], got shape \[9, 4, 16\]"),
        ({"k": pool_like(9, 4, 2, 16, dtype=torch.int8)}, "floating point, got torch.int8"),
        ({"k": pool_like(99, 8, 2, 16)}, "the nodes' pages have 4 rows, but the pool's have 8"),
        ({"k": pool_like(2, 4, 2, 16)}, rf"name page {NODES.last_page}, but the pool has pages 0\.\.1"),
        ({"k": torch.empty(1 << 29, 4, 2, 16, device="meta")}, "536870912 pages of 4 rows is too large"),
    ],
)
def test_bad_plans_are_refused_with_the_numbers(change, message):
    arguments = {"nodes": NODES, "k": POOL.k, "q_heads": 6, "chunk_size": 64} | change
    with pytest.raises(ValueError, match=message):
        make_plan(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": POOL.q[None]}, r"q must be \[Q, Hq, D\], got shape \[1, 2, 6, 16\]"),
        ({"q": POOL.q[:1]}, "2 queries and room for 2, but q holds 1 rows"),
        ({"q": POOL.q.repeat(2, 1, 1)}, "2 queries and room for 2, but q holds 4 rows"),
        ({"q": POOL.q[:, :4]}, r"Hq, Hkv, D = \(6, 2, 16\), but q is \[2, 4, 16\]"),
        ({"q": POOL.q[..., :8]}, r"Hq, Hkv, D = \(6, 2, 16\), but q is \[2, 6, 8\]"),
        ({"q": POOL.q.half()}, "the plan is for torch.float32 on cpu, but q is torch.float16 on cpu"),
        ({"v": POOL.v.bfloat16()}, "but v is torch.bfloat16"),
        ({"v": POOL.v.to("meta")}, "but v is torch.float32 on meta"),
        ({"v": POOL.v[:-1]}, "k and v must have the same shape"),
        ({"v": POOL.v.transpose(1, 2).contiguous().transpose(1, 2)}, "k and v must have the same strides"),
        ({"q": POOL.q.transpose(1, 2).contiguous().transpose(1, 2)}, "D must be dense"),
        ({"k": POOL.k[:1], "v": POOL.v[:1]}, r"but the pool has pages 0\.\.0"),
        ({"softcap": 0.0}, "softcap must be positive, or None for no cap, got 0.0"),
        ({"window": 0}, "window must be at least 1 position, or None for no window, got 0"),
    ],
)
def test_bad_tensors_are_refused_with_the_numbers(change, message):
    arguments = {"q": POOL.q, "k": POOL.k, "v": POOL.v, "plan": plan_for(NODES, POOL)} | change
    with pytest.raises(ValueError, match=message):
        node_attention(**arguments)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float64, 64, "No kernel takes torch.float64"),
        (torch.float16, 512, "Head dim 512 exceeds the kernels' 256"),
    ],
)
def test_where_no_kernel_fits_one_warning_says_why(dtype, head_dim, reason):
    kernels_for.cache_clear()
    with pytest.warns(UserWarning, match=f"{reason}: attention over nodes runs in plain torch") as caught:
        assert [kernels_for("cuda", dtype, head_dim) for _ in range(3)] == [None, None, None]
    assert len(caught) == 1


def test_without_triton_one_warning_says_so(monkeypatch):
    kernels_for.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "specdeft.attention.general.kernels", None)
    monkeypatch.delattr("specdeft.attention.general.kernels", raising=False)
    with pytest.warns(UserWarning, match="Triton cannot be imported"):
        assert kernels_for("cuda", torch.float16, 64) is None
    kernels_for.cache_clear()


def test_one_siblings_rows_do_not_reach_the_other():
    nodes = nodes_of([-1, 0, 0, 1], [5, 3, 2, 1], 4, queries=[1, 2, 3, 0])
    pool = pool_of(nodes, 2, 16)
    plan = plan_for(nodes, pool)
    before = node_attention(pool.q, pool.k, pool.v, plan)
    own = nodes.pages[nodes.offsets[1] : nodes.offsets[2]]
    pool.k[own] += 1.0
    pool.v[own] -= 1.0
    changed = (node_attention(pool.q, pool.k, pool.v, plan) != before).any(dim=(1, 2))
    assert changed.tolist() == [True, False, True, False]
