"""The loop: draft, fill, verify, accept, commit. Read this first.

One `Decoder` decodes one batch. Its `step` works on fixed-shape device tensors and reads the device back once, for the
emitted tokens; the host only decides which sequences have ended. Knows targets, heads, trees and acceptance; knows
nothing of prompts' text or of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdeft.accept import Verdict, greedy, sample, typical, walk
from specdeft.errors import SpecdeftError
from specdeft.generation.fill import draft, tree_tensors
from specdeft.generation.memory import Memory, all_states
from specdeft.generation.result import Clock, Stats
from specdeft.generation.settings import RowSettings, ended
from specdeft.heads import DraftHeads
from specdeft.target import Target
from specdeft.trees import Tree


class Row:
    """Host-side record of one sequence: its tokens so far and why it ended."""

    def __init__(self, prompt: Sequence[int], settings: RowSettings, seed: int | None) -> None:
        self.prompt, self.settings = list(prompt), settings
        self.new: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stats = Stats()
        # one uniform per emitted token, drawn ahead: the text for a seed depends neither on the tree nor on neighbours
        self.uniforms = torch.zeros(1, dtype=torch.float64)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.uniforms = torch.rand(settings.max_new_tokens, generator=generator, dtype=torch.float64)

    @property
    def remaining(self) -> int:
        """Tokens this sequence may still emit; 0 once it has ended."""
        return 0 if self.finish_reason else self.settings.max_new_tokens - len(self.new)

    def take(self, tokens: list[int], logprobs: list[float], device: torch.device) -> int:
        """Append tokens one by one, as plain generation would, until something ends the sequence. Returns how many."""
        before = len(self.new)
        for token in tokens:
            self.new.append(token)
            if self.settings.stopping:
                context = torch.tensor([self.prompt + self.new], device=device)
                if ended(self.settings.stopping, context):
                    self.finish_reason = "stop"
            if token in self.settings.eos:
                self.finish_reason = "eos"
            elif self.finish_reason is None and len(self.new) == self.settings.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        taken = len(self.new) - before
        self.logprobs += logprobs[:taken]
        return taken


class Decoder:
    """Decodes a batch of prompts.

    Args:
        target, heads, tree: who verifies, who drafts, and in which shape.
        rows: one record per prompt.
        acceptance: "greedy", "sample" or "typical" (lossy).
        want_logprobs: record each token's log-probability under the model's raw logits.
    """

    def __init__(
        self, target: Target, heads: DraftHeads, tree: Tree, rows: list[Row], acceptance: str, want_logprobs: bool
    ) -> None:
        self.target, self.heads, self.tree, self.rows = target, heads, tree, rows
        self.acceptance, self.want_logprobs = acceptance, want_logprobs
        self.context_free = all(row.settings.context_free for row in rows)  # processors may run on the whole batch
        device = target.device
        longest = max(len(row.prompt) + row.settings.max_new_tokens for row in rows)
        self.cache = target.new_cache(len(rows), longest + tree.size)
        # all rows share one generation config, hence one EOS list
        self.eos = torch.tensor(rows[0].settings.eos, dtype=torch.int64, device=device)
        self.budget = torch.tensor([row.settings.max_new_tokens for row in rows], device=device)  # 0 once ended
        self.emitted = torch.zeros_like(self.budget)
        self.uniforms = torch.nn.utils.rnn.pad_sequence([row.uniforms for row in rows], batch_first=True).to(device)
        self.clock = Clock(device)
        prefix = heads.prefix
        self.memory = None if prefix is None else Memory(prefix, len(rows), longest + tree.max_depth + 1)
        self.token = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.hidden = torch.empty(0)
        for row in rows:
            row.stats.tree = tree.name or f"{tree.size} nodes"
            row.stats.accepted_per_depth = [0] * tree.max_depth

    def run(self) -> Iterator[list[list[int]]]:
        """Decode to the end; after prefill and after every step yields the tokens each sequence gained."""
        yield self.prefill()
        while any(row.remaining for row in self.rows):
            yield self.step()

    @torch.inference_mode()
    def prefill(self) -> list[list[int]]:
        """Read the prompts, row by row as each would be alone, and emit every sequence's first token."""
        self.clock.start()
        device = self.target.device
        prefilled = []
        for b, row in enumerate(self.rows):
            with all_states(self.target.model, wanted=self.memory is not None) as states:
                scores, hidden = self.target.prefill(torch.tensor(row.prompt, device=device), self.cache.row(b))
            if self.memory is not None:
                hidden = self.memory.prefill(b, torch.cat(states, dim=1)[0])
            prefilled.append((scores, hidden))
        logits = torch.stack([logits for logits, _ in prefilled])[:, None]  # [B, 1, V]
        self.hidden = torch.stack([hidden for _, hidden in prefilled])  # [B, H], what the heads read
        lone_root = Tree(parents=[-1], ranks=[0])
        verdict = self.accept(logits, self.token[:, None], lone_root)
        self.token = verdict.token
        self.clock.done("prefill")
        return self.take(verdict, first=True)

    @torch.inference_mode()
    def step(self) -> list[list[int]]:
        """One round: several tokens per sequence for one pass of the model."""
        clock, cache = self.clock, self.cache
        clock.start()
        tree = self.tree.truncated(max(row.remaining for row in self.rows) - 1)  # deeper nodes could not be emitted
        embed = self.target.model.get_input_embeddings()
        tokens = draft(self.heads, tree, self.token, self.hidden, self.target.lm_head, embed)  # [B, N]
        clock.done("draft")
        logits, hiddens = self.target.verify(tokens, tree, cache)  # [B, N, V], [B, N, H]
        clock.done("verify")
        verdict = self.accept(logits, tokens, tree)
        clock.done("accept")
        cache.commit(verdict.path, verdict.count)
        if self.memory is None:
            self.hidden = hiddens[torch.arange(len(self.rows), device=hiddens.device), verdict.last]
        else:
            path = verdict.path[:, :, None].expand(-1, -1, hiddens.shape[-1])
            self.hidden = self.memory.extend(hiddens.gather(1, path), verdict.count)
        self.token = verdict.token
        clock.done("commit")
        return self.take(verdict, first=False)

    def accept(self, logits: Tensor, tokens: Tensor, tree: Tree) -> Verdict:
        """Decide which nodes the model agrees with, by this decoder's rule."""
        remaining = (self.budget - self.emitted).clamp(min=0)
        if self.acceptance == "typical":
            scores = self.node_scores(logits, tokens, tree)
            drawn = self.draw_everywhere(scores, tree)
            raw = logits if self.want_logprobs else None
            return typical(scores, tokens, tree.parents, tree.depths, drawn, remaining, self.eos, raw)
        chosen: list[list[int]] = [[] for _ in self.rows]

        def choose(here: Tensor, level: int, alive: Tensor) -> Tensor:
            scores = self.process(here, chosen, alive)
            token = greedy(scores) if self.acceptance == "greedy" else sample(scores, self.uniform(level))
            if not self.context_free:  # processors will want to see what was chosen
                for b, chosen_token in enumerate(token.tolist()):
                    chosen[b].append(chosen_token)
            return token

        children = tree_tensors(tree, logits.device).children
        return walk(choose, logits, tokens, children, tree.max_depth + 1, remaining, self.eos, self.want_logprobs)

    def uniform(self, level: int) -> Tensor:
        """The uniform [B] of the token that comes `level` tokens after those already emitted."""
        index = (self.emitted + level).clamp(max=self.uniforms.shape[1] - 1)
        return self.uniforms.gather(1, index[:, None])[:, 0]

    def process(self, scores: Tensor, chosen: list[list[int]], alive: Tensor) -> Tensor:
        """Apply each row's logits processors to its scores [B, V]; `chosen` follows the tokens emitted so far."""
        if not any(row.settings.processors for row in self.rows):
            return scores
        if self.context_free:
            nothing = torch.zeros(len(scores), 0, dtype=torch.int64, device=scores.device)
            processed: Tensor = self.rows[0].settings.processors(nothing, scores.clone())
            return processed
        out = scores.clone()
        for b, living in enumerate(alive.tolist()):
            if living:
                row = self.rows[b]
                context = torch.tensor([row.prompt + row.new + chosen[b]], device=scores.device)
                out[b] = row.settings.processors(context, scores[b : b + 1].clone())[0]
        return out

    def node_scores(self, logits: Tensor, tokens: Tensor, tree: Tree) -> Tensor:
        """Processed logits [B, N, V] of every node, each in the context of its own path (typical acceptance only)."""
        if self.context_free:
            return self.process(logits.flatten(0, 1), [], torch.empty(0)).unflatten(0, logits.shape[:2])
        out = logits.clone()
        everyone = torch.tensor([row.remaining > 0 for row in self.rows])
        held = tokens.tolist()
        below: dict[int, list[list[int]]] = {0: [[] for _ in self.rows]}
        for node in sorted(range(tree.size), key=lambda i: tree.depths[i]):
            if node:
                parent = below[tree.parents[node]]
                below[node] = [[*path, held[b][node]] for b, path in enumerate(parent)]
            out[:, node] = self.process(logits[:, node], below[node], everyone)
        return out

    def draw_everywhere(self, scores: Tensor, tree: Tree) -> Tensor:
        """A draw at every node [B, N], each with the uniform of the token it would emit."""
        levels = torch.stack([self.uniform(level) for level in range(tree.max_depth + 1)], dim=1)  # [B, E]
        uniform = levels[:, tree_tensors(tree, scores.device).depth]  # [B, N]
        return sample(scores.flatten(0, 1), uniform.flatten()).unflatten(0, scores.shape[:2])

    def take(self, verdict: Verdict, first: bool) -> list[list[int]]:
        """Read the verdict back (the step's one synchronisation) and let every row take its tokens."""
        packed = torch.cat([verdict.count[:, None], verdict.drafted[:, None], verdict.emitted], dim=1).tolist()
        logprobs = verdict.logprobs.tolist() if verdict.logprobs is not None else [[]] * len(self.rows)
        self.emitted += verdict.count
        self.clock.read()
        gained: list[list[int]] = []
        for b, (row, (count, drafted, *emitted), scores) in enumerate(zip(self.rows, packed, logprobs, strict=True)):
            if not row.remaining:
                gained.append([])
                continue
            if min(emitted[:count]) < 0:
                raise SpecdeftError(
                    "the scores after logits processing are no distribution (NaN, inf, or every token banned): "
                    "check the model's dtype, the temperature and the logits processors."
                )
            taken = row.take(emitted[:count], scores, self.target.device)
            stats = row.stats
            stats.tokens_per_step.append(taken)
            if not first:
                for depth in range(min(drafted, taken)):
                    stats.accepted_per_depth[depth] += 1
            if row.finish_reason:
                self.budget[b] = 0
            gained.append(row.new[len(row.new) - taken :])
        return gained
