"""`specdeft train`: draft heads for a frozen model, measured on rows that were held out."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdeft.cli.options import chat_template_option, json_option, model_options, set_chat_template

if TYPE_CHECKING:
    from specdeft.heads import DraftHeads
    from specdeft.train import TokenData

positive = click.FloatRange(min=0, min_open=True)


@click.command(short_help="Train draft heads on a frozen model.")
@click.option("--data", metavar="SOURCE", required=True, help="From specdeft distill, or .jsonl, .json, a data set.")
@click.option("--split", default="train", show_default=True, help="Of the data set.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the heads.")
@model_options
@chat_template_option
@click.option("--heads", "start", metavar="HEADS", help="Go on from these heads instead of new ones.")
@click.option("--kind", type=click.Choice(["medusa", "hydra", "recurrent"]), default="medusa", show_default=True)
@click.option("--num-heads", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--num-layers", type=click.IntRange(min=1), default=1, show_default=True, help="Blocks per head.")
@click.option("--lm-head", type=click.Choice(["shared", "own"]), default="shared", show_default=True)
@click.option("--draft-vocab-size", type=click.IntRange(min=1), help="Guess only so many tokens, the commonest ones.")
@click.option("--prefix", is_flag=True, help="Hidden states pass through an attention layer of the heads' own first.")
@click.option("--epochs", type=positive, default=2.0, show_default=True)
@click.option("--tokens", "max_tokens", type=click.IntRange(min=1), help="Answer tokens to train on, at most.")
@click.option("--steps", "max_steps", type=click.IntRange(min=1), help="Steps, at most.")
@click.option("--time-limit", type=positive, help="Seconds of training, at most.")
@click.option("--max-length", type=click.IntRange(min=2), help="Tokens per row. Default: the model's positions.")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=32_768, show_default=True, help="Per process.")
@click.option("--learning-rate", "--lr", type=positive, default=1e-3, show_default=True)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--clip", type=positive, default=1.0, show_default=True, help="Largest norm of the gradient.")
@click.option("--depth-decay", type=positive, default=0.8, show_default=True, help="Weight of each next depth's loss.")
@click.option("--depth-weights", metavar="W,W,...", help="One weight per depth instead.")
@click.option("--ce", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Weight of cross-entropy.")
@click.option(
    "--kl", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Of divergence from the model."
)
@click.option("--lk", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of -log(acceptance).")
@click.option("--bf16/--no-bf16", default=None, help="Heads in bfloat16. Default: on a GPU.")
@click.option("--compile", is_flag=True, help="Run the loss through torch.compile.")
@click.option("--keep-states", is_flag=True, help="Run the model over each row once: faster from the second epoch.")
@click.option("--resume", is_flag=True, help="Go on where training into OUT was stopped.")
@click.option("--save-every", type=positive, default=60.0, show_default=True, help="Seconds between checkpoints.")
@click.option("--log-with", multiple=True, metavar="TRACKER", help="tensorboard, wandb, ... May be repeated.")
@click.option(
    "--save-dtype", type=click.Choice(["bfloat16", "float16", "float32", "int8"]), default="bfloat16", show_default=True
)
@click.option("--held-out", type=click.IntRange(min=1), help="Rows kept for measuring. Default: a twentieth.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def train(
    data: str,
    split: str,
    out: Path,
    start: str | None,
    held_out: int | None,
    save_dtype: str,
    chat_template: Path | None,
    depth_weights: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train heads; write them, what they cost and how well they guess to a folder.

    \b
    specdeft distill --out data.npz --turns 200 --time-limit 300
    specdeft train --data data.npz --out my-heads --epochs 1
    accelerate launch --num_processes 2 -m specdeft train --data data.npz --out my-heads

    The folder holds config.json, heads.safetensors, README.md, recipe.json (command, settings, accuracy per depth),
    calibration.json (how often each rank path held) and trees/ built from it. Ctrl-C saves; --resume goes on.
    """
    from specdeft.cli.measured import split_rows
    from specdeft.heads import DraftHeads
    from specdeft.models import DTYPES, load_model
    from specdeft.train import train as fit
    from specdeft.train.workers import launched, main_process, place_of

    if data.endswith(".npz") and not Path(data).is_file():
        raise FileNotFoundError(2, "no such file", data)
    given["depth_weights"] = _numbers(depth_weights)
    device = given.pop("device") if launched() == 1 else place_of(given.pop("device"))
    model, tokenizer = load_model(given.pop("model"), dtype=given.pop("dtype"), device=device)
    set_chat_template(tokenizer, chat_template)
    rows = split_rows(_read(data, split, model, tokenizer), held_out, given["seed"])
    _say(
        f"{len(rows.seen)} rows to train on, {len(rows.unseen)} held out; "
        f"{rows.looped} tokens of answers that only repeat themselves are left out"
    )
    _say(f"the first answer, learnt from its second token on: {_shown(rows.seen, tokenizer)!r}")
    began = time.monotonic()
    try:
        heads = fit(
            model, tokenizer, rows.seen, heads=DraftHeads.from_pretrained(start) if start else None, out=out, **given
        )
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if not main_process():
        return
    seconds = time.monotonic() - began
    if save_dtype == "int8":
        heads.save_pretrained(out, storage="int8")
        heads = DraftHeads.from_pretrained(out, device=model.device)  # measured as they will be used
    else:
        heads = heads.to(DTYPES[save_dtype])
        heads.save_pretrained(out)
    recipe: dict[str, Any] = {
        "kind": "training",
        "settings": given | {"held_out": len(rows.unseen), "started_from": start, "save_dtype": save_dtype},
        "data": rows.seen.manifest
        | {"loop_tokens_left_out": rows.looped, "answer_tokens_trained_on": rows.seen.answer_tokens},
        "seconds": seconds,
        "processes": launched(),
    }
    recipe |= _measure(model, heads, rows.unseen, out)
    _write(out, recipe, heads)
    if as_json:
        click.echo(json.dumps(recipe, indent=2))
        return
    click.echo(f"{out}: held-out accuracy per depth")
    for top, per_depth in recipe["accuracy"].items():
        click.echo(f"{top:6} " + "  ".join(f"{share:.3f}" for share in per_depth))
    click.echo("tokens per pass, by nodes: " + "  ".join(f"{size}: {tau:.2f}" for size, tau in recipe["tau"].items()))


def _read(source: str, split: str, model: Any, tokenizer: Any) -> "TokenData":
    """Rows of a distilled file, or of text in any format that training reads."""
    from specdeft.train import TokenData
    from specdeft.train.chat import end_ids
    from specdeft.train.conversations import read_conversations

    if source.endswith(".npz"):
        return TokenData.load(source)
    vocab_size = model.config.get_text_config().vocab_size
    found, skipped = read_conversations(source, tokenizer, vocab_size, end_ids(model), split)
    for line in skipped.lines():
        _say(f"{source}: {line}")
    return found


def _measure(model: Any, heads: "DraftHeads", unseen: "TokenData", out: Path) -> dict[str, Any]:
    from specdeft.cli.measured import calibrate, fit_trees
    from specdeft.evaluate.provenance import provenance

    return {"accuracy": calibrate(model, heads, unseen, out), "tau": fit_trees(out), "provenance": provenance(model)}


def _write(out: Path, recipe: dict[str, Any], heads: "DraftHeads") -> None:
    """recipe.json, and README.md unless somebody wrote one."""
    from specdeft.train.card import MARK, card

    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    readme = out / "README.md"
    if not readme.is_file() or readme.read_text(encoding="utf-8").startswith(MARK):
        readme.write_text(card(out.resolve().name, recipe, asdict(heads.config)), encoding="utf-8")


def _say(text: str) -> None:
    from specdeft.train.workers import main_process

    if main_process():
        click.echo(text, err=True)


def _shown(data: "TokenData", tokenizer: Any) -> str:
    """The beginning of the first answer, so that a wrong mask is seen at once."""
    return str(tokenizer.decode(data.row(0)[data.answer_start[0] :].tolist()))[:200]


def _numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers such as 1,0.8,0.6, got {text!r}") from None
