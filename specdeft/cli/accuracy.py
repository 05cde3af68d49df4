"""`specdeft eval accuracy`: relative error of attention per dtype and method, and perplexity of a decoded text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specdeft.cli.devices import find_device
from specdeft.cli.numbers import numbers
from specdeft.cli.options import MODEL, drafting_options, heads_for, json_option

PROMPT = "Write a long story about a lighthouse keeper who learns to repair clocks."
DTYPES = ("float32", "float16", "bfloat16")


def dtypes_named(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """float32,bfloat16 as names, each once; () where nothing was given."""
    names = tuple(dict.fromkeys(value.split(","))) if value else ()
    for name in names:
        if name not in DTYPES:
            raise click.BadParameter(f"expected some of {', '.join(DTYPES)}, separated by commas, got {name!r}")
    return names


@click.command("accuracy", short_help="Relative error of attention, perplexity of decoded text.")
@click.option("--model", default=MODEL, show_default=True, metavar="MODEL", help="A name or a folder.")
@click.option(
    "--dtype", "names", callback=dtypes_named, metavar="DTYPE,...", help="Default: all that the device is good for."
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: cuda where there is one.")
@drafting_options
@click.option("--shape", default="llama3-8b", show_default=True, help="Heads of a model, or HqxHkvxD.")
@click.option("--lengths", callback=numbers, default="1000,16384", show_default=True, metavar="L,L,...")
@click.option("--nodes", default=64, show_default=True, help="Tree nodes: 32, 64, 128 or 256.")
@click.option("--tokens", type=click.IntRange(min=1), default=400, show_default=True, help="New tokens of the text.")
@click.option("--without-model", is_flag=True, help="Attention only.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for result.json.")
@json_option
def accuracy(
    shape: str, lengths: tuple[int, ...], nodes: int, names: tuple[str, ...], tokens: int, without_model: bool,
    out: Path | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Attention against float64, in every dtype of the device; and a text's perplexity by the passes that decoded it,
    beside that by a plain pass of the model over the same tokens.

    \b
    specdeft eval accuracy
    specdeft eval accuracy --dtype float32,bfloat16 --tokens 100
    specdeft eval accuracy --without-model --shape 4x2x16 --lengths 100 --nodes 32
    """
    heads_name = None if without_model else heads_for(given["model"], given["heads"])

    import torch

    from specdeft.evaluate.accuracy import attention_errors, perplexity
    from specdeft.evaluate.attention.report import printed
    from specdeft.evaluate.provenance import provenance
    from specdeft.evaluate.records import line_by_line

    device = find_device(given["device"])
    usual = DTYPES if device.type == "cuda" else ("float32", "float16")
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in names or usual]
    heads = None
    if heads_name is not None:  # before anything is measured: heads that are not there end the command at once
        from specdeft.heads import DraftHeads

        heads = DraftHeads.from_pretrained(heads_name)
    errors = []
    for record in attention_errors(shape, lengths, nodes, dtypes, device):
        errors.append(record)
        found = record.get("relative_error", record.get("not_run", record.get("error")))
        click.echo(f"{record['dtype']} {record['cell']}: {record['method']}: {found}", err=True)
    texts = []
    if heads is not None:
        import specdeft
        from specdeft.generation.choose_tree import choose_tree
        from specdeft.generation.prompts import chat_ids

        for dtype in dtypes:
            model, tokenizer = specdeft.load_model(given["model"], dtype=dtype, device=str(device))
            vocab_size = model.get_output_embeddings().weight.shape[0]
            tree, _ = choose_tree(given["tree"], heads, model.device, vocab_size)
            prompt = chat_ids(tokenizer, [{"role": "user", "content": PROMPT}])
            texts.append(perplexity(model, heads, tree, prompt, tokens, given["chunk_size"]))
            click.echo(f"{texts[-1]}", err=True)
    where = provenance(SimpleNamespace(device=device, dtype=dtypes[-1])) | {"dtype": "each named in its row"}
    result = {
        "kind": "accuracy",
        "settings": {"shape": shape, "lengths": lengths, "nodes": nodes, "tokens": tokens, "model": given["model"]},
        "attention": errors,
        "perplexity": texts,
        "provenance": where,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(line_by_line(result) + "\n", encoding="utf-8")
    click.echo(line_by_line(result) if as_json else printed(result))
    if any("error" in record for record in errors):
        raise SystemExit(1)
