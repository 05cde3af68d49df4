"""The true tokens after a position, as heads that see the tokens before their guess are shown them in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdeft.heads import DraftHeads


def path_embeddings(model: Any, heads: DraftHeads, ids: Tensor, source: Tensor) -> Tensor | None:
    """[P, K, H]: the embeddings of the K tokens after each flat position `source` [P] of ids [B, T], if heads ask.

    Beyond the end of a row they are those of other tokens, where no head has a target either.
    """
    if not heads.sees_tokens:
        return None
    after = source[:, None] + 1 + torch.arange(heads.num_heads, device=source.device)
    return model.get_input_embeddings()(ids.flatten()[after.clamp(max=ids.numel() - 1)])
