"""Chat templates: where a user's words go, what ends a turn, and one rendering into token ids.

Never invents a template and never adds special tokens beyond the template's own. Knows no model weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.heads.model import template_sha256

MARK = "SPECDEFTUSERTURN"


@dataclass(frozen=True)
class ChatFormat:
    """What a template says: ids before a first user turn's words, ids that end a turn, the template's SHA-256."""

    user_prefix: tuple[int, ...]
    stop_ids: tuple[int, ...]
    template_sha256: str | None


def find_template(tokenizer: Any) -> str | None:
    """The tokenizer's chat template, of several the default one; None for none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template; SpecdeftError with the way out when there is none."""
    template = find_template(tokenizer)
    if template is None:
        raise SpecdeftError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'this model'} has no chat template: "
            "set tokenizer.chat_template, on the command line with --chat-template FILE"
        )
    return template


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered template text: the template writes its own BOS, so the tokenizer must not add a second."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = getattr(tokenizer, "bos_token_id", None)
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return list(ids)


def encode_prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Ids of messages through the full template, ending where the assistant starts to speak."""
    template_text(tokenizer)
    return encode_rendered(
        tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )


def chat_format(tokenizer: Any, eos_ids: tuple[int, ...] = ()) -> ChatFormat:
    """Read the template by rendering a marked user turn and cutting at the mark.

    `eos_ids` are the model's own end tokens; the token that the template puts right after a user's words joins them if
    it is a special one. Raises SpecdeftError when the template does not keep a user's words in one piece.
    """
    template = template_text(tokenizer)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    if rendered.count(MARK) != 1:
        raise SpecdeftError(f"the chat template shows a user's words {rendered.count(MARK)} times, expected once")
    before, after = rendered.split(MARK)
    stops = set(eos_ids)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    following = tokenizer(after, add_special_tokens=False)["input_ids"]
    if following and following[0] in tokenizer.all_special_ids:
        stops.add(following[0])
    if not stops:
        raise SpecdeftError("neither the model nor the tokenizer nor the template names a token that ends a turn")
    prefix = tuple(encode_rendered(tokenizer, before))
    if not prefix:
        raise SpecdeftError("the chat template puts nothing before a user's words, so no turn can be sampled from it")
    return ChatFormat(prefix, tuple(sorted(stops)), template_sha256(template))


def end_ids(model: Any) -> tuple[int, ...]:
    """The ids at which the model's own `generate` would stop."""
    found: list[int] = []
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        found += [value] if isinstance(value, int) else list(value or [])
    return tuple(sorted(set(found)))
