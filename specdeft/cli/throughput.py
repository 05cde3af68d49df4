"""`specdeft eval throughput`: tokens per second beside plain, compiled and other speculative decoding."""

from pathlib import Path
from typing import Any

import click

from specdeft.cli.numbers import numbers
from specdeft.cli.options import drafting_options, heads_for, json_option, model_options


@click.command("throughput", short_help="Tokens per second beside other ways to decode.")
@model_options
@drafting_options
@click.option("--workload", default="mixed", show_default=True, help="A shipped name or a JSONL file.")
@click.option("--limit", type=click.IntRange(min=1), default=8, show_default=True, help="So many prompts of it.")
@click.option("--batch", "batches", callback=numbers, default="1", show_default=True, metavar="B,B,...")
@click.option("--prompt-tokens", "lengths", callback=numbers, metavar="L,L,...", help="Prompts of these lengths.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--compiled", is_flag=True, help="Also the ways through torch.compile; minutes the first time.")
@click.option(
    "--shape", metavar="SHAPE", help="A model of random weights instead: llama3-8b, ..., or a folder with config.json."
)
@click.option(
    "--replay", metavar="RECORD", help="With --shape: tokens per pass, as a mean or a file of DeFT's accept lists."
)
@click.option("--ways", "chosen", metavar="NAME,NAME,...", help="Only these.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for records.jsonl and result.json. Resumes there.")
@json_option
def throughput(out: Path | None, as_json: bool, **given: Any) -> None:
    """Greedy decoding of the same prompts in several ways, in turns: by transformers plainly, with its prompt lookup,
    with a compiled static cache; by Medusa's dense verification and by specdeft, with the same heads and tree.

    \b
    specdeft eval throughput --limit 4
    specdeft eval throughput --batch 1,8,32 --compiled --out runs/throughput
    specdeft eval throughput --shape llama3-8b --replay 2.5 --tree deft-64 --prompt-tokens 1024,32768 --compiled

    With --shape nothing is loaded: weights and prompts are random, and specdeft keeps as many tokens per pass as
    --replay says, after all the work of finding out.

    Prefill is apart: tokens per second count what comes after every prompt's first token. Exit code 1 if a way failed.
    """
    if (given["shape"] is None) != (given["replay"] is None):
        raise click.UsageError("--shape and --replay go together: random weights guess nothing that could be accepted.")

    from specdeft.errors import SpecdeftError
    from specdeft.evaluate.provenance import provenance
    from specdeft.evaluate.records import line_by_line
    from specdeft.evaluate.throughput import table
    from specdeft.evaluate.throughput.run import Point, of_length, run

    model, ways, prompts, settings = _replayed(**given) if given["shape"] else _real(**given)
    chosen = given["chosen"].split(",") if given["chosen"] else list(ways)
    for name in chosen:
        if name not in ways:
            raise SpecdeftError(f"no way {name!r}: there are {', '.join(ways)} (some with --compiled only)")
    ways = {name: way for name, way in ways.items() if name in chosen}
    points = [
        Point(batch, length, prompts if length is None else [of_length(ids, length) for ids in prompts])
        for batch in given["batches"]
        for length in given["lengths"] or (None,)
    ]
    settings |= {
        "prompts": len(prompts), "max_new_tokens": given["max_new_tokens"],
        "dtype": str(model.dtype).removeprefix("torch."),
    }  # fmt: skip
    records = run(
        model, ways, points, given["max_new_tokens"], settings, None if out is None else out / "records.jsonl",
        lambda line: click.echo(line, err=True), compare="replay" not in settings,
    )  # fmt: skip
    kind = "replay" if "replay" in settings else "throughput"
    result = {"kind": kind, "settings": settings, "records": records, "provenance": provenance(model)}
    if out is not None:
        (out / "result.json").write_text(line_by_line(result) + "\n", encoding="utf-8")
    click.echo(line_by_line(result) if as_json else table.throughput(records))
    if any("error" in record for record in records):
        raise SystemExit(1)


def _real(*, model: str, tree: Any, workload: str, limit: int, compiled: bool, **given: Any) -> tuple[Any, ...]:
    """Model, ways, prompts, and what to record of them: real weights, real heads, real prompts."""
    from specdeft.evaluate.workload import choose, read_workload, sha256

    items = choose(read_workload(workload), (), limit)

    import specdeft
    from specdeft.evaluate.throughput.ways import ways
    from specdeft.generation.choose_tree import choose_tree
    from specdeft.generation.prompts import read_prompts

    heads = specdeft.DraftHeads.from_pretrained(heads_for(model, given["heads"]))
    target, tokenizer = specdeft.load_model(model, dtype=given["dtype"], device=given["device"])
    heads.to(target.device)
    vocab_size = target.get_output_embeddings().weight.shape[0]
    drafted, _ = choose_tree(tree, heads, target.device, vocab_size)
    bos = getattr(tokenizer, "bos_token_id", None)
    prompts, _ = read_prompts([item.prompt for item in items], tokenizer, bos, vocab_size)
    settings = {
        "model": model, "heads": heads.config.base_model, "tree": "auto" if tree == "auto" else drafted.name,
        "nodes": drafted.size, "workload": Path(workload).stem, "workload_sha256": sha256(workload),
    }  # fmt: skip
    return target, ways(heads, drafted, compiled, auto=tree == "auto"), prompts, settings


def _replayed(*, shape: str, replay: str, tree: Any, limit: int, compiled: bool, **given: Any) -> tuple[Any, ...]:
    """The same of a shape: random weights, untrained heads, random tokens, and a record of what was accepted."""
    from functools import partial

    from specdeft.evaluate.throughput.replay import by_replay, read_accepted
    from specdeft.evaluate.throughput.shaped import random_heads, random_model, random_prompts
    from specdeft.evaluate.throughput.ways import LOOKUP, ways
    from specdeft.models import device_and_dtype
    from specdeft.trees import Tree

    accepted = read_accepted(replay)
    drafted = Tree.load("deft-64" if tree == "auto" else f"deft-{tree}" if isinstance(tree, int) else tree)
    device, dtype = device_and_dtype(given["device"], given["dtype"])
    target = random_model(shape, dtype, device)
    heads = random_heads(target, max(1, drafted.max_depth))
    found = ways(heads, drafted, compiled, partial(by_replay, accepted=accepted))
    del found[LOOKUP]  # it would look up random tokens
    settings = {
        "model": Path(shape).name, "tree": drafted.name, "nodes": drafted.size, "heads": f"{heads.num_heads} untrained",
        "replay": Path(replay).stem if Path(replay).exists() else replay,
    }  # fmt: skip
    return target, found, random_prompts(target, limit, max(given["lengths"] or (1024,))), settings
