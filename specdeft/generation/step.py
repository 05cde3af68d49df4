"""One round of decoding on the device: draft, fill, verify, accept, commit. Read this beside loop.py.

Everything it reads and writes is a tensor of fixed shape and address, so that the round may be captured as a CUDA graph
and replayed (`captured`). It asks the host nothing. Knows targets, heads and trees; knows nothing of text or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specdeft.accept import Verdict
from specdeft.cache import SlotCache
from specdeft.generation.fill import draft
from specdeft.generation.memory import Memory, all_states
from specdeft.generation.pace import LONE_ROOT
from specdeft.generation.rule import Rule
from specdeft.generation.tensors import tree_tensors
from specdeft.heads import DraftHeads
from specdeft.target import Target, vocab_size_of
from specdeft.trees import DynamicTree, Tree

Mark = Callable[[str], None]  # called with the name of the phase that has just been issued


class State:
    """What a batch of B sequences is between two rounds, for trees of at most `levels` levels.

    Attributes:
        cache, memory: committed rows of the model, and of heads that have a layer of their own.
        token [B] int64, hidden [B, H]: the next root, and the hidden state that heads read.
        emitted, budget [B] int64: tokens emitted so far, and how many may be; no more are once emitted >= budget.
        uniforms [B, U] float64: the random number of each token to come.
        seen [B, V + 1] bool: tokens of prompt and answer so far; column V takes what is no token.
        eos [n] int64: tokens that end a sequence.
        report [B, 2 + levels] int64: of the last round: emitted count, drafted count, emitted tokens.
        logprobs [B, levels] float32: of the emitted tokens, where they are wanted.
    """

    def __init__(
        self, target: Target, heads: DraftHeads, batch: int, slots: int, levels: int, draws: int, eos: Sequence[int]
    ) -> None:
        device = target.device
        self.cache: SlotCache = target.new_cache(batch, slots)
        drafts = levels > 1  # else the heads are never asked, and need no memory
        self.memory = Memory(heads.prefix, batch, slots) if drafts and heads.prefix is not None else None
        self.token, self.emitted, self.budget = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(3))
        self.hidden = target.new_hidden(batch)
        self.uniforms = torch.zeros(batch, draws, dtype=torch.float64, device=device)
        self.seen = torch.zeros(batch, vocab_size_of(target.model) + 1, dtype=torch.bool, device=device)
        self.eos = torch.tensor(eos, dtype=torch.int64, device=device)
        self.report = torch.zeros(batch, 2 + levels, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(batch, levels, device=device)

    def begin(self, index: int, budget: int, uniforms: Tensor) -> None:
        """Give row `index` to a new sequence: nothing committed, nothing emitted. The other rows stay as they are."""
        self.cache.lengths[index] = 0
        if self.memory is not None:
            self.memory.cache.lengths[index] = 0
        self.emitted[index] = 0
        self.budget[index] = budget
        self.uniforms[index, : len(uniforms)].copy_(uniforms)
        self.seen[index] = False

    def uniform(self, level: int) -> Tensor:
        """The uniform [B] of the token that comes `level` tokens after those already emitted."""
        index = (self.emitted + level).clamp(max=self.uniforms.shape[1] - 1)
        return self.uniforms.gather(1, index[:, None])[:, 0]

    def take(self, verdict: Verdict) -> None:
        """Move on by what a round decided, and report it."""
        levels = verdict.emitted.shape[1]
        self.report[:, 0], self.report[:, 1] = verdict.count, verdict.drafted
        self.report[:, 2 : 2 + levels] = verdict.emitted
        if verdict.logprobs is not None:
            self.logprobs[:, :levels] = verdict.logprobs
        self.emitted += verdict.count
        order = torch.arange(levels, device=self.seen.device)
        said = (order < verdict.count[:, None]) & (verdict.emitted >= 0)
        self.seen.scatter_(1, torch.where(said, verdict.emitted, self.seen.shape[1] - 1), True)
        gained = verdict.count > 0
        ended = (verdict.token[:, None] == self.eos).any(dim=1) & gained
        self.budget.copy_(torch.where(ended, 0, self.budget))
        self.token.copy_(torch.where(gained, verdict.token, self.token))


def prefill(state: State, prompts: Mapping[int, Sequence[int]], target: Target, rule: Rule) -> None:
    """Read the prompts of some rows, one by one as each would be alone, and emit their first tokens; others rest."""
    asked = torch.zeros_like(state.budget)
    scores = torch.zeros(0, device=target.device)
    for b, prompt in prompts.items():
        ids = torch.tensor(prompt, device=target.device)
        state.seen[b].index_fill_(0, ids, True)
        with all_states(target.model, wanted=state.memory is not None) as states:
            logits, hidden = target.prefill(ids, state.cache.row(b))
        if state.memory is not None:
            hidden = state.memory.prefill(b, torch.cat(states, dim=1)[0])
        state.hidden[b].copy_(hidden)
        if not len(scores):
            scores = logits.new_zeros(len(asked), 1, len(logits))  # [B, 1, V]
        scores[b], asked[b] = logits, 1
    remaining = (state.budget - state.emitted).clamp(min=0) * asked
    root = tree_tensors(LONE_ROOT, scores.device)
    state.take(rule.accept(scores, state.token[:, None], root, state.uniform, remaining, state.eos, state.seen))


def step(state: State, tree: Tree | DynamicTree, target: Target, heads: DraftHeads, rule: Rule, mark: Mark) -> None:
    """One round: several tokens per sequence for one pass of the model."""
    cache = state.cache
    embed = target.model.get_input_embeddings()
    tokens, parts = draft(heads, tree, state.token, state.hidden, target.output_layer, embed)  # [B, N]
    mark("draft")
    logits, hiddens = target.verify(tokens, parts.arrays, cache)  # [B, N, V], [B, N, H]
    mark("verify")
    remaining = (state.budget - state.emitted).clamp(min=0)
    verdict = rule.accept(logits, tokens, parts, state.uniform, remaining, state.eos, state.seen)
    mark("accept")
    cache.commit(verdict.path, verdict.count)
    if state.memory is None:
        state.hidden.copy_(hiddens[torch.arange(cache.batch, device=hiddens.device), verdict.last])
    else:
        path = verdict.path[:, :, None].expand(-1, -1, hiddens.shape[-1])
        state.hidden.copy_(state.memory.extend(hiddens.gather(1, path), verdict.count))
    state.take(verdict)
    mark("commit")
