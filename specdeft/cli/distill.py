"""`specdeft distill`: training data that the model writes itself."""

import json
from pathlib import Path
from typing import Any

import click

from specdeft.cli.options import chat_template_option, json_option, model_options, set_chat_template


@click.command(short_help="Let the model write training data for its heads.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The .npz file to write.")
@model_options
@chat_template_option
@click.option("--turns", type=click.IntRange(min=1), default=10_000, show_default=True, help="User turns to sample.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds for the whole command.")
@click.option("--max-turn-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=512, show_default=True, help="Per answer.")
@click.option(
    "--temperature", type=float, default=1.0, show_default=True, help="Of the user turns; answers are greedy."
)
@click.option("--slots", type=click.IntRange(min=1), help="Rows decoded at once. Default: what fits.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def distill(out: Path, chat_template: Path | None, as_json: bool, **given: Any) -> None:
    """Sample user turns from the chat template's own beginning, answer each greedily, keep the token ids.

    \b
    specdeft distill --out data.npz --turns 200 --time-limit 300
    """
    from specdeft.models import load_model
    from specdeft.train import distill as write_data

    model, tokenizer = load_model(given.pop("model"), dtype=given.pop("dtype"), device=given.pop("device"))
    set_chat_template(tokenizer, chat_template)
    data = write_data(model, tokenizer, **given)
    data.save(out)
    if as_json:
        click.echo(json.dumps(data.manifest, indent=2))
    else:
        click.echo(f"{out}: {len(data)} rows, {data.answer_tokens} answer tokens")
