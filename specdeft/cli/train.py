"""`specdeft train`: draft heads for a frozen model, measured on rows that were held out."""

import json
from pathlib import Path
from typing import Any

import click

from specdeft.cli.options import chat_template_option, json_option, model_options, set_chat_template


@click.command(short_help="Train draft heads on a frozen model.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="A file from specdeft distill.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the heads.")
@model_options
@chat_template_option
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
    data: Path,
    out: Path,
    start: str | None,
    held_out: int | None,
    save_dtype: str,
    chat_template: Path | None,
    as_json: bool,
    **given: Any,
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

    from specdeft.cli.measured import calibrate, split_rows
    from specdeft.evaluate.provenance import provenance
    from specdeft.heads import DraftHeads
    from specdeft.models import DTYPES, load_model
    from specdeft.train import train as fit

    rows = split_rows(data, held_out, given["seed"])
    kept = len(rows.unseen)
    click.echo(
        f"{len(rows.seen)} rows to train on, {kept} held out; "
        f"{rows.looped} tokens of answers that only repeat themselves are left out",
        err=True,
    )
    model, tokenizer = load_model(given.pop("model"), dtype=given.pop("dtype"), device=given.pop("device"))
    set_chat_template(tokenizer, chat_template)
    heads = fit(
        model, tokenizer, rows.seen, heads=DraftHeads.from_pretrained(start) if start else None, out=out, **given
    )
    heads = heads.to(DTYPES[save_dtype])
    heads.save_pretrained(out)
    shares = calibrate(model, heads, rows.unseen, out)
    recipe = {
        "kind": "training",
        "settings": given | {"held_out": kept, "started_from": start, "save_dtype": save_dtype},
        "data": rows.seen.manifest
        | {"loop_tokens_left_out": rows.looped, "answer_tokens_trained_on": rows.seen.answer_tokens},
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
