"""Training of draft heads on a frozen base model: what a user may choose, put together and run (see `run.py`).

Knows nothing of decoding.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from specdeft.errors import SpecdeftError
from specdeft.heads.model import DraftHeads
from specdeft.heads.output import output_layer, output_sizes
from specdeft.train.base import frozen
from specdeft.train.batches import trainable
from specdeft.train.chat import find_template
from specdeft.train.checkpoint import Checkpoint, differences
from specdeft.train.data import TokenData
from specdeft.train.interrupt import asked_to_stop
from specdeft.train.limits import Limits
from specdeft.train.progress import to_stderr
from specdeft.train.ready import ready
from specdeft.train.run import Run
from specdeft.train.states import States
from specdeft.train.vocabulary import commonest_ids
from specdeft.train.work import Work
from specdeft.train.workers import Workers


def train(
    model: Any,
    tokenizer: Any,
    data: TokenData,
    *,
    heads: DraftHeads | None = None,
    kind: str = "medusa",
    num_heads: int = 4,
    num_layers: int = 1,
    lm_head: str = "shared",
    draft_vocab_size: int | None = None,
    prefix: bool = False,
    epochs: float = 2.0,
    max_tokens: int | None = None,
    max_steps: int | None = None,
    time_limit: float | None = None,
    max_length: int | None = None,
    batch_tokens: int = 32_768,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    depth_decay: float = 0.8,
    depth_weights: Sequence[float] | None = None,
    ce: float = 1.0,
    kl: float = 1.0,
    lk: float = 0.0,
    chunk: int | None = None,
    seed: int = 0,
    bf16: bool | None = None,
    compile: bool = False,
    keep_states: bool = False,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    save_every: float = 60.0,
    log_with: Sequence[Any] = (),
    log: Callable[[str], None] = to_stderr,
) -> DraftHeads:
    """Train heads (new ones of `kind` unless `heads`) on `data` and return them, float32, on the model's device.

    Each head's loss is `ce` times cross-entropy with the answer's own token, plus `kl` times the divergence from the
    base model's distribution there, plus `lk` times the negative log acceptance (see `specdeft.train.losses`), times
    `depth_weights[k]` (None: `depth_decay`**k). `draft_vocab_size` lets new heads guess the commonest tokens only,
    `prefix` gives them a layer of their own that attends to all hidden states before.

    Ends at the first of `epochs`, `max_tokens` (answer tokens seen), `max_steps` and `time_limit` (seconds); the cosine
    schedule follows whichever is nearest. Weights and optimiser are float32; `bf16` (None: on a GPU) runs the heads in
    bfloat16. `chunk` bounds the target positions whose logits exist at once. `compile` runs the loss through
    torch.compile. `keep_states` runs the base over each row once and holds its hidden states on the device, 2 bytes
    times the hidden size per token in bfloat16. The model's weights are not changed.

    Under `accelerate launch`, processes share each step: `batch_tokens` padded tokens are each one's part, and W
    processes take the steps of one process with W times as many.

    `out` gets the heads and `training.pt` every `save_every` seconds and at SIGINT or SIGTERM, which then raises
    KeyboardInterrupt. With `resume` training goes on from there: with the same arguments, to the same weights, on a CPU
    bit for bit, as without the stop, unless `time_limit` sets the pace or `keep_states` rounds otherwise. `log_with`
    are trackers known to Accelerate.

    Raises SpecdeftError for data that does not suit (see `specdeft.train.ready`), nothing to resume, and at the first
    loss or gradient that is not finite; `out` then holds the last good heads.
    """
    settings = {
        "kind": kind, "num_heads": num_heads, "num_layers": num_layers, "lm_head": lm_head, "epochs": epochs,
        "draft_vocab_size": draft_vocab_size, "prefix": prefix, "max_tokens": max_tokens, "max_steps": max_steps,
        "time_limit": time_limit, "max_length": max_length, "batch_tokens": batch_tokens,
        "learning_rate": learning_rate, "weight_decay": weight_decay, "clip": clip, "depth_decay": depth_decay,
        "depth_weights": list(depth_weights) if depth_weights else None, "ce": ce, "kl": kl, "lk": lk, "seed": seed,
        "bf16": bf16, "data": _digest(data),
    }  # fmt: skip
    data = ready(model, tokenizer, data, max_length)
    state = _load(out, settings) if resume else None
    if heads is None:
        few = (
            None
            if draft_vocab_size is None
            else commonest_ids(data, draft_vocab_size, output_sizes(output_layer(model))[0])
        )
        heads = DraftHeads.for_model(
            model, kind=kind, num_heads=num_heads, num_layers=num_layers, lm_head=lm_head,
            chat_template=find_template(tokenizer), vocab_ids=few, prefix=prefix,
        )  # fmt: skip
    heads.check_fits(model)
    heads = heads.float().train()
    weights = list(depth_weights or [depth_decay**k for k in range(heads.num_heads)])
    if len(weights) != heads.num_heads:
        raise ValueError(f"depth_weights: expected one for each of {heads.num_heads} heads, got {len(weights)}")
    device = heads.device
    work = Work(
        model, heads, weights, States(model, data, keep_states), ce=ce, kl=kl, lk=lk, chunk=chunk, compiled=compile,
        bf16=device.type == "cuda" if bf16 is None else bf16,
    )  # fmt: skip
    labels = trainable(data)
    goal = int(min(labels.sum() * epochs, max_tokens or math.inf))
    limits = Limits(max(goal, 1), max_steps, time_limit)
    run = Run(
        work, Workers(device, log_with, out, settings), data, limits, settings, out, save_every, log,
    )  # fmt: skip
    run.say(
        f"labels on {labels.sum()} of {data.offsets[-1]} tokens ({labels.sum() / data.offsets[-1]:.0%}) in "
        f"{len(data)} rows; goal {goal} labels, {run.workers.count} processes"
    )
    if state is not None:
        run.restore(state)
    with frozen(model), asked_to_stop() as interrupt:
        run.go(interrupt)
    run.finish()
    return heads.eval()


def _load(out: str | os.PathLike[str] | None, settings: dict[str, Any]) -> Checkpoint:
    if out is None:
        raise ValueError("resume needs out, the folder in which training stopped")
    state = Checkpoint.load(out)
    for name in ("kind", "num_heads", "num_layers", "lm_head", "draft_vocab_size", "prefix"):
        if state.settings[name] != settings[name]:
            raise SpecdeftError(
                f"{out} holds a run with {name} {state.settings[name]}, not {settings[name]}: resume with the same"
            )
    if changed := differences(state.settings, settings):
        warnings.warn(f"resumed with other settings than before: {', '.join(changed)}", stacklevel=3)
    return state


def _digest(data: TokenData) -> str:
    digest = hashlib.sha256()
    for array in (data.ids, data.offsets, data.answer_start):
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]
