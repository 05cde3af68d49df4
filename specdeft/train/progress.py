"""What a training run says while it goes on: one line per look, and the same numbers for trackers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

BAR = 20  # characters


def line(
    progress: float,
    step: int,
    epoch: float,
    losses: Sequence[float],
    accuracy: dict[int, list[float]],
    rate: float,
    labels_per_second: float,
    seconds: float,
) -> str:
    """A bar, then step, epoch, loss per depth, top-1/top-5 per depth, learning rate and speed."""
    done = round(BAR * min(progress, 1.0))
    left = seconds * (1 / progress - 1) if progress > 0 else 0.0
    shown = " ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(accuracy[1], accuracy[5], strict=True))
    return (
        f"[{'#' * done}{'.' * (BAR - done)}] {progress:4.0%} step {step} epoch {epoch:.2f} "
        f"loss {' '.join(f'{value:.3f}' for value in losses)} top1/top5 {shown} lr {rate:.1e} "
        f"{labels_per_second:.0f} labels/s {seconds:.0f} s, {max(left, 0.0):.0f} s to go"
    )


def numbers(losses: Sequence[float], accuracy: dict[int, list[float]], rate: float) -> dict[str, float]:
    """The same for trackers: loss/1, top1/1, top5/1 for depth 1 and so on, loss and lr."""
    values = {"loss": sum(losses), "lr": rate}
    for depth, value in enumerate(losses, start=1):
        values[f"loss/{depth}"] = value
        values |= {f"top{top}/{depth}": shares[depth - 1] for top, shares in accuracy.items()}
    return values


def to_stderr(text: str) -> None:
    """Print; on a terminal a progress line is overwritten by what follows it."""
    bar = text.startswith("[") and sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="" if bar else "\n", file=sys.stderr, flush=True)
