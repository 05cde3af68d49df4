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
@click.option("--ways", "chosen", metavar="NAME,NAME,...", help="Only these.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for records.jsonl and result.json. Resumes there.")
@json_option
def throughput(workload: str, limit: int, out: Path | None, as_json: bool, **given: Any) -> None:
    """Greedy decoding of the same prompts in several ways, in turns: by transformers plainly, with its prompt lookup,
    with a compiled static cache; by Medusa's dense verification and by specdeft, with the same heads and tree.

    \b
    specdeft eval throughput --limit 4
    specdeft eval throughput --batch 1,8,32 --compiled --out runs/throughput

    Prefill is apart: tokens per second count what comes after every prompt's first token. Exit code 1 if a way failed.
    """
    from specdeft.errors import SpecdeftError
    from specdeft.evaluate.workload import choose, read_workload, sha256

    items = choose(read_workload(workload), (), limit)

    import specdeft
    from specdeft.evaluate.provenance import provenance
    from specdeft.evaluate.records import line_by_line
    from specdeft.evaluate.throughput import table
    from specdeft.evaluate.throughput.run import Point, of_length, run
    from specdeft.evaluate.throughput.ways import ways
    from specdeft.generation.choose_tree import choose_tree
    from specdeft.generation.prompts import read_prompts

    heads = specdeft.DraftHeads.from_pretrained(heads_for(given["model"], given["heads"]))
    model, tokenizer = specdeft.load_model(given["model"], dtype=given["dtype"], device=given["device"])
    heads.to(model.device)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    tree, _ = choose_tree(given["tree"], heads, model.device, vocab_size)
    found = ways(heads, tree, given["compiled"])
    for name in given["chosen"].split(",") if given["chosen"] else ():
        if name not in found:
            raise SpecdeftError(f"no way {name!r}: there are {', '.join(found)} (some with --compiled only)")
    if given["chosen"]:
        found = {name: way for name, way in found.items() if name in given["chosen"].split(",")}
    bos = getattr(tokenizer, "bos_token_id", None)
    prompts, _ = read_prompts([item.prompt for item in items], tokenizer, bos, vocab_size)
    points = [
        Point(batch, length, prompts if length is None else [of_length(ids, length) for ids in prompts])
        for batch in given["batches"]
        for length in given["lengths"] or (None,)
    ]
    settings = {
        "model": given["model"], "heads": heads.config.base_model, "tree": tree.name, "nodes": tree.size,
        "workload": Path(workload).stem, "workload_sha256": sha256(workload), "prompts": len(prompts),
        "max_new_tokens": given["max_new_tokens"], "dtype": str(model.dtype).removeprefix("torch."),
    }  # fmt: skip
    records = run(
        model, found, points, given["max_new_tokens"], settings,
        None if out is None else out / "records.jsonl", lambda line: click.echo(line, err=True),
    )  # fmt: skip
    result = {"kind": "throughput", "settings": settings, "records": records, "provenance": provenance(model)}
    if out is not None:
        (out / "result.json").write_text(line_by_line(result) + "\n", encoding="utf-8")
    click.echo(line_by_line(result) if as_json else table.throughput(records))
    if any("error" in record for record in records):
        raise SystemExit(1)
