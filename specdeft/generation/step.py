"""One round of decoding on the device: draft, fill, verify, accept, commit. Read this beside loop.py.

Everything it reads and writes is a tensor of fixed shape and address, so that the round may be captured as a CUDA graph
and replayed (`captured`). It asks the host nothing. Knows targets, heads and trees; knows nothing of text or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from specdeft.target import Target
from specdeft.trees import DynamicTree, Tree

Mark = Callable[[str], None]  # called with the name of the phase that has just been issued


class State:
    """What a batch of B sequences is between two rounds, for trees of at most `levels` levels.

    Attributes:
        cache, memory: committed rows of the model, and of heads that have a layer of their own.
        token [B] int64, hidden [B, H]: the next root, and the hidden state that heads read.
        emitted, budget [B] int64: tokens emitted so far, and how many may be; no more are once emitted >= budget.
        uniforms [B, U] float64: the random number of each token to come.
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
        self.eos = torch.tensor(eos, dtype=torch.int64, device=device)
        self.report = torch.zeros(batch, 2 + levels, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(batch, levels, device=device)

    def reset(self, budget: Sequence[int], uniforms: Sequence[Tensor]) -> None:
        """Make it the state of a new batch: nothing committed, nothing emitted."""
        self.cache.lengths.zero_()
        if self.memory is not None:
            self.memory.cache.lengths.zero_()
        self.emitted.zero_()
        self.budget.copy_(torch.tensor(budget))
        for row, drawn in zip(self.uniforms, uniforms, strict=True):
            row[: len(drawn)].copy_(drawn)

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
        ended = (verdict.token[:, None] == self.eos).any(dim=1) & (verdict.count > 0)
        self.budget.copy_(torch.where(ended, 0, self.budget))
        self.token.copy_(verdict.token)


def prefill(state: State, prompts: Sequence[Sequence[int]], target: Target, rule: Rule) -> None:
    """Read the prompts, row by row as each would be alone, and emit every sequence's first token."""
    scores = []
    for b, prompt in enumerate(prompts):
        with all_states(target.model, wanted=state.memory is not None) as states:
            logits, hidden = target.prefill(torch.tensor(prompt, device=target.device), state.cache.row(b))
        if state.memory is not None:
            hidden = state.memory.prefill(b, torch.cat(states, dim=1)[0])
        state.hidden[b].copy_(hidden)
        scores.append(logits)
    remaining = (state.budget - state.emitted).clamp(min=0)
    logits = torch.stack(scores)[:, None]  # [B, 1, V]
    root = tree_tensors(LONE_ROOT, logits.device)
    state.take(rule.accept(logits, state.token[:, None], root, state.uniform, remaining, state.eos))


def step(state: State, tree: Tree | DynamicTree, target: Target, heads: DraftHeads, rule: Rule, mark: Mark) -> None:
    """One round: several tokens per sequence for one pass of the model."""
    cache = state.cache
    embed = target.model.get_input_embeddings()
    tokens, parts = draft(heads, tree, state.token, state.hidden, target.lm_head, embed)  # [B, N]
    mark("draft")
    logits, hiddens = target.verify(tokens, parts.arrays, cache)  # [B, N, V], [B, N, H]
    mark("verify")
    remaining = (state.budget - state.emitted).clamp(min=0)
    verdict = rule.accept(logits, tokens, parts, state.uniform, remaining, state.eos)
    mark("accept")
    cache.commit(verdict.path, verdict.count)
    if state.memory is None:
        state.hidden.copy_(hiddens[torch.arange(cache.batch, device=hiddens.device), verdict.last])
    else:
        path = verdict.path[:, :, None].expand(-1, -1, hiddens.shape[-1])
        state.hidden.copy_(state.memory.extend(hiddens.gather(1, path), verdict.count))
    state.take(verdict)
    mark("commit")
