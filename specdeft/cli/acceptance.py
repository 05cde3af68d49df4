"""`specdeft eval acceptance`: tokens per pass on a workload, with everything needed to trust and repeat the number."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdeft.cli.accuracy import accuracy
from specdeft.cli.attention import attention
from specdeft.cli.folders import heads_folder
from specdeft.cli.options import drafting_options, heads_for, json_option, model_options
from specdeft.cli.throughput import throughput

if TYPE_CHECKING:
    from specdeft.heads import DraftHeads


@click.group("eval", short_help="Measure acceptance, attention and accuracy.")
def evaluate() -> None:
    """Measure, and keep what was measured with where it comes from.

    \b
    specdeft eval acceptance --limit 8
    specdeft eval attention --preset llama3-8b
    specdeft eval accuracy
    """


evaluate.add_command(attention)
evaluate.add_command(accuracy)
evaluate.add_command(throughput)


@evaluate.command("acceptance", short_help="Tokens per pass, per-depth acceptance, expected against measured.")
@model_options
@drafting_options
@click.option("--workload", default="mixed", show_default=True, help="A shipped name or a JSONL file.")
@click.option("--limit", type=click.IntRange(min=1), help="So many prompts, evenly from all over the file.")
@click.option("--without", multiple=True, metavar="CATEGORY", help="Leave a category out. May be repeated.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded at once.")
@click.option("--check-lossless", is_flag=True, help="Also decode plainly: compare every token, and the speed.")
@click.option(
    "--compare", type=click.IntRange(min=1), metavar="N", help="The same for N prompts from all over the file."
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for records.jsonl and result.json. Resumes there.")
@json_option
def acceptance(workload: str, limit: int | None, without: tuple[str, ...], out: Path | None, **given: Any) -> None:
    """Greedy decoding of a workload: tau, acceptance per depth, tau expected from calibration, speed.

    \b
    specdeft eval acceptance --limit 8 --check-lossless
    specdeft eval acceptance --workload question.jsonl --without summarization --without rag \\
        --batch 64 --compare 64 --out runs/spec-bench

    With --out each prompt's record is on disk as soon as it is measured, and the same command goes on where it was
    stopped. With --batch speeds are those of batches, in plain decoding too. Exit code 1 if a prompt failed, or parted
    from plain decoding other than at a near-tie: a 16-bit dtype, and two tokens whose logits are within 8 units in the
    last place of the larger one.
    """
    from specdeft.evaluate.workload import choose, read_workload, sha256

    heads_name = heads_for(given["model"], given["heads"])
    items = choose(read_workload(workload), without, limit)

    import specdeft
    from specdeft.evaluate.acceptance import Settings, run
    from specdeft.evaluate.calibration import Calibration
    from specdeft.evaluate.provenance import provenance
    from specdeft.evaluate.summary import lines, summarise
    from specdeft.generation.choose_tree import choose_tree

    heads = specdeft.DraftHeads.from_pretrained(heads_name)
    model, tokenizer = specdeft.load_model(given["model"], dtype=given["dtype"], device=given["device"])
    heads.check_fits(model)
    _warn_of_another_template(heads, tokenizer)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    tree, _ = choose_tree(given["tree"], heads, model.device, vocab_size)
    settings = Settings(
        model=given["model"],
        heads=Path(heads_name).name,
        tree=tree.name or "unnamed",
        nodes=tree.size,
        workload=Path(workload).stem,
        workload_sha256=sha256(workload),
        prompts=len(items),
        max_new_tokens=given["max_new_tokens"],
        dtype=str(model.dtype).removeprefix("torch."),
        chunk_size=given["chunk_size"],
        without=without,
        check_lossless=given["check_lossless"] or given["compare"] is not None,
        batch=given["batch"],
        compare=given["compare"],
    )
    records = run(
        model, tokenizer, heads, tree, items, settings,
        in_float32=lambda: specdeft.load_model(given["model"], dtype="float32", device=given["device"])[0],
        records=None if out is None else out / "records.jsonl", say=lambda line: click.echo(line, err=True),
    )  # fmt: skip
    summary = summarise(records)
    calibration = Calibration.load(heads_folder(heads_name))
    expected = None  # the counts promise nothing of a tree that changes
    if calibration is not None and isinstance(tree, specdeft.Tree):
        expected = calibration.expected_tau(tree)
    result = {
        "kind": "acceptance",
        "settings": asdict(settings),
        "summary": summary | {"expected_tau": expected},
        "provenance": provenance(model),
    }
    if out is not None:
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given["as_json"]:
        click.echo(json.dumps(result, indent=2))
    else:
        for line in lines(summary, expected):
            click.echo(line)
    parted = summary.get("compared", 0) - summary.get("equal", 0) - summary.get("near_ties", 0)
    if summary["n_failed"] or parted:
        raise SystemExit(1)


def _warn_of_another_template(heads: "DraftHeads", tokenizer: Any) -> None:
    """Heads know the template that their data was written in; under another one they guess worse."""
    from specdeft.heads.model import template_sha256
    from specdeft.train.chat import find_template

    trained, ours = heads.config.chat_template_sha256, template_sha256(find_template(tokenizer))
    if trained is not None and trained != ours:
        got = "has none" if ours is None else f"has {ours[:16]}..."
        warnings.warn(
            f"these heads were trained with another chat template (sha256 {trained[:16]}..., the tokenizer {got}): "
            "output stays exact, acceptance may be lower",
            stacklevel=2,
        )
