"""Read whatever a user calls a prompt into token ids: text, chat messages, ids, or a list of any of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdeft.errors import SpecdeftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompts(
    prompt: Any, tokenizer: PreTrainedTokenizerBase | None, bos: int | None, vocab_size: int
) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether the caller gave a batch.

    Text goes through the tokenizer, which adds its own BOS; chat messages go through the chat template, which writes
    its own, so no second one is added. An empty prompt becomes the BOS token alone.

    Raises:
        ValueError: nothing to continue (empty prompt and no BOS), an id outside the vocabulary, or another type.
        SpecdeftError: chat messages for a tokenizer without chat template, or text without a tokenizer.
    """
    batch = _batch_of(prompt)
    if batch is not None and not batch:
        raise ValueError("empty batch: expected at least one prompt, got an empty list.")
    prompts = [prompt] if batch is None else batch
    many = len(prompts) > 1
    rows = [
        _checked(_ids_of(one, tokenizer), f"prompt {i}" if many else "prompt", bos, vocab_size)
        for i, one in enumerate(prompts)
    ]
    return rows, batch is not None


def _batch_of(prompt: Any) -> list[Any] | None:
    """The prompts of a batch, or None for a single prompt."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        mask = prompt.get("attention_mask")
        rows = _batch_of(prompt["input_ids"]) or [prompt["input_ids"]]
        if mask is None:
            return rows
        masks = _batch_of(mask) or [mask]
        return [
            [i for i, kept in zip(_plain(row), _plain(m), strict=True) if kept]
            for row, m in zip(rows, masks, strict=True)
        ]
    if isinstance(prompt, torch.Tensor) or hasattr(prompt, "__array__"):
        array = torch.as_tensor(prompt)
        if array.ndim not in (1, 2):
            raise ValueError(f"prompt ids must have 1 or 2 dimensions, got shape {tuple(array.shape)}.")
        return list(array) if array.ndim == 2 else None
    if isinstance(prompt, str):
        return None
    if isinstance(prompt, Sequence):
        if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return None
        if prompt and all(isinstance(item, Mapping) and "role" in item for item in prompt):
            return None
        return list(prompt)
    raise ValueError(
        f"prompt must be text, chat messages, token ids or a list of these, got {type(prompt).__name__}: {prompt!r:.80}"
    )


def _plain(ids: Any) -> list[int]:
    return [int(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]


def _ids_of(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise SpecdeftError("a text prompt needs a tokenizer: pass tokenizer=, or give token ids.")
        return _plain(tokenizer(_valid(prompt))["input_ids"])
    if isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        return chat_ids(tokenizer, prompt)
    nested = _batch_of(prompt)
    if nested:
        if len(nested) != 1:
            raise ValueError("a batch must be one list of prompts; got a list of lists of prompts.")
        return _ids_of(nested[0], tokenizer)
    return _plain(prompt)


def chat_ids(tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Any]) -> list[int]:
    """Token ids of chat messages, the assistant's turn opened.

    The rendered template carries the special tokens (BOS included), so none are added when it is tokenised.
    """
    if tokenizer is None:
        raise SpecdeftError("chat messages need a tokenizer: pass tokenizer=, or give token ids.")
    if not getattr(tokenizer, "chat_template", None):
        raise SpecdeftError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template. Set tokenizer.chat_template, "
            "pass --chat-template on the command line, or give plain text instead of messages."
        )
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return _plain(tokenizer(_valid(text), add_special_tokens=False)["input_ids"])


def _valid(text: str) -> str:
    """`text`, unless it holds what no UTF-8 can: half of a surrogate pair, as wrongly decoded input has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no valid text at character {error.start}; give it as UTF-8.") from error
    return text


def _checked(ids: list[int], what: str, bos: int | None, vocab_size: int) -> list[int]:
    if not ids:
        if bos is None:
            raise ValueError(f"{what}: empty prompt and no BOS token to start from. Give at least one token.")
        return [bos]
    bad = [i for i in ids if not 0 <= i < vocab_size]
    if bad:
        raise ValueError(f"{what}: token id {bad[0]} is outside the model's vocabulary of {vocab_size}.")
    return ids
