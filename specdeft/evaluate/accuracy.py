"""How exact attention is: against float64 per dtype and method, and in the perplexity of a text that trees decoded.

Source: DeFT (arXiv 2404.00242), table 15: relative error of attention outputs, and perplexity after 400 decoding steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdeft.evaluate.attention.case import make_case
from specdeft.evaluate.attention.exact import exact_attention, relative_error
from specdeft.evaluate.attention.measure import explain
from specdeft.evaluate.attention.method import NotHere
from specdeft.evaluate.attention.methods import find_method
from specdeft.evaluate.attention.presets import grid
from specdeft.generation import generate
from specdeft.trees import DynamicTree, Tree

METHODS = (
    *("deft-flatten", "deft-flatten-paged", "deft-flatten-triton", "deft-flatten-nodes", "deft-node"),
    *("deft-node-chunk", "q-guided", "dense-mask", "sdpa"),
)
Record = dict[str, Any]


def attention_errors(
    shape: str, lengths: Sequence[int], nodes: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> Iterator[Record]:
    """Each method's ||out - exact|| / ||exact|| over a token tree behind L rows; exact is float64, of equal inputs."""
    for dtype in dtypes:
        for cell in grid(shape, lengths, (nodes,), ()):
            with torch.inference_mode():
                case = make_case(cell.workload, cell.shape, dtype, device, sets=1)
                exact = exact_attention(case, 0, torch.float64)
                for name in METHODS:
                    found: Record = {"method": name, "dtype": str(dtype).removeprefix("torch."), "cell": cell.id}
                    try:
                        out = find_method(name).prepare(case).launch(0)
                        yield found | {"relative_error": relative_error(out, exact)}
                    except NotHere as reason:
                        yield found | {"not_run": str(reason)}
                    except Exception as error:
                        yield found | {"error": explain(error)}


def perplexity(
    model: Any, heads: Any, tree: Tree | DynamicTree, prompt: Sequence[int], tokens: int, chunk_size: int | str = "auto"
) -> Record:
    """Perplexity of a greedy text of `tokens` tokens, by the passes that decoded it and by one plain pass.

    `chunk_size` is of the passes that decode: rows of KV per chunk, or "auto".

    Returns:
        "specdeft" and "transformers", the two perplexities of the same tokens; "largest", the largest difference of a
        token's log-probabilities; "tokens" and "passes".
    """
    config, eos = model.generation_config, model.generation_config.eos_token_id
    config.eos_token_id = None  # the text has its full length
    try:
        out = generate(
            model, heads, list(prompt),
            tree=tree, chunk_size=chunk_size, max_new_tokens=tokens, return_logprobs=True,
        )  # fmt: skip
    finally:
        config.eos_token_id = eos
    ours = torch.tensor(out.logprobs, dtype=torch.float64)
    plain = plain_logprobs(model, prompt, out.token_ids).double().cpu()
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens": len(ours),
        "passes": out.stats.steps,
        "specdeft": math.exp(-float(ours.mean())),
        "transformers": math.exp(-float(plain.mean())),
        "largest": float((ours - plain).abs().max()),
    }


@torch.inference_mode()
def plain_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Log-probability of each of `tokens` behind `prompt`, [T] float32, by one pass of the model's own attention."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
