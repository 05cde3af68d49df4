"""Trees of thoughts as the benchmark's files hold them, made up here."""

import json

import pytest

from specdeft.errors import SpecdeftError
from specdeft.evaluate.attention.presets import grid, paper
from specdeft.evaluate.attention.reasoning import FILES, at_step, find_folder, read_thoughts, sampled


def node(key: int, value: int, start: int, end: int, *children: int) -> dict[str, object]:
    return {"id": key, "value": value, "start": start, "end": end, "children": list(children)}


# two thoughts of 3 and 5 tokens behind a prompt of 100; the longer one has a child that decodes at steps 6 to 9
TREE = {"0": node(0, 100, 0, 0, 1, 2), "1": node(1, 3, 1, 3), "2": node(2, 5, 1, 5, 3), "3": node(3, 4, 6, 9)}


@pytest.fixture
def folder(tmp_path):
    entry = {"incompleted": False, "prompt": "", "data": TREE}
    for name in FILES.values():
        (tmp_path / f"{name}.json").write_text(json.dumps([entry, {"data": {}}]), encoding="utf-8")
    return tmp_path


def test_live_leaves_ask_over_what_they_see(folder):
    [tree] = read_thoughts(folder / "set128ToT.json")
    assert (tree.prompt, tree.steps) == (100, 9)
    early = at_step(tree, 2, "t")
    assert (early.rows, early.queries) == ((100, 2, 2), (1, 2))
    middle = at_step(tree, 4, "t")  # the first thought has ended
    assert (middle.rows, middle.queries) == ((100, 4), (1,))
    late = at_step(tree, 8, "t", prompt=7)
    assert (late.rows, late.queries, late.parents) == ((7, 5, 3), (2,), (-1, 0, 1))
    with pytest.raises(ValueError, match="decodes nothing at step 10"):
        at_step(tree, 10, "t")


def test_steps_are_sampled_evenly(folder):
    [tree] = read_thoughts(folder / "set128ToT.json")
    assert sampled(tree, 3) == [2, 5, 7]


def test_the_papers_cells_come_from_the_folder(folder):
    cells = paper(folder, steps=2)
    kinds = {cell.workload.kind for cell in cells}
    assert kinds == {"few-shot", "token-tree", "reasoning"}
    assert len({cell.id for cell in cells}) == len(cells)
    assert all("column" in cell.workload.facts for cell in cells)


def test_a_folder_without_the_files_and_a_file_of_another_form_are_refused(folder, tmp_path):
    assert find_folder(folder) == folder
    with pytest.raises(SpecdeftError, match=r"does not hold sorting128ToT\.json"):
        find_folder(tmp_path / "none")
    (folder / "set128ToT.json").write_text('[{"data": {"0": {}}}]', encoding="utf-8")
    with pytest.raises(SpecdeftError, match="no file of trees of thoughts"):
        read_thoughts(folder / "set128ToT.json")


def test_a_grid_has_every_length_and_size_and_then_chunk_sizes():
    cells = grid("4x2x16", (100, 200), (32, 64), (16, 32))
    assert [cell.id for cell in cells[:4]] == [f"4x2x16 N={n} L={length}" for length in (100, 200) for n in (32, 64)]
    assert cells[4].only == ("deft-flatten@16", "deft-flatten@32")
    assert len(grid("llama3-8b")) > 18
