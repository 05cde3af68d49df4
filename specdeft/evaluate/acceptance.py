"""Run a workload through `specdeft.generate` and count: tokens per pass, acceptance per depth, speed, equality.

One record per prompt is kept as soon as it is there, so that whatever ends the run, finished work is not lost.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdeft.evaluate.plain import compare, plain_generate
from specdeft.evaluate.records import Record, appending, finished
from specdeft.evaluate.workload import Item
from specdeft.generation import generate
from specdeft.generation.prompts import read_prompts
from specdeft.trees import Tree

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    """What makes two runs comparable. `workload_sha256` names the prompts wherever the file lay."""

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


def run(
    model: Any,
    tokenizer: Any,
    heads: Any,
    tree: Tree,
    items: Sequence[Item],
    settings: Settings,
    *,
    in_float32: Callable[[], Any],
    records: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Record]:
    """One record per item: greedy, a batch of 1. `say` gets a line of progress per item.

    `in_float32` gives the same weights in float32, should a 16-bit text part from the plain one.

    `records` is a JSONL file that each record is appended to; items that it already holds are not run again, provided
    that it was written with the same settings (SpecdeftError otherwise). An item that fails, drafting or being compared
    with plain decoding, is recorded with its error alone and the run goes on: nothing is skipped in silence.
    """
    done = finished(records, asdict(settings))
    if any(item.id not in done for item in items):  # first calls compile kernels and fill caches: not part of a speed
        short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
        _measure(model, tokenizer, heads, tree, items[0], short, in_float32)
    with appending(records, asdict(settings)) as write:
        for number, item in enumerate(items, 1):
            if item.id in done:
                continue
            record = done[item.id] = _measure(model, tokenizer, heads, tree, item, settings, in_float32)
            write(record)
            say(f"{number}/{len(items)} {item.id} {item.category}: {_describe(record)}")
    return [done[item.id] for item in items]


def _measure(
    model: Any,
    tokenizer: Any,
    heads: Any,
    tree: Tree,
    item: Item,
    settings: Settings,
    in_float32: Callable[[], Any],
) -> Record:
    name: Record = {"id": item.id, "category": item.category}
    prompt = _prompt(item, tokenizer)
    # what fails is recorded and counted; the next item may well succeed
    try:
        ids, record = _drafted(model, tokenizer, heads, tree, prompt, settings)
    except Exception as error:
        smaller = f"a tree of {max(tree.size // 2, 1)} nodes, or a smaller --max-new-tokens"
        return name | {"error": _explain(error, tree, settings, smaller)}
    if not settings.check_lossless:
        return name | record
    try:
        return name | record | _compared(model, tokenizer, prompt, ids, settings, in_float32)
    except Exception as error:
        smaller = "a smaller --max-new-tokens, or no --check-lossless"
        return name | {"error": f"compared with plain decoding: {_explain(error, tree, settings, smaller)}"}


def _drafted(
    model: Any, tokenizer: Any, heads: Any, tree: Tree, prompt: Any, settings: Settings
) -> tuple[list[int], Record]:
    """(new ids, what was counted)."""
    options: dict[str, Any] = {"tree": tree, "chunk_size": settings.chunk_size}
    began = time.perf_counter()
    result = generate(model, heads, prompt, tokenizer=tokenizer, max_new_tokens=settings.max_new_tokens, **options)
    seconds = time.perf_counter() - began
    stats = result.stats
    return result.token_ids, {
        "tokens": len(result.token_ids),
        "passes": stats.steps,
        "accepted": stats.accepted,
        "accepted_per_depth": list(stats.accepted_per_depth),
        "finish_reason": result.finish_reason,
        "seconds": seconds,
        "ms": {phase: getattr(stats, f"{phase}_ms") for phase in ("prefill", "draft", "verify", "accept", "commit")},
    }


def _compared(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    ours: Sequence[int],
    settings: Settings,
    in_float32: Callable[[], Any],
) -> Record:
    """The same prompt by plain decoding: its size, its time, whether the texts are the same."""
    bos = getattr(tokenizer, "bos_token_id", None)
    [ids], _ = read_prompts(prompt, tokenizer, bos, model.get_output_embeddings().weight.shape[0])
    plain = plain_generate(model, ids, settings.max_new_tokens)
    measured = {"plain_tokens": len(plain.token_ids), "plain_seconds": plain.seconds}
    return measured | compare(model, in_float32, ids, ours, plain.token_ids)


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


def _explain(error: Exception, tree: Tree, settings: Settings, smaller: str) -> str:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"out of memory with a tree of {tree.size} nodes and {settings.max_new_tokens} new tokens. Try {smaller}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
