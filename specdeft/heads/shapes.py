"""Which tensors heads hold: names and shapes from a config. Knows no files and no modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdeft.heads.prefix import prefix_shapes

if TYPE_CHECKING:
    from specdeft.heads.files import HeadsConfig

VOCAB_IDS = "vocab_ids"


def expected_shapes(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that heads of this config hold; all are floats but `vocab_ids`.

    Of K heads with n blocks, medusa has `weight` [n, K, H, H] and `bias` [n, K, H]. A hydra head's first block reads
    wider input the deeper the head, so it is apart: `first.k` [2, H, (k+2) H] and `first_bias` [K, 2, H], each holding
    the residual connection, then the layer under SiLU; `weight` and `bias` hold the other n-1 blocks, if any. Recurrent
    heads share n gated blocks of inner size I over all depths, behind `join`, which takes a token in.
    """
    n, k, h = config.num_layers, config.num_heads, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.kind == "recurrent":
        inner = config.inner_size or 0
        shapes |= {"join": (h, 2 * h), "join_norm": (2 * h,), "depth_bias": (k, h)}
        shapes |= {"gate_up": (n, 2 * inner, h), "down": (n, h, inner), "block_norm": (n, h)}
        n = 0
    if config.kind == "hydra":
        shapes |= {f"first.{head}": (2, h, (head + 2) * h) for head in range(k)}
        shapes["first_bias"] = (k, 2, h)
        n -= 1
    if n:
        shapes |= {"weight": (n, k, h, h), "bias": (n, k, h)}
    if config.lm_head == "own":
        shapes["lm_heads"] = (k, config.num_guessed, h)
        if config.kind == "hydra":
            shapes["lm_heads_bias"] = (k, config.num_guessed)
    if config.prefix is not None:
        shapes |= {f"prefix.{name}": shape for name, shape in prefix_shapes(config.prefix, h).items()}
    if config.draft_vocab_size is not None:
        shapes[VOCAB_IDS] = (config.draft_vocab_size,)
    return shapes
