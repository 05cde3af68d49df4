"""Held-out rows and what heads make of them: shared by the commands that train heads and that measure them again.

Knows no options and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdeft.heads import DraftHeads
    from specdeft.train import TokenData

MEASURED_POSITIONS = 200_000  # enough for three digits of the rarest path in a tree of 256
HELD_OUT_SHARE = 20  # one row in so many, unless a number is given
SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
TREES = "trees"  # folder beside the heads


@dataclass(frozen=True)
class Split:
    """Rows to train on, rows held out, and how many looped tokens were left out of both."""

    seen: TokenData
    unseen: TokenData
    looped: int


def split_rows(rows: Path | TokenData, held_out: int | None, seed: int) -> Split:
    """Rows, or those of a file from `specdeft distill`; the same rows, number and seed hold out the same ones.

    Raises SpecdeftError when the file is no training data, ValueError when fewer than `held_out` + 1 rows are in it.
    """
    from specdeft.train import TokenData
    from specdeft.train.loops import cut_loops

    data, looped = cut_loops(TokenData.load(rows) if isinstance(rows, Path) else rows)
    seen, unseen = data.split(held_out or max(len(data) // HELD_OUT_SHARE, 1), seed=seed)
    return Split(seen, unseen, looped)


def calibrate(model: Any, heads: DraftHeads, unseen: TokenData, out: Path) -> dict[str, list[float]]:
    """Measure heads on held-out rows: writes calibration.json to `out`, returns top-k accuracy per depth.

    The model runs in float32 meanwhile: in 16 bits many logits are equal, and a rank among equals says nothing.
    """
    from specdeft.evaluate.calibration import Calibration
    from specdeft.train import accuracy, measure_ranks

    with in_float32(model):
        ranks, step = measure_ranks(model, heads, unseen, max_positions=MEASURED_POSITIONS)
    source = f"passes on {len(unseen)} held-out self-distilled answers, {len(ranks)} positions"
    Calibration.from_ranks(ranks, step, source).save(out)
    return {f"top{top}": shares for top, shares in accuracy(ranks).items()}


def fit_trees(out: Path) -> dict[str, float]:
    """Build the best trees from calibration.json in `out`, as trees/NAME-SIZE.json there; returns tau by size.

    Sizes beyond what the counts can fill are left out. tau is what the counts promise, per verify pass.
    """
    from specdeft.evaluate.calibration import Calibration
    from specdeft.trees import best_family, save_family

    found = Calibration.load(out)
    assert found is not None
    sizes = [size for size in SIZES if size <= 1 + len(found.counts)]
    family = best_family(found.counts, found.total, sizes, out.resolve().name)
    (out / TREES).mkdir(exist_ok=True)
    save_family(family, out / TREES, source=found.source, about=f"calibrated for {out.resolve().name}")
    return {str(tree.size): found.expected_tau(tree) for tree in family}


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """The model in float32 inside the block, and after it every weight in its own dtype with its own bits."""
    weights = [(weight, weight.dtype) for weight in model.parameters()]
    # Buffers are kept, not cast back: rotary frequencies are float32 also in a 16-bit model.
    buffers = [(part, name, kept) for part in model.modules() for name, kept in part.named_buffers(recurse=False)]
    model.float()
    try:
        yield
    finally:
        for weight, dtype in weights:
            weight.data = weight.data.to(dtype)
        for part, name, kept in buffers:
            setattr(part, name, kept)
