"""Training data made sure of before the first step: of this model, within its context, teaching something."""

from __future__ import annotations

import warnings
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.heads.fingerprint import fingerprint
from specdeft.heads.model import template_sha256
from specdeft.train.batches import trainable
from specdeft.train.chat import find_template
from specdeft.train.data import TokenData

MOST_LOST = 0.1  # of the labels, before cutting rows is worth a warning


def ready(model: Any, tokenizer: Any, data: TokenData, max_length: int | None = None) -> TokenData:
    """`data`, each row cut to `max_length` tokens (None: the model's positions).

    Raises SpecdeftError when nothing can be learnt from it (no trainable token, or none within the length), and when it
    was made with other weights or another chat template. Warns when cutting loses more than a tenth of the labels.
    """
    config = model.config.get_text_config()
    data.check("training data", config.vocab_size)
    _check_origin(model, tokenizer, data)
    labels = int(trainable(data).sum())
    if labels == 0:
        raise SpecdeftError(
            f"none of {len(data)} rows has a trainable token: heads learn from the second token of an answer on, so "
            "each answer needs at least two tokens after the prompt"
        )
    limit = max_length or getattr(config, "max_position_embeddings", None)
    if limit is None:
        return data
    short = data.truncated(limit)
    left = int(trainable(short).sum())
    if left == 0:
        raise SpecdeftError(
            f"none of {len(data)} rows has a trainable token within its first {limit} tokens: raise max_length, or "
            "give rows with shorter prompts"
        )
    if left < (1 - MOST_LOST) * labels:
        warnings.warn(
            f"cutting rows to {limit} tokens loses {labels - left} of {labels} labels and {len(data) - len(short)} of "
            f"{len(data)} rows",
            stacklevel=3,
        )
    return short


def _check_origin(model: Any, tokenizer: Any, data: TokenData) -> None:
    found = data.manifest.get("fingerprint")
    if found is not None and found != (ours := fingerprint(model)):
        raise SpecdeftError(f"the data was distilled from other weights (fingerprint {found}, this model has {ours})")
    wanted, got = data.manifest.get("chat_template_sha256"), template_sha256(find_template(tokenizer))
    if tokenizer is not None and wanted is not None and wanted != got:
        raise SpecdeftError(
            f"the data was distilled with another chat template: expected the one with sha256 {wanted[:16]}..., the "
            f"tokenizer has {'none' if got is None else f'{got[:16]}...'}. Set the template that distill was given "
            "(--chat-template FILE), or distill again"
        )
