"""`specdeft heads`: what is on the shelf, what one set of heads says of itself, and measuring it again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from specdeft.cli.folders import heads_folder
from specdeft.cli.options import json_option, model_options


@click.group(short_help="List, describe and calibrate draft heads.")
def heads() -> None:
    """List and describe draft heads; measure heads again on held-out rows.

    \b
    specdeft heads ls
    specdeft heads show smollm2-135m-instruct-medusa
    specdeft heads calibrate my-heads --data data.npz --held-out 100
    """


@heads.command("ls", short_help="List the shipped heads.")
@json_option
def ls(as_json: bool) -> None:
    """List the shipped heads.

    \b
    specdeft heads ls
    """
    from specdeft.content import content_dir
    from specdeft.heads.files import read_config

    folders = sorted(path.parent for path in content_dir("heads").glob("*/config.json"))
    shelf = [(folder.name, read_config(folder)) for folder in folders]
    if as_json:
        click.echo(json.dumps([{"name": name, **dataclasses.asdict(config)} for name, config in shelf], indent=2))
        return
    name_column = max((len(name) for name, _ in shelf), default=4)
    click.echo(f"{'name':{name_column}}  kind    heads  blocks  base model")
    for name, config in shelf:
        click.echo(
            f"{name:{name_column}}  {config.kind:6}  {config.num_heads:5}  {config.num_layers:6}  {config.base_model}"
        )


@heads.command("show", short_help="Describe one set of heads.")
@click.argument("heads")
@json_option
def show(heads: str, as_json: bool) -> None:
    """Describe one set of heads: its sizes, its base, and its card with what was measured.

    \b
    specdeft heads show smollm2-135m-instruct-medusa
    """
    from specdeft.heads import DraftHeads

    loaded = DraftHeads.from_pretrained(heads)
    facts = dataclasses.asdict(loaded.config) | {
        "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
        "dtype": str(next(loaded.parameters()).dtype).removeprefix("torch."),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        click.echo(f"{key:21} {value}")
    card = heads_folder(heads) / "README.md"
    if card.is_file():
        click.echo()
        click.echo(card.read_text(encoding="utf-8").strip())


@heads.command("calibrate", short_help="Measure heads again on held-out rows.")
@click.argument("heads", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="From specdeft distill.")
@click.option("--held-out", type=click.IntRange(min=1), required=True, help="As given to specdeft train.")
@click.option("--seed", type=int, default=0, show_default=True, help="As given to specdeft train.")
@model_options
def calibrate(heads: Path, data: Path, held_out: int, seed: int, **given: Any) -> None:
    """Measure the heads in a folder on rows that their training held out; writes calibration.json there.

    \b
    specdeft heads calibrate my-heads --data data.npz --held-out 100
    """
    from specdeft.cli.measured import calibrate as measure
    from specdeft.cli.measured import split_rows
    from specdeft.heads import DraftHeads
    from specdeft.models import load_model

    unseen = split_rows(data, held_out, seed).unseen
    model, _ = load_model(given["model"], dtype=given["dtype"], device=given["device"])
    loaded = DraftHeads.from_pretrained(heads, device=model.device)
    for top, shares in measure(model, loaded, unseen, heads).items():
        click.echo(f"{top:6} " + "  ".join(f"{share:.3f}" for share in shares))
