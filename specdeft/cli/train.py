"""`specdeft train`: draft heads for a frozen model, measured on rows that were held out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdeft.cli.options import json_option, model_options

if TYPE_CHECKING:
    from specdeft.heads import DraftHeads
    from specdeft.train import TokenData

MEASURED_POSITIONS = 200_000  # enough for three digits of the rarest path in a tree of 256


@click.command(short_help="Train draft heads on a frozen model.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="A file from specdeft distill.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the heads.")
@model_options
@click.option("--heads", "start", metavar="HEADS", help="Go on from these heads instead of new ones.")
@click.option("--num-heads", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--num-layers", type=click.IntRange(min=1), default=1, show_default=True, help="Blocks per head.")
@click.option("--lm-head", type=click.Choice(["shared", "own"]), default="shared", show_default=True)
@click.option("--epochs", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True)
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds of training.")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=32_768, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), default=1e-3, show_default=True)
@click.option("--depth-decay", type=float, default=0.8, show_default=True, help="Weight of each next depth's loss.")
@click.option("--ce", type=float, default=1.0, show_default=True, help="Weight of cross-entropy with the answer.")
@click.option("--kl", type=float, default=1.0, show_default=True, help="Weight of the divergence from the model.")
@click.option("--compile", is_flag=True, help="Run the loss through torch.compile.")
@click.option(
    "--save-dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True
)
@click.option("--held-out", type=click.IntRange(min=1), help="Rows kept for measuring. Default: a twentieth.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def train(
    data: Path, out: Path, start: str | None, held_out: int | None, save_dtype: str, as_json: bool, **given: Any
) -> None:
    """Train heads; write them, what they cost and how well they guess to a folder.

    \b
    specdeft distill --out data.npz --turns 200 --time-limit 300
    specdeft train --data data.npz --out my-heads --epochs 1

    The folder holds config.json, heads.safetensors, recipe.json (command, settings, accuracy per depth) and
    calibration.json (how often each rank path held, from which trees are built: specdeft trees search).
    """
    if not data.is_file():
        raise FileNotFoundError(2, "no such file", str(data))

    from specdeft.evaluate.provenance import provenance
    from specdeft.heads import DraftHeads
    from specdeft.models import DTYPES, load_model
    from specdeft.train import TokenData
    from specdeft.train import train as fit
    from specdeft.train.loops import cut_loops

    rows, looped = cut_loops(TokenData.load(data))
    click.echo(f"{len(rows)} rows; {looped} tokens of answers that only repeat themselves are left out", err=True)
    model, tokenizer = load_model(given.pop("model"), dtype=given.pop("dtype"), device=given.pop("device"))
    kept = held_out or max(len(rows) // 20, 1)
    seen, unseen = rows.split(kept, seed=given["seed"])
    heads = fit(model, tokenizer, seen, heads=DraftHeads.from_pretrained(start) if start else None, out=out, **given)
    heads = heads.to(DTYPES[save_dtype])
    heads.save_pretrained(out)
    shares = calibrate(model, heads, unseen, out)
    recipe = {
        "kind": "training",
        "settings": given | {"held_out": kept, "started_from": start, "save_dtype": save_dtype},
        "data": rows.manifest | {"loop_tokens_left_out": looped, "answer_tokens_trained_on": seen.answer_tokens},
        "accuracy": shares,
        "provenance": provenance(model),
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(recipe, indent=2))
        return
    click.echo(f"{out}: held-out accuracy per depth")
    for top, per_depth in shares.items():
        click.echo(f"{top:6} " + "  ".join(f"{share:.3f}" for share in per_depth))


def calibrate(model: Any, heads: "DraftHeads", unseen: "TokenData", out: Path) -> dict[str, list[float]]:
    """Measure heads on held-out rows: writes calibration.json to `out`, returns top-k accuracy per depth.

    The model is turned to float32 for good: in 16 bits many logits are equal, and a rank among equals says nothing.
    """
    from specdeft.evaluate.calibration import Calibration
    from specdeft.train import accuracy, measure_ranks

    ranks, step = measure_ranks(model.float(), heads, unseen, max_positions=MEASURED_POSITIONS)
    source = f"passes on {len(unseen)} held-out self-distilled answers, {len(ranks)} positions"
    Calibration.from_ranks(ranks, step, source).save(out)
    return {f"top{top}": shares for top, shares in accuracy(ranks).items()}
