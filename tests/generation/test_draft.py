"""Trees drafted level by level: each node sees its own path, and the text stays what the model would say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import specdeft
from specdeft.generation.fill import draft, tree_levels
from specdeft.heads import DraftHeads, HydraHeads
from specdeft.trees import Tree
from tests.tiny import VOCAB, assert_telling, plain, prompts, tiny

SCATTERED = Tree(parents=[-1, 2, 0, 0, 3, 1, 3], ranks=[0, 1, 0, 3, 0, 2, 4])  # parents after children, ranks skipped


class OracleHydra(HydraHeads):
    """Knows the true text. A node whose path is true so far gets the truth at a random rank; any other gets noise."""

    @classmethod
    def of(cls, model, ids: list[int], count: int, num_heads: int = 4) -> OracleHydra:
        heads = DraftHeads.for_model(model, kind="hydra", num_heads=num_heads)
        heads.__class__ = cls
        heads.__dict__["truth"] = plain(model, ids, count + num_heads + 1)
        heads.__dict__["generator"] = torch.Generator().manual_seed(len(ids))
        return heads  # type: ignore[return-value]

    def propose_level(self, hidden: Tensor, path: Tensor, embed, lm_head, width: int):
        level = super().propose_level(hidden, path, embed, lm_head, width)
        ids = level.ids.clone()
        for node, tokens in enumerate(path[0].tolist()):
            followers = {
                self.truth[i + len(tokens)]
                for i in range(len(self.truth) - len(tokens))
                if self.truth[i : i + len(tokens)] == tokens
            }
            drawn = torch.randperm(self.config.vocab_size, generator=self.generator).tolist()
            others = [token for token in drawn if token not in followers]
            guesses = [*followers, *others][:width]
            order = torch.randperm(len(guesses), generator=self.generator).tolist()
            ids[0, node] = torch.tensor([guesses[i] for i in order])
        return type(level)(ids, level.log_probs)


@pytest.mark.parametrize("tree", [SCATTERED, Tree.load("medusa-63"), Tree.chain(3), Tree.star(5)])
def test_a_levels_arrays_lead_from_the_root_to_each_node(tree: Tree) -> None:
    seen = []
    for depth, level in enumerate(tree_levels(tree, torch.device("cpu")), start=1):
        for node, row, rank in zip(level.node.tolist(), level.parent.tolist(), level.rank.tolist(), strict=True):
            path = level.paths[row].tolist()
            assert len(path) == depth == tree.depths[node]
            assert [tree.parents[child] for child in [*path, node]] == [-1, *path]
            assert rank == tree.ranks[node] < level.width
            seen.append(node)
    assert sorted(seen) == list(range(1, tree.size))


def test_every_node_holds_the_guess_of_its_rank_after_its_own_path() -> None:
    model = tiny()
    heads = DraftHeads.for_model(model, kind="hydra", num_heads=3, num_layers=2)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert isinstance(heads, HydraHeads)
    embed, layer = model.get_input_embeddings(), model.get_output_embeddings()
    token, hidden = torch.tensor([3, 9]), torch.randn(2, 144)
    tokens, _ = draft(heads, SCATTERED, token, hidden, layer, embed)
    assert torch.equal(tokens[:, 0], token)
    for node in range(1, SCATTERED.size):
        path, at = [], SCATTERED.parents[node]
        while at >= 0:
            path.insert(0, at)
            at = SCATTERED.parents[at]
        alone = heads.propose_level(hidden, tokens[:, None, path], embed, layer, VOCAB)
        assert torch.equal(tokens[:, node], alone.ids[:, 0, SCATTERED.ranks[node]])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("tree", ["medusa-63", "chain-4", "deft-32"])
def test_conditional_drafts_say_what_the_model_would_have_said(family: str, tree: str) -> None:
    model, deep = tiny(family), 0
    for ids in prompts(2):
        out = specdeft.generate(model, OracleHydra.of(model, ids, 40), ids, tree=tree, max_new_tokens=40)
        assert out.token_ids == plain(model, ids, 40)
        assert_telling(out.token_ids)
        deep += sum(out.stats.accepted_per_depth[1:])
    assert deep > 5, "nothing beyond the first depth was accepted: paths were not exercised"


def test_an_odd_shape_and_untrained_hydra_heads_are_lossless_in_a_ragged_batch() -> None:
    model = tiny()
    heads = DraftHeads.for_model(model, kind="hydra", num_heads=3, num_layers=2, seed=0)
    batch = [prompts(1, length=n, seed=n)[0] for n in (1, 7, 30)]
    wide = Tree(parents=[-1, *[0] * 15, 3, 3, 16], ranks=[0, *range(15), 1, 0, 2])
    accepted = 0
    for ids, row in zip(batch, specdeft.generate(model, heads, batch, tree=wide, max_new_tokens=30), strict=True):
        assert row.token_ids == plain(model, ids, 30)
        accepted += row.stats.accepted
    assert accepted > 10


def test_sampling_with_hydra_heads_gives_the_text_of_the_lone_root() -> None:
    model, ids = tiny(), prompts(1)[0]
    heads = DraftHeads.for_model(model, kind="hydra", num_heads=2, seed=0)
    options = {"acceptance": "sample", "seed": 5, "max_new_tokens": 30}
    out = specdeft.generate(model, heads, ids, tree=Tree.star(15), **options)
    assert out.stats.accepted > 0
    assert out.token_ids == specdeft.generate(model, heads, ids, tree=Tree.chain(0), **options).token_ids


def test_a_draft_vocabulary_is_lossless_and_a_wider_tree_is_refused() -> None:
    model, ids = tiny(), prompts(1)[0]
    common = sorted(set(plain(model, ids, 30)))
    for kind in ("medusa", "hydra"):
        heads = DraftHeads.for_model(model, kind=kind, num_heads=1, seed=0, vocab_ids=common)
        out = specdeft.generate(model, heads, ids, tree=Tree.star(len(common)), max_new_tokens=30)
        assert out.token_ids == plain(model, ids, 30)
        assert out.stats.accepted > 10
        with pytest.raises(specdeft.SpecdeftError, match=f"draft vocabulary has {len(common)} tokens"):
            specdeft.generate(model, heads, ids, tree=Tree.star(len(common) + 1), max_new_tokens=30)
