"""`torch.ops.specdeft.tree_attention`: what torch.compile sees of tree attention."""

import pytest
import torch

from specdeft.attention import make_plan, tree_attention
from specdeft.attention.operator import as_operator
from tests.attention.cases import inputs, paged, random_tree

NONE = {"softcap": None, "window": None, "sinks": None}


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 9}, {"sinks": torch.tensor([0.5, -1, 2, 0])}])
@pytest.mark.parametrize("page", [None, 16])
def test_the_operator_gives_what_the_function_gives(options, page):
    tree = random_tree(9)
    x = inputs([40, 3], 9, 2, 16, kv_heads=2)
    k, v, table = (x.k, x.v, None) if page is None else paged(x, page)
    plan = make_plan(tree, x.lengths, 64, table)
    out = as_operator(x.q, k, v, plan, scale=0.25, **(NONE | options))
    assert torch.equal(out, tree_attention(x.q, k, v, plan, scale=0.25, **options))
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("page", [None, 16])
def test_the_operator_passes_torchs_own_checks(page):
    """Schema, fake tensors, and that tracing with symbolic shapes agrees with running."""
    x = inputs([40, 3], 9, 2, 16, kv_heads=2, behind=0.0)
    k, v, table = (x.k, x.v, None) if page is None else paged(x, page)
    plan = make_plan(random_tree(9), x.lengths, 64, table)
    arguments = (x.q, k, v, plan.lengths, *plan.arrays.tensors(), table, None, 0, 0.25, None, None)
    torch.library.opcheck(torch.ops.specdeft.tree_attention.default, arguments)


def test_a_compiled_function_keeps_it_whole():
    x = inputs([40], 9, 2, 16, behind=0.0)
    plan = make_plan(random_tree(9), x.lengths)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q):
        return tree_attention(q + 1.0, x.k, x.v, plan, window=20) * 2.0

    expected = tree_attention(x.q + 1.0, x.k, x.v, plan, window=20) * 2.0
    torch.testing.assert_close(layer(x.q), expected, rtol=0, atol=1e-6)
    x.lengths.sub_(7)  # data on the device, not a constant of the graph
    expected = tree_attention(x.q + 1.0, x.k, x.v, plan, window=20) * 2.0
    torch.testing.assert_close(layer(x.q), expected, rtol=0, atol=1e-6)
