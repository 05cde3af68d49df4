"""Run a workload through `specdeft.generate` and count: tokens per pass, acceptance per depth, speed, equality.

Prompts are decoded one by one or several at once. One record per prompt is kept as soon as it is there, so that
whatever ends the run, finished work is not lost.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdeft.evaluate.plain import compare, plain_batch
from specdeft.evaluate.records import Record, appending, finished
from specdeft.evaluate.workload import Item, choose
from specdeft.generation import generate
from specdeft.generation.prompts import read_prompts
from specdeft.generation.result import PHASES
from specdeft.trees import DynamicTree, Tree

WARM_UP_TOKENS = 8


T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Settings:
    """What makes two runs comparable. `workload_sha256` names the prompts wherever the file lay.

    `batch` prompts are decoded at once. `check_lossless` compares texts with plain decoding: those of `compare`
    prompts, taken evenly from all over the workload, or all (None).
    """

    model: str
    heads: str
    tree: str
    nodes: int
    workload: str
    workload_sha256: str
    prompts: int
    max_new_tokens: int
    dtype: str
    chunk_size: int | str = "auto"
    without: tuple[str, ...] = ()
    check_lossless: bool = False
    batch: int = 1
    compare: int | None = None


def run(
    model: Any,
    tokenizer: Any,
    heads: Any,
    tree: Tree | DynamicTree,
    items: Sequence[Item],
    settings: Settings,
    *,
    in_float32: Callable[[], Any],
    records: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Record]:
    """One record per item, decoded greedily. `say` gets a line of progress per item.

    `in_float32` gives the same weights in float32, should a 16-bit text part from the plain one.

    Items of a batch share its time evenly. Items that are compared with plain decoding come first and in batches of
    their own, for plain decoding runs in the same batches.

    `records` is a JSONL file that each record is appended to; items that it already holds are not run again, provided
    that it was written with the same settings (SpecdeftError otherwise). A batch that fails is tried again in halves;
    an item that fails alone, drafting or being compared with plain decoding, is recorded with its error alone and the
    run goes on: nothing is skipped in silence.
    """
    done = finished(records, asdict(settings))
    place = {item.id: number for number, item in enumerate(items, 1)}
    compared = {item.id for item in _compared_items(items, settings)}
    left = [item for item in items if item.id not in done]
    measure = Measure(model, tokenizer, heads, tree, settings, in_float32)
    groups = [
        (part[first : first + settings.batch], checked)
        for checked in (True, False)
        if (part := [item for item in left if (item.id in compared) is checked])
        for first in range(0, len(part), settings.batch)
    ]
    if groups:  # first calls compile kernels and fill caches: not part of a speed
        short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
        replace(measure, settings=short).records(*groups[0])
    with appending(records, asdict(settings)) as write:
        for group, checked in groups:
            for record in measure.records(group, checked):
                done[record["id"]] = record
                write(record)
                say(f"{place[record['id']]}/{len(items)} {record['id']} {record['category']}: {_describe(record)}")
    return [done[item.id] for item in items]


@dataclass(frozen=True)
class Measure:
    """What all items of a run are measured with."""

    model: Any
    tokenizer: Any
    heads: Any
    tree: Tree | DynamicTree
    settings: Settings
    in_float32: Callable[[], Any]

    def records(self, group: Sequence[Item], checked: bool) -> list[Record]:
        """Decode items as one batch, and plainly too if they are `checked`."""
        what = f"a tree of {max(self.tree.size // 2, 1)} nodes, " + "a smaller --batch, " * (self.settings.batch > 1)
        drafted: list[Record] = [
            {"error": self._explain(found, f"{what}or a smaller --max-new-tokens")}
            if isinstance(found, Exception)
            else found
            for found in _each(self._drafted, group)
        ]
        if checked:
            pairs = [(item, record) for item, record in zip(group, drafted, strict=True) if "error" not in record]
            for (_, record), found in zip(pairs, _each(self._compared, pairs), strict=True):
                if isinstance(found, Exception):
                    record.clear()
                    explained = self._explain(found, "a smaller --max-new-tokens, or no --check-lossless")
                    record["error"] = f"compared with plain decoding: {explained}"
                else:
                    record |= found
        return [
            {"id": item.id, "category": item.category}
            | {name: value for name, value in record.items() if name != "token_ids"}
            for item, record in zip(group, drafted, strict=True)
        ]

    def _drafted(self, group: Sequence[Item]) -> list[Record]:
        """What was counted, and the new `token_ids`."""
        prompts = [_prompt(item, self.tokenizer) for item in group]
        options: dict[str, Any] = {"tree": self.tree, "chunk_size": self.settings.chunk_size}
        options["max_new_tokens"] = self.settings.max_new_tokens
        began = time.perf_counter()
        results = generate(self.model, self.heads, prompts, tokenizer=self.tokenizer, **options)
        seconds = time.perf_counter() - began
        return [
            {
                "token_ids": result.token_ids,
                "tokens": len(result.token_ids),
                "passes": result.stats.steps,
                "accepted": result.stats.accepted,
                "accepted_per_depth": list(result.stats.accepted_per_depth),
                "finish_reason": result.finish_reason,
                "seconds": seconds / len(group),
                "ms": {phase: getattr(result.stats, f"{phase}_ms") / len(group) for phase in PHASES},
            }
            for result in results
        ]

    def _compared(self, group: Sequence[tuple[Item, Record]]) -> list[Record]:
        """The same prompts by plain decoding: sizes, time, whether the texts are the same."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        prompts = [_prompt(item, self.tokenizer) for item, _ in group]
        rows, _ = read_prompts(prompts, self.tokenizer, bos, vocab_size)
        plain = plain_batch(self.model, rows, self.settings.max_new_tokens)
        return [
            {"plain_tokens": len(each.token_ids), "plain_seconds": each.seconds}
            | compare(self.model, self.in_float32, ids, record["token_ids"], each.token_ids)
            for ids, (_, record), each in zip(rows, group, plain, strict=True)
        ]

    def _explain(self, error: Exception, smaller: str) -> str:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            size = f"a tree of {self.tree.size} nodes and {self.settings.max_new_tokens} new tokens"
            return f"out of memory with {size}. Try {smaller}"
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _compared_items(items: Sequence[Item], settings: Settings) -> Sequence[Item]:
    if not settings.check_lossless:
        return ()
    return choose(items, limit=settings.compare)


def _each(work: Callable[[Sequence[T]], Sequence[R]], group: Sequence[T]) -> list[R | Exception]:
    """Work on all at once, or where that fails on halves, down to single ones, which give their error."""
    if not group:
        return []
    try:
        return [*work(group)]
    except Exception as error:  # of one the others know nothing: they may well succeed
        alone = error.with_traceback(None)  # its frames hold tensors
    if isinstance(alone, (torch.OutOfMemoryError, MemoryError)):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if len(group) == 1:
        return [alone]
    half = len(group) // 2
    return [*_each(work, group[:half]), *_each(work, group[half:])]


def _prompt(item: Item, tokenizer: Any) -> Any:
    """Chat messages where there is a template; without one, the text of a lone user turn."""
    if isinstance(item.prompt, str) or getattr(tokenizer, "chat_template", None) or len(item.prompt) > 1:
        return item.prompt
    return item.prompt[0]["content"]


def _describe(record: Record) -> str:
    if "error" in record:
        return f"failed: {record['error']}"
    tau = (record["tokens"] - 1) / record["passes"] if record["passes"] else 0.0
    same = {True: ", equals plain", False: ", differs from plain", None: ""}[record.get("equal")]
    return f"{record['tokens']} tokens in {record['passes']} passes, tau {tau:.2f}{same}"
