"""`specdeft tune`: measure this machine, once, for what its defaults should be."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specdeft.cli.devices import find_device
from specdeft.cli.numbers import numbers
from specdeft.cli.options import ChunkSize, heads_for, json_option, model_options


@click.group("tune", invoke_without_command=True, short_help="Measure this machine for its own best settings.")
@model_options
@click.option("--heads", metavar="HEADS", help="A shipped name or a folder. Default: those of the default model.")
@click.option("--batch", "batches", callback=numbers, metavar="B,B,...", help="Sequences at once. Default: 1,8,32.")
@click.option("--lengths", callback=numbers, metavar="L,L,...", help="Committed rows. Default: 512,4096.")
@click.option("--sizes", callback=numbers, metavar="N,N,...", help="Tree nodes. Default: 16,32,48,64,96,128.")
@click.option("--chunk-sizes", metavar="C,C,...", default="auto", show_default=True, help="Rows per chunk, or auto.")
@click.option("--compile", "compiled", is_flag=True, help="For compile=True: layers through torch.compile.")
@click.option("--seconds", type=click.FloatRange(min=0.001), default=0.3, show_default=True, help="Time per size.")
@click.option("--realised", type=click.FloatRange(0, 1), help="Share of the promised draft tokens to count on.")
@click.option("--out", type=click.Path(path_type=Path), help="The table's file. Default: the one that auto reads.")
@click.option("--export", type=click.Path(path_type=Path), help="Also write the chosen trees to this folder.")
@json_option
@click.pass_context
def tune(ctx: click.Context, **given: Any) -> None:
    """Measure this machine, and keep what suits it: by itself which tree pays, for tree="auto".

    \b
    specdeft tune
    specdeft tune --model my-model --heads my-heads --batch 1,8 --lengths 1024
    specdeft tune attention

    Whole rounds are timed for the best trees of the heads' calibration and for plain decoding, and the fastest tree of
    every batch and length is kept in this user's cache.
    """
    if ctx.invoked_subcommand is None:
        generation(**given)


def generation(
    model: str, heads: str | None, out: Path | None, export: Path | None, as_json: bool, **given: Any
) -> None:
    """Time trees for a model and its heads, and write the table that `tree="auto"` reads."""
    from specdeft.cli.folders import heads_folder
    from specdeft.errors import SpecdeftError
    from specdeft.evaluate.calibration import Calibration

    named = heads_for(model, heads)
    folder = heads_folder(named)
    calibration = Calibration.load(folder)
    if calibration is None:
        raise SpecdeftError(
            f"{folder} has no calibration.json, so what a tree would give is unknown: "
            "specdeft train writes it beside the heads (heads from elsewhere: give --tree by name instead of tuning)"
        )

    import specdeft
    from specdeft.evaluate import tuning
    from specdeft.evaluate.provenance import provenance
    from specdeft.generation.tuned import merged, read_table, table_path, write_table
    from specdeft.trees import best_family, save_family

    chunk_sizes = [ChunkSize().convert(each, None, None) for each in given["chunk_sizes"].split(",")]
    loaded, _ = specdeft.load_model(model, dtype=given["dtype"], device=given["device"])
    drafting = specdeft.DraftHeads.from_pretrained(named, device=loaded.device)
    drafting.check_fits(loaded)
    sizes = [size for size in given["sizes"] or tuning.SIZES if given["sizes"] or size <= 1 + len(calibration.counts)]
    if not sizes or min(sizes) < 2:
        raise SpecdeftError(f"expected sizes of at least 2 nodes, got {sizes}: a tree of 1 is plain decoding")
    family = best_family(calibration.counts, calibration.total, sizes, drafting.config.trees or folder.resolve().name)
    path = out or table_path(loaded, drafting, loaded.device, given["compiled"])
    timings = []
    for timing in tuning.tune(
        loaded,
        drafting,
        family,
        calibration,
        given["batches"] or tuning.BATCHES,
        given["lengths"] or tuning.LENGTHS,
        chunk_sizes,
        given["compiled"],
        given["seconds"],
        tuning.REALISED if given["realised"] is None else given["realised"],
    ):
        timings.append(timing)
        click.echo(timing.line(), err=True)
    found, where = tuning.best(timings), provenance(loaded)
    try:
        old = read_table(path, path.stat().st_mtime_ns) if path.is_file() else ()
    except SpecdeftError as error:
        click.echo(f"Warning: replaced: {error}", err=True)
        old = ()
    write_table(path, merged(old, found), where)
    if export is not None:
        export.mkdir(parents=True, exist_ok=True)
        chosen = {entry.tree: entry.tree for entry in found}
        source = f"specdeft tune: calibration of {folder.resolve().name}, timed on {where['device']}"
        save_family(chosen, export, source=source, about=f"fastest for {folder.resolve().name} on {where['device']}")
    if as_json:
        entries = [entry.content() | {"ratio": entry.ratio} for entry in found]
        measured = [asdict(timing) | {"tree": timing.tree.name, "nodes": timing.tree.size} for timing in timings]
        kept = {"kind": "generation", "path": str(path), "provenance": where, "entries": entries}
        click.echo(json.dumps(kept | {"timings": measured}, indent=1))
        return
    for entry in found:
        what = f"tree of {entry.tree.size}" if entry.ratio > 1 else f"plain (best tree: {entry.tree.size})"
        click.echo(f"batch {entry.batch}, {entry.length} tokens: {what}, {entry.ratio:.2f} of plain decoding's speed")
    click.echo(f"wrote {path}")


@tune.command("attention", short_help="The best chunk sizes of tree attention on this GPU.")
@click.option("--shape", "shapes", multiple=True, help="Heads of a model, or HqxHkvxD. Default: the known models.")
@click.option("--lengths", callback=numbers, metavar="L,L,...", help="Committed rows.")
@click.option("--nodes", callback=numbers, metavar="N,N,...", help="Tree nodes: 32, 64, 128, 256.")
@click.option("--batches", callback=numbers, metavar="B,B,...", help="Sequences at once.")
@click.option("--chunk-sizes", callback=numbers, metavar="C,C,...", help="Rows per chunk to try.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--device", metavar="DEVICE", help="cuda or cuda:N. Default: cuda.")
@click.option("--seconds", type=click.FloatRange(min=0.001), default=0.03, show_default=True, help="Time per size.")
@click.option("--out", type=click.Path(path_type=Path), help="The table's file. Default: this user's table of the GPU.")
@json_option
def attention(shapes: tuple[str, ...], out: Path | None, as_json: bool, **given: Any) -> None:
    """Time chunk sizes over a grid of shapes, and write the table that `chunk_size="auto"` reads.

    A size is written where it is at least 2 % faster than the rule that holds without a table. Entries of other shapes
    stay. Deleting the file brings the rule back.
    """
    import torch

    from specdeft.attention.chunk_table import read_table, user_table, write_table
    from specdeft.errors import SpecdeftError
    from specdeft.evaluate.attention import tune as grid
    from specdeft.evaluate.attention.shapes import SHAPES, find_shape
    from specdeft.evaluate.provenance import provenance

    device = find_device(given["device"])
    if device.type != "cuda":
        raise SpecdeftError("chunk sizes are of the GPU kernels: there is nothing to tune without a CUDA device.")
    where = provenance(SimpleNamespace(device=device, dtype=getattr(torch, given["dtype"])))
    points = []
    for point in grid.tune(
        [find_shape(name) for name in shapes] if shapes else [SHAPES["llama3-8b"], SHAPES["smollm2-135m"]],
        given["lengths"] or grid.LENGTHS,
        given["nodes"] or grid.NODES,
        given["batches"] or grid.BATCHES,
        given["chunk_sizes"] or grid.SIZES,
        getattr(torch, given["dtype"]),
        device,
        given["seconds"],
    ):
        points.append(point)
        click.echo(point.line(), err=True)
    path = out or user_table(where["device"])
    old = read_table(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else ()
    found = [point.best for point in points if point.best is not None]
    write_table(path, where["device"], grid.merged(old, found), where)
    if as_json:
        kept = {"kind": "chunk-sizes", "settings": {"seconds": given["seconds"]}, "provenance": where}
        click.echo(json.dumps(kept | {"points": [asdict(point) for point in points]}, indent=1))
    else:
        click.echo(f"{len(found)} of {len(points)} shapes have a better chunk size than the rule's: {path}")
