"""What `specdeft tune` kept is what "auto" takes, where it fits and nowhere else; never does it change a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specdeft
from specdeft.generation import api, tuned
from specdeft.generation.tuned import PLAIN, Entry, find_choice, merged, nearest, read_table, table_path, write_table
from specdeft.trees import Tree
from tests.tiny import OracleHeads, plain, prompts, tiny

CPU = torch.device("cpu")
SMALL = Tree([-1, 0, 0, 1], [0, 0, 1, 0], "small-4")


def entry(batch: int = 1, length: int = 64, plain_seconds: float = 0.01) -> Entry:
    """A tree that gives 1.5 tokens in 10 ms."""
    return Entry(batch, length, SMALL, 16, 0.01, 1.5, plain_seconds)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEFT_CACHE", str(tmp_path))
    return tmp_path


def test_a_batch_takes_the_next_larger_entry_and_the_nearest_length():
    entries = [entry(b, length) for b in (1, 8) for length in (512, 4096)]
    found = [nearest(entries, *asked) for asked in ((1, 10), (2, 3000), (8, 900), (64, 9000))]
    assert [(each.batch, each.length) for each in found] == [(1, 512), (8, 4096), (8, 512), (8, 4096)]


def test_measured_again_replaces_and_others_stay(cache: Path):
    kept = merged([entry(1), entry(8)], [entry(8, plain_seconds=0.02)])
    assert [each.plain_seconds for each in kept] == [0.01, 0.02]
    write_table(cache / "table.json", kept, {})
    assert list(read_table(cache / "table.json", 0)) == kept


def test_auto_takes_the_tuned_tree_and_chunk_size_and_says_the_same(monkeypatch: pytest.MonkeyPatch):
    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 40)
    write_table(table_path(model, heads, CPU, False), [entry(2), entry(8, 32)], {})
    sizes, target = [], api.Target
    monkeypatch.setattr(api, "Target", lambda model, size, *rest: sizes.append(size) or target(model, size, *rest))
    out = specdeft.generate(model, heads, ids, max_new_tokens=40)
    assert out.token_ids == plain(model, ids, 40)
    assert out.stats.tree.startswith("small-4 (auto: tuned for batch 2 at 64 tokens); drafted in ")
    assert sum(out.stats.accepted_per_depth)
    specdeft.generate(model, heads, ids, max_new_tokens=4, chunk_size=32)
    assert sizes == [16, 32]
    batch = specdeft.generate(model, heads, [ids] * 3, max_new_tokens=4, batch_size=2)
    assert "tuned for batch 2" in batch[0].stats.tree  # as many as are decoded at once
    named = specdeft.generate(model, heads, ids, max_new_tokens=4, tree="chain-2")
    assert "tuned" not in named.stats.tree


def test_where_drafting_was_slower_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch):
    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 40)
    path = table_path(model, heads, CPU, False)
    write_table(path, [entry(plain_seconds=0.005)], {})
    assert find_choice(model, heads, CPU, False, 1, 64).tree == SMALL  # on a CPU, pace decides
    monkeypatch.setattr(tuned, "table_path", lambda *_: path)
    found = find_choice(model, heads, torch.device("cuda"), False, 1, 64)
    assert (found.tree, found.why) == (PLAIN, " (auto: plain, drafting measured 0.75x here)")
    monkeypatch.setattr(api, "find_choice", lambda *_: found)
    out = specdeft.generate(model, heads, ids, max_new_tokens=40)
    assert out.token_ids == plain(model, ids, 40)
    assert out.stats.tree.startswith("plain (auto: plain, drafting measured 0.75x here)")
    assert out.stats.accepted_per_depth == []


def test_a_lone_root_asks_nothing_of_heads_with_a_memory():
    model, ids = tiny(), prompts(2)
    heads = specdeft.DraftHeads.for_model(model, num_heads=3, prefix=True, seed=0)
    out = specdeft.generate(model, heads, ids, max_new_tokens=9, tree=PLAIN)
    assert [each.token_ids for each in out] == [plain(model, each, 9) for each in ids]


@pytest.mark.parametrize("text", ["", "{}", '{"entries": []}', '{"entries": [{"batch": 1}]}', "[1]"], ids=repr)
def test_a_broken_table_is_a_warning(text: str):
    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 40)
    path = table_path(model, heads, CPU, False)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="is no table of tuned trees"):
        out = specdeft.generate(model, heads, ids, max_new_tokens=9)
    assert out.token_ids == plain(model, ids, 9)
    assert "tuned" not in out.stats.tree


def test_a_table_is_of_one_device_model_heads_and_dtype(monkeypatch: pytest.MonkeyPatch):
    model, ids = tiny(), prompts(1)[0]
    heads = OracleHeads.of(model, ids, 40)
    mine = table_path(model, heads, CPU, False)
    write_table(mine, [entry()], {})
    assert find_choice(model, heads, CPU, True, 1, 64) is None
    other = specdeft.DraftHeads.for_model(model, num_heads=4, seed=5)
    torch.nn.init.normal_(next(other.parameters()))
    assert table_path(model, other, CPU, False) != mine
    assert table_path(tiny(seed=3), heads, CPU, False) != mine
    monkeypatch.setattr(tuned, "device_name", lambda device: "another device")
    assert find_choice(model, heads, CPU, False, 1, 64) is None
