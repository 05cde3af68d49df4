"""`specdeft generate`: text for one prompt, or for a file of prompts."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specdeft.cli.options import (
    chat_template_option,
    drafting_options,
    heads_for,
    json_option,
    model_options,
    set_chat_template,
)


@click.command(short_help="Generate text for a prompt.")
@click.argument("prompt", required=False)
@model_options
@drafting_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option(
    "--acceptance",
    type=click.Choice(["greedy", "sample", "typical"]),
    default="greedy",
    show_default=True,
    help="greedy and sample are lossless; typical is lossy.",
)
@click.option("--temperature", type=float, help="With sample and typical.")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--min-p", type=float)
@click.option("--seed", type=int, help="The same seed gives the same text, whatever the tree.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End after this text. May be given more than once.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@chat_template_option
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands, without the chat template.")
@click.option("--file", "prompts", type=click.Path(path_type=Path), help="Prompts from a JSONL workload; JSONL out.")
@json_option
def generate(prompt: str | None, prompts: Path | None, as_json: bool, **given: Any) -> None:
    """Generate text.

    \b
    specdeft generate "Why is the sky blue?"
    specdeft generate "Write a haiku." --acceptance sample --temperature 0.8 --seed 1
    echo "Name three rivers." | specdeft generate -

    The prompt is put through the model's chat template where there is one. The text goes to stdout as it becomes
    certain; counts and speed go to stderr.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("give one prompt, - to read it from stdin, or --file")
    if given["raw"] and (given["system"] or given["chat_template"]):
        raise click.UsageError("--raw uses no chat template: leave out --system and --chat-template")
    heads = heads_for(given["model"], given["heads"])
    asked = list(_read(prompt, prompts))

    import specdeft

    loaded = specdeft.DraftHeads.from_pretrained(heads)
    model, tokenizer = specdeft.load_model(given["model"], dtype=given["dtype"], device=given["device"])
    set_chat_template(tokenizer, given["chat_template"])
    options = {
        "tokenizer": tokenizer,
        "tree": given["tree"],
        "chunk_size": given["chunk_size"],
        "acceptance": given["acceptance"],
        "max_new_tokens": given["max_new_tokens"],
        "temperature": given["temperature"],
        "top_k": given["top_k"],
        "top_p": given["top_p"],
        "min_p": given["min_p"],
        "seed": given["seed"],
        "stop": list(given["stop"]) or None,
    }
    for name, text in asked:
        ready = _chat(text, given["system"]) if isinstance(text, str) and _wraps(tokenizer, given) else text
        stream = specdeft.stream(model, loaded, ready, **options)
        for piece in stream:
            if not (as_json or prompts):
                click.echo(piece, nl=False)
                sys.stdout.flush()
        result = stream.result
        assert result is not None
        if as_json or prompts:
            click.echo(json.dumps(document(result) | ({} if name is None else {"id": name}), ensure_ascii=False))
        else:
            click.echo()
            click.echo(summary(result), err=True)


def document(result: Any) -> dict[str, Any]:
    """A result as plain data."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }


def summary(result: Any) -> str:
    """One line: how much, how many passes, how fast."""
    stats = result.stats
    return (
        f"[{len(result.token_ids)} tokens in {stats.steps} passes, tau {stats.tau:.2f}, "
        f"{stats.tokens_per_second:.1f} tokens/s, ended by {result.finish_reason}; tree {stats.tree}]"
    )


def _read(prompt: str | None, prompts: Path | None) -> Iterator[tuple[str | None, Any]]:
    if prompts is None:
        yield None, sys.stdin.read() if prompt == "-" else prompt
        return
    from specdeft.evaluate.workload import read_workload

    for item in read_workload(prompts):
        yield item.id, item.prompt


def _wraps(tokenizer: Any, given: dict[str, Any]) -> bool:
    """Whether text is a user's turn; asking for a system message without a template is for the library to refuse."""
    return not given["raw"] and bool(getattr(tokenizer, "chat_template", None) or given["system"])


def _chat(text: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, user] if system else [user]
