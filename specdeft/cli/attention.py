"""`specdeft eval attention`: tree attention beside its peers, on the same tensors in one run."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specdeft.cli.numbers import numbers
from specdeft.cli.options import json_option


@click.command("attention", short_help="Time tree attention beside its peers.")
@click.option("--preset", default="llama3-8b", show_default=True, help="Heads of a model, HqxHkvxD, or paper.")
@click.option("--lengths", callback=numbers, metavar="L,L,...", help="Committed rows. Default: what the preset has.")
@click.option("--nodes", callback=numbers, metavar="N,N,...", help="Tree nodes: 32, 64, 128, 256.")
@click.option("--methods", metavar="NAME,NAME,...", help="Default: all. `deft-flatten@512` has chunks of 512 rows.")
@click.option("--chunk-sizes", callback=numbers, metavar="C,C,...", help="The ablation's rows per chunk.")
@click.option("--data", type=click.Path(path_type=Path), help="DeFT's reasoning trees (preset paper).")
@click.option("--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Steps of each reasoning tree.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Default: bfloat16 on a GPU.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: cuda where there is one.")
@click.option("--seconds", type=click.FloatRange(min=0.001), default=0.1, show_default=True, help="Time per method.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for records.jsonl and result.json. Resumes there.")
@click.option("--profile", metavar="METHOD", help="Only launch a method, between a profiler's marks.")
@click.option("--profiled", multiple=True, metavar="METHOD=CSV", help="Read what Nsight Compute wrote of --profile.")
@json_option
def attention(preset: str, out: Path | None, as_json: bool, **given: Any) -> None:
    """Every method over every workload of a preset: checked against exact attention, then timed.

    \b
    specdeft eval attention --preset llama3-8b --out runs/llama3-8b
    specdeft eval attention --preset paper --data DeFT/dataset/generation --out runs/paper
    specdeft eval attention --preset 4x2x16 --lengths 100 --nodes 32 --device cpu

    A time is the median of replays of a CUDA graph over several sets of keys and values, which together exceed the L2
    cache. The floor is the larger of bytes over measured bandwidth and operations over the measured rate of a matrix
    product. On a CPU times say nothing about a GPU. Exit code 1 if a method was wrong or failed.
    """
    import torch

    from specdeft.evaluate.attention import presets, profile
    from specdeft.evaluate.attention.methods import METHODS, find_method
    from specdeft.evaluate.attention.run import Run, run
    from specdeft.evaluate.provenance import provenance

    device = torch.device(given["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, given["dtype"] or ("bfloat16" if device.type == "cuda" else "float32"))
    where = provenance(SimpleNamespace(device=device, dtype=dtype))
    if given["profiled"]:
        _finish(profile.result(given["profiled"], where), out, as_json)
        return
    if preset == presets.PAPER:
        if given["data"] is None:
            raise click.UsageError("the preset paper replays reasoning trees: give their folder with --data")
        cells = presets.paper(given["data"], steps=given["steps"])
    else:
        cells = presets.grid(preset, given["lengths"], given["nodes"], given["chunk_sizes"] or None)
    if given["profile"]:
        profile.launch(cells[0], find_method(given["profile"]).name, dtype, device)
        return
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


def _finish(result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from specdeft.evaluate.attention.report import printed
    from specdeft.evaluate.records import line_by_line

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(line_by_line(result) + "\n", encoding="utf-8")
    click.echo(line_by_line(result) if as_json else printed(result))
