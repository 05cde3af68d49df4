"""Plain decoding of very many short rows: a fixed set of slots, refilled as rows end.

The device runs `STRIDE` steps without being asked anything; then ended rows are read and new prompts take their slots.
Knows token ids and stop ids; knows nothing of text, templates or files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdeft.accept import sample
from specdeft.errors import SpecdeftError
from specdeft.heads.output import output_layer, output_weight
from specdeft.train.base import final_logits, frozen, hidden_states
from specdeft.train.slots import SlotCache, slot_attention_on

STRIDE = 16
COLUMN_STEP = 64
PREFILL_TOKENS = 131_072
MAX_SLOTS = 4096


@dataclass(frozen=True)
class Row:
    """What one prompt gave: its number, the prompt, the new ids; `ended` by a stop token or not."""

    number: int
    prompt: list[int]
    ids: np.ndarray
    ended: bool


def auto_slots(model: Any, columns: int) -> int:
    """How many rows of `columns` tokens fit: 4096 at most on a GPU, within 55 % of its free memory; 16 on a CPU."""
    device = output_weight(output_layer(model)).device
    if device.type != "cuda":
        return 16
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_row = 2 * config.num_hidden_layers * kv_heads * head_dim * columns * model.dtype.itemsize
    per_row += config.vocab_size * 48  # logits of one step, and what drawing from them takes in float64
    torch.cuda.empty_cache()  # what an earlier decoding left to the allocator is free too
    free, _ = torch.cuda.mem_get_info(device)
    fit = int(free * 0.55) // per_row
    if fit < 1:
        raise SpecdeftError(f"one row of {columns} tokens needs {per_row} bytes, {free} are free: lower the limits")
    return min(MAX_SLOTS, fit)


def decode_rows(
    model: Any,
    prompts: Iterable[tuple[int, list[int]]],
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    slots: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    deadline: float | None = None,
) -> Iterator[Row]:
    """Decode each (number, prompt) to its end and give rows as they end, in no fixed order.

    Greedy without `temperature`, else drawn at it: each row from its own stream, started at `seed` and its number, so
    that neither its neighbours nor an interruption change it (beyond what rounding does in another batch). After
    `deadline` (time.monotonic seconds) what is under way comes back with ended=False. The iterator may be closed early.
    The model is used as it is, in eval mode.
    """
    columns = max_prompt_tokens + max_new_tokens
    columns += -columns % COLUMN_STEP
    _check_length(model, columns)
    source = iter(prompts)
    state = _Slots(model, slots or auto_slots(model, columns), columns, max_new_tokens, stop_ids, temperature, seed)
    with frozen(model), slot_attention_on(model):
        free, exhausted = list(range(state.slots)), False
        while True:
            if free and not exhausted:
                taken = _take(source, len(free), max_prompt_tokens)
                exhausted = len(taken) < len(free)
                state.admit(free[: len(taken)], taken)
            if not state.busy:
                return
            state.run(STRIDE)
            late = deadline is not None and time.monotonic() > deadline
            rows, free = state.collect(everything=late)
            yield from rows
            if late:
                return


def _take(source: Iterator[tuple[int, list[int]]], count: int, longest: int) -> list[tuple[int, list[int]]]:
    taken: list[tuple[int, list[int]]] = []
    for number, prompt in source:
        if not 1 <= len(prompt) <= longest:
            raise ValueError(f"a prompt of {len(prompt)} tokens; expected 1..{longest}")
        taken.append((number, prompt))
        if len(taken) == count:
            break
    return taken


def _check_length(model: Any, columns: int) -> None:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    for limit, what in ((getattr(config, "max_position_embeddings", None), "positions"), (window, "attention window")):
        if limit is not None and columns > limit:
            raise SpecdeftError(
                f"prompt and answer together take up to {columns} tokens, the model's {what} hold {limit}: "
                "lower max_prompt_tokens or max_new_tokens"
            )


class _Slots:
    """The rows under way. All tensors are [slots] or [slots, ...] on the model's device."""

    def __init__(
        self,
        model: Any,
        slots: int,
        columns: int,
        max_new: int,
        stop_ids: tuple[int, ...],
        temperature: float | None,
        seed: int,
    ) -> None:
        self.model, self.slots, self.columns, self.max_new = model, slots, columns, max_new
        self.head = output_layer(model)
        self.temperature = temperature
        self.device = output_weight(self.head).device
        self.stops = torch.tensor(stop_ids, device=self.device)
        self.seed = seed
        self.cache = SlotCache(slots, columns)
        self.busy: dict[int, tuple[int, list[int]]] = {}
        self.longest = 0
        long = {"dtype": torch.long, "device": self.device}
        self.token, self.position, self.count = (torch.zeros(slots, **long) for _ in range(3))  # type: ignore[call-overload]
        # One column more than the limit: an ended row keeps writing there, so that no step asks which have ended.
        self.new = torch.zeros(slots, max_new + 1, **long)  # type: ignore[call-overload]
        self.uniforms = torch.zeros(slots, max_new + 1 if temperature is not None else 0, device=self.device)
        self.done = torch.ones(slots, dtype=torch.bool, device=self.device)
        self.every = torch.arange(slots, device=self.device)

    @torch.no_grad()
    def admit(self, slots: list[int], prompts: list[tuple[int, list[int]]]) -> None:
        """Prefill new prompts into free slots and choose each one's first token."""
        first = 0
        while first < len(prompts):
            last, longest = first, 0
            while last < len(prompts):
                grown = max(longest, len(prompts[last][1]))
                if last > first and grown * (last + 1 - first) > PREFILL_TOKENS:
                    break
                last, longest = last + 1, grown
            self._prefill(slots[first:last], prompts[first:last], longest)
            first = last

    def _prefill(self, slots: list[int], numbered: list[tuple[int, list[int]]], longest: int) -> None:
        prompts = [prompt for _, prompt in numbered]
        padded = np.zeros((len(prompts), longest), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = prompt
        rows = torch.tensor(slots, device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.cache.admit(rows)
        ids = torch.from_numpy(padded).to(self.device)
        positions = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        hidden = hidden_states(self.model, ids, self.cache, position_ids=positions)
        if self.temperature is not None:
            streams = [np.random.default_rng((self.seed, number)) for number, _ in numbered]
            drawn = np.stack([stream.random(self.max_new + 1, dtype=np.float32) for stream in streams])
            self.uniforms[rows] = torch.from_numpy(drawn).to(self.device)
        self.count[rows] = 0
        token = self._choose(hidden[torch.arange(len(prompts), device=self.device), lengths - 1], rows)
        self.token[rows], self.position[rows], self.count[rows] = token, lengths, 1
        self.new[rows, 0] = token
        self.done[rows] = torch.isin(token, self.stops) | (self.max_new == 1)
        self.longest = max(self.longest, longest)
        self.busy |= dict(zip(slots, numbered, strict=True))

    @torch.no_grad()
    def run(self, steps: int) -> None:
        """Advance every row by up to `steps` tokens; the host only queues work."""
        for _ in range(steps):
            self.longest = min(self.longest + 1, self.columns)
            visible = min(self.longest + -self.longest % COLUMN_STEP, self.columns)
            self.cache.step(self.position, visible)
            seen = torch.arange(visible, device=self.device) <= self.position.unsqueeze(1)
            mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
            mask = mask.masked_fill_(~seen, float("-inf"))[:, None, None]  # [slots, 1, 1, visible]
            hidden = hidden_states(
                self.model, self.token[:, None], self.cache, position_ids=self.position[:, None], attention_mask=mask
            )
            token = self._choose(hidden[:, 0], self.every)
            self.new[self.every, self.count] = token
            live = ~self.done
            self.count += live
            self.position += live
            self.token = token
            self.done |= torch.isin(token, self.stops) | (self.count >= self.max_new)

    def _choose(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        if self.temperature is None:
            return logits.argmax(-1)
        scores = final_logits(self.model, logits.float()) / self.temperature
        return sample(scores, self.uniforms[rows, self.count[rows]])

    def collect(self, everything: bool) -> tuple[list[Row], list[int]]:
        """Read the rows that have ended (or all); give them and the slots that are free now."""
        done, count = self.done.cpu().numpy(), self.count.cpu().numpy()
        picked = [slot for slot in self.busy if everything or done[slot]]
        rows: list[Row] = []
        if picked:
            new = self.new[torch.tensor(picked, device=self.device)].cpu().numpy()
            stops = set(self.stops.tolist())
            for i, slot in enumerate(picked):
                number, prompt = self.busy.pop(slot)
                ids = new[i, : count[slot]].astype(np.int32)
                rows.append(Row(number, prompt, ids, bool(int(ids[-1]) in stops)))
        longest = self.position[~self.done].max() if self.busy else None
        self.longest = 0 if longest is None else int(longest)
        return rows, [slot for slot in range(self.slots) if slot not in self.busy]
