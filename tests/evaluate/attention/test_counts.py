"""Floors and traffic, by hand on small numbers."""

import pytest
import torch

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention.floors import Ceilings, floor_us, least_bytes, least_flops, measure_ceilings
from specdeft.evaluate.attention.shapes import SHAPES, find_shape
from specdeft.evaluate.attention.traffic import (
    dense_real,
    flatten_paper,
    flatten_real,
    partial_bytes,
    per_query_paper,
    per_query_real,
)
from specdeft.evaluate.attention.workloads import star, token_tree
from specdeft.trees import Tree
from tests.evaluate.attention.conftest import CPU, SHAPE

WORK = token_tree(Tree.chain(2), 10)  # 3 queries; paths of 11, 12 and 13 rows; 13 rows in all


def test_the_least_to_move_is_every_row_query_and_output_once():
    assert WORK.pairs == 11 + 12 + 13
    assert least_bytes(WORK, SHAPE, 2) == (2 * 13 * 2 + 2 * 3 * 4) * 16 * 2  # K and V of 2 heads; q and out of 4
    assert least_flops(WORK, SHAPE) == 4 * 36 * 4 * 16


def test_the_floor_is_the_slower_of_moving_and_computing():
    moving = Ceilings(bytes_per_second=1e9, flops_per_second=1e30)
    computing = Ceilings(bytes_per_second=1e30, flops_per_second=1e9)
    assert floor_us(WORK, SHAPE, 2, moving) == pytest.approx(least_bytes(WORK, SHAPE, 2) / 1e3)
    assert floor_us(WORK, SHAPE, 2, computing) == pytest.approx(least_flops(WORK, SHAPE) / 1e3)


def test_ceilings_are_measured():
    found = measure_ceilings(CPU, torch.float32, 0.01)
    assert found.bytes_per_second > 1e8
    assert found.flops_per_second > 1e8


def test_flatten_reads_kv_once_and_the_paper_counts_it_per_query_head():
    real, paper = flatten_real(WORK, SHAPE, 2, chunks=3, blocks=2), flatten_paper(WORK, SHAPE, 2)
    assert real.kv == 13 * 2 * 2 * 16 * 2
    assert real.kv_loads == 2 * real.kv
    assert real.masks == 3 * 1 * 8 * 2
    assert real.partials == partial_bytes(3 * 4 * 3, 16) == 2 * 36 * 17 * 4
    assert paper.kv == 2 * real.kv  # 4 query heads, 2 kv heads
    assert real.total == real.kv + real.masks + real.partials


def test_queries_by_themselves_read_their_paths():
    real = per_query_real(WORK, SHAPE, 2, chunks=1)
    assert real.kv == real.kv_loads == 36 * 2 * 2 * 16 * 2
    assert per_query_paper(WORK, SHAPE, 2).kv == 36 * 2 * 4 * 16 * 2


def test_a_dense_mask_repeats_heads_and_carries_scores():
    moved = dense_real(WORK, SHAPE, 2)
    assert moved.kv == 13 * 2 * 16 * 2 * (2 + 2 * 4)
    assert moved.partials == 4 * 3 * 13 * (6 * 2 + 2 * 4)


def test_a_star_shares_its_prompt():
    work = star(20, 4000, 400)
    assert (work.total_rows, work.pairs) == (4000 + 20 * 400, 20 * 4400)
    visible = work.visible()
    assert visible.sum() == work.pairs
    assert visible[:, :4000].all()
    assert visible[3, 4000 + 3 * 400 : 4000 + 4 * 400].all()


def test_a_token_tree_sees_what_the_tree_says():
    visible = WORK.visible()
    assert visible.tolist() == [[True] * 11 + [False] * 2, [True] * 12 + [False], [True] * 13]


def test_shapes_have_names_or_numbers():
    assert find_shape("llama3-8b") is SHAPES["llama3-8b"]
    assert find_shape("6x2x32").group == 3
    for wrong in ("llama", "3x2x16", "0x1x16", "4x2"):
        with pytest.raises(SpecdeftError):
            find_shape(wrong)
