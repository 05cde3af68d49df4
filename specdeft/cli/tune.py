"""`specdeft tune`: measure this machine, once, for what its defaults should be."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specdeft.cli.devices import find_device
from specdeft.cli.numbers import numbers
from specdeft.cli.options import json_option


@click.group("tune", short_help="Measure this machine for its own best settings.")
def tune() -> None:
    """Measure this machine, and keep what suits it.

    \b
    specdeft tune attention
    """


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
