"""Plans that live through growing, branching and pruning stay what a plan made afresh would be."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdeft.attention.general import VARIANTS, Nodes, make_nodes, make_plan, node_attention
from specdeft.attention.general.tiles import auto_chunk
from tests.attention.general.cases import Pool, fill, nodes_of, plan_for, pool_of, specified

TOLERANCE = 1e-5  # float32 sums of a few hundred products of order 1, in another order
PAGES, PAGE_SIZE, MOST_LEAVES = 120, 4, 16


@dataclass
class Branch:
    parent: Branch | None
    rows: int
    pages: list[int]


@dataclass
class Search:
    """A tree search in miniature: live branches grow, split and end; ended ones give their pages back."""

    rng: random.Random
    free: list[int] = field(default_factory=lambda: list(range(PAGES)))
    branches: list[Branch] = field(default_factory=list)

    def begin(self, parent: Branch | None, rows: int) -> None:
        self.branches.append(Branch(parent, rows, [self.free.pop() for _ in range(5)]))

    @property
    def leaves(self) -> list[Branch]:
        return [b for b in self.branches if all(other.parent is not b for other in self.branches)]

    def end(self, branch: Branch | None) -> None:
        """The branch ends, and so do those above it that have no other."""
        while branch is not None and branch in self.leaves:
            self.branches.remove(branch)
            self.free = branch.pages + self.free
            branch = branch.parent

    def nodes(self) -> Nodes:
        place = {id(branch): i for i, branch in enumerate(self.branches)}
        return make_nodes(
            [place[id(b.parent)] if b.parent else -1 for b in self.branches],
            [b.rows for b in self.branches],
            [b.pages for b in self.branches],
            page_size=PAGE_SIZE,
        )

    def change(self, kind: str) -> bool:
        """Branch or prune at a random leaf, where there is room; whether anything changed."""
        leaves = self.leaves
        leaf = self.rng.choice(leaves)
        if kind == "branch" and len(leaves) < 7 and len(self.free) >= 10:
            self.begin(leaf, 1)
            self.begin(leaf, self.rng.randrange(1, 3))
            return True
        if kind == "prune" and len(leaves) > 1:
            self.end(leaf)
            return True
        return False


def live_through(kinds: list[str], variant: str, seed: int) -> int:
    """Do so to one plan, and compare each step with the specification and with a new plan. How often trees changed."""
    search = Search(random.Random(seed))
    search.begin(None, 9)
    for rows in (1, 2, 1):
        search.begin(search.branches[0], rows)
    nodes = search.nodes()
    pool = pool_of(nodes, 1, 16, pages=PAGES)
    plan = plan_for(nodes, pool, variant, 16, headroom=5.0)
    assert plan.room.queries <= MOST_LEAVES == plan.tiles.block_m  # so that a new plan has the same tiles
    q, changed = torch.randn(plan.room.queries, 1, 16), 0
    for step, kind in enumerate(kinds):
        if kind == "grow" and all(leaf.rows < 20 for leaf in search.leaves):
            for leaf in search.leaves:
                leaf.rows += 1
            plan.grow()
        elif search.change(kind):
            plan.refill(search.nodes())
            changed += 1
        nodes = search.nodes()
        now = Pool(q[: plan.size], pool.k, pool.v)
        fill(now, nodes, nodes.lengths, seed=step)
        assert plan.lengths.tolist() == nodes.lengths.tolist()
        out = node_attention(now.q, now.k, now.v, plan)
        torch.testing.assert_close(out.double(), specified(nodes, now), rtol=0, atol=TOLERANCE)
        afresh = plan_for(nodes, now, variant, 16)
        assert torch.equal(out, node_attention(now.q, now.k, now.v, afresh))
        for name in ("positions", "places"):
            assert torch.equal(getattr(plan, name)[: plan.size], getattr(afresh, name))
    return changed


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plan_that_lives_on_equals_a_new_one(variant):
    assert live_through(["grow", "branch", "prune"], variant, seed=2) == 2


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["grow", "grow", "branch", "prune"]), min_size=1, max_size=25),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 10**6),
)
def test_in_plain_torch(kinds, variant, seed):
    live_through(kinds, variant, seed)


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("variant", VARIANTS)
def test_leaves_with_several_queries_grow_by_several_rows(variant):
    nodes = nodes_of([-1, 0, 0, 1, 1], [20, 7, 1, 2, 30], 4, queries=[3, 3, 2, 4, 1], spare=40)
    pool = pool_of(nodes, 2, 16)
    plan = plan_for(nodes, pool, variant, 16)
    for step, rows in enumerate([1, 20]):
        plan.grow(rows)
        fill(pool, nodes, plan.lengths, seed=step)
        out = node_attention(pool.q, pool.k, pool.v, plan)
        torch.testing.assert_close(out.double(), specified(nodes, pool, plan.lengths), rtol=0, atol=TOLERANCE)
    assert plan.lengths.tolist() == [20, 7, 22, 23, 51]  # inner nodes keep their rows, whoever asks there


@pytest.mark.usefixtures("kernels")
def test_growing_uploads_nothing(monkeypatch):
    nodes = nodes_of([-1, 0, 0], [9, 2, 1], 4, spare=20)
    plan = plan_for(nodes, pool_of(nodes, 1, 16))
    monkeypatch.setattr(type(plan), "_upload", lambda plan: pytest.fail("the host's tables were sent again"))
    before = plan.places.clone()
    plan.grow()
    assert (plan.places != before).all()


@pytest.mark.parametrize("interpreted_too", [False, True])
def test_places_and_positions_say_where_new_rows_go(interpreted_too, request):
    if interpreted_too:
        request.getfixturevalue("kernels")
    nodes = make_nodes([-1, 0, 0], [6, 1, 3], [[9, 2], [4], [0, 7]], page_size=4, queries=[2, 1], skips=[0, 1, 2])
    plan = make_plan(nodes, torch.zeros(10, 4, 1, 16), 1)
    assert (plan.places.tolist(), plan.positions.tolist()) == ([7 * 4 + 0, 4 * 4 + 1], [8, 6])
    plan.grow()
    assert (plan.places.tolist(), plan.positions.tolist()) == ([7 * 4 + 1, 4 * 4 + 2], [9, 7])


def test_a_full_leaf_is_refused_and_nothing_changes():
    nodes = nodes_of([-1, 0, 0], [9, 2, 1], 4, spare=1)
    plan = plan_for(nodes, pool_of(nodes, 1, 16))
    room = int((nodes.capacity - nodes.lengths)[1:].min())
    full = 1 + int((nodes.capacity - nodes.lengths)[1:].argmin())
    plan.grow(room)
    before, places = plan.lengths, plan.places.clone()
    with pytest.raises(ValueError, match=rf"node {full} has {before[full]} rows and room for {before[full]}.*by 1"):
        plan.grow()
    assert np.array_equal(plan.lengths, before)
    assert torch.equal(plan.places, places)
    with pytest.raises(ValueError, match="cannot grow by -1 rows"):
        plan.grow(-1)


def test_more_pages_let_a_leaf_go_on():
    nodes = make_nodes([-1], [4], [[2]], page_size=4)
    plan = make_plan(nodes, torch.zeros(5, 4, 1, 16), 1, headroom=2)
    with pytest.raises(ValueError, match="cannot grow"):
        plan.grow()
    plan.refill(make_nodes([-1], [4], [[2, 0]], page_size=4))
    plan.grow()
    assert plan.places.tolist()[0] == 0


def test_a_tree_beyond_the_room_is_refused_with_the_numbers():
    small, large = nodes_of([-1, 0], [3, 2], 4), nodes_of([-1, 0, 0], [3, 2, 1], 4)
    plan = make_plan(small, torch.zeros(20, 4, 1, 16), 1)
    with pytest.raises(ValueError, match=r"no room for this tree \(nodes: 3, more than 2\)"):
        plan.refill(large)
    assert plan.nodes is small


@pytest.mark.parametrize("variant", ["deft-flatten", "deft-node-chunk"])
def test_auto_chunks_are_the_smaller_the_larger_the_processor(variant):
    nodes = nodes_of([-1] + [0] * 20, [20000] + [400] * 20, 64)
    sizes = [auto_chunk(nodes, variant, 4, 64, 8, resident) for resident in (1, 130, 10**6)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 8192
    assert sizes[1] not in (sizes[0], sizes[-1])
    assert sizes[-1] == 256
