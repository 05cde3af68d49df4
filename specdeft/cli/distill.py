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
@click.option("--prompts", metavar="SOURCE", help="Prompts to answer: .jsonl, .json, .txt, or a data set.")
@click.option("--split", default="train", show_default=True, help="Of the data set.")
@click.option("--turns", type=click.IntRange(min=1), default=10_000, show_default=True, help="User turns to sample.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds for the whole command.")
@click.option("--max-turn-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=512, show_default=True, help="Per answer.")
@click.option(
    "--temperature", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Of user turns."
)
@click.option(
    "--answer-temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of answers; 0: greedy."
)
@click.option("--slots", type=click.IntRange(min=1), help="Rows decoded at once. Default: what fits.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def distill(
    out: Path, chat_template: Path | None, as_json: bool, prompts: str | None, split: str, **given: Any
) -> None:
    """Let the model answer prompts and keep the token ids. Without --prompts it also writes the user turns.

    \b
    specdeft distill --out data.npz --turns 200 --time-limit 300
    specdeft distill --out data.npz --prompts questions.jsonl

    Finished rows are kept in OUT.parts as they come: after Ctrl-C the same command goes on from there.
    """
    from specdeft.errors import SpecdeftError
    from specdeft.models import load_model
    from specdeft.train import distill as write_data
    from specdeft.train import journal
    from specdeft.train.prompts import read_prompts

    if out.exists():
        raise SpecdeftError(f"{out} is there already: give another --out, or remove it")
    parts = out.with_name(f"{out.name}.parts")
    asked, skipped = (None, None) if prompts is None else read_prompts(prompts, split)
    for line in [] if skipped is None else skipped.lines():
        click.echo(f"{prompts}: {line}", err=True)
    model, tokenizer = load_model(given.pop("model"), dtype=given.pop("dtype"), device=given.pop("device"))
    set_chat_template(tokenizer, chat_template)
    try:
        data = write_data(model, tokenizer, prompts=asked, journal=parts, **given)
    except KeyboardInterrupt:
        click.echo(f"stopped: finished rows are in {parts}, the same command goes on from there", err=True)
        raise SystemExit(130) from None
    if skipped is not None:
        data.manifest.update(source=str(prompts), skipped=skipped.counts)
    data.save(out)
    journal.remove(parts)
    if as_json:
        click.echo(json.dumps(data.manifest, indent=2))
    else:
        click.echo(f"{out}: {len(data)} rows, {data.answer_tokens} answer tokens")
