"""What a user may pass to `generate`, checked before anything is loaded or computed. Knows values, not models."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specdeft.attention import check_chunk_size

ACCEPTANCE = ("greedy", "sample", "typical")
_WARPERS = ("temperature", "top_k", "top_p", "min_p")
_LARGEST_SEED = 2**63 - 1  # what torch generators take

# name: (whole number?, what it must be, the test of it)
_NUMBERS: dict[str, tuple[bool, str, Callable[[Any], bool]]] = {
    "max_new_tokens": (True, "at least 1", lambda v: v >= 1),
    "batch_size": (True, "at least 1", lambda v: v >= 1),
    "temperature": (False, "at least 0 (0 is greedy)", lambda v: 0 <= v < math.inf),
    "top_k": (True, "at least 0 (0 is off)", lambda v: v >= 0),
    "top_p": (False, "above 0 and at most 1", lambda v: 0 < v <= 1),
    "min_p": (False, "between 0 and 1", lambda v: 0 <= v <= 1),
}


def check_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate` with numbers as Python's own and `stop`, `eos_token_id` as lists or None.

    Raises:
        ValueError: a value of the wrong type or outside its range, or one without effect under this acceptance rule.
    """
    options = dict(given)
    if options["acceptance"] not in ACCEPTANCE:
        raise ValueError(f"acceptance must be one of {', '.join(ACCEPTANCE)}, got {options['acceptance']!r}.")
    for name in _NUMBERS:
        options[name] = _number(name, options[name])
    if options["acceptance"] == "greedy" and options["temperature"] != 0:
        for name in _WARPERS:
            if options[name] is not None:
                raise ValueError(
                    f"{name}={options[name]!r} has no effect with acceptance='greedy'. Use acceptance='sample'."
                )
    options["eos_token_id"] = _token_ids(options["eos_token_id"])
    options["stop"] = _strings(options["stop"])
    check_chunk_size(options["chunk_size"])
    for name in ("logits_processor", "stopping_criteria"):
        each = options[name]
        if each is not None and not (isinstance(each, Sequence) and all(callable(one) for one in each)):
            raise ValueError(f"{name} must be a list of callables, got {each!r:.80}.")
    config = options["generation_config"]
    if config is not None and not hasattr(config, "max_new_tokens"):
        raise ValueError(f"generation_config must be a transformers GenerationConfig, got {type(config).__name__}.")
    tokenizer = options["tokenizer"]
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ValueError(f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}.")
    return options


def seeds_of(seed: Any, count: int) -> list[int]:
    """One seed per sequence; None draws fresh ones from torch's global generator.

    Raises:
        ValueError: not a whole number that a generator takes, or a list of another length.
    """
    if seed is None:
        return [int(s) for s in torch.randint(2**62, (count,))]
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != count:
            raise ValueError(f"seed must be one number or one per prompt: got {len(seed)} seeds for {count} prompts.")
        return [_seed(each) for each in seed]
    return [_seed(seed)] * count


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or abs(int(seed)) > _LARGEST_SEED:
        raise ValueError(f"seed must be a whole number of at most 63 bits, got {seed!r}.")
    return int(seed)


def _number(name: str, value: Any) -> int | float | None:
    if value is None:
        return None
    whole, rule, holds = _NUMBERS[name]
    kind: Any = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
        raise ValueError(f"{name} must be {'a whole number ' if whole else ''}{rule}, got {value!r}.")
    return int(value) if whole else float(value)


def _token_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    ids = value.tolist() if hasattr(value, "tolist") else value
    ids = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
    if not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) and int(i) >= 0 for i in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}.")
    return [int(i) for i in ids]


def _strings(value: Any) -> list[str] | None:
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop must be a string or a list of strings, none of them empty, got {value!r}.")
    return list(texts) or None
