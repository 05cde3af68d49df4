"""`specdeft heads`: what is on the shelf, and what one set of heads says of itself."""

import dataclasses
import json

import click

from specdeft.cli.options import json_option


@click.group(short_help="List and describe draft heads.")
def heads() -> None:
    """List and describe draft heads.

    \b
    specdeft heads ls
    specdeft heads show smollm2-135m-instruct-medusa
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
    card = _card(heads)
    if card:
        click.echo()
        click.echo(card.strip())


def _card(name_or_path: str) -> str | None:
    """The README beside the heads, if they lie in a folder here or on the shelf."""
    from pathlib import Path

    from specdeft.content import content_dir

    for folder in (Path(name_or_path), content_dir("heads") / name_or_path):
        if (folder / "README.md").is_file():
            return (folder / "README.md").read_text(encoding="utf-8")
    return None
