"""`specdeft eval accuracy`: relative error of attention per dtype and method, and perplexity of a decoded text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specdeft.cli.numbers import numbers
from specdeft.cli.options import drafting_options, heads_for, json_option, model_options

PROMPT = "Write a long story about a lighthouse keeper who learns to repair clocks."


@click.command("accuracy", short_help="Relative error of attention, perplexity of decoded text.")
@model_options
@drafting_options
@click.option("--shape", default="llama3-8b", show_default=True, help="Heads of a model, or HqxHkvxD.")
@click.option("--lengths", callback=numbers, default="1000,16384", show_default=True, metavar="L,L,...")
@click.option("--nodes", default=64, show_default=True, help="Tree nodes: 32, 64, 128 or 256.")
@click.option("--tokens", type=click.IntRange(min=1), default=400, show_default=True, help="New tokens of the text.")
@click.option("--without-model", is_flag=True, help="Attention only.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for result.json.")
@json_option
def accuracy(
    shape: str, lengths: tuple[int, ...], nodes: int, tokens: int, without_model: bool, out: Path | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Attention against float64, in every dtype of the device; and a text's perplexity by the passes that decoded it,
    beside that by a plain pass of the model over the same tokens.

    \b
    specdeft eval accuracy
    specdeft eval accuracy --without-model --shape 4x2x16 --lengths 100 --nodes 32
    """
    import torch

    from specdeft.evaluate.accuracy import attention_errors, perplexity
    from specdeft.evaluate.attention.report import printed
    from specdeft.evaluate.provenance import provenance
    from specdeft.evaluate.records import line_by_line

    device = torch.device(given["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if device.type == "cuda" else [])]
    if given["dtype"]:
        dtypes = [getattr(torch, given["dtype"])]
    errors = []
    for record in attention_errors(shape, lengths, nodes, dtypes, device):
        errors.append(record)
        found = record.get("relative_error", record.get("not_run", record.get("error")))
        click.echo(f"{record['dtype']} {record['cell']}: {record['method']}: {found}", err=True)
    texts = []
    if not without_model:
        import specdeft
        from specdeft.generation.choose_tree import choose_tree
        from specdeft.generation.prompts import chat_ids

        heads = specdeft.DraftHeads.from_pretrained(heads_for(given["model"], given["heads"]))
        for dtype in dtypes:
            model, tokenizer = specdeft.load_model(given["model"], dtype=dtype, device=str(device))
            vocab_size = model.get_output_embeddings().weight.shape[0]
            tree, _ = choose_tree(given["tree"], heads, model.device, vocab_size)
            prompt = chat_ids(tokenizer, [{"role": "user", "content": PROMPT}])
            texts.append(perplexity(model, heads, tree, prompt, tokens))
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
