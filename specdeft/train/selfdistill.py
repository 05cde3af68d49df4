"""Training data out of the model itself: its own answers, to prompts from outside or to user turns that it writes too.

Turns out of the template alone are the idea of Magpie (Xu et al. 2024, section 2). Knows nothing of heads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specdeft.errors import SpecdeftError
from specdeft.heads.fingerprint import fingerprint
from specdeft.train.chat import chat_format, encode_prompt, end_ids
from specdeft.train.conversations import Messages
from specdeft.train.data import TokenData, pack
from specdeft.train.journal import Journal
from specdeft.train.rows import Row, decode_rows

SHORTEST_WORDS = 8  # characters
SHORTEST_PARTIAL = 32  # tokens of an answer cut by the clock that are worth keeping
TURNS_SHARE = 0.2  # of the time limit
REPORT_SECONDS = 5.0


def distill(
    model: Any,
    tokenizer: Any,
    *,
    prompts: Sequence[Messages] | None = None,
    turns: int = 10_000,
    time_limit: float | None = None,
    max_turn_tokens: int = 128,
    max_prompt_tokens: int = 256,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    answer_temperature: float = 0.0,
    slots: int | None = None,
    seed: int = 0,
    journal: str | os.PathLike[str] | None = None,
) -> TokenData:
    """Answer `prompts`, or up to `turns` user turns sampled at `temperature`; rows in the full chat template.

    Answers are greedy, or drawn at `answer_temperature`. `time_limit` (seconds) ends sampling of turns after a fifth of
    it and answering at its end; answers then under way are kept as far as they got, so that long ones are not left out.
    `slots` is the number of rows decoded at once (None: what fits). Lengths are tokens; longer prompts are left out.

    `journal` is a folder for finished rows: after an interruption the same call goes on from there, and gives what it
    would have given (in 16 bits a near-tie may fall otherwise in another batch). Once the data is saved,
    `specdeft.train.journal.remove` it. Raises SpecdeftError without a chat template, when no turn or answer came out,
    or when the journal is of another run.
    """
    began = time.monotonic()
    form = chat_format(tokenizer, end_ids(model))
    settings = {
        "fingerprint": fingerprint(model), "chat_template_sha256": form.template_sha256, "seed": seed,
        "prompts": None if prompts is None else _digest(prompts), "turns": None if prompts is not None else turns,
        "max_turn_tokens": max_turn_tokens, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "answer_temperature": answer_temperature,
        "dtype": str(model.dtype).removeprefix("torch."),
    }  # fmt: skip
    kept = None if journal is None else Journal(journal, settings)
    try:
        if prompts is None:
            words = sample_user_turns(
                model, tokenizer, turns, max_turn_tokens=max_turn_tokens, temperature=temperature, slots=slots,
                seed=seed, deadline=None if time_limit is None else began + time_limit * TURNS_SHARE, journal=kept,
            )  # fmt: skip
            if not words:
                raise SpecdeftError("no usable user turn was sampled: give more time, or prompts of your own")
            prompts = [[{"role": "user", "content": each}] for each in words]
        data = answer(
            model, tokenizer, prompts, max_new_tokens=max_new_tokens, max_prompt_tokens=max_prompt_tokens, slots=slots,
            temperature=answer_temperature, deadline=None if time_limit is None else began + time_limit, seed=seed,
            journal=kept,
        )  # fmt: skip
    finally:
        if kept is not None:
            kept.flush()
    manifest = {"version": data.manifest["version"], "base_model": str(getattr(model.config, "_name_or_path", ""))}
    return TokenData(data.ids, data.offsets, data.answer_start, manifest | settings | data.manifest)


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
    journal: Journal | None = None,
) -> list[str]:
    """Up to `count` distinct user turns, continued from the template's own words before a first turn.

    Kept are turns that the model itself ended within `max_turn_tokens`, without special tokens inside, of at least 8
    characters with a letter among them, and not mostly repetition. Draws count in the order of their numbers, whichever
    ends first. Stops at `deadline` (time.monotonic seconds).
    """
    if journal is not None and (complete := journal.turns()) is not None:
        return complete
    form = chat_format(tokenizer, end_ids(model))
    done = {row.number: row for row in ([] if journal is None else journal.rows("draws"))}
    prefix = list(form.user_prefix)
    fresh = decode_rows(
        model, ((number, prefix) for number in itertools.count() if number not in done),
        max_prompt_tokens=len(prefix), max_new_tokens=max_turn_tokens, stop_ids=form.stop_ids, slots=slots,
        temperature=temperature, seed=seed, deadline=deadline,
    )  # fmt: skip
    found: dict[str, str] = {}
    report, late = _Report("turns"), False
    for drawn, row in enumerate(_in_order(done, _kept("draws", fresh, journal, max_turn_tokens)), start=1):
        if text := _usable(row, tokenizer):
            found.setdefault(" ".join(text.casefold().split()), text)
        report.line(f"{len(found)} of {count} distinct, {drawn} drawn")
        late = deadline is not None and time.monotonic() > deadline
        if len(found) >= count:
            break
    fresh.close()  # type: ignore[attr-defined]
    report.line(f"{len(found)} of {count} distinct", last=True)
    words = list(found.values())
    if journal is not None and words and (late or len(words) >= count):
        journal.set_turns(words)
    return words


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Messages],
    *,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 256,
    temperature: float = 0.0,
    slots: int | None = None,
    seed: int = 0,
    deadline: float | None = None,
    journal: Journal | None = None,
) -> TokenData:
    """The model's answers to `prompts` as training data, greedy or drawn at `temperature`.

    Prompts longer than `max_prompt_tokens` are left out and counted. `seed` draws, and shuffles the order, so that a
    `deadline` (time.monotonic seconds) does not favour the first. Raises SpecdeftError when nothing was answered.
    """
    form = chat_format(tokenizer, end_ids(model))
    order = np.random.default_rng(seed).permutation(len(prompts))
    encoded = [encode_prompt(tokenizer, prompts[i]) for i in order]
    short = {number: ids for number, ids in enumerate(encoded) if len(ids) <= max_prompt_tokens}
    if not short:
        raise SpecdeftError(f"none of {len(prompts)} prompts is at most {max_prompt_tokens} tokens long")
    done = {row.number: row for row in ([] if journal is None else journal.rows("answers"))}
    fresh = decode_rows(
        model, ((number, ids) for number, ids in short.items() if number not in done),
        max_prompt_tokens=max(map(len, short.values())), max_new_tokens=max_new_tokens,
        stop_ids=end_ids(model) or form.stop_ids, slots=slots, temperature=temperature or None, seed=seed,
        deadline=deadline,
    )  # fmt: skip
    tokens, report = sum(len(row.ids) for row in done.values()), _Report("answers")
    before = tokens
    for row in _kept("answers", fresh, journal, max_new_tokens):
        if row.ended or len(row.ids) >= min(SHORTEST_PARTIAL, max_new_tokens):
            done[row.number] = row
            tokens += len(row.ids)
        report.line(f"{len(done)} of {len(short)}, {tokens} tokens, {(tokens - before) / report.seconds:.0f} tokens/s")
    report.line(f"{len(done)} of {len(short)}, {tokens} tokens", last=True)
    if not done:
        raise SpecdeftError("no prompt was answered before the time was over: give more time")
    rows = [done[number] for number in sorted(done)]
    counts = {
        "rows": len(rows),
        "rows_without_end": sum(not row.ended for row in rows),
        "prompts_too_long": len(encoded) - len(short),
        "answer_tokens": tokens,
    }
    return pack([(short[row.number], row.ids) for row in rows], model.config.get_text_config().vocab_size, counts)


def _kept(stage: str, rows: Iterator[Row], journal: Journal | None, limit: int) -> Iterator[Row]:
    """`rows`, each that is complete written down on the way: it ended, or has all the tokens that it may have."""
    for row in rows:
        if journal is not None and (row.ended or len(row.ids) >= limit):
            journal.add(stage, row)
        yield row


def _in_order(done: dict[int, Row], fresh: Iterator[Row]) -> Iterator[Row]:
    """Rows 0, 1, 2, ... from those known and those that come."""
    waiting, following = dict(done), 0
    while True:
        while following in waiting:
            yield waiting.pop(following)
            following += 1
        row = next(fresh, None)
        if row is None:
            yield from (waiting[number] for number in sorted(waiting))
            return
        waiting[row.number] = row


def _usable(row: Row, tokenizer: Any) -> str | None:
    ids = row.ids[:-1]
    if not row.ended or len(ids) < 2 or len(np.unique(ids)) < 0.35 * len(ids):
        return None
    if not set(tokenizer.all_special_ids).isdisjoint(ids.tolist()):
        return None
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False).strip()
    fine = len(text) >= SHORTEST_WORDS and any(c.isalpha() for c in text) and "\ufffd" not in text
    return text if fine else None


def _digest(prompts: Sequence[Messages]) -> str:
    return hashlib.sha256(json.dumps(prompts, ensure_ascii=False).encode()).hexdigest()[:16]


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
