"""Training data out of the model alone: it writes user turns from its chat template, then answers them greedily.

Needs no outside text (the idea of Magpie, Xu et al. 2024, section 2). Knows nothing of heads.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdeft.errors import SpecdeftError
from specdeft.heads.fingerprint import fingerprint
from specdeft.train.chat import chat_format, encode_turn, end_ids
from specdeft.train.data import TokenData, pack
from specdeft.train.rows import decode_rows

SHORTEST_WORDS = 8  # characters
SHORTEST_PARTIAL = 32  # tokens of an answer cut by the clock that are worth keeping
TURNS_SHARE = 0.2  # of the time limit
REPORT_SECONDS = 5.0


def distill(
    model: Any,
    tokenizer: Any,
    *,
    turns: int = 10_000,
    time_limit: float | None = None,
    max_turn_tokens: int = 128,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    slots: int | None = None,
    seed: int = 0,
) -> TokenData:
    """Sample up to `turns` user turns and answer each; rows in the full chat template, answers marked.

    `time_limit` (seconds) ends both stages cleanly, the first after a fifth of it; answers then under way are kept as
    far as they got, so that long answers are not left out. `slots` is the number of rows decoded at once (None: what
    fits). Lengths are tokens. Raises SpecdeftError without a chat template, or when no turn survives the filters.
    """
    began = time.monotonic()
    deadline = None if time_limit is None else began + time_limit
    share = None if time_limit is None else began + time_limit * TURNS_SHARE
    words = sample_user_turns(
        model, tokenizer, turns, max_turn_tokens=max_turn_tokens, temperature=temperature, slots=slots, seed=seed,
        deadline=share,
    )  # fmt: skip
    if not words:
        raise SpecdeftError("no usable user turn was sampled: give more time, or prompts of your own")
    return answer(model, tokenizer, words, max_new_tokens=max_new_tokens, slots=slots, deadline=deadline, seed=seed)


def sample_user_turns(
    model: Any,
    tokenizer: Any,
    count: int,
    *,
    max_turn_tokens: int = 128,
    temperature: float = 1.0,
    slots: int | None = None,
    seed: int = 0,
    deadline: float | None = None,
) -> list[str]:
    """Up to `count` distinct user turns, continued from the template's own words before a first turn.

    Kept are turns that the model itself ended within `max_turn_tokens`, without special tokens inside, of at least 8
    characters with a letter among them, and not mostly repetition. Stops at `deadline` (time.monotonic seconds).
    """
    form = chat_format(tokenizer, end_ids(model))
    special = set(tokenizer.all_special_ids)
    found: dict[str, str] = {}
    drawn, report = 0, _Report("turns")
    rows = decode_rows(
        model, itertools.repeat(list(form.user_prefix)), max_prompt_tokens=len(form.user_prefix),
        max_new_tokens=max_turn_tokens, stop_ids=form.stop_ids, slots=slots, temperature=temperature, seed=seed,
        deadline=deadline,
    )  # fmt: skip
    for row in rows:
        drawn += 1
        ids = row.ids[:-1]
        if row.ended and _is_varied(ids) and special.isdisjoint(ids.tolist()):
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False).strip()
            if len(text) >= SHORTEST_WORDS and any(c.isalpha() for c in text) and "\ufffd" not in text:
                found.setdefault(" ".join(text.casefold().split()), text)
        report.line(f"{len(found)} of {count} distinct, {drawn} drawn")
        if len(found) >= count:
            break
    rows.close()  # type: ignore[attr-defined]
    report.line(f"{len(found)} of {count} distinct, {drawn} drawn", last=True)
    return list(found.values())


def answer(
    model: Any,
    tokenizer: Any,
    words: Sequence[str],
    *,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 256,
    slots: int | None = None,
    seed: int = 0,
    deadline: float | None = None,
) -> TokenData:
    """The model's greedy answers to `words`, one user turn each, as training data.

    Prompts longer than `max_prompt_tokens` are left out and counted. `seed` only shuffles the order, so that a
    `deadline` (time.monotonic seconds) does not favour the first. Raises SpecdeftError when nothing was answered.
    """
    form = chat_format(tokenizer, end_ids(model))
    order = np.random.default_rng(seed).permutation(len(words))
    prompts = [encode_turn(tokenizer, words[i]) for i in order]
    kept = [prompt for prompt in prompts if len(prompt) <= max_prompt_tokens]
    if not kept:
        raise SpecdeftError(f"none of {len(words)} prompts is at most {max_prompt_tokens} tokens long")
    rows: list[tuple[list[int], np.ndarray]] = []
    tokens, cut, report = 0, 0, _Report("answers")
    stops = end_ids(model) or form.stop_ids
    longest = max(len(prompt) for prompt in kept)
    for row in decode_rows(
        model, kept, max_prompt_tokens=longest, max_new_tokens=max_new_tokens, stop_ids=stops, slots=slots,
        deadline=deadline,
    ):  # fmt: skip
        if row.ended or len(row.ids) >= min(SHORTEST_PARTIAL, max_new_tokens):
            rows.append((row.prompt, row.ids))
            tokens += len(row.ids)
            cut += not row.ended
        report.line(f"{len(rows)} of {len(kept)}, {tokens} tokens, {tokens / report.seconds:.0f} tokens/s")
    report.line(f"{len(rows)} of {len(kept)}, {tokens} tokens, {tokens / report.seconds:.0f} tokens/s", last=True)
    if not rows:
        raise SpecdeftError("no prompt was answered before the time was over: give more time")
    manifest = {
        "base_model": str(getattr(model.config, "_name_or_path", "")),
        "fingerprint": fingerprint(model),
        "chat_template_sha256": form.template_sha256,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "rows": len(rows),
        "rows_without_end": cut,
        "prompts_too_long": len(prompts) - len(kept),
        "answer_tokens": tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return pack(rows, model.config.get_text_config().vocab_size, manifest)


def _is_varied(ids: np.ndarray) -> bool:
    return len(ids) >= 2 and len(np.unique(ids)) >= 0.35 * len(ids)


class _Report:
    """A line on stderr every few seconds."""

    def __init__(self, what: str) -> None:
        self.what, self.began, self.next = what, time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.began, 1e-9)

    def line(self, text: str, last: bool = False) -> None:
        if last or self.seconds >= self.next:
            self.next = self.seconds + REPORT_SECONDS
            print(f"{self.what}: {text} ({self.seconds:.0f} s)", file=sys.stderr, flush=True)
