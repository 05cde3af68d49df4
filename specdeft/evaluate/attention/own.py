"""specdeft's own methods, as a user calls them: DeFT-Flatten for token trees, and the three partitions of nodes.

Knows the attention package's public names, and where its kernels have two forms, both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from specdeft.attention import Plan, general, make_plan, tree_attention
from specdeft.attention.plan import chunks
from specdeft.attention.tiles import Launch, plan_launch
from specdeft.evaluate.attention.case import PAGE, Case, node_pages
from specdeft.evaluate.attention.method import NotHere, Ready
from specdeft.evaluate.attention.traffic import Moved, flatten_paper, flatten_real
from specdeft.trees import Tree

ChunkSize = int | str


def flatten(case: Case, chunk_size: ChunkSize = "auto") -> Ready:
    """DeFT-Flatten: the token tree kernel where the workload is a token tree, else the kernels for nodes."""
    if case.workload.tree is None:
        return nodes(case, "deft-flatten", chunk_size)
    return _token_tree(case, lambda: _plan(case, chunk_size), _contiguous(case))


def flatten_paged(case: Case, chunk_size: ChunkSize = "auto") -> Ready:
    """DeFT-Flatten over paged KV."""
    if case.workload.tree is None:
        raise NotHere("deft-flatten is paged here already")
    pages = case.pools[0][0].shape[0]
    table = torch.arange(pages, dtype=torch.int32, device=case.device)[None]  # [1, pages]
    return _token_tree(case, lambda: _plan(case, chunk_size, table), lambda index: case.pools[index])


def flatten_triton(case: Case, chunk_size: ChunkSize = "auto") -> Ready:
    """DeFT-Flatten by the kernel that runs on every GPU, where another one is taken by itself."""
    tree = case.workload.tree
    if tree is None:
        raise NotHere("there is one kernel for nodes")
    if case.device.type != "cuda":
        raise NotHere("needs a GPU")
    from specdeft.attention import deft_flatten
    from specdeft.attention.merge import merge

    plan = _plan(case, chunk_size)
    k, _ = case.flats[0]
    q, launch = case.heads_first, plan_launch(case.heads_first, k, plan, None)
    if not uses_another_kernel(deft_flatten, case, plan):
        raise NotHere("deft-flatten is this kernel here")

    def attend(index: int) -> Tensor:
        k, v = case.flats[index]
        parts, lse_log2 = deft_flatten.attend(q, k, v, plan, launch, scale=case.scale, softcap=None)
        return merge(parts, lse_log2, plan, launch, q, None)[0].transpose(0, 1)

    return Ready(attend, _flatten_bytes(case, launch), _paper_bytes(case), lambda: _plan(case, chunk_size))


def uses_another_kernel(deft_flatten: ModuleType, case: Case, plan: Plan) -> bool:
    """Whether `tree_attention` takes a kernel of its own for this GPU and these shapes."""
    hopper = deft_flatten.hopper_kernel()
    q, (k, v) = case.heads_first, case.flats[0]
    if hopper is None or not hopper.takes(q, k, v, plan, scale=case.scale):
        return False
    return plan_launch(q, k, plan, None, warpgroups=True).warpgroups > 0


def nodes(case: Case, variant: str, chunk_size: ChunkSize = "auto") -> Ready:
    """One of the partitions of a tree of nodes over paged KV: "deft-flatten", "deft-node" or "deft-node-chunk"."""
    k, _ = case.pools[0]

    def make() -> general.Plan:
        return general.make_plan(as_nodes(case), k, case.shape.q_heads, variant=variant, chunk_size=chunk_size)

    plan = make()

    def attend(index: int) -> Tensor:
        k, v = case.pools[index]
        return general.node_attention(case.q, k, v, plan, scale=case.scale)

    real, paper = general.real_traffic(plan), general.paper_traffic(plan)
    return Ready(
        attend,
        Moved(real.kv, real.masks, real.partials_written + real.partials_read, real.kv_loads),
        Moved(paper.kv, paper.masks, 0),
        make,
        lambda: plan.grow(0),
        f"pages of {PAGE}, chunks of {plan.how.chunk_rows}" if variant != "deft-node" else f"pages of {PAGE}",
    )


def nodes_of_token_tree(case: Case) -> Ready:
    """DeFT-Flatten by the kernels for nodes, on a token tree."""
    if case.workload.tree is None:
        raise NotHere("deft-flatten is this here")
    return nodes(case, "deft-flatten")


def as_nodes(case: Case) -> general.Nodes:
    """The workload as the general kernels take it."""
    lists, skips = node_pages(case.workload)
    work = case.workload
    return general.make_nodes(work.parents, work.rows, lists, page_size=PAGE, queries=work.queries, skips=skips)


def per_query_plan(case: Case) -> tuple[Plan, int]:
    """A plan in which every query is a sequence of its own over a table of places; and chunks of the longest one."""
    work, shared = case.workload, case.workload.length
    longest = max(work.path_rows[node] for node in work.queries)
    table = torch.zeros(work.size, longest, dtype=torch.int32, device=case.device)
    table[:, :shared] = case.slots[:shared].to(torch.int32)
    behind = case.visible[:, shared:]
    query, row = behind.nonzero(as_tuple=True)
    place = behind.cumsum(dim=1)[query, row] - 1  # among the rows behind the prefix that the query sees
    table[query, shared + place] = case.slots[shared + row].to(torch.int32)
    lengths = torch.tensor([work.path_rows[node] - 1 for node in work.queries], device=case.device)
    plan = make_plan(Tree([-1], [0]), lengths, page_table=table)
    k = case.pools[0][0].view(-1, 1, *case.pools[0][0].shape[2:])
    launch = plan_launch(case.q[:, :, None], k, plan, None)
    return plan, _chunk_count(longest - 1, 1, launch)


def _token_tree(case: Case, make: Callable[[], Plan], kv: Callable[[int], tuple[Tensor, Tensor]]) -> Ready:
    plan, q = make(), case.heads_first

    def attend(index: int) -> Tensor:
        k, v = kv(index)
        return tree_attention(q, k, v, plan, scale=case.scale)[0].transpose(0, 1)

    k, v = kv(0)
    launch = plan_launch(q, k, plan, None, warpgroups=_on_hopper(case, q, k, v, plan))
    return Ready(attend, _flatten_bytes(case, launch), _paper_bytes(case), make, note=_describe(case, launch))


def _on_hopper(case: Case, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> bool:
    if case.device.type != "cuda":
        return False
    from specdeft.attention import deft_flatten

    hopper = deft_flatten.hopper_kernel()
    return hopper is not None and bool(hopper.takes(q, k, v, plan, scale=case.scale))


def _describe(case: Case, launch: Launch) -> str:
    if case.device.type != "cuda":
        return "plain torch"
    kernel = "Gluon" if launch.warpgroups else "Triton"
    return f"{kernel}, {launch.splits} splits"


def _plan(case: Case, chunk_size: ChunkSize, table: Tensor | None = None) -> Plan:
    tree = case.workload.tree
    assert tree is not None
    return make_plan(tree, torch.tensor([case.workload.length], device=case.device), chunk_size, table)


def _contiguous(case: Case) -> Callable[[int], tuple[Tensor, Tensor]]:
    return partial(tuple.__getitem__, case.flats)


def _flatten_bytes(case: Case, launch: Launch) -> Moved:
    count, blocks = 1, 1
    if case.device.type == "cuda":
        count, blocks = _chunk_count(case.workload.length, case.workload.size, launch), launch.blocks
    return flatten_real(case.workload, case.shape, case.q.dtype.itemsize, count, blocks)


def _paper_bytes(case: Case) -> Moved:
    return flatten_paper(case.workload, case.shape, case.q.dtype.itemsize)


def _chunk_count(length: int, n: int, launch: Launch) -> int:
    """Chunks of a sequence in a launch, by the partition that kernels follow."""
    _, chunk_tiles, most, _ = launch.cut
    tile = launch.tiles.block_n
    return len(chunks(length, n, chunk_tiles * tile, tile, most=most))
