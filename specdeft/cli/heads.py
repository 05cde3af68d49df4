"""`specdeft heads`: the shelf, what one set of heads says of itself, measuring it again, other projects' formats."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from specdeft.cli.folders import heads_folder
from specdeft.cli.options import json_option, model_options

IMPORTS = ("auto", "fasterdecoding-v1", "fasterdecoding-v2", "medusa-2", "tgi", "vllm", "modelopt", "hydra")
EXPORTS = ("fasterdecoding-v1", "fasterdecoding-v2", "tgi", "vllm", "mlc")


@click.group(short_help="List, describe, calibrate, import and export draft heads.")
def heads() -> None:
    """List and describe draft heads; measure them again on held-out rows; exchange them with other projects.

    \b
    specdeft heads ls
    specdeft heads show smollm2-135m-instruct-medusa
    specdeft heads calibrate my-heads --data data.npz --held-out 100
    specdeft heads import FasterDecoding/medusa-vicuna-7b-v1.3 my-heads
    specdeft heads export smollm2-135m-instruct-medusa for-vllm --format vllm
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
    click.echo(f"{'name':{name_column}}  kind       heads  blocks  base model")
    for name, config in shelf:
        click.echo(
            f"{name:{name_column}}  {config.kind:9}  {config.num_heads:5}  {config.num_layers:6}  {config.base_model}"
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


@heads.command("import", short_help="Take over heads in another project's format.")
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "layout", type=click.Choice(IMPORTS), default="auto", show_default=True)
@click.option("--base", metavar="MODEL", help="The model they were made for. Default: what the checkpoint says.")
def import_(source: str, out: Path, layout: str, base: str | None) -> None:
    """Read heads from a file, a folder or a Hub repository and write them to the new folder OUT.

    \b
    specdeft heads import FasterDecoding/medusa-vicuna-7b-v1.3 my-heads

    The number of heads is that of the tensors. Pickled files are read as plain tensors or refused; code in them is
    never run. The base model is loaded once, to check that the heads fit and to name its weights. A Medusa-2 or
    ModelOpt checkpoint is its own base model: generate with that, not with the original.
    """
    from specdeft.heads.formats import heads_for, read_heads
    from specdeft.heads.formats.package import check_free
    from specdeft.models import load_model

    check_free(out)
    found = read_heads(source, layout)
    base = base or found.base
    if base is None:
        raise click.UsageError(f"{source} does not say which model its heads were made for: name it with --base")
    # half the memory of float32; names and comparisons of weights round to bfloat16 anyway
    model, _ = load_model(base, dtype="bfloat16", device="cpu")
    taken = heads_for(found.parts, model)
    taken.save_pretrained(out)
    ours = taken.config
    layer = "its output layer" if ours.lm_head == "shared" else "output layers of their own"
    click.echo(
        f"{out}: {ours.num_heads} {ours.kind} heads with {ours.num_layers} blocks each and {layer}, "
        f"for {ours.base_model} (read as {found.format})"
    )


@heads.command("export", short_help="Write heads in another project's format.")
@click.argument("heads")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "layout", type=click.Choice(EXPORTS), required=True)
@click.option(
    "--base", metavar="MODEL", help="Where to take a shared output layer from. Default: the heads' base model."
)
@click.option(
    "--dtype", metavar="DTYPE", help="float32, bfloat16 or float16. Default: the narrowest that loses nothing."
)
def export(heads: str, out: Path, layout: str, base: str | None, dtype: str | None) -> None:
    """Write HEADS to the new folder OUT, for another engine to load.

    \b
    specdeft heads export smollm2-135m-instruct-medusa for-vllm --format vllm

    Where the format has no way to share the base model's output layer, every head gets a copy of it. vllm is for
    vLLM 0.30 to 0.32, which draft a chain of the likeliest tokens.
    """
    from specdeft.heads import DraftHeads
    from specdeft.heads.formats import export_heads, needs_base
    from specdeft.heads.formats.package import check_free
    from specdeft.models import DTYPES, load_model

    if dtype is not None and dtype not in DTYPES:
        raise click.UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    check_free(out)
    ours = DraftHeads.from_pretrained(heads)
    model = None
    if needs_base(ours, layout):
        model, _ = load_model(base or ours.config.base_model, dtype="float32", device="cpu")
    export_heads(ours, out, layout, model, DTYPES[dtype] if dtype else None)
    for file in sorted(out.iterdir()):
        click.echo(f"{file} {file.stat().st_size:,} bytes")
