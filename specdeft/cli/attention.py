"""`specdeft eval attention`: tree attention beside its peers, on the same tensors in one run."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specdeft.cli.devices import find_device
from specdeft.cli.numbers import numbers
from specdeft.cli.options import json_option


@click.command("attention", short_help="Time tree attention beside its peers.")
@click.option("--preset", default="llama3-8b", show_default=True, help="Heads of a model, HqxHkvxD, paper or quick.")
@click.option("--lengths", callback=numbers, metavar="L,L,...", help="Committed rows. Default: what the preset has.")
@click.option("--nodes", callback=numbers, metavar="N,N,...", help="Tree nodes: 32, 64, 128, 256.")
@click.option("--methods", metavar="NAME,NAME,...", help="Default: all. `deft-flatten@512` has chunks of 512 rows.")
@click.option("--chunk-sizes", callback=numbers, metavar="C,C,...", help="The ablation's rows per chunk.")
@click.option("--data", type=click.Path(path_type=Path), help="DeFT's reasoning trees (preset paper).")
@click.option("--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Steps of each reasoning tree.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Default: bfloat16 on a GPU.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: cuda where there is one.")
@click.option("--seconds", type=click.FloatRange(min=0.001), default=0.1, show_default=True, help="Time per method.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for records, result, tables and plots. Resumes there."
)
@click.option("--from", "earlier", type=click.Path(path_type=Path), help="A result.json: its tables and plots again.")
@click.option("--profile", metavar="METHOD", help="Only launch a method, between a profiler's marks.")
@click.option("--profiled", multiple=True, metavar="METHOD=CSV", help="Read what Nsight Compute wrote of --profile.")
@json_option
def attention(preset: str, out: Path | None, as_json: bool, **given: Any) -> None:
    """Every method over every workload of a preset: checked against exact attention, then timed.

    \b
    specdeft eval attention --preset llama3-8b --out runs/llama3-8b
    specdeft eval attention --preset paper --data DeFT/dataset/generation --out runs/paper
    specdeft eval attention --preset quick --device cpu
    specdeft eval attention --from runs/llama3-8b/result.json --out plots

    A time is the median of replays of a CUDA graph over several sets of keys and values, which together exceed the L2
    cache. The floor is the larger of bytes over measured bandwidth and operations over the measured rate of a matrix
    product. On a CPU times say nothing about a GPU. Exit code 1 if a method was wrong or failed.
    """
    if given["earlier"] is not None:
        _show(_read(given["earlier"]), out, as_json)
        return
    import torch

    from specdeft.evaluate.attention import presets, profile
    from specdeft.evaluate.attention.methods import METHODS, find_method
    from specdeft.evaluate.attention.run import Run, run
    from specdeft.evaluate.provenance import provenance

    device = find_device(given["device"])
    dtype = getattr(torch, given["dtype"] or ("bfloat16" if device.type == "cuda" else "float32"))
    where = provenance(SimpleNamespace(device=device, dtype=dtype))
    if given["profiled"]:
        _finish(profile.result(given["profiled"], where), out, as_json)
        return
    if preset == presets.PAPER:
        if given["data"] is None:
            raise click.UsageError("the preset paper replays reasoning trees: give their folder with --data")
        cells = presets.paper(given["data"], steps=given["steps"])
    elif preset == presets.QUICK:
        cells = presets.quick()
    else:
        cells = presets.grid(preset, given["lengths"], given["nodes"], given["chunk_sizes"] or None)
    if given["profile"]:
        profile.launch(cells[0], find_method(given["profile"]).name, dtype, device)
        return
    if device.type == "cpu":
        click.echo("on a CPU only outputs and tables mean something: no time here says anything about a GPU", err=True)
    asked = tuple(given["methods"].split(",")) if given["methods"] else None
    methods = asked or presets.methods_by_default(preset, tuple(METHODS))
    settings = {"preset": preset, "dtype": where["dtype"], "device": where["device"], "seconds": given["seconds"]}
    done = run(
        Run(cells, methods, dtype, device, given["seconds"], asked is not None),
        settings,
        None if out is None else out / "records.jsonl",
        lambda line: click.echo(line, err=True),
    )
    result = {"kind": "attention", "settings": settings, **done, "provenance": where}
    _finish(result, out, as_json)
    outcomes = Counter("bad" if "error" in record or record.get("wrong") else "good" for record in result["records"])
    if outcomes["bad"]:
        raise SystemExit(1)


def _read(path: Path) -> dict[str, Any]:
    from specdeft.errors import SpecdeftError

    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["kind"] in ("attention", "attention-profile") and result["provenance"]:
            return dict(result)
    except (ValueError, KeyError, TypeError):
        pass
    raise SpecdeftError(f"{path} is no result of specdeft eval attention: give the result.json of its --out folder")


def _finish(result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from specdeft.evaluate.records import line_by_line

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(line_by_line(result) + "\n", encoding="utf-8")
    _show(result, out, as_json)


def _show(result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from specdeft.errors import SpecdeftError
    from specdeft.evaluate.attention.plots import draw
    from specdeft.evaluate.attention.report import printed
    from specdeft.evaluate.records import line_by_line

    text = printed(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tables.md").write_text(text, encoding="utf-8")
        try:
            for path in draw(result, out) if "records" in result else ():
                click.echo(f"wrote {path}", err=True)
        except SpecdeftError as error:  # no matplotlib: everything else is written
            click.echo(str(error), err=True)
    click.echo(line_by_line(result) if as_json else text)
