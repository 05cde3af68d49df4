"""Generation settings as `model.generate` would resolve them, so that every option means here what it means there.

transformers' own (private) helpers resolve the config and build processors and criteria; calling them is what keeps a
repetition penalty, `min_new_tokens` or a stop string identical. This file is the only one that touches them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode, logits_process

from specdeft.errors import SpecdeftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_NEW_TOKENS = 20  # transformers' own default when nothing says how long an answer may be
_CONTEXT_FREE = tuple(  # processors that look at the scores only: they may run on a whole batch at once
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
    )
    if hasattr(logits_process, name)
)


def is_penalty(processor: Any) -> bool:
    """Whether it is transformers' repetition penalty of prompt and answer alike."""
    kind = logits_process.RepetitionPenaltyLogitsProcessor
    return type(processor) is kind and processor.prompt_ignore_length is None


@dataclass(frozen=True)
class RowSettings:
    """Everything one sequence needs besides its ids."""

    max_new_tokens: int
    eos: tuple[int, ...]
    processors: LogitsProcessorList
    stopping: StoppingCriteriaList

    @property
    def on_device(self) -> bool:
        """Whether no processor looks at the tokens so far, but for penalties of those that have occurred."""
        return all(is_penalty(each) or type(each) in _CONTEXT_FREE for each in self.processors)  # a subclass may look


def resolve(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    do_sample: bool,
    max_positions: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
    logits_processor: Sequence[Any] | None,
    stopping_criteria: Sequence[Any] | None,
    options: dict[str, Any],
) -> list[RowSettings]:
    """Settings per prompt.

    Args:
        options: explicit options under transformers' names (max_new_tokens, temperature, ...); None means "not given".

    Raises:
        ValueError: an option outside its range, or a config that asks for beams.
        SpecdeftError: a prompt that leaves no room in the model's positions.
    """
    given = {key: value for key, value in options.items() if value is not None}
    explicit_length = any(
        getattr(config, "max_length", None) is not None for config in (generation_config, model.generation_config)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        asked = copy.deepcopy(generation_config) if generation_config is not None else GenerationConfig()
        unused = asked.update(do_sample=do_sample, **given)
        config, _ = model._prepare_generation_config(asked)
    if unused:
        raise TypeError(f"generation options {sorted(unused)} are not part of transformers' GenerationConfig.")
    _check_mode(config)
    return [
        _row(
            model,
            copy.deepcopy(config),
            ids,
            index if len(rows) > 1 else None,
            explicit_length,
            max_positions,
            tokenizer,
            LogitsProcessorList(logits_processor or []),
            StoppingCriteriaList(stopping_criteria or []),
        )
        for index, ids in enumerate(rows)
    ]


def _row(
    model: PreTrainedModel,
    config: GenerationConfig,
    ids: Sequence[int],
    index: int | None,
    explicit_length: bool,
    max_positions: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    processors: LogitsProcessorList,
    stopping: StoppingCriteriaList,
) -> RowSettings:
    what = "the prompt" if index is None else f"prompt {index}"
    if config.max_new_tokens is not None:
        new_tokens = config.max_new_tokens
    elif explicit_length:
        new_tokens = config.max_length - len(ids)
        if new_tokens < 1:
            raise ValueError(
                f"{what} has {len(ids)} tokens, but max_length is {config.max_length}. Set max_new_tokens."
            )
    else:
        new_tokens = DEFAULT_NEW_TOKENS
    if max_positions is not None:
        if len(ids) >= max_positions:
            raise SpecdeftError(
                f"{what} has {len(ids)} tokens, but the model has {max_positions} positions and needs one for the "
                "answer. Shorten the prompt."
            )
        if len(ids) + new_tokens > max_positions:
            warnings.warn(
                f"{what} has {len(ids)} tokens and the model {max_positions} positions: "
                f"max_new_tokens is cut from {new_tokens} to {max_positions - len(ids)}.",
                stacklevel=5,
            )
            new_tokens = max_positions - len(ids)
    config.max_length = len(ids) + new_tokens
    if config.min_new_tokens is not None:
        config.min_length = len(ids) + config.min_new_tokens
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device, batch_size=1)
    eos = config._eos_token_tensor
    prompt = torch.tensor([list(ids)], device=model.device)
    return RowSettings(
        max_new_tokens=new_tokens,
        eos=() if eos is None else tuple(eos.tolist()),
        processors=model._get_logits_processor(
            config,
            input_ids_seq_length=len(ids),
            encoder_input_ids=prompt,
            logits_processor=processors,
            device=model.device,
            model_kwargs={},
        ),
        stopping=_criteria(config, stopping, tokenizer),
    )


def _criteria(
    config: GenerationConfig, stopping: StoppingCriteriaList, tokenizer: PreTrainedTokenizerBase | None
) -> StoppingCriteriaList:
    """Criteria beyond length and EOS, which the decoding step itself keeps."""
    from transformers import MaxTimeCriteria, StopStringCriteria

    criteria = StoppingCriteriaList()
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings:
        if tokenizer is None:
            raise SpecdeftError("stop strings need a tokenizer: pass tokenizer=.")
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    return StoppingCriteriaList([*criteria, *stopping])


def _check_mode(config: GenerationConfig) -> None:
    """Refuse what a config may ask of `model.generate` beyond following one path token by token."""
    for name in ("num_beams", "num_beam_groups", "num_return_sequences"):
        value = getattr(config, name, None) or 1
        if value != 1:
            raise ValueError(f"{name}={value}: speculative decoding follows one path, {name} must be 1.")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"the generation config asks for {mode.value}; specdeft decodes greedily or by sampling.")
    for name in ("dola_layers", "token_healing", "force_words_ids", "constraints", "penalty_alpha"):
        if getattr(config, name, None):
            raise ValueError(f"the generation config sets {name}, which specdeft does not support. Unset it.")


def ended(stopping: StoppingCriteriaList, ids: Tensor) -> bool:
    """Whether any criterion stops after the ids [1, T] so far."""
    return bool(stopping) and bool(stopping(ids, None).any())
