"""From a verified tree's scores to the tokens that a batch gains: processors, draws, and one of three acceptances.

Knows rows' settings and `specdeft.accept`; knows nothing of models, caches or drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from specdeft.accept import Verdict, greedy, greedy_at_once, sample, typical, walk
from specdeft.generation.row import Row
from specdeft.generation.settings import is_penalty
from specdeft.generation.tensors import TreeTensors

Uniform = Callable[[int], Tensor]  # the uniform [B] of the token that comes so many tokens after those emitted


class Rule:
    """How the rows of a batch choose their tokens.

    Args:
        acceptance: "greedy", "sample" or "typical" (lossy).
        rows: the sequences that are decoded now, a list that may get others; one generation config made the settings
            of all of them.
        want_logprobs: record each token's log-probability under the model's raw logits.
    """

    def __init__(self, acceptance: str, rows: list[Row], want_logprobs: bool) -> None:
        self.acceptance, self.rows, self.want_logprobs = acceptance, rows, want_logprobs
        self.processed = any(row.settings.processors for row in rows)
        # processors that need scores and `seen` only may run on the whole batch, and without asking the host anything
        self.on_device = all(row.settings.on_device for row in rows)

    @property
    def key(self) -> Hashable | None:
        """Equal for rules that do the same to every batch; None where that takes the host."""
        if not self.on_device:
            return None
        processors = tuple(_described(each) for each in self.rows[0].settings.processors)
        return None if None in processors else (self.acceptance, self.want_logprobs, processors)

    def accept(
        self,
        logits: Tensor,
        tokens: Tensor,
        parts: TreeTensors,
        uniform: Uniform,
        remaining: Tensor,
        eos: Tensor,
        seen: Tensor,
    ) -> Verdict:
        """Decide which nodes the model agrees with.

        Args:
            logits, tokens: the verified tree, [B, N, V] float32 and [B, N].
            parts: its arrays.
            uniform: see `Uniform`.
            remaining, eos: as in `specdeft.accept.walk`.
            seen: the tokens so far, the root's included, [B, V + 1] bool; see `State`.
        """
        if self.acceptance == "typical":
            scores = self.node_scores(logits, tokens, parts, remaining > 0, seen)
            drawn = _draw_everywhere(scores, parts, uniform)
            raw = logits if self.want_logprobs else None
            return typical(scores, tokens, parts.parent, parts.paths, parts.depth, drawn, remaining, eos, raw)
        if self.acceptance == "greedy" and self.on_device:
            raw = logits if self.want_logprobs else None
            scores = self.node_scores(logits, tokens, parts, remaining > 0, seen)
            return greedy_at_once(scores, tokens, parts.parent, parts.paths, parts.depth, remaining, eos, raw)
        chosen: list[list[int]] = [[] for _ in self.rows]
        so_far = seen.clone() if self.processed else seen

        def choose(here: Tensor, level: int, alive: Tensor) -> Tensor:
            scores = self.on_batch(here, so_far) if self.on_device else self.on_host(here, chosen, alive)
            token = greedy(scores) if self.acceptance == "greedy" else sample(scores, uniform(level))
            if self.processed:  # they will want to see what was chosen
                so_far.scatter_(1, torch.where(token < 0, seen.shape[1] - 1, token)[:, None], True)
            if not self.on_device:
                for b, chosen_token in enumerate(token.tolist()):
                    chosen[b].append(chosen_token)
            return token

        levels = parts.paths.shape[-1]
        return walk(choose, logits, tokens, parts.parent, levels, remaining, eos, self.want_logprobs)

    def on_batch(self, scores: Tensor, seen: Tensor, paths: Tensor | None = None) -> Tensor:
        """Processors on scores [B, V] where `seen` came before; on [B, N, V] those on `paths` [B, N, P] as well."""
        if not self.processed:
            return scores
        out, vocab = scores.clone(), scores.shape[-1]
        nothing = torch.zeros(out.numel() // vocab, 0, dtype=torch.int64, device=scores.device)
        for each in self.rows[0].settings.processors:
            if not is_penalty(each):
                out = each(nothing, out.reshape(-1, vocab)).view(scores.shape)
                continue
            penalised = torch.where(out < 0, out * each.penalty, out / each.penalty)
            rows = seen[:, :vocab] if paths is None else seen[:, None, :vocab]
            out = torch.where(rows, penalised, out)
            if paths is not None:
                out.scatter_(2, paths, penalised.gather(2, paths))
        return out

    def on_host(self, scores: Tensor, chosen: list[list[int]], alive: Tensor) -> Tensor:
        """Apply each row's logits processors to its scores [B, V]; `chosen` follows the tokens emitted so far."""
        out = scores.clone()
        for b, living in enumerate(alive.tolist()):
            if living:
                row = self.rows[b]
                context = torch.tensor([row.prompt + row.new + chosen[b]], device=scores.device)
                out[b] = row.settings.processors(context, scores[b : b + 1].clone())[0]
        return out

    def node_scores(self, logits: Tensor, tokens: Tensor, parts: TreeTensors, alive: Tensor, seen: Tensor) -> Tensor:
        """Processed logits [B, N, V] of every node of the living, each in the context of its own path."""
        if self.on_device:  # the root is among the seen; before the first token there is none
            nodes = parts.paths[..., 1:].expand(*tokens.shape, -1)  # [B, N, P]
            return self.on_batch(logits, seen, tokens.gather(1, nodes.flatten(1)).view(nodes.shape))
        out = logits.clone()
        held = tokens.tolist()
        paths = parts.paths.expand(len(held), -1, -1).tolist()
        depths = parts.depth.expand(len(held), -1).tolist()
        for node in range(tokens.shape[1]):
            below = [
                [row[at] for at in path[node][1 : depth[node] + 1]]
                for row, path, depth in zip(held, paths, depths, strict=True)
            ]
            out[:, node] = self.on_host(logits[:, node], below, alive)
        return out


def _draw_everywhere(scores: Tensor, parts: TreeTensors, uniform: Uniform) -> Tensor:
    """A draw at every node [B, N], each with the uniform of the token it would emit."""
    levels = torch.stack([uniform(level) for level in range(parts.paths.shape[-1])], dim=1)  # [B, E]
    chosen = levels.gather(1, parts.depth.expand(len(scores), -1))  # [B, N]
    return sample(scores.flatten(0, 1), chosen.flatten()).unflatten(0, scores.shape[:2])


def _described(processor: Any) -> Hashable | None:
    """A processor by its class and plain attributes; None if it holds anything else."""
    held = vars(processor)
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in held.values()):
        return None
    return (type(processor), *sorted(held.items()))
